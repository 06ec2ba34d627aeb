/* Codes of up to four bits: the sixteen values of a group are computed once, and codes choose among them: one
   instruction for 32 weights of 16 bits. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_groups.h"
#include "avx512_parts.h"

enum { BYTE_EACH, LOW_FIRST, HIGH_FIRST }; /* how codes come: one to a byte, or two */

/* Bytes (in elements of twice an index's width) become two indices each; only their low bits count. */
INLINE __m512i pairs16(__m512i bytes, int order) {
    if (order == LOW_FIRST) return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
}

INLINE __m512i pairs32(__m512i bytes, int order) {
    if (order == LOW_FIRST) return _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    return _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
}

/* A run of a group, as halves. */
INLINE void choose16(__m512i values, int order, const uint8_t *codes, int64_t count, uint16_t *out) {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i index =
            order == BYTE_EACH ? _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)))
                               : pairs16(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i / 2))), order);
        _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(index, values));
    }
    if (i < count) {
        const __mmask32 valid = ((__mmask32)1 << (count - i)) - 1;
        const __mmask16 held = (__mmask16)((1 << ((count - i + 1) / 2)) - 1);
        const __m512i index =
            order == BYTE_EACH ? _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(valid, codes + i))
                               : pairs16(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(held, codes + i / 2)), order);
        _mm512_mask_storeu_epi16(out + i, valid, _mm512_permutexvar_epi16(index, values));
    }
}

INLINE void choose32(__m512 values, int order, const uint8_t *codes, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i index =
            order == BYTE_EACH ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)))
                               : pairs32(_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i / 2))), order);
        _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(index, values));
    }
    if (i < count) {
        const __mmask16 valid = first_of(count - i), held = first_of((count - i + 1) / 2);
        const __m128i some = _mm_maskz_loadu_epi8(order == BYTE_EACH ? valid : held,
                                                  codes + (order == BYTE_EACH ? i : i / 2));
        const __m512i index = order == BYTE_EACH ? _mm512_cvtepu8_epi32(some) : pairs32(_mm512_cvtepu8_epi64(some), order);
        _mm512_mask_storeu_ps(out + i, valid, _mm512_permutexvar_ps(index, values));
    }
}

/* Weights whose groups are known. `into`: where in its group the first one is. */
INLINE void strip(const Rules *rules, int plain, int own_zero, Type type, int order, const Groups *groups,
                  __m512 numbers, const uint8_t *codes, int64_t size, int64_t into, int64_t count, char *out) {
    for (int64_t group = 0; count > 0; group++) {
        const int64_t run = size - into < count ? size - into : count;
        const __m512 values = scaled(rules, plain, own_zero, numbers, groups, group);
        if (type == F32) choose32(values, order, codes, run, (float *)out);
        else choose16(_mm512_broadcast_i64x4(halves_of(values, type)), order, codes, run, (uint16_t *)out);
        into = 0;
        codes += order == BYTE_EACH ? run : run / 2;
        out += run * (type == F32 ? 4 : 2);
        count -= run;
    }
}

INLINE void strips(const Form *form, const Parts *parts, Type type, int order, int64_t first, int64_t count, char *out) {
    uint8_t spare[STRIP + SPARE];
    float numbers[16];
    Groups groups;
    const Rules rules = rules_of(form);
    const int planes = planes_of(form->packing), own_zero = form->zeros >= 0;
    const int64_t held = (form->rows * form->columns / form->group + planes - 1) / planes * form->group;
    const int bits = form->packing == PLANES2 ? 2 : form->packing == THREES || form->packing == SDNQ3 ? 3 : 4;
    for (int i = 0; i < 16; i++) {
        const int code = i & ((1 << bits) - 1);
        numbers[i] = (form->looked_up ? form->table[code] : (float)code) - (own_zero ? 0 : form->zero);
    }
    const __m512 of_codes = _mm512_loadu_ps(numbers);
    while (count > 0) {
        int64_t run = count < STRIP ? count : STRIP;
        if (planes > 1 && held - first % held < run) run = held - first % held;
        const int64_t group = first / form->group, into = first - group * form->group;
        if (groups_at(form, parts, group, (into + run - 1) / form->group + 1, &groups)) {
            const uint8_t *codes = order == BYTE_EACH ? unpack512(form, parts, first, run, spare) : parts->codes + first / 2;
            if (rules.plain) strip(&rules, 1, 0, type, order, &groups, of_codes, codes, form->group, into, run, out);
            else strip(&rules, 0, own_zero, type, order, &groups, of_codes, codes, form->group, into, run, out);
        } else {
            decode_plain512(form, parts, first, run, type, out);
        }
        first += run;
        count -= run;
        out += run * (type == F32 ? 4 : 2);
    }
}

INLINE void typed(const Form *form, const Parts *parts, int order, int64_t first, int64_t count, Type type, void *out) {
    if (type == BF16) strips(form, parts, BF16, order, first, count, out);
    else if (type == F16) strips(form, parts, F16, order, first, count, out);
    else strips(form, parts, F32, order, first, count, out);
}

void choose512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    const int even = first % 2 == 0 && form->group % 2 == 0;
    if (even && form->packing == NIBBLES_LOW) typed(form, parts, LOW_FIRST, first, count, type, out);
    else if (even && form->packing == NIBBLES_HIGH) typed(form, parts, HIGH_FIRST, first, count, type, out);
    else typed(form, parts, BYTE_EACH, first, count, type, out);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
