/* Rows of weights as panels, of codes: see int8.h for what lies where. */
#include "avx512vnni.h"

#ifdef BUILD
#include <string.h>

#include "avx512_parts.h"
#include "int8.h"
#include "scales.h"

#include "avx512_transpose.h"

enum { LEAST_UNPACKED = 128 }; /* columns from which half of the spare memory is enough for `unpack512` */

/* Whether there are instructions of which this file does not ask for itself. */
static int vbmi(void) { return kernels() != &avx2_kernels && kernels() != &portable_kernels; }

/* What int8_rows.h is made of. */
static const uint8_t *unpacked(const Weight *weight, int64_t first, uint8_t *spare) {
    const int64_t columns = weight->form->columns;
    if (columns < LEAST_UNPACKED || !vbmi()) return codes_at(weight->form, weight->parts, first, columns, spare);
    return unpack512(weight->form, weight->parts, first, columns, spare);
}

static int64_t nine_taps(const uint8_t *from, int64_t in, uint8_t *to) { return vbmi() ? nine_taps512(from, in, to) : 0; }

#define QUANTIZE_RUNS quantize_runs512
#define QUANTIZE_LINE quantize_line512
#include "int8_rows.h"

/* Sixteen rows of 64 bytes, `stride` apart, as sixteen vectors of four bytes of each; to `to`, `step` bytes apart. */
INLINE void turn(const uint8_t *from, int64_t stride, int rows, __mmask64 mask, __m512i flip, uint8_t *to, int64_t step,
                 int64_t fours) {
    __m512i a[16];
    EACH(i, 16)
    a[i] = i < rows ? _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, from + i * stride), flip) : _mm512_setzero_si512();
    transpose(a);
    EACH(i, 16) if (i < fours) _mm512_storeu_si512(to + i * step, a[i]);
}

/* What VNNI begins the sums of runs with: activations are 128 too high. The weight's `count` rows are `stride` apart. */
static void begins_of(const Weight *weight, const uint8_t *rows, int64_t stride, int count, int32_t *begins) {
    const int64_t runs = scales_in(weight), span = weight->form->columns / runs;
    for (int64_t r = 0; r < runs; r++, rows += span, begins += PANEL)
        for (int i = 0; i < PANEL; i++) {
            __m512i pairs = _mm512_setzero_si512();
            for (int64_t at = 0; at < span && i < count; at += 64) {
                const __m512i twos = _mm512_maddubs_epi16(_mm512_set1_epi8(1), _mm512_loadu_si512(rows + i * stride + at));
                pairs = _mm512_add_epi32(pairs, _mm512_madd_epi16(twos, _mm512_set1_epi16(1)));
            }
            begins[i] = -128 * _mm512_reduce_add_epi32(pairs);
        }
}

void panel512(const Weight *weight, int64_t start, uint8_t *panel, float *scale, int32_t *minus, void *spare) {
    const int64_t columns = weight->form->columns;
    const int count = count_of(weight, start), by_run = weight->coding & BY_RUN;
    const int is_signed = weight->coding & MADE || weight->form->packing == SIGNED_BYTES;
    const int flip = is_signed && !by_run ? 0x80 : 0; /* so that codes begin at 0 */
    const int direct = !(weight->coding & MADE) && weight->taps == 1;
    const uint8_t *rows = weight->parts->codes + start * columns;
    int64_t stride = columns;
    if (by_run) scales_by_run(weight, start, scale);
    else scales_of(weight, start, flip, scale, minus);
    if (!direct) {
        uint8_t *bytes = (uint8_t *)spare + (columns * 4 + 63) / 64 * 64;
        stride = (columns + 63) / 64 * 64;
        codes_of(weight, start, bytes, stride, scale, spare);
        rows = bytes;
    }
    if (by_run) begins_of(weight, rows, stride, count, minus);
    const __m512i xor = _mm512_set1_epi8((char)flip);
    const uint8_t *next = rows + (start + 2 * PANEL <= weight->form->rows ? PANEL * stride : 0);
    for (int64_t at = 0; at < columns; at += 64) {
        if (direct)
            for (int i = 0; i < count; i++) _mm_prefetch((const char *)next + i * stride + at, _MM_HINT_T1);
        const int64_t left = columns - at, fours = left < 64 ? (left + 3) / 4 : 16;
        const __mmask64 mask = left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
        for (int half = 0; half < 2; half++) {
            const int here = count - 16 * half;
            if (here >= 16)
                turn(rows + 16 * half * stride + at, stride, 16, mask, xor, panel + at * PANEL + 64 * half, PANEL * 4,
                     fours);
            else
                turn(rows + 16 * half * stride + at, stride, here, mask, xor, panel + at * PANEL + 64 * half, PANEL * 4,
                     fours);
        }
    }
}

void rows512(const Weight *weight, int64_t start, uint8_t *panel, float *scale, int32_t *minus, void *spare) {
    if (weight->coding & BY_RUN) scales_by_run(weight, start, scale);
    else scales_of(weight, start, 0, scale, minus);
    if (panel) codes_of(weight, start, panel, panel_bytes(weight->form->columns) / PANEL, scale, spare);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
