/* Bytes whose group has scales by turns: those of convolutions, with one for each position of the kernel. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "avx512_groups.h"

enum { PERIOD = 16 * MOST_TAPS }; /* weights after which the scales begin anew, and whole vectors of them */

typedef struct {
    int64_t group, tap, count; /* what it is for; how many there are */
    float scale[PERIOD];
} Turns;

/* 0 if a scale is not tame. */
static int turns_of(const Form *form, const Parts *parts, int64_t group, int64_t tap, Turns *out) {
    const int64_t taps = form->taps;
    out->group = group, out->tap = tap, out->count = 16 * taps;
    for (int64_t i = 0; i < taps; i++) out->scale[i] = scale_of(form, parts, group * taps + (tap + i) % taps);
    for (int64_t i = taps; i < out->count; i++) out->scale[i] = out->scale[i - taps];
    __mmask16 fits = 0xffff;
    for (int64_t i = 0; i < out->count; i += 16) fits &= tame(_mm512_loadu_ps(out->scale + i), 0xffff);
    return fits == 0xffff;
}

INLINE __m512 sixteen(int is_signed, const uint8_t *codes, __mmask16 valid, __m512 zero, const float *scale) {
    const __m128i some = _mm_maskz_loadu_epi8(valid, codes);
    const __m512i wide = is_signed ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some);
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(wide), zero), _mm512_loadu_ps(scale));
}

INLINE void run(int is_signed, Type type, const uint8_t *codes, int64_t count, __m512 zero, const Turns *turns,
                int64_t ahead, char *out) {
    for (int64_t i = 0, at = 0; i < count; i += 16, at += 16) {
        if (at == turns->count) at = 0;
        if (i % 64 == 0) _mm_prefetch((const char *)codes + i + ahead, _MM_HINT_T1);
        const __mmask16 valid = first_of(count - i);
        const __m512 values = sixteen(is_signed, codes + i, valid, zero, turns->scale + at);
        if (type == F32) _mm512_mask_storeu_ps((float *)out + i, valid, values);
        else _mm256_mask_storeu_epi16((uint16_t *)out + i, valid, halves_of(values, type));
    }
}

void turns512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    const Rules rules = rules_of(form, type);
    const int fast = rules.plain && !form->looked_up && (form->packing == SIGNED_BYTES || form->packing == BYTES);
    const __m512 zero = _mm512_set1_ps(form->zero);
    Turns turns = {-1, -1, 0, {0}};
    char *to = out;
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first, tap = first % form->taps;
        const int64_t now = left < count ? left : count;
        const int known = turns.group == group && turns.tap == tap;
        if (!fast || (!known && !turns_of(form, parts, group, tap, &turns))) {
            turns.group = -1;
            decode_plain512(form, parts, first, now, type, to);
        } else {
            const uint8_t *codes = parts->codes + first;
            if (form->packing == SIGNED_BYTES) {
                if (type == BF16) run(1, BF16, codes, now, zero, &turns, parts->ahead, to);
                else if (type == F16) run(1, F16, codes, now, zero, &turns, parts->ahead, to);
                else run(1, F32, codes, now, zero, &turns, parts->ahead, to);
            } else if (type == BF16) run(0, BF16, codes, now, zero, &turns, parts->ahead, to);
            else if (type == F16) run(0, F16, codes, now, zero, &turns, parts->ahead, to);
            else run(0, F32, codes, now, zero, &turns, parts->ahead, to);
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
