/* Products in 8-bit integers by AMX: see int8.h for what lies where. Sixteen rows of the weight and 64 columns, as they
   lie, are a left tile. Activations are laid out once: sixteen rows and 64 columns are a right tile, four columns of each
   row after four of the one before. Sums lie by row of the weight, so that results of images need not be turned. */
#include "amx.h"

#ifdef AMX
#include <string.h>

#include "int8.h"
#include "amx_branch.h"
#include "amx_halves.h"

enum {
    TILE = TILE_ROWS * TILE_BYTES,
    SQUARE = TILE_ROWS * TILE_ROWS, /* sums of a tile; a group and a panel have four, by half of the panel, then of the
                                       group */
    ALL_TILES = 4, /* of the sums of a group and a panel */
    PAIRS = PANEL / 2,
    AT_ONCE = 4, /* pairs of rows of the weight that are computed at once */
    PIECES = PAIRS / AT_ONCE + 1,
    LARGE = 6 << 20, /* bytes of results that are written past the caches: reading so many lines before they are written
                         costs more than reading them from memory afterwards (measured on Granite Rapids) */
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

/* Results of one group and panel that are computed, a piece at a time, while tiles of others are multiplied: half of the
   group by some rows of the weight, in bf16. Where results of one row of activations lie together, they are kept in pairs
   until a half has all, and turned. */
typedef struct {
    Place place;
    const int32_t *sums;
    const float *runs;             /* sums of all runs but the last, by the same order; NULL where there are no runs */
    const float *bias;             /* [PANEL] */
    int at, end;                   /* pieces that are done, and that there are */
    int rows, along, less, beyond; /* of activations; whether results of one row of the weight lie together; whether there
                                      is something to subtract; whether lines are written past the caches */
    float kept[PANEL];
    __m512i pairs[PAIRS];
} Results;

#define FOUR_TIMES(x) x, x, x, x
#define NOTHING FOUR_TIMES(-0.0f), FOUR_TIMES(-0.0f)
static const float NO_BIAS[PANEL] = {FOUR_TIMES(NOTHING)}; /* it changes no number that it is added to */

static __mmask16 first_of(int count) { return count >= TILE_ROWS ? 0xffff : (__mmask16)((1u << count) - 1); }

/* The next to compute. */
static void begin(Results *some, const Place *place, const int32_t *sums, const float *runs, int rows) {
    const Target *to = place->to;
    some->place = *place, some->sums = sums, some->runs = runs, some->rows = rows;
    some->at = 0, some->end = rows > TILE_ROWS ? 2 * PIECES : PIECES;
    some->less = 0;
    for (int i = 0; i < PANEL && !runs; i++) some->less |= place->minus[i];
    some->bias = to->bias ? to->bias + place->column : NO_BIAS;
    if (!to->bias || place->count == PANEL) return;
    some->bias = memcpy(some->kept, NO_BIAS, sizeof NO_BIAS);
    memcpy(some->kept, to->bias + place->column, place->count * sizeof(float));
}

/* The one at `at` of the sums, of row n of the weight. */
INLINE __m512 value(const Results *some, int at, int n, __m512i row_sum, __m512 row_scale) {
    const __m512 scale = _mm512_set1_ps(some->place.scale[n]), bias = _mm512_set1_ps(some->bias[n]);
    __m512i total = _mm512_load_si512(some->sums + at);
    if (some->runs) {
        const __m512 all = _mm512_add_ps(_mm512_load_ps(some->runs + at), _mm512_mul_ps(_mm512_cvtepi32_ps(total), scale));
        return _mm512_add_ps(_mm512_mul_ps(all, row_scale), bias);
    }
    if (some->less)
        total = _mm512_sub_epi32(total, _mm512_mullo_epi32(_mm512_set1_epi32(some->place.minus[n]), row_sum));
    return _mm512_add_ps(_mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(total), row_scale), scale), bias);
}

/* Results of two rows of the weight, which lie together by row of the weight. */
INLINE void put_along(const Results *some, int half, int n, __mmask16 mask, __m512i both) {
    const Place *at = &some->place;
    const Target *to = at->to;
    const int64_t row = at->row + half * TILE_ROWS;
    uint16_t *out = (uint16_t *)to->out + row / to->image * to->image_step + row % to->image +
                    (at->column + n) * to->column_step;
    if (n < at->count) _mm256_mask_storeu_epi16(out, mask, _mm512_castsi512_si256(both));
    if (n + 1 < at->count) _mm256_mask_storeu_epi16(out + to->column_step, mask, _mm512_extracti64x4_epi64(both, 1));
}

INLINE void pairs(Results *some, int half, int n) {
    static const uint16_t BY_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_loadu_si512(BY_TURNS);
    const __mmask16 mask = first_of(some->rows - half * TILE_ROWS);
    const __m512i row_sum = _mm512_maskz_loadu_epi32(mask, some->place.row_sum + half * TILE_ROWS);
    const __m512 row_scale = _mm512_maskz_loadu_ps(mask, some->place.row_scale + half * TILE_ROWS);
    const int first = (n / TILE_ROWS * 2 + half) * SQUARE + n % TILE_ROWS * TILE_ROWS;
    __m512i both[AT_ONCE];
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++) {
        const __m512 one = value(some, first + 2 * i * TILE_ROWS, n + 2 * i, row_sum, row_scale);
        const __m512 other = value(some, first + (2 * i + 1) * TILE_ROWS, n + 2 * i + 1, row_sum, row_scale);
        both[i] = (__m512i)_mm512_cvtne2ps_pbh(other, one);
    }
    if (some->along) {
        for (int i = 0; i < AT_ONCE; i++) put_along(some, half, n + 2 * i, mask, both[i]);
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++) some->pairs[n / 2 + i] = _mm512_permutexvar_epi16(order, both[i]);
}

INLINE void turn_pairs(Results *some, int half) {
    const Place *at = &some->place;
    const int64_t step = at->to->row_step;
    const int rows = some->rows - half * TILE_ROWS;
    uint16_t *out = (uint16_t *)at->to->out + (at->row + half * TILE_ROWS) * step + at->column;
    __m512i a[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) a[i] = some->pairs[i];
    transpose(a);
    const float *branch = at->branch ? at->branch + half * TILE_ROWS * PANEL : 0;
    for (int i = 0; i < TILE_ROWS && branch; i++) a[i] = with_branch(branch + i * PANEL, a[i]);
    if (some->beyond && at->count == PANEL) {
        for (int i = 0; i < TILE_ROWS && i < rows; i++, out += step) _mm512_stream_si512((void *)out, a[i]);
        return;
    }
    const __mmask32 mask = at->count == PANEL ? 0xffffffffu : ((__mmask32)1 << at->count) - 1;
    for (int i = 0; i < TILE_ROWS; i++, out += step)
        if (i < rows) _mm512_mask_storeu_epi16(out, mask, a[i]);
}

INLINE void compute(Results *some, int count) {
    for (; count > 0 && some->at < some->end; count--) {
        const int half = some->at >= PIECES, piece = some->at++ - half * PIECES;
        if (piece < PIECES - 1) pairs(some, half, piece * 2 * AT_ONCE);
        else if (!some->along) turn_pairs(some, half);
    }
}

/* Sums by row of the weight, integers or floats, by row of activations. */
static void turned_sums(const void *sums, void *turned) {
    for (int tile = 0; tile < 4; tile++) {
        __m512i a[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; i++) a[i] = _mm512_load_si512((const char *)sums + (tile * TILE_ROWS + i) * 64);
        transpose(a);
        char *to = (char *)turned + (tile % 2 * TILE_ROWS * PANEL + tile / 2 * TILE_ROWS) * 4;
        for (int i = 0; i < TILE_ROWS; i++) _mm512_store_si512(to + i * PANEL * 4, a[i]);
    }
}

/* Results of any kind. */
static void results(const int32_t *sums, int rows, const Place *place) {
    int32_t turned[TALLEST * PANEL] __attribute__((aligned(64)));
    turned_sums(sums, turned);
    results512(turned, rows, place);
}

static void float_results(const float *sums, int rows, const Place *place) {
    float turned[TALLEST * PANEL] __attribute__((aligned(64)));
    turned_sums(sums, turned);
    float_results512(turned, rows, place);
}

/* Sums of one run that are added, each times its scale, to those of the runs before, while tiles of the next are
   multiplied. */
typedef struct {
    const int32_t *sums;
    const float *scale; /* [PANEL] */
    float *to;
    int at, by, whole; /* the tile that is next, and how many further the one after it is: groups of up to sixteen rows have
                          half of the tiles; whether there are no runs before */
} Adding;

INLINE void add_tile(const int32_t *sums, const float *scale, float *to, int whole) {
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++, sums += TILE_ROWS, to += TILE_ROWS) {
        const __m512 more = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums)), _mm512_set1_ps(scale[i]));
        _mm512_store_ps(to, whole ? more : _mm512_add_ps(_mm512_load_ps(to), more));
    }
}

INLINE void add_some(Adding *some, int tiles) {
    for (; tiles > 0 && some->at < ALL_TILES; tiles--, some->at += some->by) {
        const int first = some->at * SQUARE;
        const float *scale = some->scale + some->at / 2 * TILE_ROWS;
        if (some->whole) add_tile(some->sums + first, scale, some->to + first, 1);
        else add_tile(some->sums + first, scale, some->to + first, 0);
    }
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

/* Some columns of a panel, whose rows are `stride` bytes apart, by a group of sixteen rows or, if `two`, 32, which are
   `between` bytes after the first, in steps of 64 columns. `adding`: NULL where there are no runs. */
INLINE void tiles(int two, int is_signed, const uint8_t *panel, int64_t stride, const int8_t *codes, int64_t between,
                  int64_t steps, int32_t *sums, Results *others, Adding *adding, Wanted *wanted) {
    const int each = (int)((2 * PIECES + steps - 1) / steps), lines = (int)((TALLEST + steps - 1) / steps);
    const int adds = (int)((ALL_TILES + steps - 1) / steps);
    const char *ahead = wanted->ahead, *out = wanted->out;
    const uint8_t *lower = panel + TILE_ROWS * stride;
    const int8_t *second = codes + between;
    zero_tiles();
    MEMORY_IS_WRITTEN;
    for (int64_t s = 0; s < steps; s++, panel += TILE_BYTES, lower += TILE_BYTES, codes += TILE, second += TILE) {
        for (int64_t i = 0; i < wanted->ahead_step; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
        ahead += wanted->ahead_step;
        _tile_loadd(6, codes, TILE_BYTES);
        _tile_loadd(4, panel, stride);
        PRODUCT(0, 4, 6);
        _tile_loadd(5, lower, stride);
        PRODUCT(2, 5, 6);
        if (two) {
            _tile_loadd(7, second, TILE_BYTES);
            PRODUCT(1, 4, 7);
            PRODUCT(3, 5, 7);
        }
        compute(others, each);
        if (adding) add_some(adding, adds);
        if (wanted->out_step)
            for (int i = 0; i < lines; i++, out += wanted->out_step) __builtin_prefetch(out, 1);
    }
    wanted->ahead = ahead;
    compute(others, 2 * PIECES);
    if (adding) add_some(adding, ALL_TILES);
    _tile_stored(0, sums, 4 * TILE_ROWS);
    _tile_stored(2, sums + 2 * SQUARE, 4 * TILE_ROWS);
    if (!two) return;
    _tile_stored(1, sums + SQUARE, 4 * TILE_ROWS);
    _tile_stored(3, sums + 3 * SQUARE, 4 * TILE_ROWS);
}

static void one_or_two(const Panels *panels, const uint8_t *panel, const int8_t *codes, int rows, int64_t steps,
                       int32_t *sums, Results *others, Wanted *wanted) {
    const int64_t stride = panels->bytes / PANEL, between = steps * TILE;
    if (rows > TILE_ROWS && panels->is_signed)
        tiles(1, 1, panel, stride, codes, between, steps, sums, others, 0, wanted);
    else if (rows > TILE_ROWS) tiles(1, 0, panel, stride, codes, between, steps, sums, others, 0, wanted);
    else if (panels->is_signed) tiles(0, 1, panel, stride, codes, between, steps, sums, others, 0, wanted);
    else tiles(0, 0, panel, stride, codes, between, steps, sums, others, 0, wanted);
}

/* All runs of a group and a panel, of signed codes. Sums of the last are in sums[which], which is returned; those of the
   others together in `all`. Results of `others` are computed while the first is multiplied, so that both are free then. */
static int all_runs(const Panels *panels, const uint8_t *panel, const int8_t *codes, int rows, int64_t steps,
                    const float *scale, int32_t (*sums)[4 * SQUARE], int which, float *all, Results *others,
                    Wanted *wanted) {
    const int64_t stride = panels->bytes / PANEL, between = steps * TILE, span = steps / panels->runs;
    const int two = rows > TILE_ROWS;
    Adding adding = {.to = all, .at = ALL_TILES, .by = two ? 1 : 2};
    for (int64_t r = 0; r < panels->runs; r++, panel += span * TILE_BYTES, codes += span * TILE, scale += PANEL) {
        which = !which;
        if (two) tiles(1, 1, panel, stride, codes, between, span, sums[which], others, &adding, wanted);
        else tiles(0, 1, panel, stride, codes, between, span, sums[which], others, &adding, wanted);
        adding.sums = sums[which], adding.scale = scale, adding.whole = !r;
        adding.at = 0;
        wanted->out_step = 0;
    }
    return which;
}

/* The same with `of_runs`, one run after another, to where results belong. */
static void both_in_runs(const Panels *panels, const uint8_t *panel, const int8_t *codes, int rows, int64_t steps,
                          const Place *place, Results *none, Wanted *wanted) {
    int32_t sums[4 * SQUARE] __attribute__((aligned(64))), turned[TALLEST * PANEL] __attribute__((aligned(64)));
    float kept[TALLEST][PANEL];
    const int64_t stride = panels->bytes / PANEL, between = steps * TILE, span = steps / panels->runs;
    for (int64_t r = 0; r < panels->runs; r++, panel += span * TILE_BYTES, codes += span * TILE) {
        if (rows > TILE_ROWS) tiles(1, 1, panel, stride, codes, between, span, sums, none, 0, wanted);
        else tiles(0, 1, panel, stride, codes, between, span, sums, none, 0, wanted);
        turned_sums(sums, turned);
        add_run512(turned, rows, place, r, panels->runs, kept);
    }
    float_results512(kept[0], rows, place);
}

/* Rows of `up` from `first` on, as a right factor. */
static void lay(const Branch *branch, int64_t first, int64_t count, uint32_t *laid) {
    const int64_t rank = branch->rank, units = rank / 2;
    const uint32_t *up = branch->up;
    if (branch->halves) lay_up_halves(branch, first, count, laid);
    else lay_up(up + first * units, 0, count, units, branch_steps(rank), laid);
}

/* The branch's sums of rows from `first` on. */
static void sums_of(const Branch *branch, int64_t first, int rows, const uint32_t *laid, float *sums) {
    const uint32_t *between = branch->between + first * branch->rank;
    if (branch->halves) halves_sums(branch, between, rows, laid, sums);
    else branch_sums(branch, between, rows, laid, sums);
}

/* What the next `sums_of` reads: all that was multiplied since has taken it from the first cache. */
static void ask_for(const Branch *branch, int64_t first, int64_t rows, const uint32_t *laid) {
    const char *between = (const char *)(branch->between + first * branch->rank);
    const int64_t bytes = 4 * branch->rank;
    for (int64_t at = 0; at < rows * bytes; at += TILE_BYTES) _mm_prefetch(between + at, _MM_HINT_T0);
    for (int64_t at = 0; at < bytes * PANEL; at += TILE_BYTES) _mm_prefetch((const char *)laid + at, _MM_HINT_T0);
}

static int multiply_amx(const Panels *panels, int64_t weights, const int8_t *codes, int64_t m, int64_t columns,
                        const Place *place, const char *ahead, int64_t ahead_bytes) {
    int32_t sums[2][4 * SQUARE] __attribute__((aligned(64))); /* of what is multiplied, and of what is computed */
    float runs[4 * SQUARE] __attribute__((aligned(64)));
    const int64_t count = (weights + PANEL - 1) / PANEL, groups = groups_of(m), steps = padded(columns) / TILE_BYTES;
    const Target *to = place->to;
    const int fused = to->type == BF16 && !to->by_steps && !to->of_runs; /* results are computed beside tiles */
    const int together = fused && to->column_step == 1;
    const int along = fused && to->column_step != 1 && to->row_step == 1 && place->row % TILE_ROWS == 0 &&
                      to->image % TILE_ROWS == 0; /* then no sixteen rows are of two images */
    const int whole = (uintptr_t)to->out % 64 == 0 && to->row_step % 32 == 0; /* results of a panel are lines */
    Wanted wanted = {ahead, 0, ahead_bytes / (count * groups * steps), 0};
    const int in_tiles = together || (to->branch && to->branch->halves && !to->of_runs);
    const Branch *branch = in_tiles && to->branch && to->branch->laid ? to->branch : 0;
    const int read = to->branch && !branch; /* afterwards, to add it */
    Results others = {.along = along, .beyond = together && whole && !read && to->bytes >= LARGE};
    float of_branch[BRANCH_SUMS] __attribute__((aligned(64)));
    uint32_t up[BRANCH_LAID] __attribute__((aligned(64)));
    int64_t laid = -1; /* the panel whose rows `up` has */
    int turn = 0;
    _tile_loadconfig(&WHOLE_TILES);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t p = 0; p < count; p++) { /* one panel after another, so that results lie together */
            const int64_t first = begin_of(m, groups, g), rows = begin_of(m, groups, g + 1) - first;
            Place here = place_of(place, panels, first, p, weights);
            const uint8_t *panel = panels->at + p * panels->bytes;
            const int8_t *group = codes + g * 2 * steps * TILE;
            wanted.out_step = together && !others.beyond ? to->row_step * 2 : 0;
            wanted.out = (const char *)to->out + here.row * wanted.out_step + here.column * 2;
            if (panels->runs && to->of_runs) {
                both_in_runs(panels, panel, group, (int)rows, steps, &here, &others, &wanted);
                continue;
            }
            if (panels->runs) {
                turn = all_runs(panels, panel, group, (int)rows, steps, here.scale, sums, turn, runs, &others, &wanted);
                here.scale += (panels->runs - 1) * PANEL;
            } else {
                turn = !turn;
                one_or_two(panels, panel, group, (int)rows, steps, sums[turn], &others, &wanted);
            }
            const int by_floats = panels->runs && !together && !along;
            if (branch && by_floats && laid == p) ask_for(branch, first, rows, up);
            if (by_floats) {
                Adding last = {sums[turn], here.scale, runs, .by = rows > TILE_ROWS ? 1 : 2};
                add_some(&last, ALL_TILES);
            }
            if (branch) {
                if (laid != p) lay(branch, here.column, here.count, up);
                laid = p;
                sums_of(branch, first, (int)rows, up, of_branch);
                here.branch = of_branch;
            }
            if (together || along) begin(&others, &here, sums[turn], panels->runs ? runs : 0, (int)rows);
            else if (by_floats) float_results(runs, (int)rows, &here);
            else results(sums[turn], (int)rows, &here);
        }
    compute(&others, 2 * PIECES);
    if (others.beyond) _mm_sfence();
    _tile_release();
    return branch != 0;
}

const Int8 amx_int8 = {
    .name = "amx", .tall = TALLEST, .unit = TILE_BYTES, .code = 1, .rows = 1, .block = 1152 << 10,
    .beside = 128 << 10, .quantize = quantize_amx, .largest = largest512, .codes = codes512, .numbers = numbers512,
    .last = last512, .panel = rows512, .multiply = multiply_amx,
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
