/* Codes to 8-bit integers in plain C, and the choice of what does it on this machine. */
#include "expand.h"

#include <math.h>

void expand_portable(const uint8_t *low, const uint8_t *high, const float *table, const float *scales, int64_t groups,
                     int64_t group, int8_t *out) {
    for (int64_t g = 0, i = 0; g < groups; g++)
        for (const int64_t end = i + group; i < end; i++) {
            const int code = low[i / 2] >> 4 * (i & 1) & 15;
            const float known = high ? (float)(code + ((high[i / 4] >> 2 * (i & 3) & 3) << 4) - 32) : table[code];
            const float value = rintf(known * scales[g]);
            out[i] = (int8_t)(value > 127 ? 127 : value > -127 ? value : -127);
        }
}

void expand_rows(const Grouped *from, int64_t start, int64_t stop, float *spare, int8_t *out) {
    const int64_t groups = from->groups, columns = groups * from->group;
    for (int64_t row = start; row < stop; row++) {
        const uint8_t *low = from->codes + row * from->stride;
        const float *scales = spare;
        if (from->bytes) {
            const uint8_t *codes = (const uint8_t *)from->scales + row * groups;
            for (int64_t g = 0; g < groups; g++) spare[g] = from->bytes[codes[g]];
        } else
            scales = (const float *)from->scales + row * groups;
        kernels()->expand(low, from->bits == 6 ? low + columns / 2 : 0, from->table + row * from->apart, scales, groups,
                          from->group, out + row * columns);
    }
}
