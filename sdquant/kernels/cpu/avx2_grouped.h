/* One row of activations or two, times codes that choose among sixteen and GGUF's blocks of 16 bytes with two codes in each:
   numbers are multiplied as they are, and the sum of a group by its scale. Weights are as in avx2_unrounded.h. What is
   added to all weights of a block is multiplied by the sum of as many activations.

   For codes that are numbers themselves this takes as long as making weights of them, or longer where memory is waited
   for. */
#ifndef SDQUANT_AVX2_GROUPED_H
#define SDQUANT_AVX2_GROUPED_H

#include "avx2_unrounded.h"

enum {
    BLOCK = 32,
    NEAR = 24 * 1024, /* bytes of activations that are in the first cache beside weights; whole blocks of columns */
};

/* To `whole` of each row: the sum of a group's numbers times activations, scaled. */
INLINE void add_group(float scale, __m256 (*sum)[MOST_TURNS], int m, __m256 *whole) {
    for (int j = 0; j < m; j++) {
        for (int t = 1; t < turns_of(m); t++) sum[j][0] = _mm256_add_ps(sum[j][0], sum[j][t]);
        whole[j] = _mm256_fmadd_ps(sum[j][0], _mm256_set1_ps(scale), whole[j]);
    }
}

/* As dot_as_nibbles and dot_as_planes of avx2_unrounded.h. */
INLINE void chosen_of(Packing packing, const Choices *table, const Form *form, const Parts *parts, int64_t first,
                      int64_t count, const float *x, int64_t stride, int m, float *sums) {
    const int64_t held = packing == PLANES4 ? (form->rows * form->columns / form->group + 1) / 2 : 0;
    int64_t group = first / form->group, left = (group + 1) * form->group - first;
    __m256 whole[FEWER];
    for (int j = 0; j < m; j++) whole[j] = _mm256_setzero_ps();
    for (; count > 0; group++, left = form->group) {
        const int upper = packing == PLANES4 && group >= held;
        const int64_t run = left < count ? left : count, code = first - (upper ? held * form->group : 0);
        const uint8_t *codes = parts->codes + (packing == NIBBLES_LOW ? code / 2 : code);
        __m256 sum[FEWEST][MOST_TURNS];
        no_sums(m, sum);
        for (int64_t at = 0; at < run; at += UNIT, codes += packing == NIBBLES_LOW ? UNIT / 2 : UNIT, x += UNIT) {
            _mm_prefetch((const char *)codes + AHEAD / 2, _MM_HINT_T0);
            sixty_four(packing, table, 0, codes, upper, 0, x, stride, m, sum);
        }
        add_group(scale_of(form, parts, group) * form->factor, sum, m, whole);
        first += run, count -= run;
    }
    for (int j = 0; j < m; j++) sums[j] += sum8(whole[j]);
}

/* A block's weights are its numbers * scale + common. */
typedef struct {
    float scale, common;
} Affine;

/* What those of the block at `from` are, which is behind it then. */
typedef Affine Head(const uint8_t **from);

/* Codes are a half of each byte behind the other, in the order that `turn` has for PLANES4. */
INLINE void blocks_of(Head *head, const Choices *table, int bytes, const Parts *parts, int64_t first, int64_t count,
                      const float *x, int64_t stride, int m, float *sums) {
    const uint8_t *from = parts->codes + first / BLOCK * bytes;
    float common[NEAR / (SUMMED * 4)], *next = common;
    __m256 whole[FEWER];
    for (int j = 0; j < m; j++) whole[j] = _mm256_setzero_ps();
    for (int64_t at = 0; at < count; at += BLOCK) {
        __m256 sum[FEWEST][MOST_TURNS];
        _mm_prefetch((const char *)from + AHEAD / 2, _MM_HINT_T0);
        const Affine of = head(&from);
        const __m128i low = _mm_loadu_si128((const __m128i *)from), high = _mm_srli_epi16(low, 4);
        from += BLOCK / 2;
        no_sums(m, sum);
        half_bytes(table, 0, _mm256_set_m128i(high, low), 0, 0, 0, x + at, stride, m, sum);
        add_group(of.scale, sum, m, whole);
        for (int i = 0; i < BLOCK / SUMMED; i++) *next++ = of.common;
    }
    for (int j = 0; j < m; j++) {
        const float *summed = x + count + j * stride;
        int64_t i = 0;
        for (; i + 8 <= count / SUMMED; i += 8)
            whole[j] = _mm256_fmadd_ps(_mm256_loadu_ps(common + i), _mm256_loadu_ps(summed + i), whole[j]);
        for (; i < count / SUMMED; i++) sums[j] += common[i] * summed[i];
        sums[j] += sum8(whole[j]);
    }
}

INLINE float half_of(const uint8_t **from) {
    const float value = _cvtsh_ss(u16(*from));
    *from += 2;
    return value;
}

/* Codes that are numbers are (16 + code) / 2, see avx2_unrounded.h. */
INLINE Affine head_q4_0(const uint8_t **from) {
    const float scale = half_of(from);
    return (Affine){2 * scale, -(16 + 8) * scale};
}

INLINE Affine head_q4_1(const uint8_t **from) {
    const float scale = half_of(from), least = half_of(from);
    return (Affine){2 * scale, least - 16 * scale};
}

INLINE Affine head_iq4_nl(const uint8_t **from) { return (Affine){half_of(from), 0}; }

INLINE Affine head_mxfp4(const uint8_t **from) { return (Affine){e8m0_half(*(*from)++), 0}; }

static const float of_iq4_nl[16] = {NON_LINEAR}, of_mxfp4[16] = {E2M1};

/* `run` is a call for M rows. `numbers`: what sixteen codes choose among, `chosen` there. */
#define ONE_OR_TWO(name, numbers, run) \
    static void name(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const float *x, \
                     int64_t stride, int m, float *sums) { \
        const Choices chosen = sixteen(numbers); \
        (void)form, (void)type, (void)chosen; \
        if (m == 1) { \
            enum { M = 1 }; \
            run; \
        } else { \
            enum { M = FEWER }; \
            run; \
        } \
    }
#define CHOSEN(name, packing) \
    ONE_OR_TWO(name, form->table, chosen_of(packing, &chosen, form, parts, first, count, x, stride, M, sums))
#define BLOCKS(name, bytes, numbers, choices) \
    ONE_OR_TWO(dot_##name, numbers, blocks_of(head_##name, choices, bytes, parts, first, count, x, stride, M, sums))

CHOSEN(dot_of_nibbles, NIBBLES_LOW)
CHOSEN(dot_of_planes, PLANES4)
BLOCKS(q4_0, 18, form->table, 0)
BLOCKS(q4_1, 20, form->table, 0)
BLOCKS(iq4_nl, 18, of_iq4_nl, &chosen)
BLOCKS(mxfp4, 17, of_mxfp4, &chosen)

/* How weights are floats in memory, and products of up to FEWER rows with the order in which these have x; NULL where there
   is none. */
typedef struct {
    Floats *floats;
    DotFew *dot;
    Packing order;
} Unrounded;

static Unrounded unrounded_ways(const Form *form) {
    static const struct { int packing, looked_up; Unrounded ways; } rows[] = {
        {SIGNED_BYTES, 0, {floats_as_signed, dot_as_signed, SIGNED_BYTES}},
        {BYTES, 0, {floats_as_bytes, dot_as_bytes, BYTES}},
        {PLANES2, 0, {floats_as_planes2, dot_as_planes2, PLANES2}},
        {TWOS, 0, {floats_as_twos, dot_as_twos, TWOS}},
        {THREES, 0, {floats_as_threes, dot_as_threes, THREES}},
        {FIVES, 0, {floats_as_fives, dot_as_fives, FIVES}},
        {SIXES, 0, {floats_as_sixes, dot_as_sixes, SIXES}},
        {SEVENS, 0, {floats_as_sevens, dot_as_sevens, SEVENS}},
        {SDNQ3, 0, {floats_as_sdnq3, dot_as_sdnq3, SDNQ3}},
        {SDNQ6, 0, {floats_as_sdnq6, dot_as_sdnq6, SDNQ6}},
        {PLANES4, 0, {floats_as_planes, dot_as_planes, PLANES4}},
        {PLANES4, 1, {floats_of_planes, dot_of_planes, PLANES4}},
        {NIBBLES_LOW, 0, {floats_as_nibbles, dot_as_nibbles, NIBBLES_LOW}},
        {NIBBLES_LOW, 1, {floats_of_nibbles, dot_of_nibbles, NIBBLES_LOW}},
        {NIBBLES_HIGH, 0, {floats_as_nibbles, dot_as_nibbles, NIBBLES_HIGH}},
        {NIBBLES_HIGH, 1, {floats_of_nibbles, dot_of_nibbles, NIBBLES_HIGH}},
        {PACKING_q4_0, 0, {0, dot_q4_0, PLANES4}},
        {PACKING_q4_1, 0, {0, dot_q4_1, PLANES4}},
        {PACKING_iq4_nl, 0, {0, dot_iq4_nl, PLANES4}},
        {PACKING_mxfp4, 0, {0, dot_mxfp4, PLANES4}},
    };
    static const Unrounded of_float8[] = {
        [E4M3_BITS] = {floats_as_e4m3, dot_as_e4m3, BYTES},
        [E5M2_BITS] = {floats_as_e5m2, dot_as_e5m2, BYTES},
        [E4M3_SORTED] = {floats_as_sorted_e4m3, dot_as_sorted_e4m3, BYTES},
    };
    static const Unrounded of_short = {floats_of_nibbles, dot_of_short_nibbles, NIBBLES_LOW};
    static const Unrounded of_short_high = {floats_of_nibbles, dot_of_short_nibbles, NIBBLES_HIGH};
    const int looked_up = form->packing < CODED && form->looked_up;
    if (looked_up && form->group < UNIT && form->packing == NIBBLES_LOW) return of_short;
    if (looked_up && form->group < UNIT && form->packing == NIBBLES_HIGH) return of_short_high;
    if (form->packing == BYTES && looked_up && form->float8.kind != NO_FLOAT8) return of_float8[form->float8.kind];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].packing == (int)form->packing && rows[i].looked_up == looked_up) return rows[i].ways;
    return (Unrounded){0, 0, form->packing};
}

#endif
