/* Products in 8-bit integers by AMX: see int8.h for what lies where. */
#include "amx.h"

#ifdef AMX
#include <string.h>

#include "int8.h"

static void quantize_amx(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale,
                         int32_t *sum) {
    const int64_t wide = padded(from->columns);
    (void)line;
    for (int i = 0; i < rows; i++, codes += wide) {
        quantize_line512(from, first + i, codes, scale + i, sum + i);
        memset(codes + from->columns, 0, wide - from->columns);
    }
}

enum { CHUNK = 8 }; /* steps of 64 columns: so much of a panel stays in the first cache while activations pass by */

/* Results that are computed while tiles are multiplied, in rows of bf16 that lie together: `results512` for these. */
typedef struct {
    Place place;
    const int32_t *sums;
    int at, rows;
} Results;

INLINE void compute(Results *some, int count) {
    const Place *at = &some->place;
    const Target *to = at->to;
    const __mmask32 mask = at->count == PANEL ? 0xffffffffu : ((__mmask32)1 << at->count) - 1;
    for (; count > 0 && some->at < some->rows; count--, some->at++) {
        const int32_t *sums = some->sums + some->at * PANEL;
        const __m512i sum = _mm512_set1_epi32(at->row_sum[some->at]);
        const __m512 of_row = _mm512_set1_ps(at->row_scale[some->at]);
        const __m512i less0 = _mm512_mullo_epi32(_mm512_loadu_si512(at->minus), sum);
        const __m512i less1 = _mm512_mullo_epi32(_mm512_loadu_si512(at->minus + 16), sum);
        const __m512 total0 = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), less0));
        const __m512 total1 = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums + 16), less1));
        __m512 y0 = _mm512_mul_ps(_mm512_mul_ps(total0, of_row), _mm512_loadu_ps(at->scale));
        __m512 y1 = _mm512_mul_ps(_mm512_mul_ps(total1, of_row), _mm512_loadu_ps(at->scale + 16));
        if (to->bias) {
            y0 = _mm512_add_ps(y0, _mm512_maskz_loadu_ps((__mmask16)mask, to->bias + at->column));
            y1 = _mm512_add_ps(y1, _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), to->bias + at->column + 16));
        }
        uint16_t *out = (uint16_t *)to->out + (at->row + some->at) * to->row_step + at->column;
        _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(y1, y0));
    }
}

/* Sixteen or, if `two`, 32 rows of activations by the rows of a panel, `steps` of them, added to the sums unless they
   are the first. Codes of the panel that no column of the weight has are multiplied by zeros. */
INLINE void tiles(int two, int first, const uint8_t *panel, const int8_t *codes, int64_t wide, int64_t steps,
                  int32_t *sums, const char *ahead, int64_t step, Results *others, const char *out, int64_t out_step) {
    const int each = (int)((TALLEST + steps - 1) / steps);
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 4 * PANEL);
        _tile_loadd(1, sums + TILE_ROWS, 4 * PANEL);
        if (two) {
            _tile_loadd(2, sums + TILE_ROWS * PANEL, 4 * PANEL);
            _tile_loadd(3, sums + TILE_ROWS * PANEL + TILE_ROWS, 4 * PANEL);
        }
    }
    MEMORY_IS_WRITTEN;
    for (int64_t s = 0; s < steps; s++, panel += TILE_BYTES * PANEL, codes += TILE_BYTES, ahead += step) {
        for (int64_t i = 0; i < step; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
        _tile_loadd(4, codes, wide);
        _tile_loadd(6, panel, 4 * PANEL);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, panel + TILE_BYTES, 4 * PANEL);
        _tile_dpbsud(1, 4, 7);
        if (two) {
            _tile_loadd(5, codes + TILE_ROWS * wide, wide);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        compute(others, each);
        for (int i = 0; i < each; i++, out += out_step) __builtin_prefetch(out, 1);
    }
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + TILE_ROWS, 4 * PANEL);
    if (!two) return;
    _tile_stored(2, sums + TILE_ROWS * PANEL, 4 * PANEL);
    _tile_stored(3, sums + TILE_ROWS * PANEL + TILE_ROWS, 4 * PANEL);
}

/* What the products of all groups and panels of a call have in common. */
typedef struct {
    const uint8_t *panels;
    const int8_t *codes;
    const Place *place;
    int32_t *sums;
    const char *ahead;
    int64_t weights, m, groups, panel_bytes, wide, steps, chunks, step;
    int lie_together, turn;
} Block;

/* One group by one chunk of one panel. */
static void group_by_panel(Block *all, int64_t g, int64_t p, int64_t chunk, Results *others) {
    const int64_t first = begin_of(all->m, all->groups, g), rows = begin_of(all->m, all->groups, g + 1) - first;
    const int64_t at = all->steps * chunk / all->chunks, n = all->steps * (chunk + 1) / all->chunks - at;
    const uint8_t *panel = all->panels + p * all->panel_bytes + at * TILE_BYTES * PANEL;
    const int8_t *codes = all->codes + first * all->wide + at * TILE_BYTES;
    int32_t *sums = all->sums + first * PANEL;
    if (all->chunks == 1) sums = all->sums + (all->turn ^= 1) * TALLEST * PANEL; /* the other one is in use still */
    const Place here = place_of(all->place, first, p, all->weights);
    const int64_t to_step = all->lie_together && chunk + 1 == all->chunks ? here.to->row_step * 2 : 0;
    const char *to = to_step ? (char*)here.to->out + (here.row * here.to->row_step + here.column) * 2 : (const char*)sums;
    if (rows > TILE_ROWS) tiles(1, !chunk, panel, codes, all->wide, n, sums, all->ahead, all->step, others, to, to_step);
    else tiles(0, !chunk, panel, codes, all->wide, n, sums, all->ahead, all->step, others, to, to_step);
    all->ahead += n * all->step;
    compute(others, TALLEST);
    if (chunk + 1 < all->chunks) return;
    if (all->lie_together) *others = (Results){here, sums, 0, (int)rows};
    else results512(sums, (int)rows, &here);
}

static void multiply_amx(const uint8_t *panels, int64_t weights, const int8_t *codes, int64_t m, int64_t columns,
                         const Place *place, int32_t *sums, const char *ahead, int64_t ahead_bytes) {
    const int64_t count = (weights + PANEL - 1) / PANEL, groups = groups_of(m);
    const int64_t steps = (columns + TILE_BYTES - 1) / TILE_BYTES, chunks = steps < 2 * CHUNK ? 1 : steps / CHUNK;
    Block all = {panels, codes, place, sums, ahead, weights, m, groups, panel_bytes(columns), padded(columns), steps,
                 chunks, ahead_bytes / (count * groups * steps), place->to->type == BF16 && place->to->column_step == 1, 0};
    Results others = {.at = 0, .rows = 0};
    _tile_loadconfig(&WHOLE_TILES);
    if (chunks == 1) /* so that results lie together */
        for (int64_t g = 0; g < groups; g++)
            for (int64_t p = 0; p < count; p++) group_by_panel(&all, g, p, 0, &others);
    else
        for (int64_t p = 0; p < count; p++)
            for (int64_t c = 0; c < chunks; c++)
                for (int64_t g = 0; g < groups; g++) group_by_panel(&all, g, p, c, &others);
    compute(&others, TALLEST);
    _tile_release();
}

const Int8 amx_int8 = {TALLEST, 0, TILE_BYTES, 1, 1152 << 10, 128 << 10, quantize_amx, largest512, last512, panel512, multiply_amx};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
