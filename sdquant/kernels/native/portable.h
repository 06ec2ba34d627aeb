/* Kernels in plain C whose loops compilers turn into vector code; included once for each instruction set.

   Set before: PLUS(a, b, c), a + b * c in one rounding or two. */
#include <math.h>
#include <string.h>

#include "codes.h"
#include "scales.h"

enum { TILE = 512 };

/* Where a count is a constant, the loops are to know. */
#ifdef _MSC_VER
#define INLINED static __forceinline
#else
#define INLINED static inline __attribute__((always_inline))
#endif

/* A run of one group, before the last rounding. */
INLINED void values_of(const Form *form, const Parts *parts, int64_t group, const uint8_t *codes, int64_t count,
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

INLINED void convert_some(const float *from, Type type, void *to, int64_t count) {
    uint16_t *halves = to;
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_bf16(from[i]);
    else if (type == F16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_f16(from[i]);
    else
        memcpy(to, from, count * sizeof *from);
}

static void convert(const float *from, Type type, void *to, int64_t count) { convert_some(from, type, to, count); }

/* A number for each code, in their order. */
#define FOUR(i) i, i + 1, i + 2, i + 3
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SIXTY_FOUR(i) SIXTEEN(i), SIXTEEN(i + 16), SIXTEEN(i + 32), SIXTEEN(i + 48)
static const uint8_t EACH_CODE[256] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128), SIXTY_FOUR(192)};

enum { SHORT = 32, LONG = 1024 }; /* groups for which a table of their 16, or 256, values pays */

static int64_t entries_of(const Form *form) {
    if (form->packing >= NIBBLES_LOW && form->packing != SDNQ6) return form->group >= SHORT ? 16 : 0;
    return form->group >= LONG ? form->packing == SDNQ6 ? 64 : 256 : 0;
}

static void make_table(const Form *form, const Parts *parts, int64_t group, int64_t entries, Type type, void *table) {
    float values[256];
    if (entries == 16) {
        values_of(form, parts, group, EACH_CODE, 16, values);
        convert_some(values, type, table, 16);
    } else {
        values_of(form, parts, group, EACH_CODE, entries, values);
        convert_some(values, type, table, entries);
    }
}

/* The codes' entries of a table of weights as they are wanted. */
static void look_up(const void *table, int64_t entries, const uint8_t *codes, int64_t count, Type type, void *out) {
#ifdef LOOK_UP16
    if (entries == 16) {
        LOOK_UP16(table, codes, count, type, out);
        return;
    }
#endif
    (void)entries;
    if (type == F32)
        for (int64_t i = 0; i < count; i++) ((float *)out)[i] = ((const float *)table)[codes[i]];
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)out)[i] = ((const uint16_t *)table)[codes[i]];
}

static void decode_plain(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    uint8_t codes[TILE];
    float values[TILE], table[256];
    const int64_t entries = entries_of(form);
    int64_t of_table = -1; /* the group that it is for */
    char *to = out;
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first;
        int64_t run = left < count ? left : count;
        if (run > TILE) run = TILE;
        const uint8_t *from = codes_at(form, parts, first, run, codes);
        if (entries && run >= SHORT) {
            if (group != of_table) {
                make_table(form, parts, group, entries, type, table);
                of_table = group;
            }
            look_up(table, entries, from, run, type, to);
        } else {
            values_of(form, parts, group, from, run, values);
            convert(values, type, to, run);
        }
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
