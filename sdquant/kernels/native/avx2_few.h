/* Products of no more than eight rows of activations, which never write a decoded weight to memory. */
#ifndef SDQUANT_AVX2_FEW_H
#define SDQUANT_AVX2_FEW_H

#include "avx2_steps.h"
#include "blocks.h"

enum {
    FEWEST = 8, /* rows of activations */
    UNIT = 64,  /* weights at a time, all of one group */
};

/* What codes are chosen from: sixteen floats. */
typedef struct {
    __m256 low, high;
} Choices;

/* sums[j] += the product of weights first .. first + count, of one row, and as many of row j of x, of `m` (1, 2, 4 or
   8), `stride` floats apart and in the order of `turn`. The weights are rounded to `type`. */
typedef void DotFew(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const float *x,
                    int64_t stride, int m, float *sums);

INLINE float sum8(__m256 values) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The entries of the four bits at `bit` of each word. */
INLINE __m256 chosen(Choices from, __m256i words, int bit) {
    const __m256i index = _mm256_srli_epi32(words, bit);                            /* of which three bits count */
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - bit)); /* the fourth one as the sign */
    const __m256 low = _mm256_permutevar8x32_ps(from.low, index), high = _mm256_permutevar8x32_ps(from.high, index);
    return _mm256_blendv_ps(low, high, upper);
}

/* Adds the products of eight weights to the sum of each row; of few rows to two sums by turns, which need not wait for
   each other. */
INLINE void add(__m256 weights, const float *x, int64_t stride, int m, int turn, __m256 (*sum)[2]) {
    for (int j = 0; j < m; j++)
        sum[j][m < FEWEST ? turn : 0] =
            _mm256_fmadd_ps(weights, _mm256_loadu_ps(x + j * stride), sum[j][m < FEWEST ? turn : 0]);
}

/* The groups of a run of weights, each by `unit`, which is given where it begins. */
#define BY_GROUPS(name, unit) \
    INLINE void name##_of(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, \
                          const float *x, int64_t stride, int m, float *sums) { \
        __m256 sum[FEWEST][2]; \
        for (int j = 0; j < m; j++) sum[j][0] = sum[j][1] = _mm256_setzero_ps(); \
        while (count > 0) { \
            const int64_t group = first / form->group, left = (group + 1) * form->group - first; \
            const int64_t run = left < count ? left : count; \
            const Steps steps = steps_of(form, parts, group); \
            unit(form, parts, &steps, first, run, type, x, stride, m, sum); \
            first += run, count -= run, x += run; \
        } \
        for (int j = 0; j < m; j++) sums[j] += sum8(_mm256_add_ps(sum[j][0], sum[j][1])); \
    } \
    BY_ROWS(name)

/* The function of any number of rows from `name`_of, which is made for each. */
#define BY_ROWS(name) \
    static void name(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const float *x, \
                     int64_t stride, int m, float *sums) { \
        switch (m) { \
        case 1: name##_of(form, parts, first, count, type, x, stride, 1, sums); break; \
        case 2: name##_of(form, parts, first, count, type, x, stride, 2, sums); break; \
        case 4: name##_of(form, parts, first, count, type, x, stride, 4, sums); break; \
        default: name##_of(form, parts, first, count, type, x, stride, FEWEST, sums); \
        } \
    }

INLINE Choices choices_of(const Form *form, const Steps *steps, Type type) {
    const __m256 first = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), later = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256 low = form->looked_up ? _mm256_loadu_ps(form->table) : first;
    const __m256 high = form->looked_up ? _mm256_loadu_ps(form->table + 8) : later;
#define BOTH(arithmetic, type, finite) \
    return (Choices){weights8(steps, low, arithmetic, type, finite), weights8(steps, high, arithmetic, type, finite)}
    IN_CASES(*steps, form, type, BOTH)
#undef BOTH
}

/* Two codes in a byte: 64 in eight words, of each the j-th four bits together. */
INLINE void unit_of_nibbles(const Form *form, const Parts *parts, const Steps *steps, int64_t first, int64_t run,
                            Type type, const float *x, int64_t stride, int m, __m256 (*sum)[2]) {
    const Choices from = choices_of(form, steps, type);
    const uint8_t *codes = parts->codes + first / 2;
    for (int64_t i = 0; i < run; i += UNIT, codes += UNIT / 2, x += UNIT) {
        const __m256i words = _mm256_loadu_si256((const __m256i *)codes);
        _mm_prefetch((const char *)codes + AHEAD / 2, _MM_HINT_T0);
        add(chosen(from, words, 0), x, stride, m, 0, sum);
        add(chosen(from, words, 4), x + 8, stride, m, 1, sum);
        add(chosen(from, words, 8), x + 16, stride, m, 0, sum);
        add(chosen(from, words, 12), x + 24, stride, m, 1, sum);
        add(chosen(from, words, 16), x + 32, stride, m, 0, sum);
        add(chosen(from, words, 20), x + 40, stride, m, 1, sum);
        add(chosen(from, words, 24), x + 48, stride, m, 0, sum);
        add(chosen(from, words, 28), x + 56, stride, m, 1, sum);
    }
}

/* One code of four bits in each byte, in the lower or upper half: 32 in eight words. */
INLINE void unit_of_planes(const Form *form, const Parts *parts, const Steps *steps, int64_t first, int64_t run,
                           Type type, const float *x, int64_t stride, int m, __m256 (*sum)[2]) {
    const Choices from = choices_of(form, steps, type);
    const int64_t held = (form->rows * form->columns / form->group + 1) / 2, group = first / form->group;
    const uint8_t *codes = parts->codes + group % held * form->group + first % form->group;
    const __m128i shift = _mm_cvtsi32_si128(group >= held ? 4 : 0);
    for (int64_t i = 0; i < run; i += UNIT / 2, codes += UNIT / 2, x += UNIT / 2) {
        const __m256i words = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)codes), shift);
        add(chosen(from, words, 0), x, stride, m, 0, sum);
        add(chosen(from, words, 8), x + 8, stride, m, 1, sum);
        add(chosen(from, words, 16), x + 16, stride, m, 0, sum);
        add(chosen(from, words, 24), x + 24, stride, m, 1, sum);
    }
}

/* Bytes that are numbers, as they lie. */
INLINE void some_bytes(const Steps *steps, const uint8_t *codes, int is_signed, int64_t run, Type arithmetic, Type type,
                       int finite, const float *x, int64_t stride, int m, __m256 (*sum)[2]) {
    for (int64_t i = 0; i < run; i += 16) {
        _mm_prefetch((const char *)codes + i + AHEAD / 2, _MM_HINT_T0);
        for (int k = 0; k < 2; k++) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i + 8 * k));
            const __m256i numbers = is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
            const __m256 weights = weights8(steps, _mm256_cvtepi32_ps(numbers), arithmetic, type, finite);
            add(weights, x + i + 8 * k, stride, m, k, sum);
        }
    }
}

INLINE void unit_of_bytes(const Form *form, const Parts *parts, const Steps *steps, int64_t first, int64_t run,
                          Type type, const float *x, int64_t stride, int m, __m256 (*sum)[2]) {
    const int is_signed = form->packing == SIGNED_BYTES;
    const Steps alone = scale_alone(steps, 0), twice = scale_alone(steps, 1);
    const int simple = only_scaled(steps);
#define RUN(arithmetic, type, finite) \
    if (simple && !steps->multiplied) \
        some_bytes(&alone, parts->codes + first, is_signed, run, arithmetic, type, finite, x, stride, m, sum); \
    else if (simple) \
        some_bytes(&twice, parts->codes + first, is_signed, run, arithmetic, type, finite, x, stride, m, sum); \
    else \
        some_bytes(steps, parts->codes + first, is_signed, run, arithmetic, type, finite, x, stride, m, sum)
    IN_CASES(*steps, form, type, RUN)
#undef RUN
}

/* GGUF's blocks. */
INLINE void dot_blocks_of(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const float *x,
                          int64_t stride, int m, float *sums) {
    __m256 sum[FEWEST][2];
    unpacked block;
    int bytes;
    Unpack *unpack = avx2_unpack(form, &bytes);
    const uint8_t *from = parts->codes + first / form->group * bytes;
    for (int i = 0; i < 16; i++) block.shift[i] = -0.0f;
    for (int j = 0; j < m; j++) sum[j][0] = sum[j][1] = _mm256_setzero_ps();
    for (; count > 0; count -= form->group, from += bytes) {
        for (int at = 0; at < bytes; at += 64) _mm_prefetch((const char *)from + 16 * 64 + at, _MM_HINT_T0);
        unpack(from, &block, (const int8_t *)parts->zeros);
        for (int64_t i = 0; i < form->group; i += 16, x += 16) {
            const __m256 scale = _mm256_set1_ps(block.scale[i / 16]), shift = _mm256_set1_ps(block.shift[i / 16]);
            for (int k = 0; k < 2; k++) {
                const __m128i codes = _mm_loadl_epi64((const __m128i *)(block.codes + i + 8 * k));
                const __m256 numbers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
                const __m256 weights = rounded8(_mm256_fmadd_ps(numbers, scale, shift), type, 1);
                add(weights, x + 8 * k, stride, m, k, sum);
            }
        }
    }
    for (int j = 0; j < m; j++) sums[j] += sum8(_mm256_add_ps(sum[j][0], sum[j][1]));
}

BY_ROWS(dot_blocks)
BY_GROUPS(dot_nibbles, unit_of_nibbles)
BY_GROUPS(dot_planes, unit_of_planes)
BY_GROUPS(dot_bytes, unit_of_bytes)

/* The function for such weights; NULL where there is none. */
INLINE DotFew *dotter_avx2(const Form *form) {
    if (form->packing > CODED) return dot_blocks;
    if (form->taps > 1 || form->columns % UNIT || form->group % UNIT) return 0;
    switch (form->packing) {
    case NIBBLES_LOW: return dot_nibbles;
    case PLANES4: return dot_planes;
    case SIGNED_BYTES:
    case BYTES: return form->looked_up ? 0 : dot_bytes;
    default: return form->packing == NIBBLES_HIGH ? dot_nibbles : 0;
    }
}

/* Where each of `count` activations is looked for, a multiple of UNIT: as its weight comes out of its word. */
static void turn(const Form *form, const float *x, int64_t count, float *to) {
    const int nibbles = form->packing == NIBBLES_LOW || form->packing == NIBBLES_HIGH;
    const int in_word = nibbles ? 8 : form->packing == PLANES4 ? 4 : 1;
    const int swapped = form->packing == NIBBLES_HIGH; /* the first of two is in the upper half */
    for (int64_t start = 0; start < count; start += 8 * in_word)
        for (int word = 0; word < 8; word++)
            for (int k = 0; k < in_word; k++) to[start + 8 * k + word] = x[start + in_word * word + (k ^ swapped)];
}

#endif
