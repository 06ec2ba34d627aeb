/* Products in 8-bit integers by AMX: see int8.h for what lies where. Sixteen rows of the weight and 64 columns, as they
   lie, are a left tile. Activations are laid out once: sixteen rows and 64 columns are a right tile, four columns of each
   row after four of the one before. Sums lie by row of the weight, so that results of images need not be turned. */
#include "amx.h"

#ifdef AMX
#include <string.h>

#include "int8.h"
#include "avx512_transpose.h"

enum {
    TILE = TILE_ROWS * TILE_BYTES,
    SQUARE = TILE_ROWS * TILE_ROWS, /* sums of a tile; a group and a panel have four: by half of the panel, then of the group */
    CHUNK = 8,                      /* steps of 64 columns: so much of a panel stays in the first cache while groups pass by */
    PAIRS = PANEL / 2,
    PIECES = 2 * (PAIRS + 1),
};

/* A group as tiles: those of its first sixteen rows, then those of the others. */
static void quantize_amx(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale,
                         int32_t *sum) {
    const int64_t wide = padded(from->columns), stride = (wide / TILE_BYTES | 1) * TILE_BYTES;
    for (int start = 0; start < rows; start += TILE_ROWS) {
        const int here = rows - start < TILE_ROWS ? rows - start : TILE_ROWS;
        for (int i = start; i < start + here; i++) {
            int8_t *to = line + (i - start) * stride;
            quantize_line512(from, first + i, to, scale + i, sum + i);
            memset(to + from->columns, 0, wide - from->columns);
        }
        for (int64_t at = 0; at < wide; at += TILE_BYTES, codes += TILE) {
            __m512i a[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++)
                a[i] = i < here ? _mm512_loadu_si512(line + i * stride + at) : _mm512_setzero_si512();
            transpose(a);
            for (int i = 0; i < TILE_ROWS; i++) _mm512_storeu_si512(codes + i * TILE_BYTES, a[i]);
        }
    }
}

/* Results of one group and panel that are computed, a piece at a time, while tiles of others are multiplied: pairs of rows
   of the weight by half of the group, in bf16. Where results of one row of activations lie together, pairs are kept until
   a half has all, and turned. */
typedef struct {
    Place place;
    const int32_t *sums;
    int at, rows, along; /* pieces done; rows of activations; whether results of one row of the weight lie together */
    __m512i pairs[PAIRS];
} Results;

INLINE __m512 value(const Place *at, const int32_t *sums, int n, __m512i row_sum, __m512 row_scale) {
    const __m512i less = _mm512_mullo_epi32(_mm512_set1_epi32(at->minus[n]), row_sum);
    const __m512 total = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), less));
    const __m512 y = _mm512_mul_ps(_mm512_mul_ps(total, row_scale), _mm512_set1_ps(at->scale[n]));
    return at->to->bias && n < at->count ? _mm512_add_ps(y, _mm512_set1_ps(at->to->bias[at->column + n])) : y;
}

INLINE void pair(Results *some, int half, int n, int rows) {
    const Place *at = &some->place;
    const int64_t first = half * TILE_ROWS;
    const __mmask16 mask = rows < TILE_ROWS ? (__mmask16)((1u << rows) - 1) : 0xffff;
    const __m512i row_sum = _mm512_maskz_loadu_epi32(mask, at->row_sum + first);
    const __m512 row_scale = _mm512_maskz_loadu_ps(mask, at->row_scale + first);
    const int32_t *sums = some->sums + (n / TILE_ROWS * 2 + half) * SQUARE + n % TILE_ROWS * TILE_ROWS;
    const __m512 one = value(at, sums, n, row_sum, row_scale);
    const __m512 other = value(at, sums + TILE_ROWS, n + 1, row_sum, row_scale);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(other, one);
    if (!some->along) {
        static const uint16_t BY_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        some->pairs[n / 2] = _mm512_permutexvar_epi16(_mm512_loadu_si512(BY_TURNS), both);
        return;
    }
    const Target *to = at->to;
    const int64_t row = at->row + first;
    uint16_t *out = (uint16_t *)to->out + row / to->image * to->image_step + row % to->image +
                    (at->column + n) * to->column_step;
    if (n < at->count) _mm256_mask_storeu_epi16(out, mask, _mm512_castsi512_si256(both));
    if (n + 1 < at->count) _mm256_mask_storeu_epi16(out + to->column_step, mask, _mm512_extracti64x4_epi64(both, 1));
}

INLINE void turn_pairs(Results *some, int half, int rows) {
    const Place *at = &some->place;
    const Target *to = at->to;
    const __mmask32 mask = at->count == PANEL ? 0xffffffffu : ((__mmask32)1 << at->count) - 1;
    uint16_t *out = (uint16_t *)to->out + (at->row + half * TILE_ROWS) * to->row_step + at->column;
    __m512i a[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) a[i] = some->pairs[i];
    transpose(a);
    for (int i = 0; i < TILE_ROWS; i++)
        if (i < rows) _mm512_mask_storeu_epi16(out + i * to->row_step, mask, a[i]);
}

INLINE void compute(Results *some, int count) {
    for (; count > 0 && some->at < PIECES; count--, some->at++) {
        const int half = some->at / (PAIRS + 1), piece = some->at % (PAIRS + 1), rows = some->rows - half * TILE_ROWS;
        if (rows <= 0) some->at = PIECES - 1;
        else if (piece < PAIRS) pair(some, half, 2 * piece, rows);
        else if (!some->along) turn_pairs(some, half, rows);
    }
}

/* Sums by row of the weight to results of any kind. */
static void results(const int32_t *sums, int rows, const Place *place) {
    int32_t turned[TALLEST * PANEL] __attribute__((aligned(64)));
    for (int tile = 0; tile < 4; tile++, sums += SQUARE) {
        __m512i a[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; i++) a[i] = _mm512_load_si512(sums + i * TILE_ROWS);
        transpose(a);
        int32_t *to = turned + tile % 2 * TILE_ROWS * PANEL + tile / 2 * TILE_ROWS;
        for (int i = 0; i < TILE_ROWS; i++) _mm512_store_si512(to + i * PANEL, a[i]);
    }
    results512(turned, rows, place);
}

/* Memory that is asked for during `steps`: `ahead`, `ahead_step` bytes in each; and lines of results. */
typedef struct {
    const char *ahead, *out;
    int64_t ahead_step, out_step;
} Wanted;

#define PRODUCT(sum, of_weight, of_rows)                      \
    do {                                                      \
        if (is_signed) _tile_dpbssd(sum, of_weight, of_rows); \
        else _tile_dpbusd(sum, of_weight, of_rows);           \
    } while (0)

/* `steps` of a panel, whose rows are `stride` bytes apart, by a group of sixteen rows or, if `two`, 32, whose second half
   is `second` bytes on. Added to the sums unless they are the first. */
INLINE void tiles(int two, int is_signed, int first, const uint8_t *panel, int64_t stride, const int8_t *codes,
                  int64_t second, int64_t steps, int32_t *sums, Results *others, Wanted *wanted) {
    const int each = (int)((PIECES + steps - 1) / steps), lines = (int)((TALLEST + steps - 1) / steps);
    const char *ahead = wanted->ahead, *out = wanted->out;
    const uint8_t *lower = panel + TILE_ROWS * stride;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 4 * TILE_ROWS);
        _tile_loadd(2, sums + 2 * SQUARE, 4 * TILE_ROWS);
        if (two) {
            _tile_loadd(1, sums + SQUARE, 4 * TILE_ROWS);
            _tile_loadd(3, sums + 3 * SQUARE, 4 * TILE_ROWS);
        }
    }
    MEMORY_IS_WRITTEN;
    for (int64_t s = 0; s < steps; s++, panel += TILE_BYTES, lower += TILE_BYTES, codes += TILE) {
        for (int64_t i = 0; i < wanted->ahead_step; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
        ahead += wanted->ahead_step;
        _tile_loadd(6, codes, TILE_BYTES);
        _tile_loadd(4, panel, stride);
        PRODUCT(0, 4, 6);
        _tile_loadd(5, lower, stride);
        PRODUCT(2, 5, 6);
        if (two) {
            _tile_loadd(7, codes + second, TILE_BYTES);
            PRODUCT(1, 4, 7);
            PRODUCT(3, 5, 7);
        }
        compute(others, each);
        for (int i = 0; i < lines; i++, out += wanted->out_step) __builtin_prefetch(out, 1);
    }
    wanted->ahead = ahead;
    _tile_stored(0, sums, 4 * TILE_ROWS);
    _tile_stored(2, sums + 2 * SQUARE, 4 * TILE_ROWS);
    if (!two) return;
    _tile_stored(1, sums + SQUARE, 4 * TILE_ROWS);
    _tile_stored(3, sums + 3 * SQUARE, 4 * TILE_ROWS);
}

/* What the products of all groups and panels of a call have in common. */
typedef struct {
    const Panels *panels;
    const int8_t *codes;
    const Place *place;
    int32_t *sums;
    Wanted wanted;
    int64_t weights, m, groups, steps, chunks;
    int together, along, turn;
} Block;

/* One group by one chunk of one panel. */
static void group_by_panel(Block *all, int64_t g, int64_t p, int64_t chunk, Results *others) {
    const int64_t first = begin_of(all->m, all->groups, g), rows = begin_of(all->m, all->groups, g + 1) - first;
    const int64_t at = all->steps * chunk / all->chunks, n = all->steps * (chunk + 1) / all->chunks - at;
    const int64_t stride = all->panels->bytes / PANEL, second = all->steps * TILE;
    const uint8_t *panel = all->panels->at + p * all->panels->bytes + at * TILE_BYTES;
    const int8_t *codes = all->codes + 2 * g * second + at * TILE;
    int32_t *sums = all->sums + g * 4 * SQUARE;
    if (all->chunks == 1) sums = all->sums + (all->turn ^= 1) * 4 * SQUARE; /* the other ones are in use still */
    const Place here = place_of(all->place, first, p, all->weights);
    const int last = chunk + 1 == all->chunks;
    Wanted *wanted = &all->wanted;
    wanted->out = (const char *)sums, wanted->out_step = 0;
    if (all->together && last) {
        wanted->out_step = here.to->row_step * 2;
        wanted->out = (const char *)here.to->out + here.row * wanted->out_step + here.column * 2;
    }
#define TILES(two, is_signed) tiles(two, is_signed, !chunk, panel, stride, codes, second, n, sums, others, wanted)
    if (all->panels->is_signed) rows > TILE_ROWS ? TILES(1, 1) : TILES(0, 1);
    else rows > TILE_ROWS ? TILES(1, 0) : TILES(0, 0);
    compute(others, PIECES);
    if (!last) return;
    if (!all->together && !all->along) {
        results(sums, (int)rows, &here);
        return;
    }
    others->place = here, others->sums = sums, others->at = 0, others->rows = (int)rows, others->along = all->along;
}

static void multiply_amx(const Panels *panels, int64_t weights, const int8_t *codes, int64_t m, int64_t columns,
                         const Place *place, int32_t *sums, const char *ahead, int64_t ahead_bytes) {
    const int64_t count = (weights + PANEL - 1) / PANEL, groups = groups_of(m);
    const int64_t steps = padded(columns) / TILE_BYTES, chunks = steps < 2 * CHUNK ? 1 : steps / CHUNK;
    const Target *to = place->to;
    Block all = {.panels = panels, .codes = codes, .place = place, .sums = sums, .weights = weights, .m = m};
    all.groups = groups, all.steps = steps, all.chunks = chunks;
    all.wanted = (Wanted){ahead, 0, ahead_bytes / (count * groups * steps), 0};
    all.together = to->type == BF16 && to->column_step == 1;
    all.along = to->type == BF16 && to->column_step != 1 && to->row_step == 1 && place->row % TILE_ROWS == 0 &&
                to->image % TILE_ROWS == 0; /* then no sixteen rows are of two images */
    Results others = {.at = PIECES};
    _tile_loadconfig(&WHOLE_TILES);
    if (chunks == 1) /* so that results lie together */
        for (int64_t g = 0; g < groups; g++)
            for (int64_t p = 0; p < count; p++) group_by_panel(&all, g, p, 0, &others);
    else
        for (int64_t p = 0; p < count; p++)
            for (int64_t c = 0; c < chunks; c++)
                for (int64_t g = 0; g < groups; g++) group_by_panel(&all, g, p, c, &others);
    compute(&others, PIECES);
    _tile_release();
}

const Int8 amx_int8 = {TALLEST, 0, TILE_BYTES, 1, 1152 << 10, 128 << 10, quantize_amx, largest512, last512, rows512, multiply_amx};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
