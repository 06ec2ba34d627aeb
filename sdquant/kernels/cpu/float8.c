/* Which float8 the 256 numbers of a table are. */
#include <math.h>

#include "floats.h"

enum { SIZES = 128, SMALL = 8 };

/* The number of a size. E4M3 has float16's exponent without its uppermost bit, so that it is 2^-8 of the number there. */
static float number_of(Float8Kind kind, int size) {
    return kind == E5M2_BITS ? from_f16((uint16_t)(size << 8)) : 256.0f * from_f16((uint16_t)(size << 7));
}

static Float8 as_kind(const float *table, Float8Kind kind) {
    const int sorted = kind == E4M3_SORTED, one = kind == E5M2_BITS ? 0x3c : 0x38;
    const float *upper = table + SIZES;
    Float8 of = {kind, 1, 1, 0, (sorted ? upper : table)[one]};
    for (int size = 0; size < SIZES; size++) {
        const float number = number_of(kind, size) * of.factor;
        const float positive = sorted ? upper[size] : table[size], negative = sorted ? table[SIZES - 1 - size] : upper[size];
        const int equal = positive == number && negative == -number;
        /* What was divided, and what is multiplied by a quotient, differ in their last two bits. */
        const int near = sorted && negative == -positive && fabsf(positive - number) <= 2.5e-7f * number;
        if (isfinite(number) && (equal || near)) of.most = (uint8_t)size, of.exact &= equal;
        else if (size < SMALL) of.least = (uint8_t)(size + 1); /* bitsandbytes' are a quarter of E4M3's there */
        else break;
    }
    return of;
}

Float8 float8_of(const float *table) {
    static const Float8Kind kinds[] = {E4M3_BITS, E5M2_BITS, E4M3_SORTED};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const Float8 of = as_kind(table, kinds[i]);
        if (of.factor > 0 && of.factor < 1e30f && of.most >= SIZES - 1 - SMALL) return of;
    }
    return (Float8){NO_FLOAT8, 0, 0, 0, 0};
}
