/* Kernels in plain C whose loops compilers turn into vector code; included once for each instruction set.

   Included before: runs.h or avx2_runs.h. Set before: OTHER_PRODUCTS where `dots` is not wanted. */
#include <math.h>
#include <string.h>

#include "codes.h"
#include "scales.h"

enum { TILE = 512 };

/* What codes stand for. */
static void numbers_of(const Form *form, const uint8_t *codes, int64_t count, float *out) {
    if (form->looked_up)
        for (int64_t i = 0; i < count; i++) out[i] = form->table[codes[i]];
    else if (form->packing == SIGNED_BYTES)
        for (int64_t i = 0; i < count; i++) out[i] = (float)(int8_t)codes[i];
    else
        for (int64_t i = 0; i < count; i++) out[i] = (float)codes[i];
}

/* Numbers of one group become its weights, before the last rounding. */
static void scale_run(const Form *form, const Parts *parts, int64_t group, int64_t count, float *out) {
    const float zero = zero_of(form, parts, group), scale = scale_of(form, parts, group), factor = form->factor;
    const float shift = shift_of(form, parts, group);
    const Type arithmetic = form->arithmetic;
    if (zero != 0)
        for (int64_t i = 0; i < count; i++) out[i] -= zero;
    if (form->fused) {
        for (int64_t i = 0; i < count; i++) out[i] = fmaf(out[i], scale, shift);
        round_run(out, arithmetic, count);
        return;
    }
    if (form->scale != NONE) {
        for (int64_t i = 0; i < count; i++) out[i] *= scale;
        round_run(out, arithmetic, count);
    }
    if (factor != 1.0f) {
        for (int64_t i = 0; i < count; i++) out[i] *= factor;
        round_run(out, arithmetic, count);
    }
    if (form->shift != NONE) {
        for (int64_t i = 0; i < count; i++) out[i] += shift;
        round_run(out, arithmetic, count);
    }
}

/* A number for each code, in their order. */
#define FOUR(i) i, i + 1, i + 2, i + 3
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SIXTY_FOUR(i) SIXTEEN(i), SIXTEEN(i + 16), SIXTEEN(i + 32), SIXTEEN(i + 48)
static const uint8_t EACH_CODE[256] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128), SIXTY_FOUR(192)};

enum { SHORT = 32, LONG = 1024 }; /* groups for which a table of their 16, or 256, values pays */

static int64_t entries_of(const Form *form) {
    const int bits = bits_of_code(form->packing);
    if (bits <= 4) return form->group >= SHORT ? 16 : 0;
    return form->group >= LONG ? 1 << bits : 0;
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

/* Weights whose group has scales by turns. */
static void decode_by_turns(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    const int64_t taps = form->taps, most = TILE / taps * taps; /* so that each run of a group begins with the same tap */
    uint8_t codes[TILE];
    float values[TILE], scale[TILE], shift[TILE];
    int64_t of_group = -1, of_tap = -1; /* what `scale` and `shift` are for */
    char *to = out;
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first, tap = first % taps;
        int64_t run = left < count ? left : count;
        if (run > most) run = most;
        if (group != of_group || tap != of_tap) {
            for (int64_t i = 0; i < taps; i++) {
                scale[i] = scale_of(form, parts, group * taps + (tap + i) % taps);
                shift[i] = shift_of(form, parts, group * taps + (tap + i) % taps);
            }
            for (int64_t i = taps; i < most; i++) scale[i] = scale[i - taps], shift[i] = shift[i - taps];
            of_group = group, of_tap = tap;
        }
        numbers_of(form, codes_at(form, parts, first, run, codes), run, values);
        for (int64_t i = 0; i < run; i++) values[i] -= form->zero;
        if (form->fused)
            for (int64_t i = 0; i < run; i++) values[i] = fmaf(values[i], scale[i], shift[i]);
        else
            for (int64_t i = 0; i < run; i++) values[i] *= scale[i];
        round_run(values, form->arithmetic, run);
        if (form->factor != 1.0f) {
            for (int64_t i = 0; i < run; i++) values[i] *= form->factor;
            round_run(values, form->arithmetic, run);
        }
        if (form->shift != NONE && !form->fused) {
            for (int64_t i = 0; i < run; i++) values[i] += shift[i];
            round_run(values, form->arithmetic, run);
        }
        convert(values, type, to, run);
        to += run * (type == F32 ? 4 : 2);
        first += run;
        count -= run;
    }
}

static void decode_plain(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    uint8_t codes[TILE];
    float values[TILE], numbers[256], table[256];
    const int64_t entries = entries_of(form);
    int64_t of_table = -1; /* the group that it is for */
    char *to = out;
    if (form->taps > 1) {
        decode_by_turns(form, parts, first, count, type, out);
        return;
    }
    numbers_of(form, EACH_CODE, entries, numbers);
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first;
        int64_t run = left < count ? left : count;
        if (run > TILE) run = TILE;
        const uint8_t *from = codes_at(form, parts, first, run, codes);
        if (entries && run >= SHORT) {
            if (group != of_table) {
                memcpy(values, numbers, entries * sizeof *values);
                scale_run(form, parts, group, entries, values);
                convert(values, type, table, entries);
                of_table = group;
            }
            look_up(table, entries, from, run, type, to);
        } else {
            numbers_of(form, from, run, values);
            scale_run(form, parts, group, run, values);
            convert(values, type, to, run);
        }
        to += run * (type == F32 ? 4 : 2);
        first += run;
        count -= run;
    }
}

#ifndef OTHER_PRODUCTS
/* Sums side by side, in the order that vectors keep. Compilers that have vectors of any size get them: the loops over
   an array of sums they leave as they are. */
#ifdef __GNUC__
enum { LANES = 4 };
typedef float Lanes __attribute__((vector_size(4 * LANES)));

static inline Lanes lanes_at(const float *from) {
    Lanes lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}
#else
enum { LANES = 1 };
typedef float Lanes;

static inline Lanes lanes_at(const float *from) { return *from; }
#endif

static inline float sum_of(Lanes lanes) {
    float each[LANES], sum = 0;
    memcpy(each, &lanes, sizeof lanes);
    for (int i = 0; i < LANES; i++) sum += each[i];
    return sum;
}

/* sums[i] += the product of row i of four and a row of activations, `count` long, a multiple of LANES. */
static void four_dots(float (*weights)[TILE], const float *x, int64_t count, float *sums) {
    Lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        const Lanes of_x = lanes_at(x + i);
        a += lanes_at(weights[0] + i) * of_x;
        b += lanes_at(weights[1] + i) * of_x;
        c += lanes_at(weights[2] + i) * of_x;
        d += lanes_at(weights[3] + i) * of_x;
    }
    sums[0] += sum_of(a);
    sums[1] += sum_of(b);
    sums[2] += sum_of(c);
    sums[3] += sum_of(d);
}

static void dots(Type type, const void *w, int64_t stride_w, int n, const void *x, int64_t stride_x, int m, int64_t k,
                 float *sums, int64_t stride_sums) {
    float weights[PANEL_ROWS][TILE], activations[TILE];
    (void)n; /* the panel has as many as the kernels like */
    for (int64_t start = 0; start < k; start += TILE) {
        const int64_t count = k - start < TILE ? k - start : TILE, whole = (count + LANES - 1) / LANES * LANES;
        for (int i = 0; i < PANEL_ROWS; i++) {
            widen(w, type, i * stride_w + start, weights[i], count);
            memset(weights[i] + count, 0, (whole - count) * sizeof **weights);
        }
        memset(activations + count, 0, (whole - count) * sizeof *activations);
        for (int j = 0; j < m; j++) {
            widen(x, type, j * stride_x + start, activations, count);
            for (int i = 0; i < PANEL_ROWS; i += 4)
                four_dots(weights + i, activations, whole, sums + j * stride_sums + i);
        }
    }
}
#endif
