/* Products in 8-bit integers with AVX2 alone: what avx2_int8.c puts together. One instruction multiplies and adds two
   columns of eight rows of the weight with those of one row of activations, as integers of 16 bits.

   A panel has its first half of PANEL rows and then the others, of each for every two columns the two codes of each row,
   signed; a group up to six rows, and for every two columns two codes of each row, of 16 bits. */
#ifndef SDQUANT_AVX2_INT8_H
#define SDQUANT_AVX2_INT8_H

#include "int8.h"

enum { HALF = PANEL / 2 };

/* avx2_codes.c: as their namesakes in int8.h. */
void quantize_avx2(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale, int32_t *sum);
void quantize_line_avx2(const Source *from, int64_t row, int8_t *line, float *scale, int32_t *sum);
void quantize_runs_avx2(const float *x, int64_t runs, int8_t *to, float *scale, int64_t step);
void largest_avx2(Type type, const void *x, int64_t columns, int64_t count, float *out);
void codes_avx2(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, float *scale, int8_t *out);
void numbers_avx2(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, int decoded, float *scale,
                  void *out);
void last_avx2(Type type, const void *x, int64_t channels, int64_t pixels, int64_t start, int64_t stop, void *out);

/* avx2_panels.c */
void panel_avx2(const Weight *weight, int64_t start, uint8_t *panel, float *scale, int32_t *minus, void *spare);

#endif
