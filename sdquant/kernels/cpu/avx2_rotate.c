/* Rotations for AVX2: the order of sums of rotate_portable, so the same numbers. */
#include "avx2.h"

#ifdef BUILD
#include "rotate.h"
#include "rotate_bounds.h"

/* Fours that are neighbours. */
INLINE __m256 near(__m256 x) {
    const __m256 mine = _mm256_setr_ps(0.5f, -0.5f, 0.5f, 0.5f, 0.5f, -0.5f, 0.5f, 0.5f); /* a+b, a-b, c-d, c+d */
    const __m256 other = _mm256_setr_ps(0.5f, 0.5f, -0.5f, 0.5f, 0.5f, 0.5f, -0.5f, 0.5f);
    const __m256 sign = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 sums = _mm256_add_ps(_mm256_mul_ps(x, mine), _mm256_mul_ps(_mm256_permute_ps(x, 0xb1), other));
    return _mm256_add_ps(_mm256_permute_ps(sums, 0xf0), _mm256_xor_ps(_mm256_permute_ps(sums, 0x5a), sign));
}

INLINE __m256 swapped(__m256 x) { return _mm256_permute2f128_ps(x, x, 1); }

INLINE __m256 half_at(const float *x) { return _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(0.5f)); }

static void rotate_avx2(float *x, int64_t count, int64_t group) {
    if (group == 4) {
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) _mm256_storeu_ps(x + i, near(_mm256_loadu_ps(x + i)));
        rotate_portable(x + i, count - i, group);
        return;
    }
    const __m256 half = _mm256_set1_ps(0.5f);
    for (int64_t i = 0; i < count; i += 16) { /* fours that are 1 apart, then 4 */
        const __m256 ab = _mm256_mul_ps(near(_mm256_loadu_ps(x + i)), half);
        const __m256 cd = _mm256_mul_ps(near(_mm256_loadu_ps(x + i + 8)), half);
        const __m256 a_b = _mm256_add_ps(ab, swapped(ab)), c_d = _mm256_add_ps(cd, swapped(cd));
        /* a - b twice, the second with the other sign, and so c - d */
        const __m256 ba = _mm256_sub_ps(ab, swapped(ab)), dc = _mm256_sub_ps(cd, swapped(cd));
        _mm256_storeu_ps(x + i, _mm256_add_ps(a_b, dc));
        _mm256_storeu_ps(x + i + 8, _mm256_add_ps(c_d, ba));
    }
    for (int64_t apart = 16; apart < group; apart *= 4)
        for (int64_t from = 0; from < count; from += 4 * apart)
            for (float *at = x + from; at < x + from + apart; at += 8) {
                const __m256 a = half_at(at), b = half_at(at + apart);
                const __m256 c = half_at(at + 2 * apart), d = half_at(at + 3 * apart);
                const __m256 ab = _mm256_add_ps(a, b), ba = _mm256_sub_ps(a, b);
                const __m256 cd = _mm256_add_ps(c, d), dc = _mm256_sub_ps(c, d);
                _mm256_storeu_ps(at, _mm256_add_ps(ab, dc));
                _mm256_storeu_ps(at + apart, _mm256_sub_ps(ab, dc));
                _mm256_storeu_ps(at + 2 * apart, _mm256_add_ps(cd, ba));
                _mm256_storeu_ps(at + 3 * apart, _mm256_sub_ps(cd, ba));
            }
}

static void bounds_avx2(const float *x, int64_t count, int64_t group, float *bounds) {
    bounds_of(x, count, group, bounds);
}

static void largest_avx2(const float *y, int64_t count, int64_t group, float *largest) {
    largest_sizes(y, count, group, largest);
}

static void codes_avx2(const float *y, int64_t count, int64_t group, float scale, const float *bounds, float least,
                       float most, int8_t *codes, uint8_t *open) {
    codes_within(y, count, group, scale, bounds, least, most, codes, open);
}

const Rotation rotation_avx2 = {rotate_avx2, bounds_avx2, largest_avx2, codes_avx2, 0};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
