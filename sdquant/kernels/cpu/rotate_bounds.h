/* How far rotations that sum in other orders may be apart, and which codes that leaves open. For files that define INLINE.

   A rotation's result is a sum of the n numbers of a group with signs, divided by the root of n. Let g be a power of 2,
   2^24 g no less than S, the sum of all sizes, and let k of the numbers not be multiples of g. Then, whatever the order
   of the n - 1 sums, each rounded to the nearest float, the result is at most k g from the exact sum:

   - No sum is larger than 2^24 g, so floats near it are at most g apart. A sum of multiples of g is one too, and exact.
   - A sum that is rounded to floats that are d apart errs by d / 2, and is then a multiple of d; what is added to it that is
     one too rounds only where floats are 2 d apart or more. So what one of the k brings in is at most
     g / 2 + g / 4 + ... < g, and by induction k of them at most k g.

   Two orders are thus at most 2 k g apart. Weights of 8 or 11 bits (bfloat16, float16) have k of 0 to 2, with S taken
   a little larger for what k g adds to it. */
#ifndef SDQUANT_ROTATE_BOUNDS_H
#define SDQUANT_ROTATE_BOUNDS_H

#include <float.h>
#include <math.h>

#include "floats.h"

enum { BOUND_LANES = 16 }; /* numbers at a time; groups are multiples of it */

static const float LEAST_STEP = 7.888609052210118e-31f; /* 2^-100: far from where products are rounded to zero */

/* Of `group` numbers, before they are rotated. Infinity where nothing can be said. */
INLINE float bound_of(const float *x, int64_t group) {
    float sums[BOUND_LANES], sum = 0.0f;
    int32_t counts[BOUND_LANES], count = 0;
    for (int j = 0; j < BOUND_LANES; j++) sums[j] = 0.0f, counts[j] = 0;
    for (int64_t i = 0; i < group; i += BOUND_LANES)
        for (int j = 0; j < BOUND_LANES; j++) sums[j] += fabsf(x[i + j]);
    for (int j = 0; j < BOUND_LANES; j++) sum += sums[j];
    if (sum == 0.0f) return 0.0f;
    sum *= 1.001f;
    if (!(sum <= FLT_MAX)) return INFINITY;
    const float power = of_bits(bits_of(sum) & 0x7f800000), step = power * 1.1920928955078125e-07f; /* 2^-23 */
    if (step < LEAST_STEP) return INFINITY;
    for (int64_t i = 0; i < group; i += BOUND_LANES)
        for (int j = 0; j < BOUND_LANES; j++) {
            const float size = fabsf(x[i + j]); /* beside `power` floats are a step apart, or two */
            counts[j] += (size + power) - power != size;
        }
    for (int j = 0; j < BOUND_LANES; j++) count += counts[j];
    return (float)(2 * count) * step / sqrtf((float)group);
}

INLINE float largest_of(const float *y, int64_t group) {
    float tops[BOUND_LANES], top = 0.0f;
    for (int j = 0; j < BOUND_LANES; j++) tops[j] = 0.0f;
    for (int64_t i = 0; i < group; i += BOUND_LANES)
        for (int j = 0; j < BOUND_LANES; j++) {
            const float size = fabsf(y[i + j]);
            tops[j] = size > tops[j] ? size : tops[j];
        }
    for (int j = 0; j < BOUND_LANES; j++) top = tops[j] > top ? tops[j] : top;
    return top;
}

/* The nearest integer, ties to even. */
INLINE int32_t code_of(float y, float scale, float least, float most) {
    const float value = y / scale, above = value > least ? value : least, within = above < most ? above : most;
    return (int32_t)((within + 12582912.0f) - 12582912.0f); /* 1.5 * 2^23: floats are 1 apart */
}

/* Codes of y / scale; whether numbers that are up to `bound` from those at y have the same. */
INLINE int codes_of(const float *y, int64_t group, float scale, float bound, float least, float most, int8_t *codes) {
    int32_t others[BOUND_LANES], other = 0;
    if (bound == 0.0f) {
        for (int64_t i = 0; i < group; i++) codes[i] = (int8_t)code_of(y[i], scale, least, most);
        return 1;
    }
    for (int j = 0; j < BOUND_LANES; j++) others[j] = 0;
    for (int64_t i = 0; i < group; i += BOUND_LANES)
        for (int j = 0; j < BOUND_LANES; j++) {
            const int32_t low = code_of(y[i + j] - bound, scale, least, most);
            others[j] |= low ^ code_of(y[i + j] + bound, scale, least, most);
            codes[i + j] = (int8_t)low;
        }
    for (int j = 0; j < BOUND_LANES; j++) other |= others[j];
    return other == 0;
}

INLINE void bounds_of(const float *x, int64_t count, int64_t group, float *bounds) {
    for (int64_t i = 0; i < count; i += group) *bounds++ = bound_of(x + i, group);
}

INLINE void largest_sizes(const float *y, int64_t count, int64_t group, float *largest) {
    for (int64_t i = 0; i < count; i += group) *largest++ = largest_of(y + i, group);
}

INLINE void codes_within(const float *y, int64_t count, int64_t group, float scale, const float *bounds, float least,
                         float most, int8_t *codes, uint8_t *open) {
    for (int64_t i = 0; i < count; i += group, bounds++)
        *open++ = !codes_of(y + i, group, scale, *bounds, least, most, codes + i);
}

#endif
