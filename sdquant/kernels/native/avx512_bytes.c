/* Codes of eight bits, or six: a conversion, or a choice among 256 floats, and the arithmetic for each weight. Where
   groups are long, the 256 values of a group are computed once, and codes choose among them. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_groups.h"
#include "avx512_parts.h"

enum { LONG = 1024 }; /* a group for which a table of its own pays */

/* A table of 256 values of 2 or 4 bytes, as tables of their first, second ... bytes. */
typedef struct {
    __m512i byte[4][4];
} Table;

INLINE void table_of(const void *values, int size, Table *out) {
    uint8_t byte[4][256];
    for (int i = 0; i < 256; i++)
        for (int k = 0; k < size; k++) byte[k][i] = ((const uint8_t *)values)[i * size + k];
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

INLINE void put_floats(const __m512 *values, int64_t left, float *out) {
    for (int k = 0; k < 4; k++) {
        if (left >= 64) _mm512_storeu_ps(out + 16 * k, values[k]);
        else _mm512_mask_storeu_ps(out + 16 * k, first_of(left - 16 * k), values[k]);
    }
}

INLINE void put_halves(const __m512i *values, int64_t left, uint16_t *out) {
    for (int k = 0; k < 2; k++) {
        const int64_t here = left - 32 * k;
        if (here >= 32) _mm512_storeu_si512(out + 32 * k, values[k]);
        else if (here > 0) _mm512_mask_storeu_epi16(out + 32 * k, ((__mmask32)1 << here) - 1, values[k]);
    }
}

INLINE void put(const __m512 *values, Type type, int64_t left, void *out) {
    __m512i halves[2];
    if (type == F32) {
        put_floats(values, left, out);
        return;
    }
    if (type == BF16) {
        halves[0] = (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]);
        halves[1] = (__m512i)_mm512_cvtne2ps_pbh(values[3], values[2]);
    } else {
        for (int k = 0; k < 2; k++)
            halves[k] = _mm512_inserti64x4(_mm512_castsi256_si512(halves_of(values[2 * k], F16)),
                                           halves_of(values[2 * k + 1], F16), 1);
    }
    put_halves(halves, left, out);
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
                   const Groups *groups, int64_t group, const uint8_t *codes, int64_t count, char *out) {
    for (int64_t i = 0; i < count; i += 64) {
        __m512 values[4];
        numbers_of(how, table, zero, codes_of(codes + i, count - i), values);
        for (int k = 0; k < 4; k++) values[k] = scaled(rules, plain, own_zero, values[k], groups, group);
        put(values, type, count - i, out + i * (type == F32 ? 4 : 2));
    }
}

/* The same, by a table of its values. */
INLINE void run_by_table(Type type, const Table *table, const uint8_t *codes, int64_t count, char *out) {
    for (int64_t i = 0; i < count; i += 64) {
        __m512 floats[4];
        __m512i halves[2];
        if (type == F32) {
            floats_of(table, codes_of(codes + i, count - i), floats);
            put_floats(floats, count - i, (float *)out + i);
        } else {
            halves_at(table, codes_of(codes + i, count - i), halves);
            put_halves(halves, count - i, (uint16_t *)out + i);
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

INLINE void strips(const Form *form, const Parts *parts, How how, Type type, int64_t first, int64_t count, char *out) {
    uint8_t spare[STRIP + SPARE];
    float numbers[256];
    Groups groups;
    Table table;
    int64_t of_table = -1; /* the group that it is for */
    const Rules rules = rules_of(form);
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
        if (groups_at(form, parts, group, (into + run - 1) / form->group + 1, &groups)) {
            const uint8_t *codes = unpack512(form, parts, first, run, spare);
            if (how == OWN) {
                if (of_table != group) own_table(&rules, own_zero, type, numbers, &groups, &table);
                of_table = group;
                run_by_table(type, &table, codes, run, out);
            } else {
                const int64_t size = type == F32 ? 4 : 2;
                for (int64_t i = 0, g = 0; i < run; g++) {
                    const int64_t end = (g + 1) * form->group - into, stop = end < run ? end : run;
                    if (rules.plain) run512(&rules, 1, 0, how, type, &table, zero, &groups, g, codes + i, stop - i, out + i * size);
                    else run512(&rules, 0, own_zero, how, type, &table, zero, &groups, g, codes + i, stop - i, out + i * size);
                    i = stop;
                }
            }
        } else {
            decode_plain512(form, parts, first, run, type, out);
        }
        first += run;
        count -= run;
        out += run * (type == F32 ? 4 : 2);
    }
}

INLINE void typed(const Form *form, const Parts *parts, How how, int64_t first, int64_t count, Type type, void *out) {
    if (type == BF16) strips(form, parts, how, BF16, first, count, out);
    else if (type == F16) strips(form, parts, how, F16, first, count, out);
    else strips(form, parts, how, F32, first, count, out);
}

void bytes512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    if (form->group >= LONG && form->packing != SDNQ6) typed(form, parts, OWN, first, count, type, out);
    else if (form->packing == SIGNED_BYTES) typed(form, parts, SIGNED, first, count, type, out);
    else if (form->looked_up) typed(form, parts, LOOK_UP, first, count, type, out);
    else typed(form, parts, UNSIGNED, first, count, type, out);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
