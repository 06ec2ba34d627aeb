/* Products of bf16 with many rows of activations. Rows of the weight are decoded and turned into a panel, which has for
   each two columns those of all its rows; activations are laid out once, in groups of up to twelve rows, two columns of
   each after the other. One instruction multiplies sixteen rows of the panel with one of the activations: a sum lies in a
   lane of its own, and both sides are read where they lie. */
#include "avx512.h"

#ifdef BUILD
#include <stdlib.h>
#include <string.h>

#include "avx512_parts.h"
#include "avx512_transpose.h"
#include "floats.h"
#include "numbered.h"

enum {
    PANEL = 32,
    SIDE = 16,           /* rows that are turned at once, and numbers of 32 bits */
    TALL = 12,           /* rows of activations in a group */
    LINE = 64,
    MOST_COLUMNS = 4096, /* of a panel, which takes 256 KB then */
    /* Activations that are multiplied with a panel before the next one is, so that they stay in the second cache of 1 MB:
       all, or those of a block. Of the weight so much is decoded before, for all blocks. */
    ALL_BYTES = 512 << 10,
    BLOCK_BYTES = 384 << 10,
    PANELS_BYTES = 1 << 20,
};

typedef struct {
    int64_t columns, chunks, each; /* columns are in so many chunks, of `each`, a multiple of every block's size */
    int64_t m, groups;
} Sizes;

static Sizes sizes_of(int64_t columns, int64_t m) {
    const int64_t chunks = (columns + MOST_COLUMNS - 1) / MOST_COLUMNS;
    const int64_t each = chunks == 1 ? columns : (columns / chunks + 255) / 256 * 256;
    return (Sizes){columns, (columns + each - 1) / each, each, m, (m + TALL - 1) / TALL};
}

static int64_t columns_in(const Sizes *of, int64_t chunk) {
    const int64_t left = of->columns - chunk * of->each;
    return left < of->each ? left : of->each;
}

/* Pairs of columns, padded with zeros. */
static int64_t pairs_in(const Sizes *of, int64_t chunk) { return (columns_in(of, chunk) + 31) / 32 * 16; }

static int64_t begin_of_group(const Sizes *of, int64_t group) { return of->m * group / of->groups; }

/* Bytes between the rows that are turned: an odd number of lines, so that these are in sets of their own. */
static int64_t stride_of(int64_t pairs) { return (pairs * 4 / LINE | 1) * LINE; }

/* A chunk of x: each group's pairs. What is stored beyond a group the next one overwrites, and what is behind the last is
   spare. */
static void lay_out(const uint16_t *x, const Sizes *of, int64_t chunk, uint32_t *to) {
    const int64_t columns = columns_in(of, chunk), pairs = pairs_in(of, chunk);
    for (int64_t g = 0; g < of->groups; g++) {
        const int64_t first = begin_of_group(of, g), n = begin_of_group(of, g + 1) - first;
        for (int64_t s = 0; s < pairs; s += SIDE, to += SIDE * n) {
            const int64_t left = columns - 2 * s;
            const __mmask32 mask = left >= 32 ? 0xffffffffu : ((__mmask32)1 << left) - 1;
            __m512i a[SIDE];
            for (int i = 0; i < SIDE; i++)
                a[i] = i < n ? _mm512_maskz_loadu_epi16(mask, x + (first + i) * of->columns + chunk * of->each + 2 * s)
                             : _mm512_setzero_si512();
            transpose(a);
            for (int i = 0; i < SIDE; i++) _mm512_storeu_si512(to + i * n, a[i]);
        }
    }
}

/* Sixteen rows, `stride` bytes apart, to a half of a panel. */
static void turn(const char *from, int64_t stride, int64_t pairs, uint32_t *to) {
    for (int64_t s = 0; s < pairs; s += SIDE, from += LINE, to += SIDE * PANEL) {
        __m512i a[SIDE];
        for (int i = 0; i < SIDE; i++) a[i] = _mm512_load_si512(from + i * stride);
        transpose(a);
        for (int i = 0; i < SIDE; i++) _mm512_store_si512(to + i * PANEL, a[i]);
    }
}

/* What a panel's rows are, those of one plane after another, and what is added to their sums. */
static void order(const Form *form, int64_t start, int n, const uint16_t *bias, int64_t *rows, float *added) {
    const int planes = planes_of(form->packing);
    int count = 0;
    for (int plane = 0; plane < planes; plane++)
        for (int i = plane; i < n; i += planes) rows[count++] = row_at(form, planes, start + i);
    for (int i = 0; i < PANEL; i++) added[i] = bias && i < n ? from_bf16(bias[rows[i]]) : 0.0f;
}

/* A chunk of rows `row` to `stop` of the weight, as many as a panel has, as one. `spare`: of SIDE rows. */
static void make_panel(Decode *decode, const Form *form, const Parts *parts, int64_t row, int64_t stop, const Sizes *of,
                       int64_t chunk, char *spare, uint32_t *panel) {
    const int64_t columns = columns_in(of, chunk), pairs = pairs_in(of, chunk), stride = stride_of(pairs);
    const int n = (int)(stop - row < PANEL ? stop - row : PANEL);
    int64_t rows[PANEL];
    float added[PANEL];
    order(form, row, n, NULL, rows, added);
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < SIDE; i++) {
            char *to = spare + i * stride;
            const int at = half * SIDE + i;
            if (at < n) decode(form, parts, rows[at] * form->columns + chunk * of->each, columns, BF16, to);
            else memset(to, 0, columns * 2);
            memset(to + columns * 2, 0, pairs * 4 - columns * 2);
        }
        turn(spare, stride, pairs, panel + half * SIDE);
    }
}

/* sum += a * x, of pairs. As the intrinsic, of which GCC 12 makes moves as well. */
INLINE void add(__m512 *sum, __m512i a, __m512i x) { __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(x)); }

/* Sums have names, as compilers keep arrays of them in memory. */
#define DECLARE(i) __m512 low##i = _mm512_setzero_ps(), high##i = low##i;
#define ADD(i)                            \
    two = _mm512_set1_epi32((int)x[i]);   \
    add(&low##i, a, two);                 \
    add(&high##i, b, two);
#define KEEP(i)                               \
    keep(sums + i * PANEL, low##i, more);     \
    keep(sums + i * PANEL + 16, high##i, more);

INLINE void keep(float *sums, __m512 sum, int more) {
    _mm512_storeu_ps(sums, more ? _mm512_add_ps(_mm512_loadu_ps(sums), sum) : sum);
}

/* Memory that is asked for on the way, `step` bytes further each time. */
typedef struct {
    const char *at;
    int64_t step;
} Ahead;

/* A group of n rows by a panel: sums [n, PANEL], added to those that are there if `more`. */
#define TILE(n, EVERY)                                                                                       \
    static void tile##n(const uint32_t *panel, const uint32_t *x, int64_t pairs, float *sums, int more,      \
                        Ahead one, Ahead other) {                                                            \
        EVERY(DECLARE)                                                                                       \
        for (int64_t j = 0; j < pairs; j++, panel += PANEL, x += n, one.at += one.step, other.at += other.step) { \
            const __m512i a = _mm512_load_si512(panel), b = _mm512_load_si512(panel + 16);                   \
            __m512i two;                                                                                     \
            _mm_prefetch(one.at, _MM_HINT_T1);                                                               \
            _mm_prefetch(other.at, _MM_HINT_T1);                                                             \
            EVERY(ADD)                                                                                       \
        }                                                                                                    \
        EVERY(KEEP)                                                                                          \
    }

TILE(1, ONE)
TILE(2, TWO)
TILE(3, THREE)
TILE(4, FOUR)
TILE(5, FIVE)
TILE(6, SIX)
TILE(7, SEVEN)
TILE(8, EIGHT)
TILE(9, NINE)
TILE(10, TEN)
TILE(11, ELEVEN)
TILE(12, TWELVE)

typedef void Tile(const uint32_t *, const uint32_t *, int64_t, float *, int, Ahead, Ahead);
static Tile *const tiles[] = {tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8, tile9, tile10, tile11, tile12};

/* Sums of a panel's `n` rows with m of activations, whose results begin at `out`; `all` are in a row. */
static void put(const float *sums, int64_t m, const float *added, const int64_t *rows, int n, int64_t all, uint16_t *out) {
    const __mmask32 mask = n < PANEL ? ((__mmask32)1 << n) - 1 : 0xffffffffu;
    const __m512 of_low = _mm512_loadu_ps(added), of_high = _mm512_loadu_ps(added + 16);
    int together = 1;
    for (int i = 1; i < n; i++) together &= rows[i] == rows[0] + i;
    for (int64_t j = 0; j < m; j++, sums += PANEL, out += all) {
        const __m512 low = _mm512_add_ps(_mm512_loadu_ps(sums), of_low);
        const __m512 high = _mm512_add_ps(_mm512_loadu_ps(sums + 16), of_high);
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        if (together) {
            _mm512_mask_storeu_epi16(out + rows[0], mask, halves);
            continue;
        }
        uint16_t each[PANEL];
        _mm512_storeu_si512(each, halves);
        for (int i = 0; i < n; i++) out[rows[i]] = each[i];
    }
}

/* What is multiplied: activations as they are laid out, and panels of some rows of the weight, from `row` on. */
typedef struct {
    const Form *form;
    const Sizes *of;
    const uint32_t *laid, *panels;
    float *sums;
    const uint16_t *bias;
    uint16_t *out;
    int64_t row, stop;
    Ahead codes; /* of the rows after these */
} Work;

/* Groups begin .. end of a chunk by all panels, which come from the third cache: each is asked for while the one before it
   is used. */
static void multiply(Work *work, int64_t chunk, int64_t begin, int64_t end) {
    const Sizes *of = work->of;
    const int64_t pairs = pairs_in(of, chunk), size = PANEL * pairs, rows = work->form->rows;
    const int64_t count = (work->stop - work->row + PANEL - 1) / PANEL;
    const uint32_t *x = work->laid + of->m * chunk * of->each / 2;
    for (int64_t p = 0; p < count; p++) {
        const int64_t left = work->stop - work->row - p * PANEL;
        const int n = (int)(left < PANEL ? left : PANEL);
        int64_t order_of[PANEL];
        float added[PANEL];
        order(work->form, work->row + p * PANEL, n, work->bias, order_of, added);
        Ahead next = {(const char *)(work->panels + (p + 1) % count * size), 4 * PANEL / (end - begin)};
        for (int64_t g = begin; g < end; g++) {
            const int64_t first = begin_of_group(of, g), tall = begin_of_group(of, g + 1) - first;
            float *sums = work->sums + (of->chunks > 1 ? (p * of->m + first) * PANEL : 0);
            tiles[tall - 1](work->panels + p * size, x + first * pairs, pairs, sums, chunk > 0, next, work->codes);
            next.at += next.step * pairs;
            work->codes.at += work->codes.step * pairs;
            if (chunk == of->chunks - 1) put(sums, tall, added, order_of, n, rows, work->out + first * rows);
        }
    }
}

int product_avx512(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, const void *x, int64_t m,
                   const void *bias, void *out) {
    const Sizes of = sizes_of(form->columns, m);
    const int64_t widest = pairs_in(&of, 0), all_pairs = (of.chunks - 1) * of.each / 2 + pairs_in(&of, of.chunks - 1);
    const int64_t panel_bytes = PANEL * widest * 4, spare_bytes = SIDE * stride_of(widest), group_bytes = TALL * widest * 4;
    const int64_t in_block = of.groups * group_bytes <= ALL_BYTES || BLOCK_BYTES < group_bytes ? of.groups : BLOCK_BYTES / group_bytes;
    const int64_t blocks = (of.groups + in_block - 1) / in_block;
    const int64_t beside = blocks == 1 || PANELS_BYTES < panel_bytes ? 1 : PANELS_BYTES / panel_bytes;
    const int64_t sums_bytes = (of.chunks > 1 ? beside * m : TALL) * PANEL * 4;
    char *memory = malloc(beside * panel_bytes + spare_bytes + sums_bytes + m * all_pairs * 4 + 2 * LINE);
    if (!memory) return 0;
    char *here = memory + (LINE - (intptr_t)memory % LINE), *spare = here + beside * panel_bytes;
    uint32_t *panels = (uint32_t *)here, *laid = (uint32_t *)(spare + spare_bytes + sums_bytes);
    Work work = {form, &of, laid, panels, (float *)(spare + spare_bytes), bias, out, 0, 0, {0, 0}};
    Decode *decode = kernels()->decoder(form);
    (void)type;
    for (int64_t c = 0; c < of.chunks; c++) lay_out(x, &of, c, laid + m * c * of.each / 2);
    parts->ahead = AHEAD;
    for (work.row = start; work.row < stop; work.row += beside * PANEL) {
        work.stop = stop - work.row < beside * PANEL ? stop : work.row + beside * PANEL;
        work.codes = (Ahead){here, 0};
        if (work.stop < stop)
            work.codes = (Ahead){(const char *)parts->codes + packed_bytes(form, work.stop * form->columns),
                                 packed_bytes(form, PANEL * form->columns) / (of.groups * all_pairs)};
        for (int64_t c = 0; c < of.chunks; c++) {
            for (int64_t row = work.row, p = 0; row < work.stop; row += PANEL, p++)
                make_panel(decode, form, parts, row, work.stop, &of, c, spare, panels + p * PANEL * pairs_in(&of, c));
            for (int64_t b = 0; b < blocks; b++) multiply(&work, c, of.groups * b / blocks, of.groups * (b + 1) / blocks);
        }
    }
    free(memory);
    return 1;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
