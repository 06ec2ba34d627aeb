/* Products of narrow.h for AVX-512. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_transpose.h"
#include "narrow.h"

#define EACH(i, n) _Pragma("GCC unroll 12") for (int i = 0; i < (n); i++)

enum {
    TALL = 12,     /* rows at a time: 24 registers of sums */
    WIDE = 32,     /* columns at a time */
    TOGETHER = 4,  /* times as many that are laid out together */
    LAID = 8192,   /* numbers: stay in the first cache */
    PANEL = 18 * TALL /* rows, for which the matrix is laid out once */
};

INLINE __mmask16 first_of(int64_t count) { return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0; }

/* Sixteen columns of a matrix from `column` on, terms `start` .. `stop`: [terms][WIDE], zeros where there are no columns. */
INLINE void lay(const float *by, int turned, int64_t terms, int64_t columns, int64_t column, int64_t start, int64_t stop,
                float *to) {
    if (!turned) {
        const __mmask16 mask = first_of(columns - column);
        for (int64_t k = start; k < stop; k++)
            _mm512_storeu_ps(to + (k - start) * WIDE, _mm512_maskz_loadu_ps(mask, by + k * columns + column));
        return;
    }
    for (int64_t k = start; k < stop; k += 16) {
        const __mmask16 mask = first_of(stop - k);
        __m512i square[16];
        for (int64_t i = 0; i < 16; i++)
            square[i] = _mm512_maskz_loadu_epi32(column + i < columns ? mask : 0, by + (column + i) * terms + k);
        transpose(square);
        for (int64_t i = 0; i < 16 && k + i < stop; i++) _mm512_storeu_si512(to + (k - start + i) * WIDE, square[i]);
    }
}

/* WIDE columns, of which there may be `count`, of `tall` rows. */
INLINE void tile(const int tall, const float *x, int64_t stride, int64_t terms, const float *laid, int64_t columns,
                 int64_t count, int adds, float *out) {
    __m512 sums[TALL][2];
    EACH(i, tall) {
        sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        _mm_prefetch((const char *)(out + i * columns), _MM_HINT_T0); /* from afar, while sums are made */
        if (count > 16) _mm_prefetch((const char *)(out + i * columns + 16), _MM_HINT_T0);
    }
    for (int64_t k = 0; k < terms; k++) {
        const __m512 a = _mm512_loadu_ps(laid + k * WIDE), b = _mm512_loadu_ps(laid + k * WIDE + 16);
        EACH(i, tall) {
            const __m512 one = _mm512_set1_ps(x[i * stride + k]);
            sums[i][0] = _mm512_fmadd_ps(one, a, sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(one, b, sums[i][1]);
        }
    }
    EACH(i, tall) {
        EACH(half, 2) {
            const __mmask16 mask = first_of(count - 16 * half);
            float *to = out + i * columns + 16 * half;
            const __m512 before = adds ? _mm512_maskz_loadu_ps(mask, to) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sums[i][half]));
        }
    }
}

void multiply_narrow512(const float *x, int64_t rows, int64_t terms, const float *by, int turned, int64_t columns,
                        int adds, float *out) {
    float laid[LAID] __attribute__((aligned(64)));
    const int64_t across = (columns < WIDE * TOGETHER ? columns + WIDE - 1 : WIDE * TOGETHER) / WIDE * WIDE;
    const int64_t deep = LAID / across;
    for (int64_t panel = 0; panel < rows; panel += PANEL)
        for (int64_t column = 0; column < columns; column += across)
            for (int64_t start = 0; start < terms; start += deep) {
                const int64_t some = terms - start < deep ? terms - start : deep;
                const int64_t end = rows - panel < PANEL ? rows : panel + PANEL;
                const int64_t stop = columns - column < across ? columns : column + across;
                for (int64_t c = column; c < stop; c += WIDE)
                    for (int64_t half = 0; half < WIDE; half += 16)
                        lay(by, turned, terms, columns, c + half, start, start + some, laid + (c - column) * some + half);
                int64_t row = panel;
#define ROWS(n)                                                                                               \
    for (; row + (n) <= end; row += (n))                                                                      \
        for (int64_t c = column; c < stop; c += WIDE)                                                         \
            tile(n, x + row * terms + start, terms, some, laid + (c - column) * some, columns, columns - c,   \
                 adds || start, out + row * columns + c)
                ROWS(TALL);
                ROWS(4);
                ROWS(1);
            }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
