/* Products of narrow.h of floats in halves, by AMX: low by high, high by high and, where factors have low halves, high by
   low. The left tiles have sixteen rows and 32 numbers, which lie as they do in memory; the right ones two numbers of
   sixteen columns in a row. */
#include "amx.h"

#ifdef AMX
#include "amx_branch.h"
#include "amx_halves.h"

enum {
    TALL = BRANCH_TALL,
    WIDE = NARROW_WIDE,          /* columns at a time */
    NUMBERS = TILE_BYTES / 2,    /* of a step */
    DEEP = BRANCH_DEEP,          /* units of a step */
    LAID = DEEP * WIDE,          /* units of a step of the right factor, of one half */
    LEFT = TALL * DEEP,          /* and of the left one */
    TURN = 8,                    /* steps that are split before they are multiplied */
    APART = (TURN + 1) * DEEP,   /* units, of rows that are split: in sets of their own */
};

/* Sixteen floats, of which the upper sixteen bits are those of the nearest bf16: numbers in the middle go away from zero.
   Of NaN that may make a zero, but what is left of it is NaN, too. */
INLINE __m512i rounded(__m512 x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); }

/* What that leaves. */
INLINE __m512 remainder_of(__m512 x, __m512i of) {
    const __m512i high = _mm512_and_si512(of, _mm512_set1_epi32((int)0xffff0000));
    return _mm512_sub_ps(x, _mm512_castsi512_ps(high));
}

INLINE void split_both(__m512 a, __m512 b, __m512i *high, __m512i *low) {
    static const uint16_t ODD[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i of_a = rounded(a), of_b = rounded(b);
    *high = _mm512_permutex2var_epi16(of_a, _mm512_loadu_si512(ODD), of_b);
    *low = (__m512i)_mm512_cvtne2ps_pbh(remainder_of(b, of_b), remainder_of(a, of_a));
}

INLINE __mmask32 first_of(int64_t count) { return count >= NUMBERS ? 0xffffffffu : count > 0 ? ((__mmask32)1 << count) - 1 : 0; }

/* 32 floats, or `count`, as high and low halves, in their order. */
INLINE void split(const float *x, int64_t count, __m512i *high, __m512i *low) {
    const __mmask32 mask = first_of(count);
    split_both(_mm512_maskz_loadu_ps((__mmask16)mask, x), _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), x + 16), high, low);
}

/* Sixteen units of one number of each vector. */
INLINE __m512i pairs_of(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
}

/* So many steps of a row, of which `left` floats are there. */
INLINE void split_row(const float *x, int64_t left, int64_t steps, uint32_t *high, uint32_t *low) {
    __m512i a, b;
    for (int64_t s = 0; s < steps; s++, x += NUMBERS, left -= NUMBERS, high += DEEP, low += DEEP) {
        if (left >= NUMBERS) split_both(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), &a, &b);
        else split(x, left, &a, &b);
        _mm512_store_si512(high, a);
        _mm512_store_si512(low, b);
    }
}

static int64_t steps_of(int64_t count) { return (count + NUMBERS - 1) / NUMBERS; }

/* `count` rows, up to 32, of so many numbers, `stride` bytes apart, as columns: [steps][halves][DEEP][WIDE]; zeros where
   there is nothing. Asks for memory `ahead` bytes further, which may be nobody's. */
INLINE void lay_rows(const char *rows, int64_t stride, int64_t count, int64_t many, int64_t ahead, int halves, uint32_t *to) {
    for (int64_t k = 0; k < many; k += NUMBERS, rows += halves * TILE_BYTES, to += halves * LAID)
        for (int64_t half = 0; half < WIDE; half += TILE_ROWS) {
            __m512i high[TILE_ROWS], low[TILE_ROWS];
            for (int64_t i = 0; i < TILE_ROWS; i++) {
                const int is_there = half + i < count;
                const int64_t left = is_there ? many - k : 0;
                const char *row = is_there ? rows + (half + i) * stride : rows;
                for (int line = 0; line < halves; line++) _mm_prefetch(row + ahead + line * TILE_BYTES, _MM_HINT_T1);
                if (halves == 2) split((const float *)row, left, high + i, low + i);
                else high[i] = _mm512_maskz_loadu_epi16(first_of(left), row);
            }
            transpose(high);
            if (halves == 2) transpose(low);
            for (int64_t i = 0; i < TILE_ROWS; i++) {
                _mm512_storeu_si512(to + i * WIDE + half, high[i]);
                if (halves == 2) _mm512_storeu_si512(to + LAID + i * WIDE + half, low[i]);
            }
        }
}

/* Sixteen floats of what has so many halves, which are low bits of nothing where it has one. */
INLINE __m512 floats_of(const char *from, __mmask16 mask, int halves) {
    if (halves == 2) return _mm512_maskz_loadu_ps(mask, from);
    const __m256i units = _mm256_maskz_loadu_epi16(mask, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(units), 16));
}

/* The same of `count` columns of a matrix of `many` rows, which are `stride` bytes long. */
INLINE void lay_columns(const char *columns, int64_t stride, int64_t count, int64_t many, int halves, uint32_t *to) {
    for (int64_t k = 0; k < many; k += NUMBERS, to += (halves - 1) * LAID)
        for (int64_t i = 0; i < DEEP; i++, to += WIDE)
            for (int64_t half = 0; half < WIDE; half += TILE_ROWS) {
                const int64_t row = k + 2 * i, left = count - half;
                const __mmask16 mask = left >= TILE_ROWS ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
                const char *from = columns + row * stride + half * 2 * halves;
                const __m512 even = floats_of(from, row < many ? mask : 0, halves);
                const __m512 odd = floats_of(from + stride, row + 1 < many ? mask : 0, halves);
                const __m512i of_even = halves == 2 ? rounded(even) : _mm512_castps_si512(even);
                const __m512i of_odd = halves == 2 ? rounded(odd) : _mm512_castps_si512(odd);
                _mm512_storeu_si512(to + half, pairs_of(of_even, of_odd));
                if (halves == 2) {
                    const __m512i low_even = rounded(remainder_of(even, of_even)), low_odd = rounded(remainder_of(odd, of_odd));
                    _mm512_storeu_si512(to + LAID + half, pairs_of(low_even, low_odd));
                }
            }
}

INLINE void lay_down(const Branch *branch, int halves, uint32_t *laid) {
    const int64_t inputs = branch->inputs, rank = branch->rank, size = 2 * halves;
    const char *down = branch->down;
    for (int64_t column = 0; column < rank; column += WIDE, laid += steps_of(inputs) * halves * LAID) {
        if (branch->turned)
            lay_rows(down + column * inputs * size, inputs * size, rank - column, inputs, 8 * halves * TILE_BYTES, halves, laid);
        else lay_columns(down + column * size, rank * size, rank - column, inputs, halves, laid);
    }
}

void lay_halves(const Branch *branch, uint32_t *laid) {
    if (branch->halves == 2) lay_down(branch, 2, laid);
    else lay_down(branch, 1, laid);
}

/* Adds the products of one step to the sums in tiles 0 to 3, or to 0 and 1, where there are but sixteen rows; the second
   half of the rows, `stride` bytes apart, is TILE_ROWS rows behind the first. */
INLINE void multiply(int rows, const uint32_t *high, const uint32_t *low, int64_t stride, const uint32_t *laid, int halves) {
    const char *a = (const char *)high, *b = (const char *)low, *by = (const char *)laid;
    const int64_t second = TILE_ROWS * stride, wide = 4 * WIDE;
    MEMORY_IS_WRITTEN;
    _tile_loadd(6, by, wide);
    _tile_loadd(7, by + TILE_BYTES, wide);
    _tile_loadd(4, b, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > TILE_ROWS) {
        _tile_loadd(5, b + second, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(5, a + second, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_loadd(4, a, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (halves < 2) return;
    _tile_loadd(6, by + 4 * LAID, wide);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, by + 4 * LAID + TILE_BYTES, wide);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > TILE_ROWS) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* `between`: of each row the high halves, [rank / 2] units, then the low ones. Many steps of rows are split and then
   multiplied: tiles that are loaded while such stores are on their way wait for them. */
void down_halves(const Branch *branch, const float *x, int64_t rows, uint32_t *between) {
    const int64_t inputs = branch->inputs, rank = branch->rank, steps = steps_of(inputs);
    const int halves = branch->halves;
    const int64_t laid = halves * LAID;
    uint32_t high[TALL][APART] __attribute__((aligned(64))), low[TALL][APART] __attribute__((aligned(64)));
    float sums[BRANCH_SUMS] __attribute__((aligned(64)));
    _tile_loadconfig(&WHOLE_TILES);
    for (int64_t first = 0; first < rows; first += TALL) {
        const int tall = rows - first < TALL ? (int)(rows - first) : TALL;
        for (int64_t column = 0; column < rank; column += WIDE) {
            const uint32_t *by = branch->laid + column / WIDE * steps * laid;
            zero_tiles();
            for (int64_t step = 0; step < steps; step += TURN) {
                const int64_t start = step * NUMBERS, some = steps - step < TURN ? steps - step : TURN;
                for (int i = 0; i < tall; i++)
                    split_row(x + (first + i) * inputs + start, inputs - start, some, high[i], low[i]);
                for (int64_t s = 0; s < some; s++, by += laid) {
                    for (int64_t i = 0; i < laid; i += DEEP) _mm_prefetch((const char *)(by + laid + i), _MM_HINT_T0);
                    multiply(tall, high[0] + s * DEEP, low[0] + s * DEEP, 4 * APART, by, halves);
                }
            }
            store_sums(tall, sums);
            for (int i = 0; i < tall; i++) {
                uint32_t *to = between + (first + i) * rank + column / 2;
                const __mmask16 mask = units_left((rank - column) / 2);
                __m512i a, b;
                split(sums + i * WIDE, WIDE, &a, &b);
                _mm512_mask_storeu_epi32(to, mask, a);
                _mm512_mask_storeu_epi32(to + rank / 2, mask, b);
            }
        }
    }
    _tile_release();
}

void lay_up_halves(const Branch *branch, int64_t first, int64_t count, uint32_t *laid) {
    const int64_t rank = branch->rank, bytes = rank * 2 * branch->halves;
    const char *up = (const char *)branch->up + first * bytes;
    if (branch->halves == 2) lay_rows(up, bytes, count, rank, WIDE * bytes, 2, laid);
    else lay_rows(up, bytes, count, rank, WIDE * bytes, 1, laid);
}

void halves_sums(const Branch *branch, const uint32_t *between, int rows, const uint32_t *laid, float *sums) {
    const int64_t rank = branch->rank, units = rank / 2;
    uint32_t high[LEFT] __attribute__((aligned(64))), low[LEFT] __attribute__((aligned(64)));
    zero_tiles();
    for (int64_t unit = 0; unit < units; unit += DEEP, laid += branch->halves * LAID) {
        const uint32_t *a = between + unit, *b = a + units;
        int64_t stride = 4 * rank;
        if (rows < TALL || units - unit < DEEP) {
            copy_units((const char *)a, stride, rows, units - unit, high);
            copy_units((const char *)b, stride, rows, units - unit, low);
            a = high, b = low, stride = TILE_BYTES;
        }
        multiply(rows, a, b, stride, laid, branch->halves);
    }
    store_sums(rows, sums);
}

/* Adds so many of 32 columns to what is there. */
INLINE void add(const float *sums, int64_t count, float *out) {
    for (int64_t half = 0; half < WIDE; half += TILE_ROWS) {
        const int64_t left = count - half;
        const __mmask16 mask = left >= TILE_ROWS ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        const __m512 before = _mm512_maskz_loadu_ps(mask, out + half);
        _mm512_mask_storeu_ps(out + half, mask, _mm512_add_ps(before, _mm512_load_ps(sums + half)));
    }
}

void up_halves(const Branch *branch, const uint32_t *between, int64_t rows, int64_t first, int64_t count, float *out,
               int64_t step) {
    const int64_t rank = branch->rank;
    uint32_t laid[BRANCH_LAID] __attribute__((aligned(64)));
    float sums[BRANCH_SUMS] __attribute__((aligned(64)));
    _tile_loadconfig(&WHOLE_TILES);
    for (int64_t column = 0; column < count; column += WIDE) {
        lay_up_halves(branch, first + column, count - column, laid);
        for (int64_t row = 0; row < rows; row += TALL) {
            const int tall = rows - row < TALL ? (int)(rows - row) : TALL;
            halves_sums(branch, between + row * rank, tall, laid, sums);
            for (int i = 0; i < tall; i++) add(sums + i * WIDE, count - column, out + (row + i) * step + column);
        }
    }
    _tile_release();
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
