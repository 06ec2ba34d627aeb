/* Products of one row of activations, or two, with codes of four bits whose groups are whole 64s, or 32 or 16 of them. The
   sixteen values of each group of a strip are computed first, and then codes choose among them: side by side in one loop, the long way
   from a scale to a value would hold up the choosing. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "avx512_sink.h"

enum { UNIT = 64, VALUES = 16, LEAST_GROUP = 16, LONG = 8192 }; /* weights of a strip at most */

/* Where the codes of 64 weights are. In 32 bytes, of which one instruction takes every second code, so that activations
   are turned as well (`evens_first`); or in the low halves of 64, or in the high ones. */
enum { LOW_TURNED, HIGH_TURNED, LOW_PLANE, HIGH_PLANE };

typedef struct {
    uint16_t of[LONG / LEAST_GROUP + 2][VALUES] __attribute__((aligned(64))); /* a strip may begin and end in a group */
} Values;

/* Two groups at a time; one after the last is any. */
INLINE void each_group(const Rules *rules, int plain, int own_zero, Type type, int64_t count, __m512 numbers,
                       const Groups *groups, Values *out) {
    for (int64_t i = 0; i < count; i += 2) {
        const __m512 one = scaled(rules, plain, own_zero, numbers, groups, i);
        const __m512 two = scaled(rules, plain, own_zero, numbers, groups, i + 1);
        if (type == BF16) {
            _mm512_store_si512(out->of[i], (__m512i)_mm512_cvtne2ps_pbh(two, one));
        } else {
            _mm256_store_si256((__m256i *)out->of[i], halves_of(one, F16));
            _mm256_store_si256((__m256i *)out->of[i + 1], halves_of(two, F16));
        }
    }
}

/* Those of groups first .. first + count, of `type`; 0 if they are not tame. */
INLINE int values_at(const Form *form, const Parts *parts, Type type, int64_t first, int64_t count, __m512 numbers,
                     Values *out) {
    Groups groups;
    if (!groups_at(form, parts, first, count, &groups)) return 0;
    const Rules rules = rules_of(form, type);
    const int own_zero = form->zeros >= 0;
    /* Rules that the compiler is to know: one rounded product, a sum after it, both in one; else any. */
#define KNOWN(how, is_normal, is_fused, is_shifted)                                                                  \
    if (rules.arithmetic == how && rules.fused == is_fused && rules.shifted == is_shifted && !rules.multiplied &&    \
        (!is_normal || normal)) {                                                                                    \
        const Rules known = {.arithmetic = how, .normal = is_normal, .fused = is_fused, .shifted = is_shifted,       \
                             .once = type == how, .factor = 1.0f};                                                   \
        if (own_zero) each_group(&known, 0, 1, type, count, numbers, &groups, out);                                  \
        else each_group(&known, 0, 0, type, count, numbers, &groups, out);                                           \
        return 1;                                                                                                    \
    }
    if (rules.plain) {
        each_group(&rules, 1, 0, type, count, numbers, &groups, out);
        return 1;
    }
    const int normal = form->scale == F16 && !form->looked_up && all_normal(&groups, count);
    KNOWN(F16, 1, 0, 0)
    KNOWN(F16, 0, 0, 0)
    KNOWN(BF16, 0, 0, 1)
    KNOWN(BF16, 0, 1, 1)
#undef KNOWN
    each_group(&rules, 0, own_zero, type, count, numbers, &groups, out);
    return 1;
}

#define VALUES_AT(name, type)                                                                                        \
    static __attribute__((noinline)) int name(const Form *form, const Parts *parts, int64_t first, int64_t count,    \
                                              Values *out) {                                                         \
        const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);                   \
        const __m512 numbers = form->looked_up ? _mm512_loadu_ps(form->table) : codes;                               \
        const __m512 zero = _mm512_set1_ps(form->zeros >= 0 ? 0 : form->zero);                                       \
        return values_at(form, parts, type, first, count, _mm512_sub_ps(numbers, zero), out);                        \
    }
VALUES_AT(values_bf16, BF16)
VALUES_AT(values_f16, F16)

/* Weights whose scales the fast way cannot use. */
INLINE void strip_plainly(const Form *form, const Parts *parts, int order, Type type, int64_t first, int64_t count,
                          Sink *sink, int m) {
    for (int64_t at = 0; at < count; at += STRIP) {
        const int64_t run = count - at < STRIP ? count - at : STRIP;
        if (order < LOW_PLANE) take_plain_turned(sink, m, form, parts, first + at, run, type);
        else take_plain(sink, m, form, parts, first + at, run, type);
        move(sink, m, type, run);
    }
}

/* Of 32 codes, those that are of one of `groups` groups, by turns of weights, have the values of their own. */
INLINE __m512i chosen(int groups, const uint16_t *values, __m512i codes) {
    static const uint16_t OF_TWO[32] = {0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
                                        16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16};
    static const uint16_t OF_FOUR[32] = {0,  0,  0,  0,  0,  0,  0,  0,  16, 16, 16, 16, 16, 16, 16, 16,
                                         32, 32, 32, 32, 32, 32, 32, 32, 48, 48, 48, 48, 48, 48, 48, 48};
    if (groups == 1) /* of an index five bits count, and the fifth one changes nothing */
        return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)values)));
    const __m512i those = _mm512_loadu_si512(groups == 2 ? OF_TWO : OF_FOUR);
    const __m512i at = _mm512_or_si512(_mm512_and_si512(codes, _mm512_set1_epi16(15)), those);
    if (groups == 2) return _mm512_permutexvar_epi16(at, _mm512_loadu_si512(values));
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(values), at, _mm512_loadu_si512(values + 32));
}

/* 64 weights, of so many groups, by turns. */
INLINE void take_chosen(int order, int groups, Type type, const uint8_t *codes, const uint16_t *values, int64_t at,
                        int turn, Sink *sink, int m) {
    __m512i one = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes)), two;
    if (order < LOW_PLANE) {
        two = order == LOW_TURNED ? _mm512_srli_epi16(one, 4) : one;
        if (order == HIGH_TURNED) one = _mm512_srli_epi16(one, 4);
    } else {
        two = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + UNIT / 2)));
        if (order == HIGH_PLANE) one = _mm512_srli_epi16(one, 4), two = _mm512_srli_epi16(two, 4);
    }
    take(sink, m, type, at, 32, sum_of(m, turn, 0), chosen(groups, values, one));
    take(sink, m, type, at + 32, 32, sum_of(m, turn, 1), chosen(groups, values, two));
}

/* A strip. `into`: where in its group the first weight is; it and `count` are whole 64s, which are each of `groups`
   groups. */
INLINE void strip(int order, int groups, Type type, const uint8_t *codes, int64_t ahead, const Values *values, int64_t group,
                  int64_t into, int64_t count, Sink *to, int m) {
    const int size = order < LOW_PLANE ? UNIT / 2 : UNIT; /* bytes of 64 codes */
    const uint16_t *those = values->of[0];
    int64_t left = group - into;
    Sink local = held(to, m), *sink = &local;
    codes -= size;
#define NEXT(turn)                                                                   \
    {                                                                                \
        take_chosen(order, groups, type, codes += size, those, at + turn * UNIT, turn, sink, m); \
        if (groups > 1) those += groups * VALUES;                                                \
        else if (!(left -= UNIT)) those += VALUES, left = group;                                 \
    }
    int64_t at = 0;
    for (; at + 2 * UNIT <= count; at += 2 * UNIT) {
        NEXT(0)
        NEXT(1)
        _mm_prefetch((const char *)codes + ahead, _MM_HINT_T0);
        if (order >= LOW_PLANE) _mm_prefetch((const char *)codes - UNIT + ahead, _MM_HINT_T0);
    }
    if (at < count) NEXT(0)
#undef NEXT
    move(sink, m, type, count);
    *to = held(&local, m);
}

INLINE void strips(const Form *form, const Parts *parts, int order, Type type, int64_t first, int64_t count, Sink *to,
                   int m) {
    Values values;
    Sink sink = *to;
    const int shift = order < LOW_PLANE;
    const int64_t start = order == HIGH_PLANE ? form->rows * form->columns / 2 : 0;
    const int64_t ahead = parts->ahead / (order < LOW_PLANE ? 2 : 4); /* bytes; planes are read twice, row by row */
    while (count > 0) {
        const int64_t run = count < LONG ? count : LONG;
        const int64_t group = groups_in(form, first), into = first - group * form->group;
        const int64_t groups = groups_in(form, into + run - 1) + 1;
        ask_scales(form, parts, first, run);
        const uint8_t *codes = parts->codes + ((first - start) >> shift);
        if (type == BF16 ? values_bf16(form, parts, group, groups, &values)
                         : values_f16(form, parts, group, groups, &values)) {
            if (shift && form->group == UNIT / 4)
                strip(order, 4, type, codes, ahead, &values, form->group, into, run, &sink, m);
            else if (shift && form->group == UNIT / 2)
                strip(order, 2, type, codes, ahead, &values, form->group, into, run, &sink, m);
            else strip(order, 1, type, codes, ahead, &values, form->group, into, run, &sink, m);
        } else strip_plainly(form, parts, order, type, first, run, &sink, m);
        first += run;
        count -= run;
    }
    *to = sink;
}

#define EACH_SINK(how)                                                                                        \
    SINK_FUNCTION(how, BF16, 1) SINK_FUNCTION(how, BF16, 2) SINK_FUNCTION(how, F16, 1) SINK_FUNCTION(how, F16, 2)
EACH_SINK(LOW_TURNED)
EACH_SINK(HIGH_TURNED)
EACH_SINK(LOW_PLANE)
EACH_SINK(HIGH_PLANE)

int whole512(const Form *form, Type type) {
    const int fits = form->group % UNIT == 0;
    if (type == F32 || form->columns % UNIT) return 0;
    if (form->packing == NIBBLES_LOW || form->packing == NIBBLES_HIGH)
        return fits || form->group == UNIT / 2 || form->group == UNIT / 4;
    if (!fits) return 0;
    /* Planes of as many whole groups, and each row in one of them. */
    return form->packing == PLANES4 && form->rows % 2 == 0 && form->rows * form->columns % (2 * form->group) == 0;
}

int turned512(const Form *form, Type type) { return form->packing != PLANES4 && whole512(form, type); }

void nibbles_and_dot512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const void *x,
                        int64_t stride, int m, float *sums) {
#define EACH_WAY(how) {{sink_##how##_BF16_1, sink_##how##_BF16_2}, {sink_##how##_F16_1, sink_##how##_F16_2}}
    static Sunk *const ways[4][2][FEW] = {EACH_WAY(LOW_TURNED), EACH_WAY(HIGH_TURNED), EACH_WAY(LOW_PLANE),
                                          EACH_WAY(HIGH_PLANE)};
#undef EACH_WAY
    const int order = form->packing == NIBBLES_LOW    ? LOW_TURNED
                      : form->packing == NIBBLES_HIGH ? HIGH_TURNED
                      : 2 * first < form->rows * form->columns ? LOW_PLANE : HIGH_PLANE;
    ways[order][type == F16][m - 1](form, parts, first, count, 0, x, stride, sums);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
