/* Products in 8-bit integers with AVX2 alone: see avx2_int8.h for what lies where. */
#include "avx2.h"

#ifdef BUILD
#include <string.h>

#include "avx2_int8.h"
#include "avx2_runs.h"
#include "floats.h"
#include "numbered.h"

enum { TALL = 6 }; /* rows of a group: twelve sums, of eight rows of the weight each, are in registers */

INLINE __m256 to_type(Type type, __m256 y) {
    if (type == F32) return y;
    if (type == F16) return _mm256_cvtph_ps(round_f16(y));
    return _mm256_castsi256_ps(_mm256_and_si256(round_bf16(y), _mm256_set1_epi32((int)0xffff0000)));
}

/* Sums times both scales; see Target. */
INLINE __m256 scaled(const Target *to, __m256 total, __m256 of_row, __m256 scale) {
    if (!to->by_steps || to->type != BF16) return _mm256_mul_ps(_mm256_mul_ps(total, of_row), scale);
    return to_type(BF16, _mm256_mul_ps(to_type(BF16, _mm256_mul_ps(to_type(BF16, total), of_row)), scale));
}

/* Row i of sums to results without their bias, in `found`. */
INLINE void finish(const Place *at, int i, const int32_t *sums, float *found) {
    const __m256 of_row = _mm256_set1_ps(at->row_scale[i]);
    const __m256i sum = _mm256_set1_epi32(at->row_sum[i]);
    for (int n = 0; n < PANEL; n += 8) {
        const __m256i less = _mm256_mullo_epi32(_mm256_loadu_si256((const __m256i *)(at->minus + n)), sum);
        const __m256i total = _mm256_sub_epi32(_mm256_loadu_si256((const __m256i *)(sums + n)), less);
        const __m256 y = scaled(at->to, _mm256_cvtepi32_ps(total), of_row, _mm256_loadu_ps(at->scale + n));
        _mm256_storeu_ps(found + n, at->to->by_steps ? to_type(at->to->type, y) : y);
    }
}

/* The same of sums of all runs; with `of_runs` each had its row's scale already. */
INLINE void finish_floats(const Place *at, int i, const float *sums, float *found) {
    const __m256 of_row = _mm256_set1_ps(at->row_scale[i]);
    for (int n = 0; n < PANEL; n += 8) {
        const __m256 sum = _mm256_loadu_ps(sums + n), y = at->to->of_runs ? sum : _mm256_mul_ps(sum, of_row);
        _mm256_storeu_ps(found + n, at->to->by_steps ? to_type(at->to->type, y) : y);
    }
}

/* Rows of results to where they belong. */
static void put(const Place *place, int rows, float (*found)[PANEL]) {
    const Target *to = place->to;
    uint32_t as_type[TALL][PANEL];
    for (int i = 0; i < rows; i++) {
        if (to->bias)
            for (int n = 0; n < place->count; n++) found[i][n] += to->bias[place->column + n];
        convert(found[i], to->type, as_type[i], PANEL);
    }
    const int64_t size = to->type == F32 ? 4 : 2;
    for (int i = 0; i < rows; i++) {
        const int64_t row = place->row + i;
        const int64_t of_row = row / to->image * to->image_step + row % to->image * to->row_step;
        int64_t at = of_row + place->column * to->column_step;
        if (to->column_step == 1) memcpy((char *)to->out + at * size, as_type[i], place->count * size);
        else if (size == 4)
            for (int n = 0; n < place->count; n++, at += to->column_step) ((uint32_t *)to->out)[at] = as_type[i][n];
        else
            for (int n = 0; n < place->count; n++, at += to->column_step)
                ((uint16_t *)to->out)[at] = ((const uint16_t *)as_type[i])[n];
    }
}

/* Two columns of sixteen rows of the weight, and those of one row of activations. As instructions, and the sums by name:
   compilers run out of registers, of which it takes all. */
INLINE void add(__m256i *low, __m256i *high, __m256i a, __m256i b, const int8_t *two) {
    __m256i x, y;
    __asm__("vpbroadcastd %6, %2\n\t"
            "vpmaddwd %2, %4, %3\n\t"
            "vpmaddwd %2, %5, %2\n\t"
            "vpaddd %3, %0, %0\n\t"
            "vpaddd %2, %1, %1"
            : "+x"(*low), "+x"(*high), "=&x"(x), "=&x"(y)
            : "x"(a), "x"(b), "m"(*(const int32_t *)two));
}

#define DECLARE(i) __m256i low##i = _mm256_setzero_si256(), high##i = low##i;
#define ADD(i) add(&low##i, &high##i, a, b, codes + 4 * i);
#define KEEP(i)                                             \
    _mm256_storeu_si256((__m256i *)sums[i], low##i);        \
    _mm256_storeu_si256((__m256i *)(sums[i] + 8), high##i);

/* Sums of half a panel: `pairs` of columns of it times those of n rows. */
#define TILE(n, EVERY)                                                                                          \
    static void tile##n(const uint8_t *panel, const int8_t *codes, int64_t pairs, int32_t (*sums)[PANEL]) {     \
        EVERY(DECLARE)                                                                                          \
        for (int64_t j = 0; j < pairs; j++, panel += 2 * HALF, codes += 4 * n) {                                \
            const __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)panel));                    \
            const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(panel + HALF)));           \
            EVERY(ADD)                                                                                          \
        }                                                                                                       \
        EVERY(KEEP)                                                                                             \
    }

TILE(1, ONE)
TILE(2, TWO)
TILE(3, THREE)
TILE(4, FOUR)
TILE(5, FIVE)
TILE(6, SIX)

static void (*const TILES[])(const uint8_t *, const int8_t *, int64_t, int32_t (*)[PANEL]) = {tile1, tile2, tile3,
                                                                                              tile4, tile5, tile6};

/* Sums of run r, scaled, are added to those of the runs before. */
static void keep(const Place *at, int rows, int64_t r, int64_t runs, int32_t (*sums)[PANEL], float (*kept)[PANEL]) {
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < PANEL; n += 8) {
            const __m256 total = _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)(sums[i] + n)));
            const __m256 scale = _mm256_loadu_ps(at->scale + r * PANEL + n);
            __m256 more;
            if (at->to->of_runs)
                more = scaled(at->to, total, _mm256_set1_ps(at->to->of_runs[(at->row + i) * runs + r]), scale);
            else more = _mm256_mul_ps(total, scale);
            _mm256_storeu_ps(kept[i] + n, r ? _mm256_add_ps(_mm256_loadu_ps(kept[i] + n), more) : more);
        }
}

static int multiply(const Panels *panels, int64_t weights, const int8_t *codes, int64_t m, int64_t columns,
                    const Place *place, const char *ahead, int64_t ahead_bytes) {
    const int64_t count = (weights + PANEL - 1) / PANEL, groups = groups_of(m);
    const int64_t pairs = (columns + 1) / 2, runs = panels->runs ? panels->runs : 1, span = pairs / runs;
    int32_t sums[TALL][PANEL];
    float found[TALL][PANEL];
    (void)ahead, (void)ahead_bytes;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = begin_of(m, groups, g);
        const int rows = (int)(begin_of(m, groups, g + 1) - first);
        const int8_t *of_group = codes + first * padded(columns);
        for (int64_t p = 0; p < count; p++) {
            const Place here = place_of(place, panels, first, p, weights);
            const uint8_t *panel = panels->at + p * panels->bytes;
            for (int64_t r = 0; r < runs; r++) {
                for (int half = 0; half < 2; half++)
                    TILES[rows - 1](panel + (half * pairs + r * span) * 2 * HALF, of_group + r * span * 4 * rows, span,
                                    (int32_t(*)[PANEL])(sums[0] + half * HALF));
                if (panels->runs) keep(&here, rows, r, runs, sums, found);
            }
            for (int i = 0; i < rows; i++)
                if (panels->runs) finish_floats(&here, i, found[i], found[i]);
                else finish(&here, i, sums[i], found[i]);
            put(&here, rows, found);
        }
    }
    return 0;
}

const Int8 avx2_int8 = {
    .name = "avx2", .tall = TALL, .even = 1, .unit = 2, .code = 2, .block = 192 << 10, .quantize = quantize_avx2,
    .largest = largest_avx2, .codes = codes_avx2, .numbers = numbers_avx2, .last = last_avx2, .panel = panel_avx2,
    .multiply = multiply,
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
