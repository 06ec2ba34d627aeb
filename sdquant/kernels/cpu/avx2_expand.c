/* Codes to 8-bit integers for AVX2, in groups of multiples of 16 columns: the numbers of expand_portable. */
#include "avx2.h"

#ifdef BUILD
#include "expand.h"

/* Eight products as integers of at most 127. */
INLINE __m256i scaled(__m256 values, __m256 scale) {
    const __m256 most = _mm256_set1_ps(127), product = _mm256_mul_ps(values, scale);
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(product, _mm256_sub_ps(_mm256_setzero_ps(), most)), most));
}

INLINE __m128i packed(__m256i first, __m256i second) {
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

/* Sixteen codes of 4 bits, one to a byte. */
INLINE __m128i nibbles(const uint8_t *from) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from), mask = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
}

/* The upper two bits of sixteen codes, from four bytes, where they belong in a code. */
INLINE __m128i upper(const uint8_t *from) {
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i bytes = _mm_cvtsi32_si128(from[0] | from[1] << 8 | from[2] << 16 | (int32_t)((uint32_t)from[3] << 24));
    const __m128i four = _mm_shuffle_epi8(bytes, _mm_set_epi8(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0));
    const __m128i half = _mm_blendv_epi8(_mm_and_si128(four, mask), _mm_and_si128(_mm_srli_epi16(four, 4), mask),
                                         _mm_set1_epi32((int32_t)0xffff0000u));
    const __m128i even = _mm_setr_epi8(0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48);
    const __m128i odd = _mm_setr_epi8(0, 0, 0, 0, 16, 16, 16, 16, 32, 32, 32, 32, 48, 48, 48, 48);
    return _mm_blendv_epi8(_mm_shuffle_epi8(even, half), _mm_shuffle_epi8(odd, half), _mm_set1_epi16((int16_t)0xff00));
}

/* Eight of sixteen bytes as floats. */
INLINE __m256 eight(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

INLINE __m128i sixes(const uint8_t *low, const uint8_t *high, __m256 scale) {
    const __m128i values = _mm_sub_epi8(_mm_or_si128(nibbles(low), upper(high)), _mm_set1_epi8(32));
    return packed(scaled(eight(values), scale), scaled(eight(_mm_srli_si128(values, 8)), scale));
}

void expand_avx2(const uint8_t *low, const uint8_t *high, const float *table, const float *scales, int64_t groups,
                 int64_t group, int8_t *out) {
    if (group % 16) {
        expand_portable(low, high, table, scales, groups, group, out);
        return;
    }
    for (int64_t g = 0, i = 0; g < groups; g++) {
        const __m256 scale = _mm256_set1_ps(scales[g]);
        const int64_t end = i + group;
        if (high) {
            for (; i < end; i += 16) _mm_storeu_si128((__m128i *)(out + i), sixes(low + i / 2, high + i / 4, scale));
            continue;
        }
        /* What the sixteen codes stand for in this group. */
        const __m128i integers = packed(scaled(_mm256_loadu_ps(table), scale), scaled(_mm256_loadu_ps(table + 8), scale));
        for (; i < end; i += 16)
            _mm_storeu_si128((__m128i *)(out + i), _mm_shuffle_epi8(integers, nibbles(low + i / 2)));
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
