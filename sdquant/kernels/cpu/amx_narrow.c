/* Products of narrow.h in bf16 by AMX, where `down` is laid out; those of floats in halves are amx_halves.c, and all
   others avx512_narrow.c. */
#include "amx.h"

#ifdef AMX
#include <string.h>

#include "amx_branch.h"
#include "amx_halves.h"

enum {
    TALL = BRANCH_TALL,
    WIDE = NARROW_WIDE, /* columns at a time */
    DEEP = BRANCH_DEEP,
    SUMS = BRANCH_SUMS,
    LAID = BRANCH_LAID,
    BESIDE = 4, /* parts of `up`, laid out, at most */
};

/* Tiles of 16 columns by so many rows, and of the rows after sixteen. */
static void configure(int rows) {
    Tiles tiles __attribute__((aligned(64))) = WHOLE_TILES;
    const int first = rows < TILE_ROWS ? rows : TILE_ROWS, others = rows > TILE_ROWS ? rows - TILE_ROWS : TILE_ROWS;
    tiles.rows[0] = tiles.rows[1] = tiles.rows[4] = (uint8_t)first;
    tiles.rows[2] = tiles.rows[3] = tiles.rows[5] = (uint8_t)others;
    MEMORY_IS_WRITTEN;
    _tile_loadconfig(&tiles);
}

/* Adds to the sums in tiles: rows of x, `stride` bytes apart, by WIDE columns of `laid`, in whole steps. */
INLINE void multiply(int rows, const char *x, int64_t stride, const uint32_t *laid, int64_t steps) {
    const char *b = (const char *)laid;
    MEMORY_IS_WRITTEN;
    if (rows > TILE_ROWS) {
        multiply_tiles(x, x + TILE_ROWS * stride, stride, TILE_BYTES, b, b + TILE_BYTES, 4 * WIDE, 4 * WIDE * DEEP, steps);
        return;
    }
    for (int64_t s = 0; s < steps; s++, x += TILE_BYTES, b += 4 * WIDE * DEEP) {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, b, 4 * WIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE_BYTES, 4 * WIDE);
        _tile_dpbf16ps(1, 4, 7);
    }
}

/* WIDE columns of a row, from the first of `count`, to `out`, or added to what is there. */
INLINE void put(const float *sums, int64_t count, int adds, uint16_t *out) {
    const __mmask32 mask = count >= WIDE ? 0xffffffffu : ((__mmask32)1 << count) - 1;
    if (adds) {
        _mm512_mask_storeu_epi16(out, mask, with_branch(sums, _mm512_maskz_loadu_epi16(mask, out)));
        return;
    }
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(sums + TILE_ROWS), _mm512_load_ps(sums));
    _mm512_mask_storeu_epi16(out, mask, both);
}

static void down_amx(const Branch *branch, const void *x, int64_t rows, uint32_t *between) {
    const int64_t units = branch->inputs / 2, rank = branch->rank, stride = units * 4;
    const int64_t steps = units / DEEP, left = units % DEEP;
    float sums[SUMS] __attribute__((aligned(64)));
    uint32_t last[TALL * DEEP] __attribute__((aligned(64))), laid[DEEP * WIDE] __attribute__((aligned(64)));
    if (branch->halves) {
        down_halves(branch, x, rows, between);
        return;
    }
    if (branch->type != BF16 || !branch->laid) {
        down512(branch, x, rows, between);
        return;
    }
    memset(laid + left * WIDE, 0, (DEEP - left) * WIDE * 4);
    for (int64_t first = 0, of = 0; first < rows; first += TALL) {
        const int tall = rows - first < TALL ? (int)(rows - first) : TALL;
        const char *from = (const char *)x + first * stride;
        if (tall != of) configure((int)(of = tall));
        if (left) copy_units(from + steps * TILE_BYTES, stride, tall, left, last);
        for (int64_t column = 0; column < rank; column += WIDE) {
            const uint32_t *by = branch->laid + column * units;
            zero_tiles();
            multiply(tall, from, stride, by, steps);
            if (left) {
                memcpy(laid, by + steps * DEEP * WIDE, left * WIDE * 4);
                multiply(tall, (const char *)last, TILE_BYTES, laid, 1);
            }
            store_sums(tall, sums);
            for (int i = 0; i < tall; i++)
                put(sums + i * WIDE, rank - column, 0, (uint16_t *)(between + (first + i) * rank) + column);
        }
    }
    _tile_release();
}

static void up_amx(const Branch *branch, const uint32_t *between, int64_t rows, int64_t first, int64_t count, void *out,
                   int64_t step) {
    const int64_t rank = branch->rank, units = rank / 2, steps = (units + DEEP - 1) / DEEP, deep = steps * DEEP;
    const int64_t whole = units / DEEP, left = units % DEEP, beside = LAID / (deep * WIDE);
    const int64_t across = (beside < BESIDE ? beside : BESIDE) * WIDE;
    float sums[SUMS] __attribute__((aligned(64)));
    uint32_t laid[LAID] __attribute__((aligned(64))), last[TALL * DEEP] __attribute__((aligned(64)));
    if (branch->halves) {
        up_halves(branch, between, rows, first, count, out, step);
        return;
    }
    if (branch->type != BF16 || !branch->laid) {
        up512(branch, between, rows, first, count, out, step);
        return;
    }
    const char *ahead = (const char *)branch->up + (first + count) * units * 4; /* of the next call; maybe nobody's memory */
    for (int64_t at = 0; at < WIDE * units * 4; at += TILE_BYTES) _mm_prefetch(ahead + at, _MM_HINT_T1);
    for (int64_t column = 0, of = 0; column < count; column += across) {
        const int64_t stop = count - column < across ? count : column + across;
        for (int64_t c = column; c < stop; c += WIDE)
            lay_up((const uint32_t *)branch->up + (first + c) * units, 0, count - c, units, steps, laid + (c - column) * deep);
        for (int64_t row = 0; row < rows; row += TALL) {
            const int tall = rows - row < TALL ? (int)(rows - row) : TALL;
            const char *from = (const char *)(between + row * rank);
            if (tall != of) configure((int)(of = tall));
            if (left) copy_units(from + whole * TILE_BYTES, 4 * rank, tall, left, last);
            for (int64_t c = column; c < stop; c += WIDE) {
                const uint32_t *by = laid + (c - column) * deep;
                uint16_t *to = (uint16_t *)out + row * step + c;
                for (int i = 0; i < tall; i++) _mm_prefetch((const char *)(to + i * step), _MM_HINT_T0);
                zero_tiles();
                multiply(tall, from, 4 * rank, by, whole);
                if (left) multiply(tall, (const char *)last, TILE_BYTES, by + whole * DEEP * WIDE, 1);
                store_sums(tall, sums);
                for (int i = 0; i < tall; i++) put(sums + i * WIDE, count - c, 1, to + i * step);
            }
        }
    }
    _tile_release();
}

static void lay_amx(const Branch *branch, uint32_t *laid) {
    if (branch->halves) lay_halves(branch, laid);
    else lay512(branch, laid);
}

const Narrow narrow_amx = {1 << F32 | 1 << BF16, lay_amx, down_amx, up_amx};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
