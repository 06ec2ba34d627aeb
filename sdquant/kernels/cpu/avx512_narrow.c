/* Products of narrow.h for AVX-512. */
#include "avx512.h"

#ifdef BUILD
#include <string.h>

#include "avx512_transpose.h"
#include "narrow.h"

#define EACH(i, n) _Pragma("GCC unroll 12") for (int i = 0; i < (n); i++)

enum {
    TALL = 12,           /* rows at a time: 24 registers of sums */
    WIDE = NARROW_WIDE,  /* columns at a time */
    LAID = 8192,         /* units of a part of `up`, laid out */
    DEEP = 128,          /* units of a row of x at a time: so much of `down` and of twelve rows is in the first cache */
    APART = DEEP + 16,   /* units, where rows of x are copied to: else all of them may be in one set of that cache */
    PANEL = 18 * TALL,   /* rows, for which a part of `up` is laid out once */
};

INLINE __mmask16 first_of(int64_t count) { return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0; }

/* WIDE columns, from the first of `count`, of rows of `units`, `step` apart: [units][WIDE]; zeros for columns beyond. */
INLINE void turn(const uint32_t *by, int64_t step, int64_t count, int64_t units, uint32_t *to) {
    for (int64_t half = 0; half < WIDE; half += 16)
        for (int64_t k = 0; k < units; k += 16) {
            const __mmask16 mask = first_of(units - k);
            __m512i square[16];
            for (int64_t i = 0; i < 16; i++)
                square[i] = _mm512_maskz_loadu_epi32(half + i < count ? mask : 0, by + (half + i) * step + k);
            transpose(square);
            for (int64_t i = 0; i < 16 && k + i < units; i++) _mm512_storeu_si512(to + (k + i) * WIDE + half, square[i]);
        }
}

/* The same of a matrix [inputs, rank], from a column on, of units start .. stop. */
INLINE void interleave(Type type, const void *down, int64_t rank, int64_t column, int64_t start, int64_t stop, uint32_t *to) {
    for (int64_t k = start; k < stop; k++, to += WIDE)
        for (int64_t half = 0; half < WIDE; half += 16) {
            const __mmask16 mask = first_of(rank - column - half);
            if (type == F32) {
                const float *from = (const float *)down + k * rank + column + half;
                _mm512_storeu_ps((float *)to + half, _mm512_maskz_loadu_ps(mask, from));
                continue;
            }
            const uint16_t *from = (const uint16_t *)down + 2 * k * rank + column + half;
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + rank));
            _mm512_storeu_si512(to + half, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

static int64_t units_of(Type type, int64_t count) { return type == BF16 ? count / 2 : count; }

/* WIDE columns of `down`, of units start .. stop. */
static void lay_part(const Branch *branch, int64_t column, int64_t start, int64_t stop, uint32_t *to) {
    const int64_t units = units_of(branch->type, branch->inputs), rank = branch->rank;
    if (branch->turned)
        turn((const uint32_t *)branch->down + column * units + start, units, rank - column, stop - start, to);
    else if (branch->type == F32) interleave(F32, branch->down, rank, column, start, stop, to);
    else interleave(BF16, branch->down, rank, column, start, stop, to);
}

void lay512(const Branch *branch, uint32_t *laid) {
    const int64_t units = units_of(branch->type, branch->inputs);
    for (int64_t column = 0; column < branch->rank; column += WIDE)
        lay_part(branch, column, 0, units, laid + column * units);
}

/* sum += one * by, of floats or of pairs. */
INLINE __m512 more(Type type, __m512 sum, __m512i one, __m512i by) {
    if (type == BF16) return _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)by);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(one), _mm512_castsi512_ps(by), sum);
}

/* `tall` rows of x, `stride` units apart, by WIDE columns, of which `count` are real. Results are of `to`, `step`
   elements apart, and are added where it `adds`. */
INLINE void tile(Type type, Type to, int tall, const uint32_t *x, int64_t stride, int64_t units, const uint32_t *laid,
                 int64_t count, int adds, void *out, int64_t step) {
    const int64_t size = to == BF16 ? 2 : 4;
    __m512 sums[TALL][2];
    EACH(i, tall) {
        sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        _mm_prefetch((const char *)out + i * step * size, _MM_HINT_T0); /* from afar, while sums are made */
        if (to == F32) _mm_prefetch((const char *)out + i * step * size + 64, _MM_HINT_T0);
    }
    for (int64_t k = 0; k < units; k++) {
        const __m512i a = _mm512_loadu_si512(laid + k * WIDE), b = _mm512_loadu_si512(laid + k * WIDE + 16);
        EACH(i, tall) {
            const __m512i one = _mm512_set1_epi32((int)x[i * stride + k]);
            sums[i][0] = more(type, sums[i][0], one, a);
            sums[i][1] = more(type, sums[i][1], one, b);
        }
    }
    EACH(i, tall) EACH(half, 2) {
        const __mmask16 mask = first_of(count - 16 * half);
        const int64_t at = i * step + 16 * half;
        if (to == F32) {
            float *here = (float *)out + at;
            const __m512 before = adds ? _mm512_maskz_loadu_ps(mask, here) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(here, mask, _mm512_add_ps(before, sums[i][half]));
        } else {
            uint16_t *here = (uint16_t *)out + at;
            const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, here));
            const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), sums[i][half]);
            _mm256_mask_storeu_epi16(here, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

typedef void Tile(const uint32_t *x, int64_t stride, int64_t units, const uint32_t *laid, int64_t count, int adds, void *out,
                  int64_t step);
#define TILE(name, type, to, n)                                                                                        \
    static void name##n(const uint32_t *x, int64_t stride, int64_t units, const uint32_t *laid, int64_t count, int adds, \
                        void *out, int64_t step) {                                                                     \
        tile(type, to, n, x, stride, units, laid, count, adds, out, step);                                             \
    }
#define TILES(name, type, to)                                                                                       \
    TILE(name, type, to, 1) TILE(name, type, to, 2) TILE(name, type, to, 3) TILE(name, type, to, 4)                  \
    TILE(name, type, to, 5) TILE(name, type, to, 6) TILE(name, type, to, 7) TILE(name, type, to, 8)                  \
    TILE(name, type, to, 9) TILE(name, type, to, 10) TILE(name, type, to, 11) TILE(name, type, to, 12)               \
    static Tile *const name[] = {name##1, name##2, name##3, name##4,  name##5,  name##6,                            \
                                 name##7, name##8, name##9, name##10, name##11, name##12};
TILES(of_floats, F32, F32)
TILES(of_pairs, BF16, F32)
TILES(to_pairs, BF16, BF16)

/* Rows of x that are multiplied together: as many as others. */
static int64_t groups(int64_t rows) { return (rows + TALL - 1) / TALL; }

void down512(const Branch *branch, const void *x, int64_t rows, uint32_t *between) {
    const int64_t units = units_of(branch->type, branch->inputs), rank = branch->rank;
    Tile *const *tiles = branch->type == BF16 ? of_pairs : of_floats;
    uint32_t copy[TALL * APART] __attribute__((aligned(64))), part[DEEP * WIDE] __attribute__((aligned(64)));
    for (int64_t g = 0; g < groups(rows); g++) {
        const int64_t first = rows * g / groups(rows), tall = rows * (g + 1) / groups(rows) - first;
        uint32_t *to = between + first * rank;
        for (int64_t start = 0; start < units; start += DEEP) {
            const int64_t some = units - start < DEEP ? units - start : DEEP;
            const uint32_t *from = (const uint32_t *)x + first * units + start;
            for (int64_t i = 0; i < tall; i++) memcpy(copy + i * APART, from + i * units, some * 4);
            for (int64_t column = 0; column < rank; column += WIDE) {
                const uint32_t *by = branch->laid ? branch->laid + column * units + start * WIDE : part;
                if (by == part) lay_part(branch, column, start, start + some, part);
                tiles[tall - 1](copy, APART, some, by, rank - column, start > 0, to + column, rank);
            }
        }
        if (branch->type != BF16) continue;
        for (int64_t i = 0; i < tall; i++)
            for (int64_t k = 0; k < rank; k += 16) {
                const __mmask16 mask = first_of(rank - k);
                const __m512 sum = _mm512_maskz_loadu_ps(mask, (const float *)(to + i * rank) + k);
                _mm256_mask_storeu_epi16((uint16_t *)(to + i * rank) + k, mask, (__m256i)_mm512_cvtneps_pbh(sum));
            }
    }
}

void up512(const Branch *branch, const uint32_t *between, int64_t rows, int64_t first, int64_t count, void *out,
           int64_t step) {
    const Type type = branch->type;
    const int64_t rank = branch->rank, units = units_of(type, rank), size = type == BF16 ? 2 : 4;
    const int64_t deep = units < LAID / WIDE ? units : LAID / WIDE, beside = LAID / 2 / deep / WIDE;
    const int64_t across = (beside < 1 ? 1 : beside > 4 ? 4 : beside) * WIDE;
    Tile *const *tiles = type == BF16 ? to_pairs : of_floats;
    uint32_t laid[LAID] __attribute__((aligned(64)));
    const char *ahead = (const char *)branch->up + (first + count) * units * 4; /* of the next call; maybe nobody's memory */
    for (int64_t at = 0; at < WIDE * units * 4; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T1);
    for (int64_t panel = 0; panel < rows; panel += PANEL)
        for (int64_t column = 0; column < count; column += across)
            for (int64_t start = 0; start < units; start += deep) {
                const int64_t some = units - start < deep ? units - start : deep;
                const int64_t here = rows - panel < PANEL ? rows - panel : PANEL;
                const int64_t stop = count - column < across ? count : column + across;
                for (int64_t c = column; c < stop; c += WIDE)
                    turn((const uint32_t *)branch->up + (first + c) * units + start, units, count - c, some,
                         laid + (c - column) * some);
                for (int64_t g = 0; g < groups(here); g++) {
                    const int64_t row = here * g / groups(here), tall = here * (g + 1) / groups(here) - row;
                    for (int64_t c = column; c < stop; c += WIDE)
                        tiles[tall - 1](between + (panel + row) * rank + start, rank, some, laid + (c - column) * some,
                                        count - c, 1, (char *)out + ((panel + row) * step + c) * size, step);
                }
            }
}

const Narrow narrow512 = {1 << F32 | 1 << BF16, lay512, down512, up512};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
