/* Weights whose codes are numbers, of float8 too, or choose among sixteen, for products with bfloat16: a fused multiply-add
   makes floats of them, which are not rounded to bfloat16, nor is any step to what the scheme computes in. Rounding them takes
   longer than multiplying. GGUF's blocks have kernels of their own, which are asked for float32. A code that stands for zero
   may be 2^-20 of its scale.

   Codes of four bits that are numbers are not turned into them: put among the bits of a float they are (16 + code) / 2. */
#ifndef SDQUANT_AVX2_UNROUNDED_H
#define SDQUANT_AVX2_UNROUNDED_H

#include "avx2_bits.h"
#include "avx2_few.h"
#include "avx2_float8.h"

/* A weight is its code's number * scale + common. */
typedef struct {
    __m256 scale, common;
} Line;

/* One of the numbers of a part, of a type below NESTED. */
INLINE float one_of(const void *from, Type type, int64_t i) {
    return type == F16 ? _cvtsh_ss(((const uint16_t *)from)[i]) : load(from, type, i);
}

INLINE Line line_of(const Form *form, const Parts *parts, int64_t group, int nibbles) {
    const float whole = form->scale < NESTED ? one_of(parts->scale, form->scale, group) : scale_of(form, parts, group);
    const float scale = whole * form->factor;
    const float least = zero_of(form, parts, group) + (nibbles ? 16.0f : 0.0f);
    return (Line){_mm256_set1_ps(nibbles ? 2 * scale : scale), _mm256_set1_ps(shift_of(form, parts, group) - scale * least)};
}

/* The first four lanes of one, and the last four of the other. */
INLINE Line halves_of(const Line *low, const Line *high) {
    return (Line){_mm256_blend_ps(low->scale, high->scale, 0xf0), _mm256_blend_ps(low->common, high->common, 0xf0)};
}

/* Those of a UNIT of nibbles in groups of 16 or 32, for `half_bytes`: see where `turn` puts each. */
INLINE void lines_of(const Form *form, const Parts *parts, int64_t group, int nibbles, Line *lines) {
    Line of[4];
    const int count = (int)(UNIT / form->group);
    for (int i = 0; i < count; i++) of[i] = line_of(form, parts, group + i, nibbles);
    for (int i = 0; i < 2; i++)
        lines[i] = count == 4 ? halves_of(of + i, of + 2 + i) : halves_of(of, of + 1);
}

/* Eight weights, `at` of their UNIT: to `to` as they are, or times rows of x to sums. `line` NULL: they are their numbers. */
INLINE void eight(const Line *line, __m256 numbers, int at, float *to, const float *x, int64_t stride, int m,
                  __m256 (*sum)[MOST_TURNS]) {
    const __m256 weights = line ? _mm256_fmadd_ps(numbers, line->scale, line->common) : numbers;
    if (to) _mm256_storeu_ps(to + at, weights);
    else add(weights, x + at, stride, m, at / 8, sum);
}

/* 32 codes of four bits in as many bytes, of each the lower or the upper half: numbers, or chosen from `table`. They come as
   `choose32` has them: a line is for the first 16 of these, another one for the rest. `lines` NULL: they are their numbers. */
INLINE void half_bytes(const Choices *table, const Line *lines, __m256i bytes, int upper, int at, float *to, const float *x,
                       int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    if (table) {
        const __m256i codes = upper ? _mm256_srli_epi16(bytes, 4) : bytes;
        __m256 chosen[4];
        choose32(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)), 0, chosen);
        for (int i = 0; i < 4; i++) eight(lines ? lines + i / 2 : 0, chosen[i], at + 8 * i, to, x, stride, m, sum);
        return;
    }
    const __m256i shifted = upper ? _mm256_srli_epi16(bytes, 1) : _mm256_slli_epi16(bytes, 3);
    const __m256i bits = _mm256_and_si256(shifted, _mm256_set1_epi8(0x78));
    const __m256i none = _mm256_setzero_si256(), more = _mm256_set1_epi8(0x41); /* 0x41000000 is 8 */
    const __m256i half[2] = {_mm256_unpacklo_epi8(bits, more), _mm256_unpackhi_epi8(bits, more)};
    for (int i = 0; i < 2; i++) {
        const __m256 first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, half[i]));
        const __m256 second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, half[i]));
        eight(lines ? lines + i : 0, first, at + 16 * i, to, x, stride, m, sum);
        eight(lines ? lines + i : 0, second, at + 16 * i + 8, to, x, stride, m, sum);
    }
}

/* IN_ORDER weights of float8. */
INLINE void some_float8(Float8Kind kind, const Form *form, const Line *line, const uint8_t *codes, float *to, const float *x,
                        int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    for (int i = 0; i < IN_ORDER; i += 16) {
        __m256 numbers[2];
        if (!sixteen_numbers(kind, &form->float8, codes + i, numbers)) {
            float each[16];
            for (int k = 0; k < 16; k++) each[k] = form->table[codes[i + k]] / factor_of(kind, &form->float8);
            numbers[0] = _mm256_loadu_ps(each), numbers[1] = _mm256_loadu_ps(each + 8);
        }
        eight(line, numbers[0], i, to, x, stride, m, sum);
        eight(line, numbers[1], i + 8, to, x, stride, m, sum);
    }
}

/* IN_ORDER weights of whole numbers. `last`: of all that there are, behind which nothing may be read. */
INLINE void some_in_order(Packing packing, const Line *line, const uint8_t *codes, int plane, int last, float *to,
                          const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const int bits = bits_of_code(packing), size = packing == PLANES2 ? IN_ORDER : IN_ORDER / 8 * bits;
    uint8_t copy[IN_ORDER + BEYOND];
    __m256i numbers[4];
    if (last && size < IN_ORDER) codes = memcpy(copy, codes, size);
    codes_in_order(packing, codes, plane, numbers);
    for (int i = 0; i < 4; i++) eight(line, _mm256_cvtepi32_ps(numbers[i]), 8 * i, to, x, stride, m, sum);
}

/* A UNIT of nibbles, or of a plane of them, `upper`: which half of each byte. */
INLINE void sixty_four(Packing packing, const Choices *table, const Line *lines, const uint8_t *codes, int upper, float *to,
                          const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const int each = packing == NIBBLES_LOW ? 0 : UNIT / 2; /* bytes from the first half of the codes to the other */
    const __m256i first = _mm256_loadu_si256((const __m256i *)codes);
    const __m256i second = _mm256_loadu_si256((const __m256i *)(codes + each));
    half_bytes(table, lines, first, packing == PLANES4 && upper, 0, to, x, stride, m, sum);
    half_bytes(table, lines, second, packing == NIBBLES_LOW || upper, UNIT / 2, to, x, stride, m, sum);
}

/* Groups of a plane; all of them where there is one. */
INLINE int64_t groups_of_plane(const Form *form, Packing packing) {
    const int planes = packing == PLANES4 ? 2 : packing == PLANES2 ? 4 : 1;
    return (form->rows * form->columns / form->group + planes - 1) / planes;
}

/* Nibbles in groups that are smaller than a UNIT. */
INLINE void small_groups(const Choices *table, const Form *form, const Parts *parts, int64_t first, int64_t count, float *to,
                         const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const uint8_t *codes = parts->codes + first / 2;
    int64_t group = first / form->group;
    const int64_t groups = UNIT / form->group;
    for (int64_t at = 0; at < count; at += UNIT, codes += UNIT / 2, group += groups) {
        Line lines[2];
        _mm_prefetch((const char *)codes + AHEAD / 2, _MM_HINT_T0);
        lines_of(form, parts, group, !table, lines);
        sixty_four(NIBBLES_LOW, table, lines, codes, 0, to ? to + at : 0, x + at, stride, m, sum);
    }
}

/* Weights first .. first + count, in the order of `turn`. `kind`: of BYTES that are float8, else NO_FLOAT8. */
INLINE void run_of(Packing packing, Float8Kind kind, const Choices *table, const Form *form, const Parts *parts, int64_t first,
                   int64_t count, float *to, const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const int nibbles = packing == NIBBLES_LOW || packing == PLANES4, planes = packing == PLANES4 || packing == PLANES2;
    const int unit = nibbles ? UNIT : IN_ORDER, bits = planes ? 8 : bits_of_code(packing);
    const int64_t of_plane = planes ? groups_of_plane(form, packing) : 0, all = form->rows * form->columns;
    int64_t group = first / form->group, end = (group + 1) * form->group - first;
    if (packing == NIBBLES_LOW && form->group < UNIT) {
        small_groups(table, form, parts, first, count, to, x, stride, m, sum);
        return;
    }
    for (int64_t at = 0; at < count; group++, end += form->group) {
        const int plane = planes ? (int)(group / of_plane) : 0;
        Line line = line_of(form, parts, group, !table && nibbles);
        if (kind != NO_FLOAT8) line.scale = _mm256_mul_ps(line.scale, _mm256_set1_ps(factor_of(kind, &form->float8)));
        const Line lines[2] = {line, line};
        for (; at < end && at < count; at += unit) {
            const int64_t code = first + at - plane * of_plane * form->group;
            const uint8_t *codes = parts->codes + code / 8 * bits;
            float *here = to ? to + at : 0;
            _mm_prefetch((const char *)codes + AHEAD / 2, _MM_HINT_T0);
            if (nibbles) sixty_four(packing, table, lines, codes, plane, here, x + at, stride, m, sum);
            else if (kind != NO_FLOAT8) some_float8(kind, form, &line, codes, here, x + at, stride, m, sum);
            else some_in_order(packing, &line, codes, plane, first + at + IN_ORDER == all, here, x + at, stride, m, sum);
        }
    }
}

#define FLOATS(name, packing, kind, choices) \
    static void floats_##name(const Form *form, const Parts *parts, int64_t first, int64_t count, float *to) { \
        const Choices chosen = sixteen(form->table); \
        (void)chosen; \
        run_of(packing, kind, choices, form, parts, first, count, to, to, 0, 0, 0); \
    }
#define DOT(name, packing, kind, choices) \
    INLINE void dot_##name##_of(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, \
                                const float *x, int64_t stride, int m, float *sums) { \
        __m256 sum[FEWEST][MOST_TURNS]; \
        const Choices chosen = sixteen(form->table); \
        (void)type, (void)chosen; \
        no_sums(m, sum); \
        run_of(packing, kind, choices, form, parts, first, count, 0, x, stride, m, sum); \
        add_sums(m, sum, sums); \
    } \
    BY_ROWS(dot_##name)
#define NUMBERS(name, packing, kind) DOT(name, packing, kind, 0) FLOATS(name, packing, kind, 0)

INLINE Choices sixteen(const float *numbers) {
    return bytes_of_sixteen(_mm256_loadu_ps(numbers), _mm256_loadu_ps(numbers + 8));
}

/* Which of two nibbles comes first is a matter of the order of x. */
NUMBERS(as_nibbles, NIBBLES_LOW, NO_FLOAT8)
NUMBERS(as_planes, PLANES4, NO_FLOAT8)
NUMBERS(as_signed, SIGNED_BYTES, NO_FLOAT8)
NUMBERS(as_bytes, BYTES, NO_FLOAT8)
NUMBERS(as_planes2, PLANES2, NO_FLOAT8)
NUMBERS(as_twos, TWOS, NO_FLOAT8)
NUMBERS(as_threes, THREES, NO_FLOAT8)
NUMBERS(as_fives, FIVES, NO_FLOAT8)
NUMBERS(as_sixes, SIXES, NO_FLOAT8)
NUMBERS(as_sevens, SEVENS, NO_FLOAT8)
NUMBERS(as_sdnq3, SDNQ3, NO_FLOAT8)
NUMBERS(as_sdnq6, SDNQ6, NO_FLOAT8)
NUMBERS(as_e4m3, BYTES, E4M3_BITS)
NUMBERS(as_e5m2, BYTES, E5M2_BITS)
NUMBERS(as_sorted_e4m3, BYTES, E4M3_SORTED)
DOT(of_short_nibbles, NIBBLES_LOW, NO_FLOAT8, &chosen)
FLOATS(of_nibbles, NIBBLES_LOW, NO_FLOAT8, &chosen)
FLOATS(of_planes, PLANES4, NO_FLOAT8, &chosen)

/* Whether weights of this packing can be in such groups and rows. */
INLINE int fits_units(const Form *form) {
    const int nibbles = form->packing == NIBBLES_LOW || form->packing == NIBBLES_HIGH;
    const int64_t unit = nibbles || form->packing == PLANES4 ? UNIT : IN_ORDER;
    const int small = nibbles && (form->group == 16 || form->group == 32);
    return form->columns % unit == 0 && (form->group % unit == 0 || small);
}

/* Weights first .. first + count as floats, in the order of `turn`; both in whole units. */
typedef void Floats(const Form *form, const Parts *parts, int64_t first, int64_t count, float *to);

#endif
