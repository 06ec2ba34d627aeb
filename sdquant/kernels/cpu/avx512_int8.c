/* Products in 8-bit integers by VNNI: see int8.h for what lies where. */
#include "avx512vnni.h"

#ifdef BUILD
#include <math.h>
#include <string.h>

#include "floats.h"
#include "int8.h"

#include "avx512_halves.h"
#include "avx512_transpose.h"
#include "numbered.h"

/* `count` of 32 results, in one store where there are as many. */
INLINE void store(Type type, void *out, int64_t at, int count, const __m512 *y) {
    if (type == F32) {
        EACH(half, 2)
        _mm512_mask_storeu_ps((float *)out + at + 16 * half, first_of(count > 16 * half ? count - 16 * half : 0), y[half]);
        return;
    }
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(half_of(type, y[0])), half_of(type, y[1]), 1);
    if (count == PANEL) _mm512_storeu_si512((uint16_t *)out + at, both);
    else _mm512_mask_storeu_epi16((uint16_t *)out + at, (__mmask32)(((uint64_t)1 << count) - 1), both);
}

INLINE void one_of(Type type, void *out, int64_t at, float y) {
    if (type == F32) ((float *)out)[at] = y;
    else ((uint16_t *)out)[at] = type == BF16 ? to_bf16(y) : to_f16(y);
}

/* Row i, but for the bias, to where it belongs; to `kept` first where rows of results are not together. */
INLINE void put(const Place *at, int i, const __m512 *without, float (*kept)[PANEL]) {
    const Target *to = at->to;
    __m512 found[2] = {without[0], without[1]};
    EACH(half, 2) {
        const __mmask16 mask = first_of(at->count > 16 * half ? at->count - 16 * half : 0);
        if (to->bias)
            found[half] = _mm512_add_ps(found[half], _mm512_maskz_loadu_ps(mask, to->bias + at->column + 16 * half));
        if (at->branch) found[half] = _mm512_add_ps(found[half], _mm512_loadu_ps(at->branch + i * PANEL + 16 * half));
    }
    if (to->column_step != 1) {
        EACH(half, 2) _mm512_storeu_ps(kept[i] + 16 * half, found[half]);
    } else store(to->type, to->out, (at->row + i) * to->row_step + at->column, at->count, found);
}

/* Sums times both scales; see Target. */
INLINE __m512 scaled(const Target *to, __m512 total, __m512 of_row, __m512 scale) {
    if (!to->by_steps || to->type != BF16) return _mm512_mul_ps(_mm512_mul_ps(total, of_row), scale);
    return to_bf16s(_mm512_mul_ps(to_bf16s(_mm512_mul_ps(to_bf16s(total), of_row)), scale));
}

/* A result before its bias; see Target. */
INLINE __m512 whole(const Target *to, __m512 y) {
    if (!to->by_steps || to->type == F32) return y;
    if (to->type == BF16) return to_bf16s(y);
    return _mm512_cvtph_ps(_mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Row i: sixteen sums and sixteen more. */
INLINE void finish(const Place *at, int i, __m512i low, __m512i high, float (*kept)[PANEL]) {
    const __m512 of_row = _mm512_set1_ps(at->row_scale[i]);
    const __m512i sum = _mm512_set1_epi32(at->row_sum[i]);
    const __m512i of_half[2] = {low, high};
    __m512 found[2];
    EACH(half, 2) {
        const __m512i less = _mm512_mullo_epi32(_mm512_loadu_si512(at->minus + 16 * half), sum);
        const __m512 total = _mm512_cvtepi32_ps(_mm512_sub_epi32(of_half[half], less));
        found[half] = whole(at->to, scaled(at->to, total, of_row, _mm512_loadu_ps(at->scale + 16 * half)));
    }
    put(at, i, found, kept);
}

/* Row i of sums of all runs; with `of_runs` each had its row's scale already. */
INLINE void finish_floats(const Place *at, int i, const float *sums, float (*kept)[PANEL]) {
    const __m512 of_row = _mm512_set1_ps(at->row_scale[i]);
    __m512 found[2];
    EACH(half, 2) {
        const __m512 sum = _mm512_loadu_ps(sums + 16 * half);
        found[half] = at->to->of_runs ? whole(at->to, sum) : _mm512_mul_ps(sum, of_row);
    }
    put(at, i, found, kept);
}

/* Up to sixteen results that lie together. */
INLINE void store16(Type type, void *out, int64_t at, __mmask16 mask, __m512 y) {
    if (type == F32) _mm512_mask_storeu_ps((float *)out + at, mask, y);
    else _mm256_mask_storeu_epi16((uint16_t *)out + at, mask, half_of(type, y));
}

/* Results whose columns are not together, by column. */
INLINE void spread(Type type, const Place *place, int rows, float (*kept)[PANEL]) {
    const Target *to = place->to;
    const int64_t start = place->row % to->image;
    int64_t at[TALLEST];
    for (int i = 0; i < rows; i++) {
        const int64_t row = place->row + i;
        at[i] = row / to->image * to->image_step + row % to->image * to->row_step + place->column * to->column_step;
    }
    if (to->row_step == 1 && start + rows <= to->image) {
        for (int i = 0; i < rows; i += 16)
            for (int n = 0; n < place->count; n += 16) {
                __m512i a[16];
                EACH(j, 16) a[j] = i + j < rows ? _mm512_loadu_si512(kept[i + j] + n) : _mm512_setzero_si512();
                transpose(a);
                EACH(j, 16)
                if (n + j < place->count)
                    store16(type, to->out, at[i] + (n + j) * to->column_step, first_of(rows - i), _mm512_castsi512_ps(a[j]));
            }
        return;
    }
    for (int n = 0; n < place->count; n++)
        for (int i = 0; i < rows; i++) one_of(type, to->out, at[i] + n * to->column_step, kept[i][n]);
}

INLINE void by_column(const Place *place, int rows, float (*kept)[PANEL]) {
    const Type type = place->to->type;
    if (place->to->column_step == 1) return;
    if (type == F32) spread(F32, place, rows, kept);
    else if (type == BF16) spread(BF16, place, rows, kept);
    else spread(F16, place, rows, kept);
}

void results512(const int32_t *sums, int rows, const Place *place) {
    float kept[TALLEST][PANEL];
    for (int i = 0; i < rows; i++, sums += PANEL)
        finish(place, i, _mm512_loadu_si512(sums), _mm512_loadu_si512(sums + 16), kept);
    by_column(place, rows, kept);
}

void float_results512(const float *sums, int rows, const Place *place) {
    float kept[TALLEST][PANEL];
    for (int i = 0; i < rows; i++, sums += PANEL) finish_floats(place, i, sums, kept);
    by_column(place, rows, kept);
}

/* Sums of one run of row i, each times both of its scales, are added to those of the runs before. */
INLINE void keep_both(const Place *at, int i, int64_t r, int64_t runs, __m512i low, __m512i high, float *kept) {
    const __m512i sums[2] = {low, high};
    const __m512 of_row = _mm512_set1_ps(at->to->of_runs[(at->row + i) * runs + r]);
    EACH(half, 2) {
        const __m512 scale = _mm512_loadu_ps(at->scale + r * PANEL + 16 * half);
        const __m512 more = scaled(at->to, _mm512_cvtepi32_ps(sums[half]), of_row, scale);
        _mm512_storeu_ps(kept + 16 * half, r ? _mm512_add_ps(_mm512_loadu_ps(kept + 16 * half), more) : more);
    }
}

void add_run512(const int32_t *sums, int rows, const Place *place, int64_t r, int64_t runs, float (*kept)[PANEL]) {
    for (int i = 0; i < rows; i++, sums += PANEL)
        keep_both(place, i, r, runs, _mm512_loadu_si512(sums), _mm512_loadu_si512(sums + 16), kept[i]);
}

/* sum += a * x, of numbers from 0 to 255 and signed ones. As the intrinsic, of which GCC 12 makes three moves. */
INLINE void add(__m512i *sum, __m512i a, __m512i x) { __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(x)); }

/* Sums have names, as compilers keep arrays of them in memory. */
#define DECLARE(i) __m512i low##i = _mm512_setzero_si512(), high##i = low##i;
#define ADD(i)                       \
    memcpy(&four, codes + 4 * i, 4); \
    x = _mm512_set1_epi32(four);     \
    add(&low##i, a, x);              \
    add(&high##i, b, x);
#define FINISH(i) finish(place, i, low##i, high##i, kept);

/* A group of n rows. On the way memory is asked for from `ahead`, `step` bytes further each time. */
#define TILE(n, EVERY)                                                                                         \
    static void tile##n(const uint8_t *panel, const int8_t *codes, int64_t fours, const Place *place,          \
                        const char *ahead, int64_t step, float (*kept)[PANEL]) {                               \
        EVERY(DECLARE)                                                                                         \
        for (int64_t j = 0; j < fours; j++, panel += 4 * PANEL, codes += 4 * n, ahead += step) {               \
            const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);                   \
            __m512i x;                                                                                         \
            int32_t four;                                                                                      \
            _mm_prefetch(ahead, _MM_HINT_T1);                                                                  \
            EVERY(ADD)                                                                                         \
        }                                                                                                      \
        EVERY(FINISH)                                                                                          \
    }

/* One run of columns more for such a group: its integers, each sum times its scale, are added to `kept`. Here activations
   are numbers from 0 to 255 and the weight's codes are signed; `begin` makes up for it. */
#define DECLARE_RUN(i) __m512i low##i = first, high##i = second;
#define ADD_RUN(i)                   \
    memcpy(&four, codes + 4 * i, 4); \
    x = _mm512_set1_epi32(four);     \
    add(&low##i, x, a);              \
    add(&high##i, x, b);
#define KEEP(i)                                                                        \
    if (place->to->of_runs) {                                                          \
        keep_both(place, i, r, runs, low##i, high##i, kept[i]);                        \
    } else {                                                                           \
        keep(kept[i], low##i, place->scale + r * PANEL, !r);                           \
        keep(kept[i] + 16, high##i, place->scale + r * PANEL + 16, !r);                \
    }
#define RUN(n, EVERY)                                                                                        \
    static void run##n(const uint8_t *panel, const int8_t *codes, int64_t fours, const Place *place, int64_t r, \
                       int64_t runs, const char *ahead, int64_t step, float (*kept)[PANEL]) {                \
        const int32_t *begin = place->minus + r * PANEL;                                                     \
        const __m512i first = _mm512_loadu_si512(begin), second = _mm512_loadu_si512(begin + 16);            \
        EVERY(DECLARE_RUN)                                                                                   \
        for (int64_t j = 0; j < fours; j++, panel += 4 * PANEL, codes += 4 * n, ahead += step) {             \
            const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);                 \
            __m512i x;                                                                                       \
            int32_t four;                                                                                    \
            _mm_prefetch(ahead, _MM_HINT_T1);                                                                \
            EVERY(ADD_RUN)                                                                                   \
        }                                                                                                    \
        EVERY(KEEP)                                                                                          \
    }

INLINE void keep(float *kept, __m512i sum, const float *scale, int whole) {
    const __m512 more = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(scale));
    _mm512_storeu_ps(kept, whole ? more : _mm512_add_ps(_mm512_loadu_ps(kept), more));
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

RUN(1, ONE)
RUN(2, TWO)
RUN(3, THREE)
RUN(4, FOUR)
RUN(5, FIVE)
RUN(6, SIX)
RUN(7, SEVEN)
RUN(8, EIGHT)
RUN(9, NINE)
RUN(10, TEN)
RUN(11, ELEVEN)
RUN(12, TWELVE)

/* All runs of a group and a panel. */
static void all_runs(const Panels *panels, const uint8_t *panel, const int8_t *codes, int rows, int64_t fours,
                     const Place *place, const char *ahead, int64_t step, float (*kept)[PANEL]) {
    static void (*const each[])(const uint8_t *, const int8_t *, int64_t, const Place *, int64_t, int64_t, const char *,
                                int64_t, float (*)[PANEL]) = {run1, run2, run3, run4,  run5,  run6,
                                                              run7, run8, run9, run10, run11, run12};
    const int64_t span = fours / panels->runs;
    for (int64_t r = 0; r < panels->runs; r++, panel += span * 4 * PANEL, codes += span * 4 * rows, ahead += span * step)
        each[rows - 1](panel, codes, span, place, r, panels->runs, ahead, step, kept);
    for (int i = 0; i < rows; i++) finish_floats(place, i, kept[i], kept);
}

static int multiply512(const Panels *panels, int64_t weights, const int8_t *codes, int64_t m, int64_t columns,
                       const Place *place, const char *ahead, int64_t ahead_bytes) {
    static void (*const tiles[])(const uint8_t *, const int8_t *, int64_t, const Place *, const char *, int64_t,
                                 float (*)[PANEL]) = {tile1, tile2, tile3, tile4,  tile5,  tile6,
                                                      tile7, tile8, tile9, tile10, tile11, tile12};
    const int64_t count = (weights + PANEL - 1) / PANEL, groups = groups_of(m);
    const int64_t wide = padded(columns), fours = wide / 4, step = ahead_bytes / (groups * count * fours);
    float kept[TALLEST][PANEL];
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = begin_of(m, groups, g), rows = begin_of(m, groups, g + 1) - first;
        for (int64_t p = 0; p < count; p++) {
            const Place here = place_of(place, panels, first, p, weights);
            const uint8_t *panel = panels->at + p * panels->bytes;
            const char *from = ahead ? ahead + (g * count + p) * fours * step : (const char *)panels->at;
            if (panels->runs)
                all_runs(panels, panel, codes + first * wide, (int)rows, fours, &here, from, ahead ? step : 0, kept);
            else tiles[rows - 1](panel, codes + first * wide, fours, &here, from, ahead ? step : 0, kept);
            by_column(&here, (int)rows, kept);
        }
    }
    return 0;
}

const Int8 avx512_int8 = {
    .name = "vnni", .tall = 12, .even = 1, .unit = 4, .code = 1, .block = 640 << 10, .quantize = quantize512,
    .largest = largest512, .codes = codes512, .numbers = numbers512, .last = last512, .panel = panel512,
    .multiply = multiply512,
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
