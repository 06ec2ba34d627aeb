/* Activations as codes of eight bits, for products with AVX2 alone: see int8.h for what lies where. */
#include "avx2.h"

#ifdef BUILD
#include <string.h>

#include "avx2_int8.h"
#include "avx2_runs.h"
#include "int8_scales.h"

INLINE __m256 eight_at(Type type, const void *from, int64_t at) {
    if (type == F32) return _mm256_loadu_ps((const float *)from + at);
    const __m128i words = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + at));
    if (type == F16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

/* Up to eight floats; zeros after `count`. */
INLINE __m256 some_at(Type type, const void *from, int64_t at, int64_t count) {
    if (count >= 8) return eight_at(type, from, at);
    uint32_t held[8] = {0};
    const int size = type == F32 ? 4 : 2;
    memcpy(held, (const char *)from + at * size, count * size);
    return eight_at(type, held, 0);
}

INLINE uint32_t largest_of(__m256i words) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
}

/* Magnitudes are compared as integers: NaN is larger than any number so. */
INLINE float largest_in(Type type, const void *from, int64_t count) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256(), other = most;
    int64_t i = 0;
    if (type == F32) {
        for (; i + 16 <= count; i += 16) {
            most = _mm256_max_epu32(most, _mm256_and_si256(size, _mm256_castps_si256(eight_at(F32, from, i))));
            other = _mm256_max_epu32(other, _mm256_and_si256(size, _mm256_castps_si256(eight_at(F32, from, i + 8))));
        }
    } else {
        const __m256i halves = _mm256_set1_epi16(0x7fff);
        const uint16_t *words = from;
        for (; i + 32 <= count; i += 32) {
            most = _mm256_max_epu16(most, _mm256_and_si256(halves, _mm256_loadu_si256((const __m256i *)(words + i))));
            other = _mm256_max_epu16(other, _mm256_and_si256(halves, _mm256_loadu_si256((const __m256i *)(words + i + 16))));
        }
        most = _mm256_max_epu16(most, other);
        const __m256i low = _mm256_and_si256(most, _mm256_set1_epi32(0xffff));
        const uint32_t found = largest_of(_mm256_max_epu32(low, _mm256_srli_epi32(most, 16)));
        const float whole = type == BF16 ? from_bf16((uint16_t)found) : from_f16((uint16_t)found);
        most = _mm256_set1_epi32((int)bits_of(whole)), other = _mm256_setzero_si256();
    }
    for (; i < count; i += 8)
        most = _mm256_max_epu32(most, _mm256_and_si256(size, _mm256_castps_si256(some_at(type, from, i, count - i))));
    return of_bits(largest_of(_mm256_max_epu32(most, other)));
}

typedef __m256i Sums;
INLINE Sums no_sums(void) { return _mm256_setzero_si256(); }
INLINE int32_t total_of(Sums sums) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

/* 32 integers as bytes, in order; those beyond a byte are its limits. */
INLINE __m256i bytes_of(const __m256i *found) {
    const __m256i low = _mm256_packs_epi32(found[0], found[1]), high = _mm256_packs_epi32(found[2], found[3]);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_order);
}

/* `count` integers, at most eight, as bytes. */
INLINE void store_bytes(__m256i found, int64_t count, int8_t *to) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
    const __m128i bytes = _mm_packs_epi16(words, words);
    if (count >= 8) _mm_storel_epi64((__m128i *)to, bytes);
    else memcpy(to, &bytes, count);
}

/* `count` codes at `to`, and their sum. */
INLINE Sums codes_of(Type type, const void *from, int64_t count, float factor, int8_t *to, Sums sum) {
    const __m256 by = _mm256_set1_ps(factor);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        __m256i found[4];
        for (int j = 0; j < 4; j++) {
            found[j] = _mm256_cvtps_epi32(_mm256_mul_ps(eight_at(type, from, i + 8 * j), by));
            sum = _mm256_add_epi32(sum, found[j]);
        }
        _mm256_storeu_si256((__m256i *)(to + i), bytes_of(found));
    }
    for (; i < count; i += 8) {
        const __m256i found = _mm256_cvtps_epi32(_mm256_mul_ps(some_at(type, from, i, count - i), by));
        sum = _mm256_add_epi32(sum, found);
        store_bytes(found, count - i, to + i);
    }
    return sum;
}

/* `count` codes to another place, and their sum. */
INLINE Sums moved(const int8_t *from, int64_t count, int8_t *to, Sums sum) {
    const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(from + i));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, bytes), pairs));
    }
    int32_t left = 0;
    for (int64_t j = i; j < count; j++) left += from[j];
    memcpy(to, from, count);
    return _mm256_add_epi32(sum, _mm256_setr_epi32(left, 0, 0, 0, 0, 0, 0, 0));
}

#include "int8_lines.h"

void quantize_line_avx2(const Source *from, int64_t row, int8_t *line, float *scale, int32_t *sum) {
    line_of_any(from, row, line, scale, sum);
}

void quantize_runs_avx2(const float *x, int64_t runs, int8_t *to, float *scale, int64_t step) {
    for (int64_t r = 0; r < runs; r++, x += AGAIN_RUN, to += AGAIN_RUN, scale += step) {
        const float largest = largest_in(F32, x, AGAIN_RUN);
        *scale = step_of(largest);
        codes_of(F32, x, AGAIN_RUN, factor_of(largest), to, no_sums());
    }
}

void quantize_avx2(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale, int32_t *sum) {
    const int64_t pairs = (from->columns + 1) / 2;
    line[2 * pairs - 1] = 0;
    for (int i = 0; i < rows; i++) {
        quantize_line_avx2(from, first + i, line, scale + i, sum + i);
        uint32_t *to = (uint32_t *)codes + i;
        for (int64_t j = 0; j < pairs; j++, to += rows)
            *to = (uint32_t)(uint16_t)(int16_t)line[2 * j] | (uint32_t)(int32_t)line[2 * j + 1] << 16;
    }
}

INLINE void largest_typed(Type type, const void *x, int64_t columns, int64_t count, float *out) {
    const int64_t size = type == F32 ? 4 : 2;
    for (int64_t i = 0; i < count; i++) out[i] = largest_in(type, (const char *)x + i * columns * size, columns);
}

void largest_avx2(Type type, const void *x, int64_t columns, int64_t count, float *out) {
    if (type == F32) largest_typed(F32, x, columns, count, out);
    else if (type == BF16) largest_typed(BF16, x, columns, count, out);
    else largest_typed(F16, x, columns, count, out);
}

INLINE __m256 to_bf16s(__m256 y) {
    return _mm256_castsi256_ps(_mm256_and_si256(round_bf16(y), _mm256_set1_epi32((int)0xffff0000)));
}

/* Eight numbers in units of the scale, within what there are codes for. */
INLINE __m256 units_at(Type type, const void *x, int64_t at, int64_t left, const Codes *how, __m256 scale) {
    __m256 units = _mm256_div_ps(some_at(type, x, at, left), scale);
    if (type == BF16) units = to_bf16s(units);
    const __m256 numbers = _mm256_cmp_ps(units, units, _CMP_ORD_Q);
    const __m256 within = _mm256_min_ps(_mm256_max_ps(units, _mm256_set1_ps(how->low)), _mm256_set1_ps(how->high));
    return how->kind == INTEGERS ? _mm256_and_ps(within, numbers) : _mm256_blendv_ps(units, within, numbers);
}

/* The scale of a row, found where it is not known. */
INLINE float scale_at(Type type, const void *x, int64_t columns, const Codes *how, float *scale) {
    if (how->known < 0) *scale = ruled_scale(type, largest_in(type, x, columns), how);
    return *scale;
}

INLINE void ruled(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, float *scale,
                  int8_t *out) {
    for (int64_t row = 0; row < count; row++, out += columns) {
        const char *from = (const char *)x + row * columns * (type == F32 ? 4 : 2);
        const __m256 by = _mm256_set1_ps(scale_at(type, from, columns, how, scale + (how->known ? row : 0)));
        for (int64_t i = 0; i < columns; i += 8)
            store_bytes(_mm256_cvtps_epi32(units_at(type, from, i, columns - i, how, by)), columns - i, out + i);
    }
}

void codes_avx2(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, float *scale, int8_t *out) {
    if (type == F32) ruled(F32, x, columns, count, how, scale, out);
    else if (type == BF16) ruled(BF16, x, columns, count, how, scale, out);
    else ruled(F16, x, columns, count, how, scale, out);
}

/* As avx512_codes.c's of this name. */
INLINE __m256 to_eight_bits(__m256 y, int kept, float normal) {
    const int cut = 23 - kept;
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, cut), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32((1 << (cut - 1)) - 1)), odd);
    const __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(-(1 << cut))));
    const __m256 magic = _mm256_set1_ps(normal * (float)(3 << (22 - kept))); /* whose last bit is such a multiple */
    const __m256 minus = _mm256_set1_ps(-0.0f), sign = _mm256_and_ps(y, minus), size = _mm256_andnot_ps(minus, y);
    const __m256 small = _mm256_or_ps(_mm256_sub_ps(_mm256_add_ps(size, magic), magic), sign);
    const __m256 found = _mm256_blendv_ps(rounded, small, _mm256_cmp_ps(size, _mm256_set1_ps(normal), _CMP_LT_OQ));
    return _mm256_blendv_ps(found, y, _mm256_cmp_ps(y, y, _CMP_UNORD_Q));
}

INLINE void rule_numbers(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, int decoded,
                         float *scale, void *out) {
    const Type to = type == BF16 ? BF16 : F32;
    for (int64_t row = 0; row < count; row++) {
        const char *from = (const char *)x + row * columns * (type == F32 ? 4 : 2);
        const __m256 by = _mm256_set1_ps(scale_at(type, from, columns, how, scale + (how->known ? row : 0)));
        char *at = (char *)out + row * columns * (to == F32 ? 4 : 2);
        for (int64_t i = 0; i < columns; i += 8) {
            const int64_t left = columns - i < 8 ? columns - i : 8;
            float eight[8];
            __m256 found = units_at(type, from, i, left, how, by);
            if (how->kind == E4M3) found = to_eight_bits(found, 3, 0x1p-6f);
            else if (how->kind == E5M2) found = to_eight_bits(found, 2, 0x1p-14f);
            else found = _mm256_round_ps(found, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            if (decoded) found = _mm256_mul_ps(found, by);
            if (to == F32 && left == 8) {
                _mm256_storeu_ps((float *)at + i, found);
                continue;
            }
            if (to == BF16) found = _mm256_castsi256_ps(_mm256_srli_epi32(round_bf16(found), 16));
            _mm256_storeu_ps(eight, found);
            if (to == F32) {
                memcpy((float *)at + i, eight, left * sizeof *eight);
                continue;
            }
            const __m256i words = _mm256_castps_si256(found);
            const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            memcpy((uint16_t *)at + i, &halves, left * sizeof(uint16_t));
        }
    }
}

void numbers_avx2(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, int decoded, float *scale,
                  void *out) {
    if (type == F32) rule_numbers(F32, x, columns, count, how, decoded, scale, out);
    else if (type == BF16) rule_numbers(BF16, x, columns, count, how, decoded, scale, out);
    else rule_numbers(F16, x, columns, count, how, decoded, scale, out);
}

/* Pixels start .. stop of an image [channels, pixels] to [pixels, channels], in squares that stay in the first cache. */
#define TURN(name, Number)                                                                                            \
    static void name(const Number *from, int64_t channels, int64_t pixels, int64_t start, int64_t stop, Number *to) { \
        enum { SQUARE = 16 };                                                                                         \
        for (int64_t p = start; p < stop; p += SQUARE)                                                                \
            for (int64_t c = 0; c < channels; c += SQUARE)                                                            \
                for (int64_t i = p; i < stop && i < p + SQUARE; i++)                                                  \
                    for (int64_t j = c; j < channels && j < c + SQUARE; j++) to[i * channels + j] = from[j * pixels + i]; \
    }

TURN(turn_words, uint16_t)
TURN(turn_floats, uint32_t)

void last_avx2(Type type, const void *x, int64_t channels, int64_t pixels, int64_t start, int64_t stop, void *out) {
    if (type == F32) turn_floats(x, channels, pixels, start, stop, out);
    else turn_words(x, channels, pixels, start, stop, out);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
