/* Codes of up to four bits: the sixteen values of a group are computed once, and codes choose among them: one
   instruction for 32 weights of 16 bits. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "avx512_sink.h"

/* How codes come: one to a byte, or two. */
enum { BYTE_EACH, LOW_FIRST, HIGH_FIRST };

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
INLINE void choose16(__m512i values, int order, const uint8_t *codes, int64_t count, int64_t ahead, Sink *sink, int m,
                     Type type) {
    int64_t i = 0;
#define TAKE(k)                                                                                              \
    {                                                                                                        \
        const uint8_t *from = codes + (order == BYTE_EACH ? i + 32 * k : i / 2 + 16 * k);                    \
        const __m512i index = order == BYTE_EACH                                                             \
                                  ? _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from))          \
                                  : pairs16(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)), order); \
        take(sink, m, type, i + 32 * k, 32, k, _mm512_permutexvar_epi16(index, values));                     \
    }
    for (; i + 64 <= count; i += 64) {
        _mm_prefetch((const char *)codes + i / 2 + ahead, _MM_HINT_T1);
        TAKE(0)
        TAKE(1)
    }
    if (i + 32 <= count) { /* groups of 32 come here alone */
        TAKE(0)
        i += 32;
    }
#undef TAKE
    for (; i < count; i += 32) {
        const int64_t left = count - i;
        const __mmask32 valid = left >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1;
        const __m512i index =
            order == BYTE_EACH
                ? _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(valid, codes + i))
                : pairs16(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first_of((left + 1) / 2), codes + i / 2)), order);
        take(sink, m, type, i, left, 0, _mm512_permutexvar_epi16(index, values));
    }
}

INLINE void choose32(__m512 values, int order, const uint8_t *codes, int64_t count, int64_t ahead, Sink *sink, int m) {
    int64_t i = 0;
#define TAKE(k)                                                                                              \
    {                                                                                                        \
        const uint8_t *from = codes + (order == BYTE_EACH ? i + 16 * k : i / 2 + 8 * k);                     \
        const __m512i index = order == BYTE_EACH                                                             \
                                  ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from))             \
                                  : pairs32(_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)from)), order); \
        take(sink, m, F32, i + 16 * k, 16, k, _mm512_castps_si512(_mm512_permutexvar_ps(index, values)));    \
    }
    for (; i + 32 <= count; i += 32) {
        _mm_prefetch((const char *)codes + i / 2 + ahead, _MM_HINT_T1);
        TAKE(0)
        TAKE(1)
    }
#undef TAKE
    for (; i < count; i += 16) {
        const int64_t left = count - i, held = order == BYTE_EACH ? left : (left + 1) / 2;
        const __m128i some = _mm_maskz_loadu_epi8(first_of(held < 16 ? held : 16), codes + (order == BYTE_EACH ? i : i / 2));
        const __m512i index = order == BYTE_EACH ? _mm512_cvtepu8_epi32(some) : pairs32(_mm512_cvtepu8_epi64(some), order);
        take(sink, m, F32, i, left, 0, _mm512_castps_si512(_mm512_permutexvar_ps(index, values)));
    }
}

/* Pairs of groups of 16, as halves; how many groups are done. */
INLINE int64_t choose_twos(const Rules *rules, int plain, int own_zero, Type type, int order, const Groups *groups,
                           __m512 numbers, const uint8_t *codes, int64_t count, Sink *sink, int m) {
    static const uint16_t OF_TWO[32] = {0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
                                        16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16};
    const __m512i those = _mm512_loadu_si512(OF_TWO);
    int64_t group = 0;
    for (; (group + 2) * 16 <= count; group += 2, codes += 16) {
        const __m256i one = halves_of(scaled(rules, plain, own_zero, numbers, groups, group), type);
        const __m256i two = halves_of(scaled(rules, plain, own_zero, numbers, groups, group + 1), type);
        const __m512i values = _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
        const __m512i pairs = pairs16(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), order);
        const __m512i index = _mm512_or_si512(_mm512_and_si512(pairs, _mm512_set1_epi16(15)), those);
        take(sink, m, type, 0, 32, 0, _mm512_permutexvar_epi16(index, values));
        move(sink, m, type, 32);
    }
    return group;
}

/* Weights whose groups are known. `into`: where in its group the first one is. */
INLINE void strip(const Rules *rules, int plain, int own_zero, Type type, int order, const Groups *groups,
                  __m512 numbers, const uint8_t *codes, int64_t size, int64_t into, int64_t count,
                  int64_t ahead, Sink *to, int m) {
    Sink local = held(to, m), *sink = &local;
    int64_t group = 0;
    if (type != F32 && order != BYTE_EACH && size == 16 && !into) {
        group = choose_twos(rules, plain, own_zero, type, order, groups, numbers, codes, count, sink, m);
        codes += group * 8;
        count -= group * 16;
    }
    for (; count > 0; group++) {
        const int64_t run = size - into < count ? size - into : count;
        const __m512 values = scaled(rules, plain, own_zero, numbers, groups, group);
        if (type == F32) choose32(values, order, codes, run, ahead, sink, m);
        else choose16(_mm512_broadcast_i64x4(halves_of(values, type)), order, codes, run, ahead, sink, m, type);
        into = 0;
        codes += order == BYTE_EACH ? run : run / 2;
        move(sink, m, type, run);
        count -= run;
    }
    *to = held(&local, m);
}

INLINE void strips(const Form *form, const Parts *parts, int order, Type type, int64_t first, int64_t count, Sink *to,
                   int m) {
    uint8_t spare[STRIP + SPARE];
    float numbers[16];
    Groups groups;
    Sink sink = *to;
    const Rules rules = rules_of(form, type);
    const int planes = planes_of(form->packing), own_zero = form->zeros >= 0;
    const int64_t held = (form->rows * form->columns / form->group + planes - 1) / planes * form->group;
    const int64_t ahead = order == BYTE_EACH ? 0 : parts->ahead / 2;
    const int bits = bits_of_code(form->packing);
    for (int i = 0; i < 16; i++) {
        const int code = i & ((1 << bits) - 1);
        numbers[i] = (form->looked_up ? form->table[code] : (float)code) - (own_zero ? 0 : form->zero);
    }
    const __m512 of_codes = _mm512_loadu_ps(numbers);
    while (count > 0) {
        int64_t run = count < STRIP ? count : STRIP;
        if (planes > 1 && held - first % held < run) run = held - first % held;
        const int64_t group = first / form->group, into = first - group * form->group;
        if (order == BYTE_EACH) ask(form, parts, first, run, planes > 1 ? 8 : bits);
        else ask_scales(form, parts, first, run);
        if (groups_at(form, parts, group, (into + run - 1) / form->group + 1, &groups)) {
            const uint8_t *codes = order == BYTE_EACH ? unpack512(form, parts, first, run, spare) : parts->codes + first / 2;
            if (rules.plain) strip(&rules, 1, 0, type, order, &groups, of_codes, codes, form->group, into, run, ahead, &sink, m);
            else strip(&rules, 0, own_zero, type, order, &groups, of_codes, codes, form->group, into, run, ahead, &sink, m);
        } else {
            take_plain(&sink, m, form, parts, first, run, type);
            move(&sink, m, type, run);
        }
        first += run;
        count -= run;
    }
    *to = sink;
}

SINK_FUNCTIONS(BYTE_EACH)
SINK_FUNCTIONS(LOW_FIRST)
SINK_FUNCTIONS(HIGH_FIRST)

static Sunk *function_of(const Form *form, int64_t first, Type type, int m) {
    const int even = first % 2 == 0 && form->group % 2 == 0;
    if (even && form->packing == NIBBLES_LOW) return functions_LOW_FIRST[type][m];
    if (even && form->packing == NIBBLES_HIGH) return functions_HIGH_FIRST[type][m];
    return functions_BYTE_EACH[type][m];
}

void choose512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    function_of(form, first, type, 0)(form, parts, first, count, out, 0, 0, 0);
}

void choose_and_dot512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const void *x,
                       int64_t stride, int m, float *sums) {
    if (whole512(form, type)) nibbles_and_dot512(form, parts, first, count, type, x, stride, m, sums);
    else function_of(form, first, type, m)(form, parts, first, count, 0, x, stride, sums);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
