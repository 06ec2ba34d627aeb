/* Products of no more than eight rows of activations, which never write a decoded weight to memory. */
#ifndef SDQUANT_AVX2_FEW_H
#define SDQUANT_AVX2_FEW_H

#include "avx2_steps.h"
#include "avx2_sums.h"
#include "blocks.h"

enum { UNIT = 64 }; /* weights at a time, all of one group */

/* What codes are chosen from: the bytes of sixteen floats, the first bytes of all together and so on, twice. */
typedef struct {
    __m256i bytes[4];
} Choices;

/* The groups of a run of weights, each by `unit`, which is given its number, where it begins and what is the same for
   all. Divisions take as long as some tens of weights: there is one. */
#define BY_GROUPS(name, unit) \
    INLINE void name##_of(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, \
                          const float *x, int64_t stride, int m, float *sums) { \
        __m256 sum[FEWEST][MOST_TURNS]; \
        const Sixteen of = sixteen_of(form, type); \
        int64_t group = first / form->group, left = (group + 1) * form->group - first; \
        no_sums(m, sum); \
        for (; count > 0; group++, left = form->group) { \
            const int64_t run = left < count ? left : count; \
            unit(form, parts, &of, group, first, run, type, x, stride, m, sum); \
            first += run, count -= run, x += run; \
        } \
        add_sums(m, sum, sums); \
    } \
    BY_ROWS(name)

INLINE Choices bytes_of_sixteen(__m256 low, __m256 high) {
    const __m256i of_each = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i a = _mm256_shuffle_epi8(_mm256_castps_si256(low), of_each);
    const __m256i b = _mm256_shuffle_epi8(_mm256_castps_si256(high), of_each);
    const __m128i a0 = _mm256_castsi256_si128(a), a1 = _mm256_extracti128_si256(a, 1);
    const __m128i b0 = _mm256_castsi256_si128(b), b1 = _mm256_extracti128_si256(b, 1);
    const __m128i first = _mm_unpacklo_epi32(a0, a1), last = _mm_unpacklo_epi32(b0, b1); /* bytes 0 and 1 */
    const __m128i third = _mm_unpackhi_epi32(a0, a1), more = _mm_unpackhi_epi32(b0, b1); /* bytes 2 and 3 */
    return (Choices){{_mm256_broadcastsi128_si256(_mm_unpacklo_epi64(first, last)),
                      _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(first, last)),
                      _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(third, more)),
                      _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(third, more))}};
}

/* What sixteen codes are before they are scaled, less `zero`, and whether a zero point and a scale are all that their
   groups have: then what all groups' zero points are is subtracted here. `held`: groups of a plane, of PLANES4. */
typedef struct {
    __m256 low, high, zero;
    int64_t held;
    int bare;
} Sixteen;

INLINE Sixteen sixteen_of(const Form *form, Type type) {
    const __m256 first = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), later = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256 low = form->looked_up ? _mm256_loadu_ps(form->table) : first;
    const __m256 high = form->looked_up ? _mm256_loadu_ps(form->table + 8) : later;
    const int bare = form->scale != NONE && form->shift == NONE && form->factor == 1.0f && !form->fused &&
                     form->arithmetic != BF16 && type != F16;
    const __m256 zero = _mm256_set1_ps(bare && form->zeros < 0 ? form->zero : 0);
    const int64_t held = form->packing == PLANES4 ? (form->rows * form->columns / form->group + 1) / 2 : 0;
    return (Sixteen){_mm256_sub_ps(low, zero), _mm256_sub_ps(high, zero), zero, held, bare};
}

INLINE Choices choices_of(const Form *form, const Parts *parts, const Sixteen *of, int64_t group, Type type) {
    if (of->bare) {
        const float number = scale_of(form, parts, group);
        const __m256 scale = _mm256_set1_ps(number);
        __m256 low = of->low, high = of->high;
        if (form->zeros >= 0) {
            const __m256 zero = _mm256_set1_ps(zero_of(form, parts, group));
            low = _mm256_sub_ps(low, zero), high = _mm256_sub_ps(high, zero);
        }
        low = _mm256_mul_ps(low, scale), high = _mm256_mul_ps(high, scale);
        if (form->arithmetic == F16) {
            const int normal = whole_f16(form) && ordinary_f16(number);
            low = normal ? nearest_f16(low) : rounded8(low, F16, 0);
            high = normal ? nearest_f16(high) : rounded8(high, F16, 0);
        }
        if (type == F32) return bytes_of_sixteen(low, high);
        if (ordinary(number)) return bytes_of_sixteen(nearest_bf16(low), nearest_bf16(high));
    }
    const Steps steps = steps_of(form, parts, group);
    __m256 low = _mm256_add_ps(of->low, of->zero), high = _mm256_add_ps(of->high, of->zero);
#define BOTH(arithmetic, type, ordinary) \
    low = weights8(&steps, low, arithmetic, type, ordinary), high = weights8(&steps, high, arithmetic, type, ordinary)
    IN_CASES(steps, form, type, BOTH)
#undef BOTH
    return bytes_of_sixteen(low, high);
}

/* 32 codes of four bits in as many bytes: numbers 4 v + k and 16 + 4 v + k of them, k from 0 to 3, in weights v. Those of
   bfloat16 have two bytes that are not zero. */
INLINE void choose32(const Choices *from, __m256i codes, int halves, __m256 *weights) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i c = _mm256_shuffle_epi8(from->bytes[2], codes), d = _mm256_shuffle_epi8(from->bytes[3], codes);
    const __m256i a = halves ? none : _mm256_shuffle_epi8(from->bytes[0], codes);
    const __m256i b = halves ? none : _mm256_shuffle_epi8(from->bytes[1], codes);
    const __m256i low[2] = {halves ? none : _mm256_unpacklo_epi8(a, b), halves ? none : _mm256_unpackhi_epi8(a, b)};
    const __m256i high[2] = {_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d)};
    for (int i = 0; i < 2; i++) {
        weights[2 * i] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low[i], high[i]));
        weights[2 * i + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[i], high[i]));
    }
}

INLINE void add32(const Choices *from, __m256i codes, int halves, const float *x, int64_t stride, int m,
                  __m256 (*sum)[MOST_TURNS]) {
    __m256 weights[4];
    choose32(from, codes, halves, weights);
    for (int v = 0; v < 4; v++) add(weights[v], x + 8 * v, stride, m, v, sum);
}

/* Two codes in a byte: 64 in 32 bytes, of each the lower half and then the upper. */
INLINE void some_nibbles(const Choices *from, const uint8_t *codes, int halves, int64_t run, const float *x,
                         int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int64_t i = 0; i < run; i += UNIT, codes += UNIT / 2, x += UNIT) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)codes);
        _mm_prefetch((const char *)codes + AHEAD / 2, _MM_HINT_T0);
        add32(from, _mm256_and_si256(both, mask), halves, x, stride, m, sum);
        add32(from, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask), halves, x + UNIT / 2, stride, m, sum);
    }
}

INLINE void unit_of_nibbles(const Form *form, const Parts *parts, const Sixteen *of, int64_t group, int64_t first,
                            int64_t run, Type type, const float *x, int64_t stride, int m,
                            __m256 (*sum)[MOST_TURNS]) {
    const Choices from = choices_of(form, parts, of, group, type);
    const uint8_t *codes = parts->codes + first / 2;
    if (type == BF16) some_nibbles(&from, codes, 1, run, x, stride, m, sum);
    else some_nibbles(&from, codes, 0, run, x, stride, m, sum);
}

/* One code of four bits in each byte, in the lower or upper half. */
INLINE void unit_of_planes(const Form *form, const Parts *parts, const Sixteen *of, int64_t group, int64_t first,
                           int64_t run, Type type, const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const Choices from = choices_of(form, parts, of, group, type);
    const int upper = group >= of->held;
    const uint8_t *codes = parts->codes + first - (upper ? of->held * form->group : 0);
    const __m128i shift = _mm_cvtsi32_si128(upper ? 4 : 0);
    const __m256i mask = _mm256_set1_epi8(15);
    for (int64_t i = 0; i < run; i += UNIT / 2, codes += UNIT / 2, x += UNIT / 2) {
        const __m256i bytes = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)codes), shift);
        add32(&from, _mm256_and_si256(bytes, mask), type == BF16, x, stride, m, sum);
    }
}

/* Bytes that are numbers, as they lie. */
INLINE void some_bytes(const Steps *steps, const uint8_t *codes, int is_signed, int64_t run, Type arithmetic, Type type,
                       int ordinary, const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    for (int64_t i = 0; i < run; i += 32) {
        _mm_prefetch((const char *)codes + i + AHEAD / 2, _MM_HINT_T0);
        for (int k = 0; k < 4; k++) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i + 8 * k));
            const __m256i numbers = is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
            const __m256 weights = weights8(steps, _mm256_cvtepi32_ps(numbers), arithmetic, type, ordinary);
            add(weights, x + i + 8 * k, stride, m, k, sum);
        }
    }
}

INLINE void unit_of_bytes(const Form *form, const Parts *parts, const Sixteen *of, int64_t group, int64_t first,
                          int64_t run, Type type, const float *x, int64_t stride, int m, __m256 (*sum)[MOST_TURNS]) {
    const int is_signed = form->packing == SIGNED_BYTES;
    const Steps steps = steps_of(form, parts, group);
    const Steps alone = known_steps(&steps, 0, 0), less = known_steps(&steps, 1, 0), twice = known_steps(&steps, 0, 1);
    const int simple = have_few_steps(&steps);
    (void)of; /* bytes are scaled one by one */
#define RUN(arithmetic, type, ordinary) \
    if (simple && steps.multiplied) \
        some_bytes(&twice, parts->codes + first, is_signed, run, arithmetic, type, ordinary, x, stride, m, sum); \
    else if (simple && steps.subtracted) \
        some_bytes(&less, parts->codes + first, is_signed, run, arithmetic, type, ordinary, x, stride, m, sum); \
    else if (simple) \
        some_bytes(&alone, parts->codes + first, is_signed, run, arithmetic, type, ordinary, x, stride, m, sum); \
    else \
        some_bytes(&steps, parts->codes + first, is_signed, run, arithmetic, type, ordinary, x, stride, m, sum)
    IN_CASES(steps, form, type, RUN)
#undef RUN
}

BY_GROUPS(dot_nibbles, unit_of_nibbles)
BY_GROUPS(dot_planes, unit_of_planes)
BY_GROUPS(dot_bytes, unit_of_bytes)

/* The function for such weights; NULL where there is none. */
INLINE DotFew *dotter_avx2(const Form *form) {
    if (form->packing > CODED) return avx2_block_dots(form);
    if (form->taps > 1 || form->columns % UNIT || form->group % UNIT) return 0;
    switch (form->packing) {
    case NIBBLES_LOW: return dot_nibbles;
    case PLANES4: return dot_planes;
    case SIGNED_BYTES:
    case BYTES: return form->looked_up ? 0 : dot_bytes;
    default: return form->packing == NIBBLES_HIGH ? dot_nibbles : 0;
    }
}

/* Where each of `count` activations is looked for, a multiple of UNIT, or of half as many but for nibbles: as its weight
   comes out of `choose32`. */
static void turn(Packing packing, const float *x, int64_t count, float *to) {
    const int nibbles = packing == NIBBLES_LOW || packing == NIBBLES_HIGH, each = nibbles ? 2 : 1;
    const int swapped = packing == NIBBLES_HIGH; /* the first of two is in the upper half */
    if (!nibbles && packing != PLANES4) {
        memcpy(to, x, count * sizeof *x);
        return;
    }
    for (int64_t start = 0; start < count; start += 32 * each)
        for (int half = 0; half < each; half++)
            for (int v = 0; v < 4; v++)
                for (int k = 0; k < 8; k++)
                    *to++ = x[start + each * (k / 4 * 16 + 4 * v + k % 4) + (half ^ swapped)];
}

#endif
