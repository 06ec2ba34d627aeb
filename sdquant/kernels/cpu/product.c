/* Whole rows: decoding, and products with few rows of activations. */
#include <stdlib.h>
#include <string.h>

#include "floats.h"

enum {
    PANEL_BYTES = 36 * 1024, /* decoded weights that are used from the first cache, of 48 KB or 32 */
    PANELS = 3,              /* as many wait in the second cache, so that activations are read less often */
    BATCH = 128,             /* rows of activations at once */
    /* The same of panels that are lower, beside as many rows of activations. */
    LOW_PANEL_BYTES = 24 * 1024,
    LOW_PANELS = 6,
    LOW_BATCH = 192,
};

int64_t row_at(const Form *form, int planes, int64_t i) {
    if (planes == 1) return i;
    const int64_t part = form->rows / planes;
    return i < part * planes ? i % planes * part + i / planes : i;
}

/* Weights at which a decoder may be called: whole blocks. */
static int64_t whole(const Form *form, int64_t wanted) {
    const int64_t unit = form->packing > CODED ? form->group : 64;
    return wanted < unit ? unit : wanted / unit * unit;
}

void decode_rows(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *out) {
    const int planes = planes_of(form->packing);
    const int64_t size = type == F32 ? 4 : 2, columns = form->columns;
    Decode *decode = kernels()->decoder(form);
    parts->ahead = AHEAD;
    if (planes == 1) {
        decode(form, parts, start * columns, (stop - start) * columns, type, (char *)out + start * columns * size);
        return;
    }
    for (int64_t i = start; i < stop; i++) {
        const int64_t row = row_at(form, planes, i);
        decode(form, parts, row * columns, columns, type, (char *)out + row * columns * size);
    }
}

void decode_part(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *out) {
    parts->ahead = AHEAD;
    kernels()->decoder(form)(form, parts, start * form->columns, (stop - start) * form->columns, type, out);
}

void decode_rounded(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *to) {
    enum { PIECE = 4096 }; /* of whole blocks */
    uint16_t piece[PIECE];
    float *out = to;
    const Kernels *use = kernels();
    Decode *decode = use->decoder(form);
    const int64_t first = start * form->columns, last = stop * form->columns;
    parts->ahead = AHEAD;
    for (int64_t at = first; at < last; at += PIECE) {
        const int64_t count = last - at < PIECE ? last - at : PIECE;
        decode(form, parts, at, count, type, type == F32 ? (void *)(out + (at - first)) : piece);
        if (type != F32) use->widen(piece, type, 0, out + (at - first), count);
    }
}

void evens_first(const uint16_t *from, int64_t count, uint16_t *to) {
    for (int64_t i = 0; i < count; i += 64)
        for (int j = 0; j < 32; j++) to[i + j] = from[i + 2 * j], to[i + 32 + j] = from[i + 2 * j + 1];
}

/* Row by row; nothing decoded touches memory. 0: no memory. */
static int in_registers(DecodeAndDot *run, const Form *form, Parts *parts, Type type, int64_t start, int64_t stop,
                         const void *x, int m, const void *bias, void *out) {
    const int planes = planes_of(form->packing);
    const int64_t columns = form->columns, stride = columns * (type == F32 ? 4 : 2);
    const Kernels *use = kernels();
    void *memory = 0;
    if (use->turned && use->turned(form, type)) {
        if (!(memory = malloc(m * stride + 64))) return 0;
        uint16_t *turned = (uint16_t *)((char *)memory + (64 - (intptr_t)memory % 64)); /* whole lines are read faster */
        for (int j = 0; j < m; j++) evens_first((const uint16_t *)x + j * columns, columns, turned + j * columns);
        x = turned;
    }
    parts->ahead = AHEAD;
    for (int64_t i = start; i < stop; i++) {
        const int64_t row = row_at(form, planes, i);
        float sums[FEW] = {0};
        run(form, parts, row * columns, columns, type, x, stride, m, sums);
        for (int j = 0; j < m; j++) put_sum(sums[j], type, bias, out, j, row, form->rows);
    }
    free(memory);
    return 1;
}

/* The sums of row j of activations with n rows of the weight that lie beside each other: as `put_sum` of each. */
static void put_sums(const float *sums, Type type, const float *bias, void *out, int64_t j, int64_t row, int64_t rows, int n) {
    float line[PANELS * PANEL_ROWS];
    for (int r = 0; r < n; r++) line[r] = sums[r] + bias[r];
    kernels()->convert(line, type, (char *)out + (j * rows + row) * (type == F32 ? 4 : 2), n);
}

int product_rows(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, const void *x, int64_t m,
                 const void *bias, void *out) {
    const Kernels *use = kernels();
    const int planes = planes_of(form->packing), size = type == F32 ? 4 : 2;
    const int64_t columns = form->columns;
    if (m <= FEW && use->dotter && use->dotter(form))
        return in_registers(use->dotter(form), form, parts, type, start, stop, x, (int)m, bias, out);
    if (use->product && use->products >> type & 1 && m >= use->least)
        return use->product(form, parts, type, start, stop, x, m, bias, out);
    Decode *decode = use->decoder(form);
    const int low = use->rows < PANEL_ROWS, some = low ? LOW_BATCH : BATCH;
    const int64_t bytes = low ? LOW_PANEL_BYTES : PANEL_BYTES;
    const int64_t most = whole(form, bytes / (use->rows * size)), step = most < columns ? most : columns;
    const int64_t stride = (step + 31) / 32 * 32; /* elements between rows of a panel; its size is as many vectors */
    const int together = (low ? LOW_PANELS : PANELS) * use->rows; /* at most as many rows as in PANELS of PANEL_ROWS */
    char *memory = malloc(together * stride * size + 64), *panels = memory + (64 - (intptr_t)memory % 64);
    if (!memory) return 0;
    float sums[LOW_BATCH * PANELS * PANEL_ROWS];
    parts->ahead = together / planes * columns; /* while panels are decoded, the next ones are asked for */
    for (int64_t batch = 0; batch < m; batch += some) {
        const int count = (int)(m - batch < some ? m - batch : some);
        for (int64_t i = start; i < stop; i += together) {
            const int n = (int)(stop - i < together ? stop - i : together);
            int64_t rows[PANELS * PANEL_ROWS];
            float added[PANELS * PANEL_ROWS] = {0};
            for (int r = 0; r < n; r++) rows[r] = row_at(form, planes, i + r);
            if (bias && planes == 1) use->widen(bias, type, i, added, n);
            memset(sums, 0, sizeof(float) * count * together);
            for (int64_t at = 0; at < columns; at += step) {
                const int64_t k = columns - at < step ? columns - at : step;
                const char *here = (const char *)x + (batch * columns + at) * size;
                for (int r = 0; r < n; r++)
                    decode(form, parts, rows[r] * columns + at, k, type, panels + r * stride * size);
                memset(panels + n * stride * size, 0, (together - n) * stride * size);
                for (int r = 0; r < n; r += use->rows)
                    use->dots(type, panels + r * stride * size, stride, n - r < use->rows ? n - r : use->rows, here,
                              columns, count, k, sums + r, together);
            }
            for (int j = 0; j < count; j++) {
                if (planes == 1) put_sums(sums + j * together, type, added, out, batch + j, i, form->rows, n);
                else
                    for (int r = 0; r < n; r++)
                        put_sum(sums[j * together + r], type, bias, out, batch + j, rows[r], form->rows);
            }
        }
    }
    free(memory);
    return 1;
}

void recode_rows(const Form *form, Parts *parts, int64_t start, int64_t stop, float *row, int8_t *codes, float *scales) {
    const Kernels *use = kernels();
    Decode *decode = use->decoder(form);
    const int planes = planes_of(form->packing);
    parts->ahead = AHEAD;
    for (int64_t i = start; i < stop; i++) {
        const int64_t at = row_at(form, planes, i);
        int32_t sum;
        decode(form, parts, at * form->columns, form->columns, F32, row);
        use->quantize(F32, row, form->columns, codes + at * form->columns, scales + at, &sum);
    }
}
