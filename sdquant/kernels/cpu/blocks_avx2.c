/* GGUF's block types with AVX2 and F16C: unpacked by the portable code, scaled and rounded sixteen at a time. */
#include "avx2.h"

#ifdef BUILD
#include "avx2_steps.h"
#include "avx2_sums.h"
#include "blocks.h"

/* See `choose_from` of blocks_unpack.h. */
static inline void choose_avx2(const int8_t *table, const uint8_t *from, int count, int8_t *to) {
    const __m128i values = _mm_loadu_si128((const __m128i *)table), half = _mm_set1_epi8(15);
    const __m128i bytes = count == 16 ? _mm_loadu_si128((const __m128i *)from) : _mm_loadl_epi64((const __m128i *)from);
    const __m128i low = _mm_shuffle_epi8(values, _mm_and_si128(bytes, half));
    const __m128i high = _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(bytes, 4), half));
    if (count == 16) {
        _mm_storeu_si128((__m128i *)to, low);
        _mm_storeu_si128((__m128i *)(to + 16), high);
    } else {
        _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(low, high));
    }
}

/* See `join` there. */
static inline __m256i bits_at(const uint8_t *from, int shift, uint8_t mask) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)from);
    return _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8((char)mask));
}

static inline void join_avx2(const uint8_t *low, int low_shift, uint8_t low_mask, const uint8_t *high, int high_shift,
                             uint8_t high_mask, int by, uint8_t zero, int8_t *to) {
    const __m256i above = _mm256_sll_epi16(bits_at(high, high_shift, high_mask), _mm_cvtsi32_si128(by));
    const __m256i codes = _mm256_or_si256(bits_at(low, low_shift, low_mask), above);
    _mm256_storeu_si256((__m256i *)to, _mm256_sub_epi8(codes, _mm256_set1_epi8((char)zero)));
}

/* All bits of byte i where bit i is set: a copy of the four bytes' one that has its bit, of which that bit is kept. */
static inline __m256i bytes_of_bits(uint32_t bits) {
    const __m256i of_each = _mm256_setr_epi64x(0, ONES, 2 * ONES, 3 * ONES);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), of_each);
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
}

/* See `fives` there. */
static inline void fives_avx2(const uint8_t *from, uint8_t zero, int8_t *to) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(from + 4));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    const __m256i four = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i codes = _mm256_or_si256(four, _mm256_and_si256(bytes_of_bits(u32(from)), _mm256_set1_epi8(16)));
    _mm256_storeu_si256((__m256i *)to, _mm256_sub_epi8(codes, _mm256_set1_epi8((char)zero)));
}

static inline __m256i eights(const uint64_t *four) {
    return _mm256_setr_epi64x((int64_t)four[0], (int64_t)four[1], (int64_t)four[2], (int64_t)four[3]);
}

/* See `rows` there. */
static inline void rows_avx2(const uint64_t *of_eight, uint32_t signs, int8_t *to) {
    const __m256i codes = eights(of_eight), negative = bytes_of_bits(signs);
    _mm256_storeu_si256((__m256i *)to, _mm256_sub_epi8(_mm256_xor_si256(codes, negative), negative));
}

/* See `eighths` there. */
static inline void eighths_avx2(const uint64_t *of_eight, uint32_t down, int8_t *to) {
    const __m256i bit = _mm256_setr_epi64x(8 * ONES, (int64_t)(0x80 * ONES), 8 * ONES, (int64_t)(0x80 * ONES));
    const __m256i byte = _mm256_setr_epi64x(0, 0, ONES, ONES);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)down), byte);
    const __m256i less = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    __m256i codes = eights(of_eight);
    for (int i = 0; i < 3; i++) codes = _mm256_add_epi8(codes, codes);
    _mm256_storeu_si256((__m256i *)to, _mm256_add_epi8(codes, _mm256_or_si256(less, _mm256_set1_epi8(1))));
}

#define ROWS rows_avx2
#define EIGHTHS eighths_avx2
#define FIVES fives_avx2
#define JOIN join_avx2
#define CHOOSE choose_avx2
#include "blocks_unpack.h"

static inline __m256 eight_codes(const void *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

static inline __m256 eight(const unpacked *from, int at) {
    const __m256 scale = _mm256_set1_ps(from->scale[at / 16]), shift = _mm256_set1_ps(from->shift[at / 16]);
    return _mm256_fmadd_ps(eight_codes(from->codes + at), scale, shift);
}

/* The upper halves of floats, rounded to the nearest, ties to even. A NaN, which only a scale that is one makes, may
   become another number: the loader refuses such blocks. */
static inline __m256i upper(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}

static inline void finish(const unpacked *from, int count, Type type, void *out) {
    for (int i = 0; i < count; i += 16) {
        const __m256 a = eight(from, i), b = eight(from, i + 8);
        if (type == F32) {
            _mm256_storeu_ps((float *)out + i, a);
            _mm256_storeu_ps((float *)out + i + 8, b);
        } else if (type == BF16) {
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper(a), upper(b)), 0xd8);
            _mm256_storeu_si256((__m256i *)((uint16_t *)out + i), both);
        } else {
            _mm_storeu_si128((__m128i *)((uint16_t *)out + i), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
            _mm_storeu_si128((__m128i *)((uint16_t *)out + i + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
        }
    }
}

#define FINISH finish
#define BLOCKS avx2_blocks
#include "blocks_portable.h"

/* Few rows of activations times blocks, each as it is unpacked. */
INLINE void dot_of(Unpack *unpack, int weights, int bytes, const Parts *parts, int64_t first, int64_t count, Type type,
                   const float *x, int64_t stride, int m, float *sums) {
    __m256 sum[FEWEST][MOST_TURNS];
    unpacked block;
    const uint8_t *from = parts->codes + first / weights * bytes;
    for (int i = 0; i < 16; i++) block.shift[i] = -0.0f;
    no_sums(m, sum);
    for (; count > 0; count -= weights, from += bytes, x += weights) {
        for (int at = 0; at < bytes; at += 64) _mm_prefetch((const char *)from + 16 * 64 + at, _MM_HINT_T0);
        if (bytes == 2 + 32) { /* q8_0: a scale and its codes, which need not be unpacked */
            const __m256 scale = _mm256_cvtph_ps(_mm_set1_epi16((short)u16(from)));
            for (int k = 0; k < 4; k++)
                add(rounded8(_mm256_mul_ps(eight_codes(from + 2 + 8 * k), scale), type, type == BF16), x + 8 * k, stride, m,
                    k, sum);
            continue;
        }
        unpack(from, &block, (const int8_t *)parts->zeros);
        for (int i = 0; i < weights; i += 32)
            for (int k = 0; k < 4; k++) /* known to the compiler, so that sums are in registers */
                add(rounded8(eight(&block, i + 8 * k), type, type == BF16), x + i + 8 * k, stride, m, k, sum);
    }
    add_sums(m, sum, sums);
}

/* SUMMED codes times each row of x, scaled, to sum[row][turn]. */
INLINE void add_sixteen(const int8_t *codes, __m256 scale, const float *x, int64_t stride, int m, int turn,
                        __m256 (*sum)[2]) {
    const __m256 first = eight_codes(codes), second = eight_codes(codes + 8);
    for (int j = 0; j < m; j++, x += stride) {
        const __m256 one = _mm256_mul_ps(first, _mm256_loadu_ps(x));
        sum[j][turn] = _mm256_fmadd_ps(_mm256_fmadd_ps(second, _mm256_loadu_ps(x + 8), one), scale, sum[j][turn]);
    }
}

/* The same of up to FEWER rows and weights that are not rounded: codes are multiplied, and their sums scaled. */
INLINE void grouped_dot_of(Unpack *unpack, int weights, int bytes, const Parts *parts, int64_t first, int64_t count,
                           const float *x, int64_t stride, int m, float *sums) {
    __m256 sum[FEWER][2];
    unpacked block;
    const uint8_t *from = parts->codes + first / weights * bytes;
    const float *summed = x + count;
    for (int i = 0; i < 16; i++) block.shift[i] = -0.0f;
    for (int j = 0; j < m; j++) sum[j][0] = sum[j][1] = _mm256_setzero_ps();
    for (; count > 0; count -= weights, from += bytes, x += weights, summed += weights / SUMMED) {
        for (int at = 0; at < bytes; at += 64) _mm_prefetch((const char *)from + 16 * 64 + at, _MM_HINT_T0);
        if (bytes == 2 + 32) { /* q8_0 */
            const __m256 scale = _mm256_cvtph_ps(_mm_set1_epi16((short)u16(from)));
            for (int k = 0; k < 2; k++)
                add_sixteen((const int8_t *)from + 2 + SUMMED * k, scale, x + SUMMED * k, stride, m, k, sum);
            continue;
        }
        unpack(from, &block, (const int8_t *)parts->zeros);
        for (int i = 0; i < weights; i += 2 * SUMMED)
            for (int k = 0; k < 2; k++) { /* known to the compiler, so that sums are in registers */
                const int at = i + SUMMED * k;
                add_sixteen(block.codes + at, _mm256_broadcast_ss(block.scale + at / SUMMED), x + at, stride, m, k, sum);
            }
        for (int j = 0; j < m; j++) {
            const float *of_x = summed + j * stride;
            if (weights < 16 * SUMMED)
                for (int i = 0; i < weights / SUMMED; i++) sums[j] += block.shift[i] * of_x[i];
            else
                for (int k = 0; k < 2; k++)
                    sum[j][k] = _mm256_fmadd_ps(_mm256_loadu_ps(block.shift + 8 * k), _mm256_loadu_ps(of_x + 8 * k), sum[j][k]);
        }
    }
    for (int j = 0; j < m; j++) sums[j] += sum8(_mm256_add_ps(sum[j][0], sum[j][1]));
}

/* The larger blocks are unpacked by a function of their own: in one with the sums, compilers run out of registers. */
#define DEFINE_DOT(name, weights, bytes) \
    static __attribute__((noinline)) void name##_apart(const uint8_t *from, unpacked *out, const int8_t *grid) { \
        unpack_##name(from, out, grid); \
    } \
    INLINE void dot_##name##_of(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, \
                                const float *x, int64_t stride, int m, float *sums) { \
        Unpack *unpack = weights > 32 ? name##_apart : unpack_##name; \
        (void)form; \
        if (type == F32 && m <= FEWER) grouped_dot_of(unpack, weights, bytes, parts, first, count, x, stride, m, sums); \
        else dot_of(unpack, weights, bytes, parts, first, count, type, x, stride, m, sums); \
    } \
    BY_ROWS(dot_##name)
BLOCK_TYPES(DEFINE_DOT)

#define DOT_ROW(name, weights, bytes) {PACKING_##name, weights, dot_##name},

DotFew *avx2_block_dots(const Form *form) {
    static const struct { int packing, weights; DotFew *dot; } rows[] = {BLOCK_TYPES(DOT_ROW)};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].packing == (int)form->packing && rows[i].weights == form->group) return rows[i].dot;
    return 0;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
