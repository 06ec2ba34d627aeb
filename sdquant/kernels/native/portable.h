/* Kernels in plain C whose loops compilers turn into vector code; included once for each instruction set.

   Set before: PLUS(a, b, c), a + b * c in one rounding or two. */
#include <math.h>
#include <string.h>

#include "codes.h"
#include "scales.h"

enum { TILE = 512 };

/* A run of one group, before the last rounding. */
static void values_of(const Form *form, const Parts *parts, int64_t group, const uint8_t *codes, int64_t count,
                      float *out) {
    const float zero = zero_of(form, parts, group), scale = scale_of(form, parts, group), factor = form->factor;
    const float shift = shift_of(form, parts, group);
    const Type arithmetic = form->arithmetic;
    if (form->looked_up)
        for (int64_t i = 0; i < count; i++) out[i] = form->table[codes[i]] - zero;
    else if (form->packing == SIGNED_BYTES)
        for (int64_t i = 0; i < count; i++) out[i] = (float)(int8_t)codes[i] - zero;
    else
        for (int64_t i = 0; i < count; i++) out[i] = (float)codes[i] - zero;
    if (form->fused) {
        for (int64_t i = 0; i < count; i++) out[i] = rounded(fmaf(out[i], scale, shift), arithmetic);
        return;
    }
    if (form->scale != NONE)
        for (int64_t i = 0; i < count; i++) out[i] = rounded(out[i] * scale, arithmetic);
    if (factor != 1.0f)
        for (int64_t i = 0; i < count; i++) out[i] = rounded(out[i] * factor, arithmetic);
    if (form->shift != NONE)
        for (int64_t i = 0; i < count; i++) out[i] = rounded(out[i] + shift, arithmetic);
}

static void convert(const float *from, Type type, void *to, int64_t count) {
    uint16_t *halves = to;
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_bf16(from[i]);
    else if (type == F16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_f16(from[i]);
    else
        memcpy(to, from, count * sizeof *from);
}

static void decode_plain(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    uint8_t codes[TILE];
    float values[TILE];
    char *to = out;
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first;
        int64_t run = left < count ? left : count;
        if (run > TILE) run = TILE;
        values_of(form, parts, group, codes_at(form, parts, first, run, codes), run, values);
        convert(values, type, to, run);
        to += run * (type == F32 ? 4 : 2);
        first += run;
        count -= run;
    }
}

/* Sixteen sums side by side, which is the order that vector code can keep. */
enum { LANES = 16 };

static float dot(const float *a, const float *b, int64_t count) {
    float sums[LANES] = {0}, all = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] = PLUS(sums[lane], a[i + lane], b[i + lane]);
    for (; i < count; i++) sums[i % LANES] += a[i] * b[i];
    for (int lane = 0; lane < LANES; lane++) all += sums[lane];
    return all;
}

static void widen(const void *from, Type type, int64_t start, float *to, int64_t count) {
    if (type == F32)
        memcpy(to, (const float *)from + start, count * sizeof *to);
    else if (type == BF16)
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(((const uint16_t *)from)[start + i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = from_f16(((const uint16_t *)from)[start + i]);
}

static void dots(Type type, const void *w, int64_t stride_w, int n, const void *x, int64_t stride_x, int m, int64_t k,
                 float *sums, int64_t stride_sums) {
    float weights[PANEL_ROWS][TILE], activations[TILE];
    for (int64_t start = 0; start < k; start += TILE) {
        const int64_t count = k - start < TILE ? k - start : TILE;
        for (int i = 0; i < n; i++) widen(w, type, i * stride_w + start, weights[i], count);
        for (int j = 0; j < m; j++) {
            widen(x, type, j * stride_x + start, activations, count);
            for (int i = 0; i < n; i++) sums[j * stride_sums + i] += dot(weights[i], activations, count);
        }
    }
}
