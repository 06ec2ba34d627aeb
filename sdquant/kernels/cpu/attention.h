/* Attention: softmax(q k^T * scale) v, for each head by itself. */
#ifndef SDQUANT_ATTENTION_H
#define SDQUANT_ATTENTION_H

#include <stdint.h>

enum {
    QUERIES = 32,     /* rows of queries that are worked on together */
};

/* Rows of bf16, `step` elements apart from batch to batch, head to head, and row to row. */
typedef struct {
    uint16_t *at;
    int64_t step[3];
} Rows;

/* q, out: [batch, heads, queries, width]; k, v: [batch, heads, keys, width]. */
typedef struct {
    Rows q, k, v, out;
    int64_t heads, queries, keys, width;
    float scale;
} Attention;

/* Blocks of QUERIES rows start .. stop, counted over all heads, those of one head together. 0: no memory. */
int attend_amx(const Attention *attention, int64_t start, int64_t stop);
int attend_avx512(const Attention *attention, int64_t start, int64_t stop);

#endif
