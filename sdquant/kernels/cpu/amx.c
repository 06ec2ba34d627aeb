/* Products of bf16 by AMX. A panel of the weight is decoded into the second cache, row by row as it is; the activations
   are laid out once as tiles of sixteen rows by 32 columns, in pairs of columns. Two tiles of each make four tiles of
   sums over all columns, which are turned, since results lie by row of activations. */
#include "amx.h"

#ifdef AMX
#include <stdlib.h>
#include <string.h>

#include "avx512_divide.h"
#include "avx512_parts.h"
#include "floats.h"
#include "amx_branch.h"

enum {
    STEP = 32,               /* columns of a tile */
    SIDE = 2 * TILE_ROWS,    /* of what is multiplied together */
    PANEL_BYTES = 1 << 20,   /* of a second cache of 2 MB */
};

/* Pairs of activations, 32 of `mask`, divided. */
INLINE __m512i divided(__m512i pairs, const Divisors *smooth, int64_t column, __mmask32 mask) {
    __m512 halves[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __mmask16 some = (__mmask16)(mask >> 16 * half);
        const __m256i words = half ? _mm512_extracti64x4_epi64(pairs, 1) : _mm512_castsi512_si256(pairs);
        const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
        const int64_t at = column + 16 * half;
        const __m512 reciprocal = _mm512_mask_loadu_ps(_mm512_set1_ps(1), some, smooth->reciprocal + at);
        halves[half] = quotient_for_bf16(x, smooth->by + at, reciprocal, some);
    }
    return (__m512i)_mm512_cvtne2ps_pbh(halves[1], halves[0]);
}

/* Rows of x, those of tile `tile`, as `steps` tiles of sixteen pairs of columns, divided by `smooth` if it is not NULL. */
static void lay_out(const uint16_t *x, int64_t m, int64_t columns, const Divisors *smooth, int64_t tile, int64_t steps,
                    char *to) {
    const int64_t first = tile * TILE_ROWS, left = m - first;
    for (int64_t s = 0; s < steps; s++, to += TILE_ROWS * TILE_BYTES) {
        const int64_t here = columns - s * STEP;
        const __mmask32 mask = here >= STEP ? 0xffffffffu : ((__mmask32)1 << here) - 1;
        __m512i a[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; i++)
            a[i] = i < left ? _mm512_maskz_loadu_epi16(mask, x + (first + i) * columns + s * STEP)
                            : _mm512_setzero_si512();
        for (int i = 0; i < TILE_ROWS && smooth; i++)
            if (i < left) a[i] = divided(a[i], smooth, s * STEP, mask);
        transpose(a);
        for (int i = 0; i < TILE_ROWS; i++) _mm512_store_si512(to + i * TILE_BYTES, a[i]);
    }
}

/* 32 rows of the weight, `stride` bytes apart, by two tiles of activations, or by one: sums [2][2][16][16], by tile of
   the weight and of the activations. */
static void both(const char *w, int64_t stride, const char *x, int64_t steps, float *sums) {
    zero_tiles();
    MEMORY_IS_WRITTEN;
    multiply_tiles(w, w + TILE_ROWS * stride, stride, TILE_BYTES, x, x + steps * TILE_ROWS * TILE_BYTES, TILE_BYTES,
                   TILE_ROWS * TILE_BYTES, steps);
    store_tiles(sums, sums + 256, sums + 512, sums + 768);
}

static void single(const char *w, int64_t stride, const char *x, int64_t steps, float *sums) {
    const char *w1 = w + TILE_ROWS * stride;
    _tile_zero(0);
    _tile_zero(2);
    MEMORY_IS_WRITTEN;
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(6, x + s * TILE_ROWS * TILE_BYTES, TILE_BYTES);
        _tile_loadd(4, w + s * TILE_BYTES, stride);
        _tile_loadd(5, w1 + s * TILE_BYTES, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, sums, TILE_BYTES);
    _tile_stored(2, sums + 512, TILE_BYTES);
}

/* Sums of sixteen rows of the weight, `rows` (`count` of them real), and `m` of activations to where they belong, and those
   of a branch, by row of activations, if it is not NULL. */
static void put(const float *sums, const int64_t *rows, int count, int64_t m, int64_t all, const uint16_t *bias,
                const float *branch, uint16_t *out) {
    __m512i a[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) {
        __m512 sum = _mm512_load_ps(sums + i * TILE_ROWS);
        if (bias && i < count) sum = _mm512_add_ps(sum, _mm512_set1_ps(from_bf16(bias[rows[i]])));
        a[i] = _mm512_castps_si512(sum);
    }
    transpose(a);
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    int together = 1;
    for (int i = 1; i < count; i++) together &= rows[i] == rows[0] + i;
    for (int j = 0; j < m; j++, out += all) {
        __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(a[j]));
        if (branch) {
            const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
            half = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(rounded, _mm512_load_ps(branch + j * NARROW_WIDE)));
        }
        if (together) {
            _mm256_mask_storeu_epi16(out + rows[0], mask, half);
            continue;
        }
        uint16_t each[TILE_ROWS];
        _mm256_storeu_si256((__m256i *)each, half);
        for (int i = 0; i < count; i++) out[rows[i]] = each[i];
    }
}

/* What a panel's rows are, those of one plane after another. */
static void order(const Form *form, int planes, int64_t start, int64_t n, int64_t *rows) {
    for (int plane = 0; plane < planes; plane++)
        for (int64_t i = plane; i < n; i += planes) *rows++ = row_at(form, planes, start + i);
}

int product_amx(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, const void *x, int64_t m,
                const void *bias, void *out) {
    const int planes = planes_of(form->packing);
    const int64_t columns = form->columns, steps = (columns + STEP - 1) / STEP;
    const int64_t stride = (steps | 1) * TILE_BYTES; /* an odd number of lines: rows of a tile are in sets of their own */
    const int64_t tiles = (m + TILE_ROWS - 1) / TILE_ROWS, tile_bytes = steps * TILE_ROWS * TILE_BYTES;
    const int64_t unit = TILE_ROWS * planes > SIDE ? TILE_ROWS * planes : SIDE; /* tiles of rows that lie together */
    const int64_t most = tiles > 2 && PANEL_BYTES / stride > unit ? PANEL_BYTES / stride / unit * unit : unit;
    const Beside *beside = parts->beside;
    const Divisors *smooth = beside && beside->smooth.by ? &beside->smooth : 0;
    const Branch *branch = beside ? &beside->branch : 0;
    const int64_t units = branch ? branch->rank / 2 : 0, deep = branch ? branch_steps(branch->rank) * BRANCH_DEEP : 0;
    char *memory = malloc(tiles * tile_bytes + most * (stride + deep * 4 + sizeof(int64_t)) + 2 * TILE_BYTES);
    if (!memory) return 0;
    char *laid = memory + (TILE_BYTES - (intptr_t)memory % TILE_BYTES), *panel = laid + tiles * tile_bytes;
    uint32_t *up = (uint32_t *)(panel + most * stride); /* of each row of a panel */
    int64_t *rows = (int64_t *)(up + most * deep);
    Decode *decode = kernels()->decoder(form);
    (void)type;
    for (int64_t t = 0; t < tiles; t++) lay_out(x, m, columns, smooth, t, steps, laid + t * tile_bytes);
    if (columns % STEP)
        for (int64_t r = 0; r < most; r++) memset(panel + r * stride + columns * 2, 0, steps * TILE_BYTES - columns * 2);
    parts->ahead = AHEAD;
    _tile_loadconfig(&WHOLE_TILES);
    for (int64_t first = start; first < stop; first += most) {
        const int64_t n = stop - first < most ? stop - first : most;
        order(form, planes, first, n, rows);
        for (int64_t r = 0; r < n; r++) decode(form, parts, rows[r] * columns, columns, BF16, panel + r * stride);
        for (int64_t r = 0; r < n && branch; r += SIDE)
            lay_up(branch->up, rows + r, n - r, units, branch_steps(branch->rank), up + r * deep);
        for (int64_t t = 0; t < tiles; t += 2) {
            for (int64_t r = 0; r < n; r += SIDE) {
                float sums[4 * 256] __attribute__((aligned(64))), of_branch[BRANCH_SUMS] __attribute__((aligned(64)));
                const char *w = panel + r * stride, *of_x = laid + t * tile_bytes;
                if (t + 1 < tiles) both(w, stride, of_x, steps, sums);
                else single(w, stride, of_x, steps, sums);
                if (branch) {
                    const int64_t left = m - t * TILE_ROWS;
                    branch_sums(branch, branch->between + t * TILE_ROWS * branch->rank, (int)(left < SIDE ? left : SIDE),
                                up + r * deep, of_branch);
                }
                for (int i = 0; i < 4; i++) {
                    const int64_t row = r + i / 2 * TILE_ROWS, at = (t + i % 2) * TILE_ROWS;
                    const int64_t count = n - row < TILE_ROWS ? n - row : TILE_ROWS;
                    const int64_t wide = m - at < TILE_ROWS ? m - at : TILE_ROWS;
                    if (count > 0 && wide > 0)
                        put(sums + i * 256, rows + row, (int)count, wide, form->rows, bias,
                            branch ? of_branch + (i % 2 * NARROW_WIDE + i / 2) * TILE_ROWS : 0,
                            (uint16_t *)out + at * form->rows);
                }
            }
        }
    }
    _tile_release();
    free(memory);
    return 1;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
