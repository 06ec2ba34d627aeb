/* Products with AVX2: four rows of the weight at a time are decoded into the first cache as floats, and multiplied by
   rows of activations, three at a time, twelve sums in registers.

   Activations are made floats once. Where they do not fit the second cache whole, a part of the columns is worked
   through for all rows of the weight before the next. */
#include "avx2.h"

#ifdef BUILD
#include <stdlib.h>

#include "avx2_few.h"
#include "avx2_grouped.h"
#include "avx2_runs.h"
#include "form.h"

enum {
    ROWS = 4,            /* of the weight */
    ACROSS = 3,          /* rows of activations */
    DEPTH = 768,         /* columns: four rows and three of so many floats are in the first cache, of 32 KB */
    BATCH = 64,          /* rows of activations: of DEPTH columns, in the second cache, of 256 KB */
    WHOLE = 192 * 1024,  /* bytes of activations that are there whole */
    EDGE = 64,
    TOGETHER = 16,       /* rows of the weight */
};

/* The sums of the lanes of four. */
INLINE __m128 across(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

/* sums[4 * j + i] += row i of w times row j of x, of `n` rows; `k` long, a multiple of 16. */
INLINE void block(const float *w, int64_t stride_w, const float *x, int64_t stride_x, int64_t k, int n, float *sums) {
    __m256 sum[ACROSS][ROWS];
    for (int j = 0; j < n; j++)
        for (int i = 0; i < ROWS; i++) sum[j][i] = _mm256_setzero_ps();
    for (int64_t at = 0; at < k; at += 8) {
        __m256 of_w[ROWS];
        for (int i = 0; i < ROWS; i++) of_w[i] = _mm256_load_ps(w + i * stride_w + at);
        for (int j = 0; j < n; j++) {
            const __m256 of_x = _mm256_load_ps(x + j * stride_x + at);
            for (int i = 0; i < ROWS; i++) sum[j][i] = _mm256_fmadd_ps(of_w[i], of_x, sum[j][i]);
        }
    }
    for (int j = 0; j < n; j++) {
        const __m128 four = across(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
        _mm_storeu_ps(sums + ROWS * j, _mm_add_ps(_mm_loadu_ps(sums + ROWS * j), four));
    }
}

/* One row of activations: twice as many sums, as each waits for the one before. */
INLINE void block_of_one(const float *w, int64_t stride_w, const float *x, int64_t k, float *sums) {
    __m256 sum[2][ROWS];
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < ROWS; i++) sum[j][i] = _mm256_setzero_ps();
    for (int64_t at = 0; at < k; at += 16)
        for (int j = 0; j < 2; j++) {
            const __m256 of_x = _mm256_load_ps(x + at + 8 * j);
            for (int i = 0; i < ROWS; i++)
                sum[j][i] = _mm256_fmadd_ps(_mm256_load_ps(w + i * stride_w + at + 8 * j), of_x, sum[j][i]);
        }
    for (int i = 0; i < ROWS; i++) sum[0][i] = _mm256_add_ps(sum[0][i], sum[1][i]);
    _mm_storeu_ps(sums, _mm_add_ps(_mm_loadu_ps(sums), across(sum[0][0], sum[0][1], sum[0][2], sum[0][3])));
}

static void blocks(const float *w, int64_t stride_w, const float *x, int64_t stride_x, int64_t k, int m, float *sums) {
    int j = 0;
    for (; j + ACROSS <= m; j += ACROSS) block(w, stride_w, x + j * stride_x, stride_x, k, ACROSS, sums + ROWS * j);
    if (m - j == 2) block(w, stride_w, x + j * stride_x, stride_x, k, 2, sums + ROWS * j);
    if (m - j == 1) block_of_one(w, stride_w, x + j * stride_x, k, sums + ROWS * j);
}

/* Numbers with a sum for each SUMMED of them. */
static int64_t with_sums(int64_t count) { return count + count / SUMMED; }

static float sum_of(const float *x) { return sum8(_mm256_add_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8))); }

static int64_t up_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/* Up to FEWEST rows of activations, which are read again for every row of the weight: so many columns of them that they
   stay in the first cache, where they lie together, for some rows of the weight, before the next. Each row's are in the
   order of `turn` for `order`, with their sums behind them, of SUMMED each. 0: no memory. */
static int some_at_once(DotFew *dot, Packing order, const Form *form, Parts *parts, Type type, Type of, int64_t start,
                        int64_t stop, const void *x, int m, const void *bias, void *out) {
    const int planes = planes_of(form->packing);
    const int64_t columns = form->columns;
    const int as_if = m > 4 ? FEWEST : m == 3 ? 4 : m; /* the others are of zeros */
    const int64_t step = NEAR / (as_if * (int64_t)sizeof(float));
    float *wide = calloc(columns + as_if * with_sums(columns), sizeof *wide), *turned = wide + columns;
    if (!wide) return 0;
    for (int j = 0; j < m; j++) {
        widen(x, type, j * columns, wide, columns);
        for (int64_t at = 0; at < columns; at += step) {
            const int64_t k = columns - at < step ? columns - at : step;
            float *to = turned + with_sums(at) * as_if + j * with_sums(k);
            turn(order, wide + at, k, to);
            for (int64_t i = 0; i < k / SUMMED; i++) to[k + i] = sum_of(to + i * SUMMED);
        }
    }
    for (int64_t first = start; first < stop; first += TOGETHER) {
        const int count = (int)(stop - first < TOGETHER ? stop - first : TOGETHER);
        float sums[TOGETHER][FEWEST] = {{0}};
        for (int64_t at = 0; at < columns; at += step) {
            const int64_t k = columns - at < step ? columns - at : step;
            for (int i = 0; i < count; i++)
                dot(form, parts, row_at(form, planes, first + i) * columns + at, k, of, turned + with_sums(at) * as_if,
                    with_sums(k), as_if, sums[i]);
        }
        for (int i = 0; i < count; i++)
            for (int j = 0; j < m; j++)
                put_sum(sums[i][j], type, bias, out, j, row_at(form, planes, first + i), form->rows);
    }
    free(wide);
    return 1;
}

/* `step` at a time by way of `spare`, which has room for so many. */
static void turn_in_place(const Form *form, float *x, int64_t count, int64_t step, float *spare) {
    for (int64_t at = 0; at < count; at += step) {
        const int64_t k = count - at < step ? count - at : step;
        turn(form->packing, x + at, k, spare);
        memcpy(x + at, spare, k * sizeof *x);
    }
}

/* Whether weights can be multiplied as floats that nothing has rounded: of blocks, and of codes with scales that are numbers
   or choose among sixteen, which 16 bits would round, and have nothing more. */
static int in_floats(const Form *form) {
    if (form->packing > CODED) return 1;
    if (form->scale == NONE || form->taps > 1 || !fits_units(form)) return 0;
    const int is_float8 = form->float8.kind != NO_FLOAT8;
    if (form->looked_up && !is_float8 && form->arithmetic != F32) return 0;
    if (form->looked_up && (form->zeros >= 0 || form->zero != 0 || form->shift != NONE)) return 0;
    return unrounded_ways(form).dot != 0;
}

int unrounded_avx2(const Form *form, Type type) { return type == BF16 && in_floats(form); }

int product_avx2(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, const void *x, int64_t m,
                 const void *bias, void *out) {
    const int single = type == F32 && (form->packing > CODED || form->arithmetic == F32); /* rounded to float32 at most */
    const int unrounded = (type == BF16 || single) && in_floats(form);
    const Unrounded ways = unrounded ? unrounded_ways(form) : (Unrounded){0, 0, form->packing};
    const Type of = unrounded ? F32 : type; /* what weights are rounded to */
    Floats *floats = ways.floats;
    if (ways.dot && m <= FEWER)
        return some_at_once(ways.dot, ways.order, form, parts, type, of, start, stop, x, (int)m, bias, out);
    DotFew *dot = !floats && m <= FEWEST ? dotter_avx2(form) : 0;
    if (dot) return some_at_once(dot, form->packing, form, parts, type, of, start, stop, x, (int)m, bias, out);
    Decode *decode = kernels()->decoder(form);
    const int planes = planes_of(form->packing);
    const int64_t columns = form->columns, rows = form->rows;
    const int64_t unit = form->packing > CODED && form->group > 64 ? form->group : 64; /* decoders want whole blocks */
    const int64_t cuts = (columns + DEPTH - 1) / DEPTH, step = up_to((columns + cuts - 1) / cuts, unit);
    const int64_t width = up_to(columns, step), fours = (stop - start + ROWS - 1) / ROWS;
    const int64_t most = m < BATCH ? m : BATCH;
    const int at_once = most * width * 4 <= WHOLE;
    const int64_t of_x = most * width * 4, of_panel = ROWS * step * 4, of_sums = fours * most * ROWS * 4;
    char *memory = malloc(of_x + of_panel + of_sums + step * 4 + 4 * EDGE);
    if (!memory) return 0;
    float *wide = (float *)(memory + (EDGE - (intptr_t)memory % EDGE)), *panel = wide + of_x / 4;
    float *sums = panel + of_panel / 4;
    void *narrow = sums + of_sums / 4; /* a row's weights as they are rounded; a row of x before it is turned */
    for (int64_t batch = 0; batch < m; batch += most) {
        const int count = (int)(m - batch < most ? m - batch : most);
        for (int64_t j = 0; j < count; j++) {
            float *to = wide + j * width;
            widen(x, type, (batch + j) * columns, to, columns);
            if (floats) turn_in_place(form, to, columns, step, narrow);
            memset(wide + j * width + columns, 0, (width - columns) * 4);
        }
        memset(sums, 0, of_sums);
        for (int64_t outer = 0; outer < (at_once ? 1 : width); outer += step)
            for (int64_t four = 0; four < fours; four++)
                for (int64_t at = outer; at < (at_once ? width : outer + step); at += step) {
                    const int64_t k = columns - at < step ? columns - at : step;
                    for (int i = 0; i < ROWS; i++) {
                        float *to = panel + i * step;
                        const int64_t nth = start + four * ROWS + i;
                        if (nth >= stop) {
                            memset(to, 0, step * 4);
                            continue;
                        }
                        const int64_t first = row_at(form, planes, nth) * columns + at;
                        if (floats) {
                            floats(form, parts, first, k, to);
                        } else {
                            decode(form, parts, first, k, of, of == F32 ? (void *)to : narrow);
                            if (of != F32) widen(narrow, of, 0, to, k);
                        }
                        memset(to + k, 0, (step - k) * 4);
                    }
                    blocks(panel, step, wide + at, width, step, count, sums + four * count * ROWS);
                }
        for (int64_t nth = start; nth < stop; nth++) {
            const int64_t row = row_at(form, planes, nth), four = (nth - start) / ROWS, i = (nth - start) % ROWS;
            for (int64_t j = 0; j < count; j++)
                put_sum(sums[(four * count + j) * ROWS + i], type, bias, out, batch + j, row, rows);
        }
    }
    free(memory);
    return 1;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
