/* Scales of rows of activations. Included with INLINE set. */
#include <float.h>
#include <math.h>

#include "floats.h"
#include "int8.h"

/* Rows whose largest value is below this count as zeros. */
static const float LEAST = 7.888609052210118e-31f; /* 2^-100 */

INLINE float factor_of(float largest) { return largest < LEAST ? 0.0f : 127.0f / largest; }
/* NaN for rows that are not finite: of infinity times a sum of codes it would be the code that decides on the sign. */
INLINE float step_of(float largest) {
    if (largest < LEAST) return 0.0f;
    return largest <= FLT_MAX ? largest / 127.0f : NAN;
}

/* Scales under it, whose numbers are zeros, are 1: the root of the least normal number of float32 and of bf16. */
static const float LEAST_SCALE = 1.0842021724855044e-19f; /* 2^-63 */

/* That of a row by the rules of sdquant/rules, from its largest magnitude. */
INLINE float ruled_scale(Type type, float largest, const Codes *how) {
    const float found = largest / how->bound, kept = type == BF16 ? from_bf16(to_bf16(found)) : found;
    return kept < LEAST_SCALE ? 1.0f : kept;
}
