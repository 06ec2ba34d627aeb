/* Where decoded weights go: to memory, or into products with a few rows of activations without touching memory. */
#ifndef SDQUANT_AVX512_SINK_H
#define SDQUANT_AVX512_SINK_H

#include "avx512_groups.h"

/* `m` and `type` are constants where this is compiled in; m = 0 is memory. */
typedef struct {
    char *out;         /* of the weight at hand, or */
    const char *x;     /* the first row's activation for the weight at hand, */
    int64_t stride;    /* bytes between rows, */
    __m512 sum[FEW][2];  /* and sums by row; two, so that one need not wait for the other */
} Sink;

INLINE __m512 wide(__m512i halves, int upper) {
    return _mm512_cvtph_ps(upper ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves));
}

INLINE __m512 product512(Type type, __m512 sum, __m512i a, __m512i b) {
    if (type == BF16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    if (type == F16) {
        sum = _mm512_fmadd_ps(wide(a, 0), wide(b, 0), sum);
        return _mm512_fmadd_ps(wide(a, 1), wide(b, 1), sum);
    }
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

/* A vector of weights, `at` weights from the one at hand, of which `left` count. */
INLINE void take(Sink *sink, int m, Type type, int64_t at, int64_t left, int turn, __m512i weights) {
    const int size = type == F32 ? 4 : 2, width = 64 / size;
    if (left >= width) {
        if (!m) _mm512_storeu_si512(sink->out + at * size, weights);
#pragma GCC unroll 2
        for (int j = 0; j < m; j++)
            sink->sum[j][turn] =
                product512(type, sink->sum[j][turn], weights, _mm512_loadu_si512(sink->x + j * sink->stride + at * size));
        return;
    }
    if (left <= 0) return;
    const __mmask32 valid = ((__mmask32)1 << left) - 1;
    if (!m) {
        if (size == 4) _mm512_mask_storeu_epi32(sink->out + at * size, (__mmask16)valid, weights);
        else _mm512_mask_storeu_epi16(sink->out + at * size, valid, weights);
    }
#pragma GCC unroll 2
    for (int j = 0; j < m; j++) {
        const char *x = sink->x + j * sink->stride + at * size;
        const __m512i some = size == 4 ? _mm512_maskz_loadu_epi32((__mmask16)valid, x) : _mm512_maskz_loadu_epi16(valid, x);
        sink->sum[j][turn] = product512(type, sink->sum[j][turn], weights, some);
    }
}

INLINE void move(Sink *sink, int m, Type type, int64_t count) {
    const int64_t size = type == F32 ? 4 : 2;
    if (m) sink->x += count * size;
    else sink->out += count * size;
}

/* Weights that the fast way cannot compute. */
INLINE void take_plain(Sink *sink, int m, const Form *form, const Parts *parts, int64_t first, int64_t count, Type type) {
    char made[STRIP * 4];
    const int size = type == F32 ? 4 : 2;
    decode_plain512(form, parts, first, count, type, m ? made : sink->out);
    for (int64_t at = 0; m && at < count; at += 64 / size)
        take(sink, m, type, at, count - at, 0, _mm512_loadu_si512(made + at * size));
}

INLINE void finish(const Sink *sink, int m, float *sums) {
#pragma GCC unroll 2
    for (int j = 0; j < m; j++) sums[j] += _mm512_reduce_add_ps(_mm512_add_ps(sink->sum[j][0], sink->sum[j][1]));
}

/* The same code for each type and number of rows that sinks are made for. */
#define EACH_M(run)                          \
    if (type == BF16 && m == 1) run(BF16, 1) \
    else if (type == BF16) run(BF16, FEW)    \
    else if (type == F16 && m == 1) run(F16, 1) \
    else if (type == F16) run(F16, FEW)      \
    else if (m == 1) run(F32, 1)             \
    else run(F32, FEW)

INLINE Sink sums_of(const void *x, int64_t stride) {
    Sink sink = {.out = 0, .x = x, .stride = stride};
#pragma GCC unroll 2
    for (int j = 0; j < FEW; j++) sink.sum[j][0] = sink.sum[j][1] = _mm512_setzero_ps();
    return sink;
}

#endif
