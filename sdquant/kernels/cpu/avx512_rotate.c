/* Rotations for AVX-512: the order of sums of rotate_portable, so the same numbers. Runs of up to 256 numbers stay in
   registers. */
#include "avx512.h"

#ifdef BUILD
#include "rotate.h"
#include "rotate_bounds.h"

#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

enum { RUN = 256, NEXT = 2560 }; /* bytes: how far ahead numbers are asked for, as in avx512_codes.c */

/* A sum and difference of four numbers each, in two steps, where `swap` and the two others are permutations of fours:
   a+b, a-b, c-d, c+d, and of these the first twice and the last twice, with the others. Products with 0.5 and one are
   exact, so that no rounding is left out. */
#define FOURS(permute, x, mine, other, sign)                                                              \
    do {                                                                                                  \
        const __m512 sums = _mm512_fmadd_ps(permute(x, 0xb1), other, _mm512_mul_ps(x, mine));             \
        x = _mm512_fmadd_ps(permute(sums, 0x5a), sign, permute(sums, 0xf0));                              \
    } while (0)
#define NEAR(x, by) _mm512_permute_ps(x, by)
#define FAR(x, by) _mm512_shuffle_f32x4(x, x, by)

INLINE __m512 sixteen(Type type, const void *x, int64_t at) {
    if (type == F32) return _mm512_loadu_ps((const float *)x + at);
    const __m256i words = _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + at));
    if (type == F16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* Fours of vectors that are `apart`. */
INLINE void across(__m512 *v, int apart) {
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 a = _mm512_mul_ps(v[0], half), b = _mm512_mul_ps(v[apart], half);
    const __m512 c = _mm512_mul_ps(v[2 * apart], half), d = _mm512_mul_ps(v[3 * apart], half);
    const __m512 ab = _mm512_add_ps(a, b), ba = _mm512_sub_ps(a, b), cd = _mm512_add_ps(c, d), dc = _mm512_sub_ps(c, d);
    v[0] = _mm512_add_ps(ab, dc), v[apart] = _mm512_sub_ps(ab, dc);
    v[2 * apart] = _mm512_add_ps(cd, ba), v[3 * apart] = _mm512_sub_ps(cd, ba);
}

/* `count` numbers, in groups of 16 * n. */
INLINE void small_groups(Type type, int n, const void *x, int64_t count, float *to) {
    const __m512 one = _mm512_set1_ps(1.0f), half = _mm512_set1_ps(0.5f);
    const __m512 odd = _mm512_mask_blend_ps(0xaaaa, one, _mm512_set1_ps(-1.0f)); /* +, -, +, - */
    const __m512 far_odd = _mm512_mask_blend_ps(0xf0f0, one, _mm512_set1_ps(-1.0f));
    const __m512 mine = _mm512_mask_blend_ps(0x2222, half, _mm512_set1_ps(-0.5f)); /* of b in a-b */
    const __m512 other = _mm512_mask_blend_ps(0x4444, half, _mm512_set1_ps(-0.5f)); /* of d in c-d */
    const __m512 far_mine = _mm512_mask_blend_ps(0x00f0, half, _mm512_set1_ps(-0.5f));
    const __m512 far_other = _mm512_mask_blend_ps(0x0f00, half, _mm512_set1_ps(-0.5f));
    const int64_t size = type == F32 ? 4 : 2;
    for (int64_t at = 0; at < count; at += 16 * n) {
        __m512 v[16];
        for (int64_t line = 0; line < 16 * n * size; line += 64) /* of rows that follow; maybe nobody's memory */
            _mm_prefetch((const char *)x + at * size + line + NEXT, _MM_HINT_T0);
        EACH(i, n) {
            v[i] = sixteen(type, x, at + 16 * i);
            FOURS(NEAR, v[i], mine, other, odd);
            FOURS(FAR, v[i], far_mine, far_other, far_odd);
        }
        if (n >= 4) EACH(j, n / 4) across(v + 4 * j, 1);
        if (n == 16) EACH(j, 4) across(v + j, 4);
        EACH(i, n) _mm512_storeu_ps(to + at + 16 * i, v[i]);
    }
}

INLINE void groups_of(Type type, const void *x, int64_t count, int64_t group, float *to) {
    if (group == 16) small_groups(type, 1, x, count, to);
    else if (group == 64) small_groups(type, 4, x, count, to);
    else small_groups(type, 16, x, count, to);
    for (int64_t apart = RUN; apart < group; apart *= 4)
        for (int64_t from = 0; from < count; from += 4 * apart)
            for (float *at = to + from; at < to + from + apart; at += 16) {
                __m512 v[4];
                EACH(i, 4) v[i] = _mm512_loadu_ps(at + i * apart);
                across(v, 1);
                EACH(i, 4) _mm512_storeu_ps(at + i * apart, v[i]);
            }
}

static void row512(Type type, const void *x, int64_t count, int64_t group, float *to) {
    if (group < 16) {
        kernels()->widen(x, type, 0, to, count);
        rotation_avx2.rotate(to, count, group);
    } else if (type == F32) groups_of(F32, x, count, group, to);
    else if (type == BF16) groups_of(BF16, x, count, group, to);
    else groups_of(F16, x, count, group, to);
}

static void rotate512(float *x, int64_t count, int64_t group) { row512(F32, x, count, group, x); }

static void bounds512(const float *x, int64_t count, int64_t group, float *bounds) { bounds_of(x, count, group, bounds); }

static void sizes512(const float *y, int64_t count, int64_t group, float *largest) {
    largest_sizes(y, count, group, largest);
}

static void within512(const float *y, int64_t count, int64_t group, float scale, const float *bounds, float least,
                      float most, int8_t *codes, uint8_t *open) {
    codes_within(y, count, group, scale, bounds, least, most, codes, open);
}

const Rotation rotation_avx512 = {rotate512, bounds512, sizes512, within512, row512};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
