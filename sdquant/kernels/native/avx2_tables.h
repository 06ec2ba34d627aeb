/* Codes of four bits and less choose among sixteen weights. For AVX2. */
#ifndef SDQUANT_AVX2_TABLES_H
#define SDQUANT_AVX2_TABLES_H

#include <immintrin.h>

#include "floats.h"

/* Of four bytes: a choice in each half of the table, and one between the two. */
static void look_up_floats(const float *table, const uint8_t *codes, int64_t count, float *out) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); /* the sign is the fourth bit */
        _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                                   _mm256_permutevar8x32_ps(high, index), upper));
    }
    for (; i < count; i++) out[i] = table[codes[i]];
}

/* Of two bytes: their first and second ones are chosen apart. */
static void look_up_halves(const uint16_t *table, const uint8_t *codes, int64_t count, uint16_t *out) {
    uint8_t first[16], second[16];
    for (int k = 0; k < 16; k++) first[k] = (uint8_t)table[k], second[k] = (uint8_t)(table[k] >> 8);
    const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)first));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)second));
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        /* Bytes are put together within each 128 bits: the middle quarters change places before. */
        const __m256i code = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(codes + i)), 0xd8);
        const __m256i a = _mm256_shuffle_epi8(low, code), b = _mm256_shuffle_epi8(high, code);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_unpacklo_epi8(a, b));
        _mm256_storeu_si256((__m256i *)(out + i + 16), _mm256_unpackhi_epi8(a, b));
    }
    for (; i < count; i++) out[i] = table[codes[i]];
}

static void look_up_avx2(const void *table, const uint8_t *codes, int64_t count, Type type, void *out) {
    if (type == F32) look_up_floats(table, codes, count, out);
    else look_up_halves(table, codes, count, out);
}

#endif
