/* What the weights of a group have in common, for AVX-512; and the arithmetic of core/packed_layout.py. */
#ifndef SDQUANT_AVX512_GROUPS_H
#define SDQUANT_AVX512_GROUPS_H

#include "scales.h"

enum { STRIP = 1024 }; /* weights at a time, of as many groups at most */

typedef struct {
    float scale[STRIP], zero[STRIP], shift[STRIP];
} Groups;

/* What to do with a number, in a place of its own: the compiler need not fear that a store changes it. */
typedef struct {
    Type arithmetic;
    int fused, shifted, multiplied;
    int once;  /* the last operation is rounded where weights are, with them */
    int plain; /* one product, rounded once, and a common zero */
    int normal; /* that product is a normal number of F16: see `normal512` */
    float factor;
} Rules;

/* For weights that are wanted as `type`: what is rounded to that type twice is rounded once. */
INLINE Rules rules_of(const Form *form, Type type) {
    Rules rules = {form->arithmetic, form->fused, form->shift != NONE, form->factor != 1.0f, 0, 0, 0, form->factor};
    rules.once = rules.arithmetic == F32 || rules.arithmetic == type;
    rules.plain = rules.once && !rules.fused && !rules.shifted && !rules.multiplied && form->zeros < 0;
    return rules;
}

/* Whole groups in so many weights. Divisions are a tenth of what a short row takes. */
INLINE int64_t groups_in(const Form *form, int64_t weights) {
    const int64_t group = form->group;
    return group & (group - 1) ? weights / group : weights >> __builtin_ctzll((unsigned long long)group);
}

INLINE __mmask16 first_of(int64_t count) { return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1 << count) - 1) : 0; }

/* BF16's instructions take the smallest floats for zero, and NaN has many forms. Whether none can come of this. */
INLINE __mmask16 tame(__m512 value, __mmask16 valid) {
    const __m512 size = _mm512_abs_ps(value);
    const __mmask16 fits = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-80f), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p80f), _CMP_LE_OQ);
    return fits | _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_EQ_OQ) | (__mmask16)~valid;
}

INLINE __m512 floats_at(const void *from, Type type, int64_t at, __mmask16 valid) {
    if (type == F32) return _mm512_maskz_loadu_ps(valid, (const float *)from + at);
    const __m256i halves = _mm256_maskz_loadu_epi16(valid, (const uint16_t *)from + at);
    if (type == F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Scales that are codes themselves: of groups first .. first + 16. */
INLINE __m512 coded_at(const Form *form, const Parts *parts, int64_t first, __mmask16 valid) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i codes = _mm_maskz_loadu_epi8(valid, (const uint8_t *)parts->scale + first);
    const __m512 inner = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(codes), form->dynamic, 4);
    if (form->scale == LOOKED_UP) return inner;
    const __m512i into = _mm512_add_epi32(_mm512_set1_epi32((int)(first & 255)), lanes);
    const __m512 outer = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), valid, _mm512_srli_epi32(into, 8),
                                                  parts->nested + (first >> 8), 4);
    return _mm512_add_ps(_mm512_mul_ps(inner, outer), _mm512_set1_ps(form->offset));
}

/* Asks for what groups have in common that will be needed after these weights; see Parts. */
INLINE void ask_scales(const Form *form, const Parts *parts, int64_t first, int64_t count) {
    if (!parts->ahead || form->group > 256) return;
    const int64_t group = groups_in(form, first + parts->ahead), groups = groups_in(form, count);
#define ASK(part, bits)                                                               \
    for (int64_t i = 0; i < groups * (bits) / 8; i += 64)                             \
        _mm_prefetch((const char *)(part) + group * (bits) / 8 + i, _MM_HINT_T1);
    if (form->scale != NONE) ASK(parts->scale, form->scale == F32 ? 32 : form->scale >= NESTED ? 8 : 16)
    if (form->shift != NONE) ASK(parts->shift, form->shift == F32 ? 32 : 16)
    if (form->zeros >= 0) ASK(parts->zeros, form->zeros == NIBBLES_LOW ? 4 : 8)
#undef ASK
}

/* Asks for codes too, all at once: where codes are used as they lie it is better done a line at a time, as they are
   used, since memory gives a core no more than some sixteen lines at a time. `bits`: a code takes in its row. */
INLINE void ask(const Form *form, const Parts *parts, int64_t first, int64_t count, int bits) {
    if (!parts->ahead) return;
    const char *codes = (const char *)parts->codes + (first + parts->ahead) * bits / 8;
    for (int64_t i = 0; i < count * bits / 8; i += 64) _mm_prefetch(codes + i, _MM_HINT_T1);
    ask_scales(form, parts, first, count);
}

/* Zero points of as many groups as are valid, at most 16, from `first` on, which is even. */
INLINE __m512 zeros_at(const Form *form, const Parts *parts, int64_t first, int64_t count) {
    const __mmask16 valid = first_of(count);
    if (form->zeros == SIGNED_BYTES)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(valid, parts->zeros + first)));
    __m128i bytes = _mm_maskz_loadu_epi8(form->zeros == BYTES ? valid : first_of((count + 1) / 2),
                                         parts->zeros + (form->zeros == BYTES ? first : first / 2));
    if (form->zeros == NIBBLES_LOW) {
        const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
        const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
        bytes = _mm_unpacklo_epi8(low, high);
    }
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

/* Those of groups first .. first + count; 0 if they are not tame. */
INLINE int groups_at(const Form *form, const Parts *parts, int64_t first, int64_t count, Groups *out) {
    __mmask16 fits = 0xffff;
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 valid = first_of(count - i);
        __m512 scale = _mm512_set1_ps(1.0f);
        if (form->scale >= NESTED) scale = coded_at(form, parts, first + i, valid);
        else if (form->scale != NONE) scale = floats_at(parts->scale, form->scale, first + i, valid);
        fits &= tame(scale, valid);
        _mm512_mask_storeu_ps(out->scale + i, valid, scale);
        if (form->shift == NONE) continue;
        __m512 shift = floats_at(parts->shift, form->shift, first + i, valid);
        if (!form->added) shift = _mm512_xor_ps(shift, _mm512_set1_ps(-0.0f));
        fits &= tame(shift, valid);
        _mm512_mask_storeu_ps(out->shift + i, valid, shift);
    }
    if (form->zeros < 0) return fits == 0xffff;
    int64_t i = first & 1; /* so that two to a byte begin at one */
    if (i) out->zero[0] = zero_of(form, parts, first);
    for (; i < count; i += 16)
        _mm512_mask_storeu_ps(out->zero + i, first_of(count - i), zeros_at(form, parts, first + i, count - i));
    return fits == 0xffff;
}

INLINE __m512 round512(__m512 value, Type type) {
    if (type == BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
    if (type == F16) return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return value;
}

/* A product of a number of F16 and an integer up to 511, rounded to F16, if that is a normal number or zero: 8193 times
   it, of which 24 bits are kept, less 8192 times it, leaves 11. Ties go to even then (all were tried). */
INLINE __m512 normal512(__m512 value) {
    const __m512 shift = _mm512_set1_ps(8192.0f);
    return _mm512_fnmadd_ps(value, shift, _mm512_fmadd_ps(value, shift, value));
}

/* Whether such products with these scales are normal, whatever the integer. */
INLINE int all_normal(const Groups *groups, int64_t count) {
    __mmask16 fits = 0xffff;
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 size = _mm512_abs_ps(_mm512_maskz_loadu_ps(first_of(count - i), groups->scale + i));
        fits &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p7f), _CMP_LE_OQ);
        fits &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-14f), _CMP_GE_OQ) |
                _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_EQ_OQ);
    }
    return fits == 0xffff;
}

/* Numbers of a group become its weights, before the last rounding. A common zero is off them already. */
INLINE __m512 scaled(const Rules *rules, int plain, int own_zero, __m512 number, const Groups *groups, int64_t group) {
    const __m512 scale = _mm512_set1_ps(groups->scale[group]);
    if (plain) return _mm512_mul_ps(number, scale);
    if (own_zero) number = _mm512_sub_ps(number, _mm512_set1_ps(groups->zero[group]));
    const Type arithmetic = rules->arithmetic, last = rules->once ? F32 : arithmetic;
    if (rules->fused) {
        const __m512 shift = _mm512_set1_ps(groups->shift[group]);
        return round512(_mm512_fmadd_ps(number, scale, shift), last);
    }
    if (rules->normal) return normal512(_mm512_mul_ps(number, scale));
    number = round512(_mm512_mul_ps(number, scale), rules->multiplied || rules->shifted ? arithmetic : last);
    if (rules->multiplied)
        number = round512(_mm512_mul_ps(number, _mm512_set1_ps(rules->factor)), rules->shifted ? arithmetic : last);
    if (rules->shifted) number = round512(_mm512_add_ps(number, _mm512_set1_ps(groups->shift[group])), last);
    return number;
}

INLINE __m256i halves_of(__m512 value, Type type) {
    return type == BF16 ? (__m256i)_mm512_cvtneps_pbh(value)
                        : _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#endif
