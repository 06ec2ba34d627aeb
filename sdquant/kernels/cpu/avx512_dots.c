/* Products of a panel of decoded weights with rows of activations. Vectors lie along the sum, so that both are read as
   they are; each sum's sixteen lanes are added up at the end. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"

#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

/* Elements of a vector of activations. */
INLINE int width(Type type) { return type == BF16 ? 32 : 16; }

/* `valid`: how many elements there are from here; the others are zeros. */
INLINE __m512 vector(Type type, const void *from, int64_t at, int64_t valid) {
    const int all = valid >= width(type);
    if (type == BF16) {
        const uint16_t *words = (const uint16_t *)from + at;
        return _mm512_castsi512_ps(all ? _mm512_loadu_si512(words)
                                       : _mm512_maskz_loadu_epi16(((__mmask32)1 << valid) - 1, words));
    }
    if (type == F16) {
        const uint16_t *words = (const uint16_t *)from + at;
        return _mm512_cvtph_ps(all ? _mm256_loadu_si256((const __m256i *)words)
                                   : _mm256_maskz_loadu_epi16((__mmask16)((1 << valid) - 1), words));
    }
    const float *floats = (const float *)from + at;
    return all ? _mm512_loadu_ps(floats) : _mm512_maskz_loadu_ps((__mmask16)((1 << valid) - 1), floats);
}

INLINE __m512 plus(Type type, __m512 sum, __m512 a, __m512 b) {
    if (type == BF16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    return _mm512_fmadd_ps(a, b, sum);
}

/* The sums of the lanes of four vectors in each 128 bits of one: those of a, b, c, d, still to be added over the four. */
INLINE __m512 quarter(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
}

/* sums[0 .. 4] += the lanes of each of four. */
INLINE void add_four(float *sums, const __m512 *four) {
    const __m512 all = quarter(four[0], four[1], four[2], four[3]);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 found = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm_loadu_ps(sums), found));
}

/* n rows of weights (a multiple of 4) by m of activations: all sums stay in registers. */
INLINE void block(Type type, int n, int m, const char *w, int64_t stride_w, const char *x, int64_t stride_x, int64_t k,
                  float *sums, int64_t stride_sums) {
    const int size = type == F32 ? 4 : 2, step = width(type);
    __m512 sum[24];
    EACH(i, n * m) sum[i] = _mm512_setzero_ps();
    int64_t at = 0;
    for (; at + step <= k; at += step) {
        __m512 of_x[6];
        EACH(j, m) of_x[j] = vector(type, x + j * stride_x * size, at, step);
        EACH(i, n) {
            const __m512 of_w = vector(type, w + i * stride_w * size, at, step);
            EACH(j, m) sum[j * n + i] = plus(type, sum[j * n + i], of_w, of_x[j]);
        }
    }
    if (at < k) {
        __m512 of_x[6];
        EACH(j, m) of_x[j] = vector(type, x + j * stride_x * size, at, k - at);
        EACH(i, n) {
            const __m512 of_w = vector(type, w + i * stride_w * size, at, k - at);
            EACH(j, m) sum[j * n + i] = plus(type, sum[j * n + i], of_w, of_x[j]);
        }
    }
    EACH(j, m) {
        EACH(i, n / 4) add_four(sums + j * stride_sums + 4 * i, sum + j * n + 4 * i);
    }
}

INLINE void typed(Type type, const char *w, int64_t stride_w, int n, const char *x, int64_t stride_x, int m, int64_t k,
                  float *sums, int64_t stride_sums) {
    const int size = type == F32 ? 4 : 2;
#define BLOCK(n, m) block(type, n, m, w, stride_w, x + j * stride_x * size, stride_x, k, sums + j * stride_sums, stride_sums)
    int j = 0;
    if (n <= 4) { /* ten loads for 24 products */
        for (; j + 6 <= m; j += 6) BLOCK(4, 6);
        for (; j + 4 <= m; j += 4) BLOCK(4, 4);
        for (; j + 2 <= m; j += 2) BLOCK(4, 2);
        for (; j < m; j++) BLOCK(4, 1);
    } else {
        for (; j + 2 <= m; j += 2) BLOCK(12, 2);
        for (; j < m; j++) BLOCK(12, 1);
    }
#undef BLOCK
}

void dots512(Type type, const void *w, int64_t stride_w, int n, const void *x, int64_t stride_x, int m, int64_t k,
             float *sums, int64_t stride_sums) {
    if (type == BF16) typed(BF16, w, stride_w, n, x, stride_x, m, k, sums, stride_sums);
    else if (type == F16) typed(F16, w, stride_w, n, x, stride_x, m, k, sums, stride_sums);
    else typed(F32, w, stride_w, n, x, stride_x, m, k, sums, stride_sums);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
