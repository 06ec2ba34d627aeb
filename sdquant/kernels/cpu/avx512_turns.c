/* Codes whose group has scales by turns: those of convolutions, with one for each position of the kernel. */
#include "avx512.h"

#ifdef BUILD
#include <string.h>

#include "avx512_parts.h"
#include "avx512_groups.h"

enum {
    PERIOD = 16 * MOST_TAPS, /* weights after which the scales begin anew, and whole vectors of them */
    PIECE = 1024,            /* codes that are unpacked at a time, about */
};

typedef enum { AS_SIGNED, AS_UNSIGNED, AS_LOOKED_UP } Kind;

typedef struct {
    int64_t group, tap, count; /* what it is for; how many there are */
    float scale[PERIOD], shift[PERIOD];
} Turns;

/* Some codes, a byte each; `mask`: their own bits. */
typedef struct {
    const uint8_t *at;
    int64_t count, ahead;
    __m128i mask;
    const float *table;
    __m512 zero;
} Codes;

/* The first `taps` again and again, up to `count`; 0 if they are not tame. */
INLINE int repeat(float *values, int64_t taps, int64_t count) {
    for (int64_t done = taps; done < count; done *= 2)
        memcpy(values + done, values, (done < count - done ? done : count - done) * sizeof *values);
    __mmask16 fits = 0xffff;
    for (int64_t i = 0; i < taps; i += 16) fits &= tame(_mm512_loadu_ps(values + i), 0xffff);
    return fits == 0xffff;
}

/* 0 if a scale is not tame. */
static int turns_of(const Form *form, const Parts *parts, int64_t group, int64_t tap, Turns *out) {
    const int64_t taps = form->taps;
    out->group = group, out->tap = tap, out->count = 16 * taps;
    for (int64_t i = 0; i < taps; i++) {
        const int64_t at = group * taps + (tap + i < taps ? tap + i : tap + i - taps);
        out->scale[i] = scale_of(form, parts, at);
        if (form->shift != NONE) out->shift[i] = shift_of(form, parts, at);
    }
    return repeat(out->scale, taps, out->count) && (form->shift == NONE || repeat(out->shift, taps, out->count));
}

INLINE __m512 numbers(Kind kind, const Codes *codes, int64_t i, __mmask16 valid) {
    const __m128i some = _mm_and_si128(_mm_maskz_loadu_epi8(valid, codes->at + i), codes->mask);
    const __m512i wide = kind == AS_SIGNED ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some);
    return kind == AS_LOOKED_UP ? _mm512_i32gather_ps(wide, codes->table, 4) : _mm512_cvtepi32_ps(wide);
}

/* Codes that begin with the first of the turns; 0 if a table has made a weight NaN, which has many forms. */
INLINE int run(Kind kind, int shifted, Type type, const Codes *codes, const Turns *turns, char *out) {
    __mmask16 wrong = 0;
    for (int64_t i = 0, at = 0; i < codes->count; i += 16, at += 16) {
        if (at == turns->count) at = 0;
        if (i % 64 == 0) _mm_prefetch((const char *)codes->at + i + codes->ahead, _MM_HINT_T1);
        const __mmask16 valid = first_of(codes->count - i);
        const __m512 centred = _mm512_sub_ps(numbers(kind, codes, i, valid), codes->zero);
        const __m512 scale = _mm512_loadu_ps(turns->scale + at);
        const __m512 values = shifted ? _mm512_fmadd_ps(centred, scale, _mm512_loadu_ps(turns->shift + at))
                                      : _mm512_mul_ps(centred, scale);
        if (kind == AS_LOOKED_UP) wrong |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        if (type == F32) _mm512_mask_storeu_ps((float *)out + i, valid, values);
        else _mm256_mask_storeu_epi16((uint16_t *)out + i, valid, halves_of(values, type));
    }
    return !wrong;
}

INLINE int run_to(Kind kind, int shifted, Type type, const Codes *codes, const Turns *turns, char *out) {
    if (type == BF16) return run(kind, shifted, BF16, codes, turns, out);
    return type == F16 ? run(kind, shifted, F16, codes, turns, out) : run(kind, shifted, F32, codes, turns, out);
}

INLINE int run_of(Kind kind, int shifted, Type type, const Codes *codes, const Turns *turns, char *out) {
    return shifted ? run_to(kind, 1, type, codes, turns, out) : run_to(kind, 0, type, codes, turns, out);
}

void turns512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    const Rules rules = rules_of(form, type);
    /* One product or one sum of a product, rounded once. */
    const int fast = rules.once && !rules.multiplied && rules.shifted == rules.fused && form->zeros < 0;
    const int bits = bits_of_code(form->packing), whole = bits == 8;
    const Kind kind = form->looked_up ? AS_LOOKED_UP : form->packing == SIGNED_BYTES ? AS_SIGNED : AS_UNSIGNED;
    const int64_t period = 16 * form->taps, piece = period < PIECE ? PIECE / period * period : period;
    Codes codes = {.mask = _mm_set1_epi8((char)((1 << bits) - 1)), .table = form->table};
    codes.zero = _mm512_set1_ps(form->zero);
    uint8_t spare[PERIOD + SPARE];
    Turns turns;
    char *to = out;
    turns.group = turns.tap = -1;
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first, tap = first % form->taps;
        int64_t now = left < count ? left : count;
        const int known = turns.group == group && turns.tap == tap;
        if (!fast || (!known && !turns_of(form, parts, group, tap, &turns))) {
            turns.group = -1;
            decode_plain512(form, parts, first, now, type, to);
        } else {
            if (now > piece && !whole) now = piece;
            codes.at = whole ? parts->codes + first : unpack512(form, parts, first, now, spare);
            codes.count = now;
            codes.ahead = whole ? parts->ahead : 0;
            if (!whole && parts->ahead)
                for (int64_t i = 0; i < now * bits / 8; i += 64)
                    _mm_prefetch((const char *)parts->codes + (first + parts->ahead) * bits / 8 + i, _MM_HINT_T1);
            if (kind == AS_SIGNED) run_of(AS_SIGNED, rules.shifted, type, &codes, &turns, to);
            else if (kind == AS_UNSIGNED) run_of(AS_UNSIGNED, rules.shifted, type, &codes, &turns, to);
            else if (!run_of(AS_LOOKED_UP, rules.shifted, type, &codes, &turns, to))
                decode_plain512(form, parts, first, now, type, to);
        }
        to += now * (type == F32 ? 4 : 2);
        first += now;
        count -= now;
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
