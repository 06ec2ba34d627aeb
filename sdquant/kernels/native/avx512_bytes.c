/* Codes of eight bits, or six: a conversion, or a choice among 256 floats, and the arithmetic for each weight. Where
   groups are long, the 256 values of a group are computed once, and codes choose among them. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "avx512_sink.h"

enum { LONG = 1024 }; /* a group for which a table of its own pays */

/* A table of 256 values of 2 or 4 bytes, as tables of their first, second ... bytes. */
typedef struct {
    __m512i byte[4][4];
} Table;

INLINE void table_of(const void *values, int size, Table *out) {
    uint8_t byte[4][256];
    for (int i = 0; i < 256; i += 64 / size) {
        __m512i some = _mm512_loadu_si512((const char *)values + i * size);
        for (int k = 0; k < size; k++, some = _mm512_srli_epi64(some, 8)) {
            if (size == 2) _mm256_storeu_si256((__m256i *)(byte[k] + i), _mm512_cvtepi16_epi8(some));
            else _mm_storeu_si128((__m128i *)(byte[k] + i), _mm512_cvtepi32_epi8(some));
        }
    }
    for (int k = 0; k < size; k++)
        for (int part = 0; part < 4; part++) out->byte[k][part] = _mm512_loadu_si512(byte[k] + 64 * part);
}

/* The k-th bytes of the values of 64 codes. */
INLINE __m512i bytes_of(const Table *table, int k, __m512i codes, __mmask64 upper) {
    return _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(table->byte[k][0], codes, table->byte[k][1]), upper,
                                _mm512_permutex2var_epi8(table->byte[k][2], codes, table->byte[k][3]));
}

/* The floats of 64 codes. Bytes are put together within each 128 bits: so that all comes out in order, fours of codes
   are turned before. */
INLINE void floats_of(const Table *table, __m512i codes, __m512 *out) {
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    codes = _mm512_permutexvar_epi32(turn, codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i a = bytes_of(table, 0, codes, upper), b = bytes_of(table, 1, codes, upper);
    const __m512i c = bytes_of(table, 2, codes, upper), d = bytes_of(table, 3, codes, upper);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab, cd));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab, cd));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab_high, cd_high));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab_high, cd_high));
}

/* The same for halves. */
INLINE void halves_at(const Table *table, __m512i codes, __m512i *out) {
    codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i low = bytes_of(table, 0, codes, upper), high = bytes_of(table, 1, codes, upper);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

INLINE __m512i codes_of(const uint8_t *codes, int64_t left) {
    return left >= 64 ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(((__mmask64)1 << left) - 1, codes);
}

INLINE void take_floats(Sink *sink, int m, int64_t at, int64_t left, const __m512 *values) {
    for (int k = 0; k < 4; k++)
        take(sink, m, F32, at + 16 * k, left - 16 * k, k & 1, _mm512_castps_si512(values[k]));
}

/* 64 weights, `at` from the one at hand, of which `left` count. */
INLINE void take_values(Sink *sink, int m, Type type, int64_t at, int64_t left, const __m512 *values) {
    if (type == F32) {
        take_floats(sink, m, at, left, values);
        return;
    }
    for (int k = 0; k < 2; k++) {
        const __m512 a = values[2 * k], b = values[2 * k + 1];
        const __m512i halves = type == BF16 ? (__m512i)_mm512_cvtne2ps_pbh(b, a)
                                            : _mm512_inserti64x4(_mm512_castsi256_si512(halves_of(a, F16)), halves_of(b, F16), 1);
        take(sink, m, type, at + 32 * k, left - 32 * k, k, halves);
    }
}

typedef enum { SIGNED, UNSIGNED, LOOK_UP, OWN } How;

/* What 64 codes stand for, less a common zero. */
INLINE void numbers_of(How how, const Table *table, float zero, __m512i codes, __m512 *out) {
    if (how == LOOK_UP) {
        floats_of(table, codes, out);
        return;
    }
    const __m128i four[4] = {_mm512_castsi512_si128(codes), _mm512_extracti32x4_epi32(codes, 1),
                             _mm512_extracti32x4_epi32(codes, 2), _mm512_extracti32x4_epi32(codes, 3)};
    for (int k = 0; k < 4; k++) {
        const __m512i wide = how == SIGNED ? _mm512_cvtepi8_epi32(four[k]) : _mm512_cvtepu8_epi32(four[k]);
        out[k] = _mm512_sub_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(zero));
    }
}

/* A run of one group. */
INLINE void run512(const Rules *rules, int plain, int own_zero, How how, Type type, const Table *table, float zero,
                   const Groups *groups, int64_t group, const uint8_t *codes, int64_t count, Sink *sink, int m) {
    for (int64_t i = 0; i < count; i += 64) {
        __m512 values[4];
        numbers_of(how, table, zero, codes_of(codes + i, count - i), values);
        for (int k = 0; k < 4; k++) values[k] = scaled(rules, plain, own_zero, values[k], groups, group);
        take_values(sink, m, type, i, count - i, values);
    }
}

/* The same, by a table of its values. */
INLINE void run_by_table(Type type, const Table *table, const uint8_t *codes, int64_t count, Sink *sink, int m) {
    for (int64_t i = 0; i < count; i += 64) {
        __m512 floats[4];
        __m512i halves[2];
        if (type == F32) {
            floats_of(table, codes_of(codes + i, count - i), floats);
            take_floats(sink, m, i, count - i, floats);
        } else {
            halves_at(table, codes_of(codes + i, count - i), halves);
            for (int k = 0; k < 2; k++) take(sink, m, type, i + 32 * k, count - i - 32 * k, k, halves[k]);
        }
    }
}

/* The table of a group. `numbers`: what the 256 codes stand for, less a common zero. */
static void own_table(const Rules *rules, int own_zero, Type type, const float *numbers, const Groups *groups,
                      Table *out) {
    float values[256];
    for (int i = 0; i < 256; i += 16) {
        const __m512 made = scaled(rules, 0, own_zero, _mm512_loadu_ps(numbers + i), groups, 0);
        if (type == F32) _mm512_storeu_ps(values + i, made);
        else _mm256_storeu_si256((__m256i *)((uint16_t *)values + i), halves_of(made, type));
    }
    if (type == F32) table_of(values, 4, out);
    else table_of(values, 2, out);
}

INLINE void strips(const Form *form, const Parts *parts, How how, Type type, int64_t first, int64_t count, Sink *to,
                   int m) {
    uint8_t spare[STRIP + SPARE];
    float numbers[256];
    Groups groups;
    Table table;
    Sink sink = *to;
    int64_t of_table = -1; /* the group that it is for */
    const Rules rules = rules_of(form, type);
    const int own_zero = form->zeros >= 0;
    const float zero = own_zero ? 0 : form->zero;
    if (how == LOOK_UP) table_of(form->table, 4, &table);
    if (how == OWN)
        for (int i = 0; i < 256; i++) {
            const float number = (float)(form->packing == SIGNED_BYTES ? (int8_t)i : i);
            numbers[i] = (form->looked_up ? form->table[i] : number) - zero;
        }
    while (count > 0) {
        int64_t run = count < STRIP ? count : STRIP;
        const int64_t group = first / form->group, into = first - group * form->group;
        if (how == OWN && form->group - into < run) run = form->group - into;
        ask(form, parts, first, run, form->packing == SDNQ6 ? 6 : 8);
        if (!groups_at(form, parts, group, (into + run - 1) / form->group + 1, &groups)) {
            take_plain(&sink, m, form, parts, first, run, type);
            move(&sink, m, type, run);
        } else if (how == OWN) {
            if (of_table != group) own_table(&rules, own_zero, type, numbers, &groups, &table);
            of_table = group;
            run_by_table(type, &table, unpack512(form, parts, first, run, spare), run, &sink, m);
            move(&sink, m, type, run);
        } else {
            const uint8_t *codes = unpack512(form, parts, first, run, spare);
            for (int64_t i = 0, g = 0; i < run; g++) {
                const int64_t end = (g + 1) * form->group - into, size = (end < run ? end : run) - i;
                if (rules.plain) run512(&rules, 1, 0, how, type, &table, zero, &groups, g, codes + i, size, &sink, m);
                else run512(&rules, 0, own_zero, how, type, &table, zero, &groups, g, codes + i, size, &sink, m);
                move(&sink, m, type, size);
                i += size;
            }
        }
        first += run;
        count -= run;
    }
    *to = sink;
}

INLINE void to_memory(const Form *form, const Parts *parts, How how, int64_t first, int64_t count, Type type, void *out) {
    Sink sink = {.out = out};
    if (type == BF16) strips(form, parts, how, BF16, first, count, &sink, 0);
    else if (type == F16) strips(form, parts, how, F16, first, count, &sink, 0);
    else strips(form, parts, how, F32, first, count, &sink, 0);
}

INLINE void to_sums(const Form *form, const Parts *parts, How how, int64_t first, int64_t count, Type type, const void *x,
                    int64_t stride, int m, float *sums) {
    Sink sink = sums_of(x, stride);
#define SUMS(type, m)                                           \
    {                                                           \
        strips(form, parts, how, type, first, count, &sink, m); \
        finish(&sink, m, sums);                                 \
    }
    EACH_M(SUMS)
#undef SUMS
}

#define EACH_HOW(run, ...)                                                                       \
    if (form->group >= LONG && form->packing != SDNQ6) run(form, parts, OWN, __VA_ARGS__);       \
    else if (form->packing == SIGNED_BYTES) run(form, parts, SIGNED, __VA_ARGS__);               \
    else if (form->looked_up) run(form, parts, LOOK_UP, __VA_ARGS__);                            \
    else run(form, parts, UNSIGNED, __VA_ARGS__);

void bytes512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    EACH_HOW(to_memory, first, count, type, out)
}

void bytes_and_dot512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const void *x,
                      int64_t stride, int m, float *sums) {
    EACH_HOW(to_sums, first, count, type, x, stride, m, sums)
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
