/* Rows of weights as panels for products with AVX2 alone: see avx2_int8.h for what lies where. */
#include "avx2.h"

#ifdef BUILD
#include <string.h>

#include "avx2_int8.h"
#include "codes.h"
#include "scales.h"

/* What int8_rows.h is made of. */
static const uint8_t *unpacked(const Weight *weight, int64_t first, uint8_t *spare) {
    return codes_at(weight->form, weight->parts, first, weight->form->columns, spare);
}

static int64_t nine_taps(const uint8_t *from, int64_t in, uint8_t *to) {
    (void)from, (void)in, (void)to;
    return 0;
}

#define QUANTIZE_RUNS quantize_runs_avx2
#define QUANTIZE_LINE quantize_line_avx2
#include "int8_rows.h"

/* Eight rows of sixteen bytes, `stride` apart, as the eight pairs of each; to `to`, 2 * HALF bytes apart. */
INLINE void turn(const uint8_t *from, int64_t stride, __m128i flip, uint8_t *to) {
    __m128i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(from + i * stride)), flip);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm_unpacklo_epi16(a[i], a[i + 1]);     /* pairs 0 .. 3 of two rows, by turns */
        b[i + 1] = _mm_unpackhi_epi16(a[i], a[i + 1]); /* 4 .. 7 */
    }
    for (int half = 0; half < 2; half++) {
        const __m128i c0 = _mm_unpacklo_epi32(b[half], b[2 + half]), c1 = _mm_unpackhi_epi32(b[half], b[2 + half]);
        const __m128i c2 = _mm_unpacklo_epi32(b[4 + half], b[6 + half]), c3 = _mm_unpackhi_epi32(b[4 + half], b[6 + half]);
        const __m128i d[4] = {_mm_unpacklo_epi64(c0, c2), _mm_unpackhi_epi64(c0, c2), _mm_unpacklo_epi64(c1, c3),
                              _mm_unpackhi_epi64(c1, c3)};
        for (int j = 0; j < 4; j++) _mm_storeu_si128((__m128i *)(to + (4 * half + j) * 2 * HALF), d[j]);
    }
}

/* The same of `rows` rows of `count` bytes; zeros for what is not there. */
static void turn_some(const uint8_t *from, int64_t stride, int rows, int64_t count, uint8_t flip, uint8_t *to) {
    for (int64_t at = 0; at < count + count % 2; at++)
        for (int i = 0; i < 8; i++)
            to[at / 2 * 2 * HALF + 2 * i + at % 2] = i < rows && at < count ? from[i * stride + at] ^ flip : 0;
}

void panel_avx2(const Weight *weight, int64_t start, uint8_t *panel, float *scale, int32_t *minus, void *spare) {
    const int64_t columns = weight->form->columns;
    const int count = count_of(weight, start), by_run = weight->coding & BY_RUN;
    const int is_signed = weight->coding & MADE || weight->form->packing == SIGNED_BYTES;
    const uint8_t flip = is_signed ? 0 : 0x80; /* so that codes are signed */
    const uint8_t *rows = weight->parts->codes + start * columns;
    int64_t stride = columns;
    if (by_run) scales_by_run(weight, start, scale);
    else scales_of(weight, start, -(int)flip, scale, minus);
    if (weight->coding & MADE || weight->taps > 1) {
        uint8_t *bytes = (uint8_t *)spare + (columns * 4 + 63) / 64 * 64;
        stride = (columns + 63) / 64 * 64;
        codes_of(weight, start, bytes, stride, scale, spare);
        rows = bytes;
    }
    const __m128i xor = _mm_set1_epi8((char)flip);
    for (int at = 0; at < PANEL; at += 8) {
        uint8_t *to = panel + at / HALF * HALF * (columns + columns % 2) + at % HALF * 2;
        const int here = count - at < 8 ? count - at : 8;
        const uint8_t *from = rows + at * stride;
        int64_t column = 0;
        for (; here == 8 && column + 16 <= columns; column += 16) turn(from + column, stride, xor, to + column * HALF);
        if (column < columns) turn_some(from + column, stride, here, columns - column, flip, to + column * HALF);
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
