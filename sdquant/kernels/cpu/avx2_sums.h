/* What products of no more than eight rows of activations with weights of any kind have in common. For files that include
   avx2.h. */
#ifndef SDQUANT_AVX2_SUMS_H
#define SDQUANT_AVX2_SUMS_H

#include "form.h"

enum {
    FEWEST = 8, /* rows of activations */
    MOST_TURNS = 4,
    FEWER = 2,   /* rows up to which weights that are not rounded stay in registers */
    SUMMED = 16, /* activations of which there is a sum */
};

/* sums[j] += the product of weights first .. first + count, of one row, and as many of row j of x, of `m` (1, 2, 4 or
   8), `stride` floats apart and in the order of `turn`. Behind those of each row are their sums, of SUMMED each. The
   weights are rounded to `type`. */
typedef void DotFew(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const float *x,
                    int64_t stride, int m, float *sums);

INLINE float sum8(__m256 values) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Sums of each row, by turns, of which none need wait for another. */
INLINE int turns_of(int m) { return m == 1 ? MOST_TURNS : m < FEWEST ? 2 : 1; }

/* Adds the products of eight weights to the sum of each row. */
INLINE void add(__m256 weights, const float *x, int64_t stride, int m, int turn, __m256 (*sum)[MOST_TURNS]) {
    const int at = turn % turns_of(m);
    for (int j = 0; j < m; j++) sum[j][at] = _mm256_fmadd_ps(weights, _mm256_loadu_ps(x + j * stride), sum[j][at]);
}

INLINE void no_sums(int m, __m256 (*sum)[MOST_TURNS]) {
    for (int j = 0; j < m; j++)
        for (int t = 0; t < turns_of(m); t++) sum[j][t] = _mm256_setzero_ps();
}

INLINE void add_sums(int m, __m256 (*sum)[MOST_TURNS], float *sums) {
    for (int j = 0; j < m; j++) {
        for (int t = 1; t < turns_of(m); t++) sum[j][0] = _mm256_add_ps(sum[j][0], sum[j][t]);
        sums[j] += sum8(sum[j][0]);
    }
}

/* blocks_avx2.c: of a type of GGUF's blocks; NULL where the form has none, or other groups. */
DotFew *avx2_block_dots(const Form *form);

/* The function of any number of rows from `name`_of, which is made for each. */
#define BY_ROWS(name) \
    static void name(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const float *x, \
                     int64_t stride, int m, float *sums) { \
        switch (m) { \
        case 1: name##_of(form, parts, first, count, type, x, stride, 1, sums); break; \
        case 2: name##_of(form, parts, first, count, type, x, stride, 2, sums); break; \
        case 4: name##_of(form, parts, first, count, type, x, stride, 4, sums); break; \
        default: name##_of(form, parts, first, count, type, x, stride, FEWEST, sums); \
        } \
    }

#endif
