/* A product with few rows of activations: weights are decoded a panel at a time into the first cache and used there. */
#include <string.h>

#include "floats.h"

#ifdef _MSC_VER
#define ALIGNED __declspec(align(64))
#else
#define ALIGNED _Alignas(64)
#endif

/* Weights of a row that are decoded at once, times PANEL_ROWS rows of 2 or 4 bytes: most of a first cache of 48 KB. */
enum { PANEL_BYTES = 36 * 1024, BATCH = 128 };

/* The order in which rows are worked through: rows that share bytes follow each other. */
static int64_t row_at(const Form *form, int planes, int64_t i) {
    const int64_t part = form->rows / planes;
    return i < part * planes ? i % planes * part + i / planes : i;
}

/* Weights at which a decoder may be called: whole blocks. */
static int64_t whole(const Form *form, int64_t wanted) {
    const int64_t unit = form->packing > CODED ? form->group : 64;
    return wanted < unit ? unit : wanted / unit * unit;
}

void decode_rows(const Form *form, const Parts *parts, Type type, int64_t start, int64_t stop, void *out) {
    const int planes = planes_of(form->packing);
    const int64_t size = type == F32 ? 4 : 2, columns = form->columns;
    Decode *decode = kernels()->decoder(form);
    if (planes == 1) {
        decode(form, parts, start * columns, (stop - start) * columns, type, (char *)out + start * columns * size);
        return;
    }
    for (int64_t i = start; i < stop; i++) {
        const int64_t row = row_at(form, planes, i);
        decode(form, parts, row * columns, columns, type, (char *)out + row * columns * size);
    }
}

void product_rows(const Form *form, const Parts *parts, Type type, int64_t start, int64_t stop, const void *x,
                  int64_t m, void *out) {
    const Kernels *use = kernels();
    Decode *decode = use->decoder(form);
    const int planes = planes_of(form->packing), size = type == F32 ? 4 : 2;
    const int64_t columns = form->columns;
    const int panel_rows = m <= FEW ? use->few : use->many;
    ALIGNED char panel[PANEL_BYTES];
    float sums[BATCH * PANEL_ROWS];
    for (int64_t batch = 0; batch < m; batch += BATCH) {
        const int count = (int)(m - batch < BATCH ? m - batch : BATCH);
        for (int64_t i = start; i < stop; i += panel_rows) {
            const int n = (int)(stop - i < panel_rows ? stop - i : panel_rows);
            int64_t rows[PANEL_ROWS];
            for (int r = 0; r < n; r++) rows[r] = row_at(form, planes, i + r);
            for (int s = 0; s < count * PANEL_ROWS; s++) sums[s] = 0;
            const int64_t most = whole(form, PANEL_BYTES / (panel_rows * size)), step = most < columns ? most : columns;
            const int64_t stride = (step + 31) / 32 * 32;
            for (int64_t at = 0; at < columns; at += step) {
                const int64_t k = columns - at < step ? columns - at : step;
                for (int r = 0; r < n; r++)
                    decode(form, parts, rows[r] * columns + at, k, type, panel + r * stride * size);
                memset(panel + n * stride * size, 0, (panel_rows - n) * stride * size);
                const char *here = (const char *)x + (batch * columns + at) * size;
                use->dots(type, panel, stride, n, here, columns, count, k, sums, PANEL_ROWS);
            }
            for (int j = 0; j < count; j++)
                for (int r = 0; r < n; r++) {
                    const float sum = sums[j * PANEL_ROWS + r];
                    const int64_t to = (batch + j) * form->rows + rows[r];
                    if (type == F32) ((float *)out)[to] = sum;
                    else ((uint16_t *)out)[to] = type == BF16 ? to_bf16(sum) : to_f16(sum);
                }
        }
    }
}
