/* Codes of few bits that stand for 8-bit integers, a float scale for a group of them: ComfyUI's W4A8 and W6A8.

   integer = value * scale, rounded to the nearest, ties to even, and at most 127 in magnitude. */
#ifndef SDQUANT_EXPAND_H
#define SDQUANT_EXPAND_H

#include "form.h"

/* A row: `groups` of `group` columns. `low`: the low four bits, the even column in the low half of a byte. `high`: the
   upper two bits of four columns in a byte, the first lowest; NULL for codes of 4 bits. `table`: the values of the 16
   codes of 4 bits; a code of 6 bits stands for itself less 32. `scales` of the groups. */
typedef void Expand(const uint8_t *low, const uint8_t *high, const float *table, const float *scales, int64_t groups,
                    int64_t group, int8_t *out);
Expand expand_portable, expand_avx2;

/* Rows of codes, `stride` bytes apart, to `out` [rows, groups * group]. Scales [rows, groups] are bytes, of which `bytes`
   [256] has the values, or, where that is NULL, floats. `apart`: from a row's table to the next one's. `spare` [groups]. */
typedef struct {
    const uint8_t *codes;
    int64_t stride, bits;
    const void *scales;
    const float *bytes, *table;
    int64_t apart, groups, group;
} Grouped;
void expand_rows(const Grouped *from, int64_t start, int64_t stop, float *spare, int8_t *out);

#endif
