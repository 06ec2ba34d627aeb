/* Products of a low-rank branch in bf16 for 32 columns of results, by tiles: see narrow.h. */
#ifndef SDQUANT_AMX_BRANCH_H
#define SDQUANT_AMX_BRANCH_H
#include <string.h>

#include "avx512_transpose.h"
#include "narrow.h"

enum {
    BRANCH_TALL = 2 * TILE_ROWS,          /* rows at a time */
    BRANCH_DEEP = TILE_BYTES / 4,         /* units of a step */
    BRANCH_LAID = NARROW_MOST / 2 * NARROW_WIDE, /* units of 32 rows of `up`, laid out, at most */
    BRANCH_SUMS = BRANCH_TALL * NARROW_WIDE, /* by row */
};

/* Of so many units left, those of a step: the others are zeros, as NaN times zero would not be. */
INLINE __mmask16 units_left(int64_t count) { return count >= BRANCH_DEEP ? 0xffff : (__mmask16)((1u << count) - 1); }

INLINE int64_t branch_steps(int64_t rank) { return (rank / 2 + BRANCH_DEEP - 1) / BRANCH_DEEP; }

/* 32 rows of `up`, or `count`, as columns: [steps * DEEP][32], zeros where there is nothing. `rows`: which; NULL: the first
   ones. */
INLINE void lay_up(const uint32_t *up, const int64_t *rows, int64_t count, int64_t units, int64_t steps, uint32_t *to) {
    for (int64_t half = 0; half < NARROW_WIDE; half += TILE_ROWS)
        for (int64_t s = 0; s < steps; s++) {
            __m512i square[TILE_ROWS];
            for (int64_t i = 0; i < TILE_ROWS; i++) {
                const int is_there = half + i < count;
                const int64_t row = rows && is_there ? rows[half + i] : half + i;
                const __mmask16 mask = is_there ? units_left(units - s * BRANCH_DEEP) : 0;
                square[i] = _mm512_maskz_loadu_epi32(mask, up + row * units + s * BRANCH_DEEP);
            }
            transpose(square);
            for (int64_t i = 0; i < TILE_ROWS; i++)
                _mm512_store_si512(to + (s * BRANCH_DEEP + i) * NARROW_WIDE + half, square[i]);
        }
}

/* The last step of rows, `stride` bytes apart, of which so many units are left: [rows][DEEP], zeros behind them. */
INLINE void copy_units(const char *x, int64_t stride, int rows, int64_t left, uint32_t *to) {
    for (int i = 0; i < rows; i++, x += stride, to += BRANCH_DEEP)
        _mm512_storeu_si512(to, _mm512_maskz_loadu_epi32(units_left(left), x));
}

/* The sums in tiles 0 to 3, or in 0 and 1, if there are but sixteen rows. */
INLINE void store_sums(int rows, float *sums) {
    _tile_stored(0, sums, 4 * NARROW_WIDE);
    _tile_stored(1, sums + TILE_ROWS, 4 * NARROW_WIDE);
    if (rows > TILE_ROWS) {
        _tile_stored(2, sums + TILE_ROWS * NARROW_WIDE, 4 * NARROW_WIDE);
        _tile_stored(3, sums + TILE_ROWS * NARROW_WIDE + TILE_ROWS, 4 * NARROW_WIDE);
    }
    MEMORY_IS_WRITTEN;
}

/* Adds 32 columns of the branch's sums to results. */
INLINE __m512i with_branch(const float *sums, __m512i results) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(results));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(results, 1));
    const __m512 of_low = _mm512_castsi512_ps(_mm512_slli_epi32(low, 16));
    const __m512 of_high = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_add_ps(of_high, _mm512_load_ps(sums + TILE_ROWS)),
                                        _mm512_add_ps(of_low, _mm512_load_ps(sums)));
}

/* The sums of up to 32 rows of `between`, in whole tiles, by `laid` of `lay_up`. Changes all tiles. */
INLINE void branch_sums(const Branch *branch, const uint32_t *between, int rows, const uint32_t *laid, float *sums) {
    const int64_t rank = branch->rank, units = rank / 2, steps = branch_steps(rank);
    uint32_t copy[BRANCH_TALL * BRANCH_DEEP] __attribute__((aligned(64)));
    zero_tiles();
    for (int64_t s = 0; s < steps; s++, laid += BRANCH_DEEP * NARROW_WIDE) {
        const char *from = (const char *)(between + s * BRANCH_DEEP);
        int64_t stride = 4 * rank;
        if (rows < BRANCH_TALL || units - s * BRANCH_DEEP < BRANCH_DEEP) {
            copy_units(from, stride, rows, units - s * BRANCH_DEEP, copy);
            memset(copy + rows * BRANCH_DEEP, 0, (BRANCH_TALL - rows) * TILE_BYTES);
            from = (const char *)copy, stride = TILE_BYTES;
        }
        MEMORY_IS_WRITTEN;
        multiply_tiles(from, from + TILE_ROWS * stride, stride, 0, (const char *)laid, (const char *)laid + TILE_BYTES,
                       4 * NARROW_WIDE, 0, 1);
    }
    store_sums(BRANCH_TALL, sums);
}
#endif
