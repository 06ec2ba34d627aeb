/* Products in 8-bit integers by AMX: see int8.h for what lies where. */
#include "amx.h"

#ifdef AMX
#include <string.h>

#include "int8.h"

static void quantize_amx(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale,
                         int32_t *sum) {
    const int64_t wide = (from->columns + TILE_BYTES - 1) / TILE_BYTES * TILE_BYTES;
    (void)line;
    for (int i = 0; i < rows; i++, codes += wide) {
        quantize_line512(from, first + i, codes, scale + i, sum + i);
        memset(codes + from->columns, 0, wide - from->columns);
    }
}

/* Sixteen or, if `two`, 32 rows of activations by the rows of a panel. Codes of the panel that no column of the weight
   has are multiplied by zeros. */
INLINE void tiles(int two, const uint8_t *panel, const int8_t *codes, int64_t wide, int32_t *sums, const char *ahead,
                  int64_t step) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    MEMORY_IS_WRITTEN;
    for (int64_t at = 0; at < wide; at += TILE_BYTES, ahead += step) {
        for (int64_t i = 0; i < step; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
        _tile_loadd(4, codes + at, wide);
        _tile_loadd(6, panel + at * PANEL, 4 * PANEL);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, panel + at * PANEL + TILE_BYTES, 4 * PANEL);
        _tile_dpbsud(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, codes + TILE_ROWS * wide + at, wide);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + TILE_ROWS, 4 * PANEL);
    if (!two) return;
    _tile_stored(2, sums + TILE_ROWS * PANEL, 4 * PANEL);
    _tile_stored(3, sums + TILE_ROWS * PANEL + TILE_ROWS, 4 * PANEL);
}

/* `results512` for rows of bf16 that lie together. */
static void results_amx(const int32_t *sums, int rows, const Place *at) {
    const Target *to = at->to;
    const __mmask32 mask = at->count == PANEL ? 0xffffffffu : ((__mmask32)1 << at->count) - 1;
    const __m512i minus0 = _mm512_loadu_si512(at->minus), minus1 = _mm512_loadu_si512(at->minus + 16);
    const __m512 scale0 = _mm512_loadu_ps(at->scale), scale1 = _mm512_loadu_ps(at->scale + 16);
    __m512 bias0 = _mm512_setzero_ps(), bias1 = bias0;
    if (to->bias) {
        bias0 = _mm512_maskz_loadu_ps((__mmask16)mask, to->bias + at->column);
        bias1 = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), to->bias + at->column + 16);
    }
    uint16_t *out = (uint16_t *)to->out + at->row * to->row_step + at->column;
    for (int i = 0; i < rows; i++, sums += PANEL, out += to->row_step) {
        const __m512i sum = _mm512_set1_epi32(at->row_sum[i]);
        const __m512 of_row = _mm512_set1_ps(at->row_scale[i]);
        const __m512i less0 = _mm512_mullo_epi32(minus0, sum), less1 = _mm512_mullo_epi32(minus1, sum);
        const __m512 total0 = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), less0));
        const __m512 total1 = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums + 16), less1));
        __m512 y0 = _mm512_mul_ps(_mm512_mul_ps(total0, of_row), scale0);
        __m512 y1 = _mm512_mul_ps(_mm512_mul_ps(total1, of_row), scale1);
        if (to->bias) y0 = _mm512_add_ps(y0, bias0), y1 = _mm512_add_ps(y1, bias1);
        _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(y1, y0));
    }
}

static void multiply_amx(const uint8_t *panel, const int8_t *codes, int rows, int64_t wide, const Place *place,
                         const char *ahead, int64_t ahead_bytes) {
    int32_t sums[TALLEST * PANEL] __attribute__((aligned(64)));
    const int64_t step = ahead ? ahead_bytes / (wide / TILE_BYTES) : 0;
    _tile_loadconfig(&WHOLE_TILES);
    if (rows > TILE_ROWS) tiles(1, panel, codes, wide, sums, ahead, step);
    else tiles(0, panel, codes, wide, sums, ahead, step);
    _tile_release();
    if (place->to->type == BF16 && place->to->column_step == 1) results_amx(sums, rows, place);
    else results512(sums, rows, place);
}

const Int8 amx_int8 = {TALLEST, 0, TILE_BYTES, 1152 << 10, 128 << 10, quantize_amx, largest512, last512, panel512, multiply_amx};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
