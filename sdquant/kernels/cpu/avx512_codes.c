/* Activations as codes of eight bits, for products by VNNI and by AMX: see int8.h for what lies where. */
#include "avx512vnni.h"

#ifdef BUILD
#include <math.h>
#include <string.h>

#include "floats.h"
#include "int8.h"

#include "avx512_halves.h"
#include "avx512_transpose.h"
#include "int8_scales.h"

enum { NEXT = 2560 }; /* bytes: how far ahead activations are asked for when they are first read */

INLINE __m512 whole_at(Type type, const void *from, int64_t at) {
    if (type == F32) return _mm512_loadu_ps((const float *)from + at);
    const __m256i words = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at));
    if (type == F16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* Up to sixteen floats; zeros after `count`. */
INLINE __m512 floats_at(Type type, const void *from, int64_t at, int64_t count) {
    const __mmask16 mask = first_of(count);
    if (type == F32) return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
    const __m256i words = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + at);
    if (type == F16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* Magnitudes are compared as integers: NaN is larger than any number so. */
INLINE float largest_in(Type type, const void *from, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    if (type == F32) {
        const __m512i size = _mm512_set1_epi32(0x7fffffff);
        for (int64_t i = 0; i < count; i += 16)
            most = _mm512_max_epu32(
                most, _mm512_and_si512(size, _mm512_castps_si512(floats_at(F32, from, i, count - i))));
        return of_bits(_mm512_reduce_max_epu32(most));
    }
    const __m512i size = _mm512_set1_epi16(0x7fff);
    const uint16_t *words = from;
    int64_t i = 0;
    for (__m512i other = most; i + 64 <= count; i += 64) {
        _mm_prefetch((const char *)(words + i) + NEXT, _MM_HINT_T0); /* of rows that follow; it may be nobody's memory */
        _mm_prefetch((const char *)(words + i) + NEXT + 64, _MM_HINT_T0);
        other = _mm512_max_epu16(other, _mm512_and_si512(size, _mm512_loadu_si512(words + i)));
        most = _mm512_max_epu16(most, _mm512_and_si512(size, _mm512_loadu_si512(words + i + 32)));
        if (i + 128 > count) most = _mm512_max_epu16(most, other);
    }
    for (; i < count; i += 32) {
        const __mmask32 mask = count - i >= 32 ? 0xffffffffu : (__mmask32)((1u << (count - i)) - 1);
        most = _mm512_max_epu16(most,
                                _mm512_and_si512(size, _mm512_maskz_loadu_epi16(mask, words + i)));
    }
    const __m512i low = _mm512_and_si512(most, _mm512_set1_epi32(0xffff)), high = _mm512_srli_epi32(most, 16);
    const uint32_t found = _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
    return type == BF16 ? of_bits(found << 16) : from_f16((uint16_t)found);
}

INLINE void largest_typed(Type type, const void *x, int64_t columns, int64_t count, float *out) {
    const int64_t size = type == F32 ? 4 : 2;
    for (int64_t i = 0; i < count; i++) out[i] = largest_in(type, (const char *)x + i * columns * size, columns);
}

void largest512(Type type, const void *x, int64_t columns, int64_t count, float *out) {
    if (type == F32) largest_typed(F32, x, columns, count, out);
    else if (type == BF16) largest_typed(BF16, x, columns, count, out);
    else largest_typed(F16, x, columns, count, out);
}

typedef __m512i Sums;
INLINE Sums no_sums(void) { return _mm512_setzero_si512(); }
INLINE int32_t total_of(Sums sums) { return _mm512_reduce_add_epi32(sums); }

/* `count` codes at `to`, and their sum. */
INLINE __m512i codes_of(Type type, const void *from, int64_t count, float factor, int8_t *to, __m512i sum) {
    const __m512 by = _mm512_set1_ps(factor);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        __m512i found[4];
        EACH(j, 4) found[j] = _mm512_cvtps_epi32(_mm512_mul_ps(whole_at(type, from, i + 16 * j), by));
        const __m512i low = _mm512_packs_epi32(found[0], found[1]), high = _mm512_packs_epi32(found[2], found[3]);
        const __m512i bytes = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(low, high));
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), bytes);
        _mm512_storeu_si512(to + i, bytes);
    }
    for (; i < count; i += 16) {
        const __m512i found = _mm512_cvtps_epi32(_mm512_mul_ps(floats_at(type, from, i, count - i), by));
        sum = _mm512_add_epi32(sum, found);
        const __m128i bytes = _mm512_cvtsepi32_epi8(found);
        if (count - i >= 16) _mm_storeu_si128((__m128i *)(to + i), bytes);
        else _mm_mask_storeu_epi8(to + i, first_of(count - i), bytes);
    }
    return sum;
}

/* `count` codes to another place, and their sum. */
INLINE __m512i moved(const int8_t *from, int64_t count, int8_t *to, __m512i sum) {
    for (int64_t i = 0; i < count; i += 64) {
        const __mmask64 mask = count - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (count - i)) - 1;
        const __m512i bytes = _mm512_maskz_loadu_epi8(mask, from + i);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), bytes);
        _mm512_mask_storeu_epi8(to + i, mask, bytes);
    }
    return sum;
}

#include "int8_lines.h"

void quantize_line512(const Source *from, int64_t row, int8_t *line, float *scale, int32_t *sum) {
    line_of_any(from, row, line, scale, sum);
}

/* The scale of a row, where it is not known. */
INLINE void find_scale(Type type, const void *x, int64_t columns, const Codes *how, float *scale) {
    if (how->known >= 0) return;
    *scale = ruled_scale(type, largest_in(type, x, columns), how);
}

/* Sixteen numbers in units of the scale, within what there are codes for. */
INLINE __m512 units_at(Type type, const void *x, int64_t at, int64_t left, const Codes *how, __m512 scale) {
    const __m512 low = _mm512_set1_ps(how->low), high = _mm512_set1_ps(how->high);
    __m512 units = _mm512_div_ps(floats_at(type, x, at, left), scale);
    if (type == BF16) units = to_bf16s(units);
    const __mmask16 numbers = _mm512_cmp_ps_mask(units, units, _CMP_ORD_Q);
    const __m512 within = _mm512_min_ps(_mm512_max_ps(units, low), high);
    return how->kind == INTEGERS ? _mm512_maskz_mov_ps(numbers, within) : _mm512_mask_mov_ps(units, numbers, within);
}

INLINE void ruled(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, float *scale,
                  int8_t *out) {
    for (int64_t row = 0; row < count; row++, out += columns) {
        const char *from = (const char *)x + row * columns * (type == F32 ? 4 : 2);
        float *own = scale + (how->known ? row : 0);
        find_scale(type, from, columns, how, own);
        const __m512 by = _mm512_set1_ps(*own);
        for (int64_t i = 0; i < columns; i += 16) {
            const __m512i found = _mm512_cvtps_epi32(units_at(type, from, i, columns - i, how, by));
            _mm_mask_storeu_epi8(out + i, first_of(columns - i), _mm512_cvtepi32_epi8(found));
        }
    }
}

/* To the nearest of a type of `kept` bits of mantissa whose numbers below `normal` are multiples of `normal` / 2^kept;
   ties to even. Within the range of the type, or NaN. */
INLINE __m512 to_eight_bits(__m512 y, int kept, float normal) {
    const int cut = 23 - kept;
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, cut), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32((1 << (cut - 1)) - 1)), odd);
    const __m512 rounded = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(-(1 << cut))));
    const __m512 magic = _mm512_set1_ps(normal * (float)(3 << (22 - kept))); /* whose last bit is such a multiple */
    const __m512 sign = _mm512_and_ps(y, _mm512_set1_ps(-0.0f)), size = _mm512_abs_ps(y);
    const __m512 small = _mm512_or_ps(_mm512_sub_ps(_mm512_add_ps(size, magic), magic), sign);
    const __m512 found = _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask(size, _mm512_set1_ps(normal), _CMP_LT_OQ), small);
    return _mm512_mask_mov_ps(found, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), y);
}

INLINE void rule_numbers(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, int decoded,
                         float *scale, void *out) {
    const Type to = type == BF16 ? BF16 : F32;
    for (int64_t row = 0; row < count; row++) {
        const char *from = (const char *)x + row * columns * (type == F32 ? 4 : 2);
        float *own = scale + (how->known ? row : 0);
        find_scale(type, from, columns, how, own);
        const __m512 by = _mm512_set1_ps(*own);
        for (int64_t i = 0; i < columns; i += 16) {
            __m512 found = units_at(type, from, i, columns - i, how, by);
            if (how->kind == E4M3) found = to_eight_bits(found, 3, 0x1p-6f);
            else if (how->kind == E5M2) found = to_eight_bits(found, 2, 0x1p-14f);
            else found = _mm512_cvtepi32_ps(_mm512_cvtps_epi32(found));
            if (decoded) found = _mm512_mul_ps(found, by);
            const int64_t at = row * columns + i, left = columns - i;
            if (to == F32) _mm512_mask_storeu_ps((float *)out + at, first_of(left), found);
            else _mm256_mask_storeu_epi16((uint16_t *)out + at, first_of(left), half_of(BF16, found));
        }
    }
}

/* Rows of x, [count, columns], as what their codes stand for: in units of their scale or, if `decoded`, times it. */
void numbers512(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, int decoded, float *scale,
                void *out) {
    if (type == F32) rule_numbers(F32, x, columns, count, how, decoded, scale, out);
    else if (type == BF16) rule_numbers(BF16, x, columns, count, how, decoded, scale, out);
    else rule_numbers(F16, x, columns, count, how, decoded, scale, out);
}

/* Rows of x, [count, columns], as codes: x / scale, rounded to x's dtype (float32 for float16) and then to an integer;
   NaN is 0. A scale that is not known is the row's largest magnitude / bound. */
void codes512(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, float *scale, int8_t *out) {
    if (type == F32) ruled(F32, x, columns, count, how, scale, out);
    else if (type == BF16) ruled(BF16, x, columns, count, how, scale, out);
    else ruled(F16, x, columns, count, how, scale, out);
}

/* One by one they would wait for each other: a loop of unknown length for each is foreseen wrongly at its end. */
void quantize_runs512(const float *x, int64_t runs, int8_t *to, float *scale, int64_t step) {
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    for (int64_t r = 0; r < runs; r++, x += AGAIN_RUN, to += AGAIN_RUN, scale += step) {
        __m512i most[4];
        EACH(i, 4) most[i] = _mm512_setzero_si512();
        EACH(i, AGAIN_RUN / 16)
        most[i % 4] = _mm512_max_epu32(most[i % 4], _mm512_and_si512(size, _mm512_loadu_si512(x + 16 * i)));
        most[0] = _mm512_max_epu32(_mm512_max_epu32(most[0], most[1]), _mm512_max_epu32(most[2], most[3]));
        const float largest = of_bits(_mm512_reduce_max_epu32(most[0]));
        *scale = step_of(largest);
        codes_of(F32, x, AGAIN_RUN, factor_of(largest), to, size);
    }
}

void quantize512(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale,
                        int32_t *sum) {
    const int64_t fours = (from->columns + 3) / 4;
    memset(line + from->columns, 0, fours * 4 - from->columns);
    for (int i = 0; i < rows; i++) {
        quantize_line512(from, first + i, line, scale + i, sum + i);
        uint32_t *to = (uint32_t *)codes + i;
        const uint32_t *four = (const uint32_t *)line, higher = from->shifted ? 0x80808080 : 0;
        for (int64_t j = 0; j < fours; j++, to += rows) *to = four[j] ^ higher;
    }
}

/* Pixels start .. stop of an image [channels, pixels] to [pixels, channels]; of 32 channels of 16 bits at a time, or 16
   of 32 bits. */
void last512(Type type, const void *x, int64_t channels, int64_t pixels, int64_t start, int64_t stop, void *out) {
    for (int64_t p = start; p < stop; p += 16) {
        const __mmask16 here = first_of(stop - p);
        const int count = stop - p < 16 ? (int)(stop - p) : 16;
        for (int64_t c = 0; c < channels; c += type == F32 ? 16 : 32) {
            __m512i a[16];
            if (type == F32) {
                const float *from = (const float *)x + c * pixels + p;
                EACH(i, 16)
                a[i] = c + i < channels ? _mm512_castps_si512(_mm512_maskz_loadu_ps(here, from + i * pixels))
                                        : _mm512_setzero_si512();
                transpose(a);
                float *to = (float *)out + p * channels + c;
                EACH(i, 16)
                if (i < count) _mm512_mask_storeu_ps(to + i * channels, first_of(channels - c), _mm512_castsi512_ps(a[i]));
            } else {
                const uint16_t *from = (const uint16_t *)x + c * pixels + p;
                const int64_t left = channels - c;
                EACH(i, 16) {
                    __m512i even = _mm512_setzero_si512(), odd = even;
                    if (2 * i < left)
                        even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, from + 2 * i * pixels));
                    if (2 * i + 1 < left)
                        odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, from + (2 * i + 1) * pixels));
                    a[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
                }
                transpose(a);
                uint16_t *to = (uint16_t *)out + p * channels + c;
                const __mmask32 mask = left >= 32 ? 0xffffffffu : (__mmask32)((1u << left) - 1);
                EACH(i, 16) if (i < count) _mm512_mask_storeu_epi16(to + i * channels, mask, a[i]);
            }
        }
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
