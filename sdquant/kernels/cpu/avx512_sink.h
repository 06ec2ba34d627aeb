/* Where decoded weights go: to memory, or into products with a few rows of activations without touching memory. */
#ifndef SDQUANT_AVX512_SINK_H
#define SDQUANT_AVX512_SINK_H

#include "avx512_groups.h"

/* `m` and `type` are constants where this is compiled in; m = 0 is memory. */
typedef struct {
    char *out;         /* of the weight at hand, or */
    const char *x;     /* the first row's activation for the weight at hand, */
    int64_t stride;    /* bytes between rows, */
    __m512 a0, a1, b0, b1; /* and sums: two of each row, or four of one, since a product of bf16 takes eight cycles */
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

/* The product with row `j` of activations, `some` of them, to the sum that has its turn: 0, 1, or to 3 of one row. */
INLINE void add_to(Sink *sink, Type type, int j, int turn, __m512i weights, __m512i some) {
    if (j || turn > 1) {
        if (turn & 1) sink->b1 = product512(type, sink->b1, weights, some);
        else sink->b0 = product512(type, sink->b0, weights, some);
    } else {
        if (turn & 1) sink->a1 = product512(type, sink->a1, weights, some);
        else sink->a0 = product512(type, sink->a0, weights, some);
    }
}

/* Which sum has its turn, of two, or of four where there is one row. */
INLINE int sum_of(int m, int turn, int k) { return m > 1 ? k : 2 * turn + k; }

/* A vector of weights, `at` weights from the one at hand, of which `left` count. */
INLINE void take(Sink *sink, int m, Type type, int64_t at, int64_t left, int turn, __m512i weights) {
    const int size = type == F32 ? 4 : 2, width = 64 / size;
    const char *x = sink->x + at * size, *other = x + sink->stride;
    if (left >= width) {
        if (!m) _mm512_storeu_si512(sink->out + at * size, weights);
        if (m > 0) add_to(sink, type, 0, turn, weights, _mm512_loadu_si512(x));
        if (m > 1) add_to(sink, type, 1, turn, weights, _mm512_loadu_si512(other));
        return;
    }
    if (left <= 0) return;
    const __mmask32 valid = ((__mmask32)1 << left) - 1;
    if (!m && size == 4) _mm512_mask_storeu_epi32(sink->out + at * size, (__mmask16)valid, weights);
    if (!m && size == 2) _mm512_mask_storeu_epi16(sink->out + at * size, valid, weights);
    /* What does not count may be NaN, which a product with nothing is too. */
    weights = size == 4 ? _mm512_maskz_mov_epi32((__mmask16)valid, weights) : _mm512_maskz_mov_epi16(valid, weights);
#define SOME(from) size == 4 ? _mm512_maskz_loadu_epi32((__mmask16)valid, from) : _mm512_maskz_loadu_epi16(valid, from)
    if (m > 0) add_to(sink, type, 0, turn, weights, SOME(x));
    if (m > 1) add_to(sink, type, 1, turn, weights, SOME(other));
#undef SOME
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

/* The same where activations are turned; `count` is a multiple of 64, `type` of 16 bits, and m not 0. */
INLINE void take_plain_turned(Sink *sink, int m, const Form *form, const Parts *parts, int64_t first, int64_t count,
                              Type type) {
    uint16_t made[STRIP], turned[STRIP];
    decode_plain512(form, parts, first, count, type, made);
    evens_first(made, count, turned);
    for (int64_t at = 0; at < count; at += 32) take(sink, m, type, at, 32, 0, _mm512_loadu_si512(turned + at));
}

INLINE void finish(const Sink *sink, int m, float *sums) {
    const __m512 a = _mm512_add_ps(sink->a0, sink->a1), b = _mm512_add_ps(sink->b0, sink->b1);
    sums[0] += _mm512_reduce_add_ps(m > 1 ? a : _mm512_add_ps(a, b));
    if (m > 1) sums[1] += _mm512_reduce_add_ps(b);
}

/* Sums in registers of their own, in loops that call nothing: else GCC keeps them in memory there too, since calls
   elsewhere take all registers. */
#define MOVED(sum) __asm__("vmovaps %1, %0" : "=v"(made.sum) : "v"(sink->sum))
INLINE Sink held(const Sink *sink, int m) {
    Sink made = *sink;
    if (m > 0) {
        MOVED(a0);
        MOVED(a1);
        MOVED(b0);
        MOVED(b1);
    }
    return made;
}
#undef MOVED

/* The arguments of `Decode` and `DecodeAndDot` in one: `out` is for m = 0, what follows it for others. */
#define SINK_ARGUMENTS                                                                                              \
    const Form *form, const Parts *parts, int64_t first, int64_t count, void *out, const void *x, int64_t stride, \
        float *sums
typedef void Sunk(SINK_ARGUMENTS);

/* A function of its own for each type and number of rows that sinks are made for, `strips` with `how`: where they are
   compiled into one, GCC finds no registers for them. */
#define SINK_FUNCTION(how, type, m)                                                    \
    static __attribute__((noinline)) void sink_##how##_##type##_##m(SINK_ARGUMENTS) { \
        Sink sink = sums_of(out, x, stride);                                          \
        strips(form, parts, how, type, first, count, &sink, m);                       \
        if (m) finish(&sink, m, sums);                                                \
    }
#define SINK_FUNCTIONS(how)                                                                       \
    SINK_FUNCTION(how, F32, 0) SINK_FUNCTION(how, F32, 1) SINK_FUNCTION(how, F32, 2)              \
    SINK_FUNCTION(how, BF16, 0) SINK_FUNCTION(how, BF16, 1) SINK_FUNCTION(how, BF16, 2)           \
    SINK_FUNCTION(how, F16, 0) SINK_FUNCTION(how, F16, 1) SINK_FUNCTION(how, F16, 2)              \
    static Sunk *const functions_##how[3][FEW + 1] = {                                            \
        {sink_##how##_F32_0, sink_##how##_F32_1, sink_##how##_F32_2},                             \
        {sink_##how##_BF16_0, sink_##how##_BF16_1, sink_##how##_BF16_2},                          \
        {sink_##how##_F16_0, sink_##how##_F16_1, sink_##how##_F16_2},                             \
    };

INLINE Sink sums_of(void *out, const void *x, int64_t stride) {
    const __m512 zero = _mm512_setzero_ps();
    return (Sink){.out = out, .x = x, .stride = stride, .a0 = zero, .a1 = zero, .b0 = zero, .b1 = zero};
}

#endif
