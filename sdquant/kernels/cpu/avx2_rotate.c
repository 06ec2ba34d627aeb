/* Rotations for AVX2: the order of sums of rotate_portable, so the same numbers. */
#include "avx2.h"

#ifdef BUILD
#include "rotate.h"

INLINE __m256 half_of(__m256 sum) { return _mm256_mul_ps(sum, _mm256_set1_ps(0.5f)); }

/* Fours that are neighbours. */
INLINE __m256 near(__m256 x) {
    const __m256 pairs = _mm256_add_ps(x, _mm256_permute_ps(x, 0xb1));
    const __m256 half = half_of(_mm256_add_ps(pairs, _mm256_permute_ps(pairs, 0x4e)));
    return _mm256_sub_ps(half, _mm256_permute_ps(x, 0x1b));
}

INLINE __m256 swapped(__m256 x) { return _mm256_permute2f128_ps(x, x, 1); }

void rotate_avx2(float *x, int64_t count, int64_t group) {
    if (group == 4) {
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) _mm256_storeu_ps(x + i, near(_mm256_loadu_ps(x + i)));
        rotate_portable(x + i, count - i, group);
        return;
    }
    for (int64_t i = 0; i < count; i += 16) { /* fours that are 1 apart, then 4 */
        const __m256 ab = near(_mm256_loadu_ps(x + i)), cd = near(_mm256_loadu_ps(x + i + 8));
        const __m256 a_b = _mm256_add_ps(ab, swapped(ab)), c_d = _mm256_add_ps(cd, swapped(cd));
        const __m256 half = half_of(_mm256_add_ps(a_b, c_d));
        _mm256_storeu_ps(x + i, _mm256_sub_ps(half, swapped(cd)));
        _mm256_storeu_ps(x + i + 8, _mm256_sub_ps(half, swapped(ab)));
    }
    for (int64_t apart = 16; apart < group; apart *= 4)
        for (int64_t from = 0; from < count; from += 4 * apart)
            for (float *at = x + from; at < x + from + apart; at += 8) {
                const __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(at + apart);
                const __m256 c = _mm256_loadu_ps(at + 2 * apart), d = _mm256_loadu_ps(at + 3 * apart);
                const __m256 half = half_of(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
                _mm256_storeu_ps(at, _mm256_sub_ps(half, d));
                _mm256_storeu_ps(at + apart, _mm256_sub_ps(half, c));
                _mm256_storeu_ps(at + 2 * apart, _mm256_sub_ps(half, b));
                _mm256_storeu_ps(at + 3 * apart, _mm256_sub_ps(half, a));
            }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
