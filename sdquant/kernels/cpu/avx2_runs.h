/* What runs.h has, with AVX2; and codes of four bits and less that choose among sixteen weights. */
#ifndef SDQUANT_AVX2_RUNS_H
#define SDQUANT_AVX2_RUNS_H

#include <immintrin.h>
#include <string.h>

#include "floats.h"

/* bfloat16 in the upper halves of eight: the bits that are kept. */
static inline __m256i round_bf16(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), unordered);
}

static inline __m128i round_f16(__m256 value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

static inline void convert(const float *from, Type type, void *to, int64_t count) {
    uint16_t *halves = to;
    int64_t i = 0;
    if (type == F32) {
        memcpy(to, from, count * sizeof *from);
        return;
    }
    if (type == BF16) {
        for (; i + 16 <= count; i += 16) {
            const __m256i a = _mm256_srli_epi32(round_bf16(_mm256_loadu_ps(from + i)), 16);
            const __m256i b = _mm256_srli_epi32(round_bf16(_mm256_loadu_ps(from + i + 8)), 16);
            _mm256_storeu_si256((__m256i *)(halves + i), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
        }
        for (; i < count; i++) halves[i] = to_bf16(from[i]);
        return;
    }
    for (; i + 8 <= count; i += 8) _mm_storeu_si128((__m128i *)(halves + i), round_f16(_mm256_loadu_ps(from + i)));
    for (; i < count; i++) halves[i] = to_f16(from[i]);
}

static inline void widen(const void *from, Type type, int64_t start, float *to, int64_t count) {
    const uint16_t *halves = (const uint16_t *)from + start;
    int64_t i = 0;
    if (type == F32) {
        memcpy(to, (const float *)from + start, count * sizeof *to);
        return;
    }
    for (; i + 8 <= count; i += 8) {
        const __m128i eight = _mm_loadu_si128((const __m128i *)(halves + i));
        const __m256i upper = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
        _mm256_storeu_ps(to + i, type == F16 ? _mm256_cvtph_ps(eight) : _mm256_castsi256_ps(upper));
    }
    for (; i < count; i++) to[i] = type == F16 ? from_f16(halves[i]) : from_bf16(halves[i]);
}

static inline void round_run(float *values, Type type, int64_t count) {
    int64_t i = 0;
    if (type == F32) return;
    for (; i + 8 <= count; i += 8) {
        const __m256 value = _mm256_loadu_ps(values + i);
        const __m256i kept = _mm256_and_si256(round_bf16(value), _mm256_set1_epi32((int)0xffff0000));
        _mm256_storeu_ps(values + i, type == F16 ? _mm256_cvtph_ps(round_f16(value)) : _mm256_castsi256_ps(kept));
    }
    for (; i < count; i++) values[i] = rounded(values[i], type);
}

/* Of four bytes: a choice in each half of the table, and one between the two. */
static inline void look_up_floats(const float *table, const uint8_t *codes, int64_t count, float *out) {
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
static inline void look_up_halves(const uint16_t *table, const uint8_t *codes, int64_t count, uint16_t *out) {
    const __m128i some = _mm_loadu_si128((const __m128i *)table), more = _mm_loadu_si128((const __m128i *)(table + 8));
    const __m128i byte = _mm_set1_epi16(0xff);
    const __m256i low = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(some, byte), _mm_and_si128(more, byte)));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(some, 8), _mm_srli_epi16(more, 8)));
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

static inline void look_up_avx2(const void *table, const uint8_t *codes, int64_t count, Type type, void *out) {
    if (type == F32) look_up_floats(table, codes, count, out);
    else look_up_halves(table, codes, count, out);
}

#endif
