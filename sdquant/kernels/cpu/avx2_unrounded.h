/* Weights whose codes are numbers, or choose among sixteen, for products with bfloat16: a fused multiply-add makes floats of
   them, which are not rounded to bfloat16, nor is any step to what the scheme computes in. Rounding them takes longer than
   multiplying. GGUF's blocks have kernels of their own, which are asked for float32. A code that stands for zero may be
   2^-20 of its scale.

   Codes of four bits that are numbers are not turned into them: put among the bits of a float they are (16 + code) / 2. */
#ifndef SDQUANT_AVX2_UNROUNDED_H
#define SDQUANT_AVX2_UNROUNDED_H

#include "avx2_few.h"

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

/* Eight weights, `at` of their UNIT: to `to` as they are, or times rows of x to sums. `line` NULL: they are their numbers. */
INLINE void eight(const Line *line, __m256 numbers, int at, float *to, const float *x, int64_t stride, int m,
                  __m256 (*sum)[MOST_TURNS]) {
    const __m256 weights = line ? _mm256_fmadd_ps(numbers, line->scale, line->common) : numbers;
    if (to) _mm256_storeu_ps(to + at, weights);
    else add(weights, x + at, stride, m, at / 8, sum);
}

/* 32 codes of four bits in as many bytes, of each the lower or the upper half: numbers, or chosen from `table`. They come as
   `choose32` has them. */
INLINE void half_bytes(const Choices *table, const Line *line, __m256i bytes, int upper, int at, float *to, const float *x,
                       int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    if (table) {
        const __m256i codes = upper ? _mm256_srli_epi16(bytes, 4) : bytes;
        __m256 chosen[4];
        choose32(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)), 0, chosen);
        for (int i = 0; i < 4; i++) eight(line, chosen[i], at + 8 * i, to, x, stride, m, sum);
        return;
    }
    const __m256i shifted = upper ? _mm256_srli_epi16(bytes, 1) : _mm256_slli_epi16(bytes, 3);
    const __m256i bits = _mm256_and_si256(shifted, _mm256_set1_epi8(0x78));
    const __m256i none = _mm256_setzero_si256(), more = _mm256_set1_epi8(0x41); /* 0x41000000 is 8 */
    const __m256i half[2] = {_mm256_unpacklo_epi8(bits, more), _mm256_unpackhi_epi8(bits, more)};
    for (int i = 0; i < 2; i++) {
        const __m256 first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, half[i]));
        const __m256 second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, half[i]));
        eight(line, first, at + 16 * i, to, x, stride, m, sum);
        eight(line, second, at + 16 * i + 8, to, x, stride, m, sum);
    }
}

/* A UNIT of weights. `upper`: of PLANES4, which half of each byte. */
INLINE void unit_of(Packing packing, const Choices *table, const Line *line, const uint8_t *codes, int upper, float *to,
                    const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    if (packing == NIBBLES_LOW || packing == PLANES4) {
        const int each = packing == NIBBLES_LOW ? 0 : UNIT / 2; /* bytes from the first half of the codes to the other */
        const __m256i first = _mm256_loadu_si256((const __m256i *)codes);
        const __m256i second = _mm256_loadu_si256((const __m256i *)(codes + each));
        half_bytes(table, line, first, packing == PLANES4 && upper, 0, to, x, stride, m, sum);
        half_bytes(table, line, second, packing == NIBBLES_LOW || upper, UNIT / 2, to, x, stride, m, sum);
        return;
    }
    for (int i = 0; i < UNIT; i += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i));
        const __m256i numbers = packing == SIGNED_BYTES ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
        eight(line, _mm256_cvtepi32_ps(numbers), i, to, x, stride, m, sum);
    }
}

/* Weights first .. first + count, in the order of `turn`. */
INLINE void run_of(Packing packing, const Choices *table, const Form *form, const Parts *parts, int64_t first,
                   int64_t count, float *to, const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const int64_t held = packing == PLANES4 ? (form->rows * form->columns / form->group + 1) / 2 : 0;
    int64_t group = first / form->group, end = (group + 1) * form->group - first;
    for (int64_t at = 0; at < count; group++, end += form->group) {
        const int upper = packing == PLANES4 && group >= held;
        const Line line = line_of(form, parts, group, !table && (packing == NIBBLES_LOW || packing == PLANES4));
        for (; at < end && at < count; at += UNIT) {
            const int64_t code = first + at - (upper ? held * form->group : 0);
            const uint8_t *codes = parts->codes + (packing == NIBBLES_LOW ? code / 2 : code);
            _mm_prefetch((const char *)codes + AHEAD / 2, _MM_HINT_T0);
            unit_of(packing, table, &line, codes, upper, to ? to + at : 0, x + at, stride, m, sum);
        }
    }
}

#define FLOATS(kind, packing, choices) \
    static void floats_##kind(const Form *form, const Parts *parts, int64_t first, int64_t count, float *to) { \
        const Choices chosen = sixteen(form->table); \
        (void)chosen; \
        run_of(packing, choices, form, parts, first, count, to, to, 0, 0, 0); \
    }
#define NUMBERS(kind, packing) \
    INLINE void dot_##kind##_of(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, \
                                const float *x, int64_t stride, int m, float *sums) { \
        __m256 sum[FEWEST][MOST_TURNS]; \
        (void)type; \
        no_sums(m, sum); \
        run_of(packing, 0, form, parts, first, count, 0, x, stride, m, sum); \
        add_sums(m, sum, sums); \
    } \
    BY_ROWS(dot_##kind) \
    FLOATS(kind, packing, 0)

INLINE Choices sixteen(const float *numbers) {
    return bytes_of_sixteen(_mm256_loadu_ps(numbers), _mm256_loadu_ps(numbers + 8));
}

/* Which of two nibbles comes first is a matter of the order of x. */
NUMBERS(as_nibbles, NIBBLES_LOW)
NUMBERS(as_planes, PLANES4)
NUMBERS(as_signed, SIGNED_BYTES)
NUMBERS(as_bytes, BYTES)
FLOATS(of_nibbles, NIBBLES_LOW, &chosen)
FLOATS(of_planes, PLANES4, &chosen)

/* Weights first .. first + count as floats, in the order of `turn`; both multiples of UNIT. */
typedef void Floats(const Form *form, const Parts *parts, int64_t first, int64_t count, float *to);

#endif
