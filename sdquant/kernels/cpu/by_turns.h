/* Rows that meet the same numbers one after another: activations divided by a factor for each column, and codes whose
   scales go by turns. Loops that compilers turn into vector code; included once for each instruction set, after
   portable.h. */

/* x / by, of F32 or BF16, rounded to that. */
static void divide(Type type, const void *x, const Divisors *divisors, int64_t count, void *restrict to) {
    const float *floats = x, *by = divisors->by;
    const uint16_t *halves = x;
    if (type == F32)
        for (int64_t i = 0; i < count; i++) ((float *)to)[i] = floats[i] / by[i];
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = to_bf16(from_bf16(halves[i]) / by[i]);
}

/* (code - middle) * scale - shift, each step rounded to float32, and the last one to `type`; `shift` may be NULL. Codes are
   bytes or, with `bits` 4, their halves, the low one first; `count` is even then. */
static void turns_of_scales(const uint8_t *codes, int64_t bits, float middle, const float *scale, const float *shift,
                            int64_t count, Type type, void *out) {
    float values[TILE];
    for (int64_t at = 0; at < count; at += TILE) {
        const int64_t here = count - at < TILE ? count - at : TILE;
        const float *by = scale + at;
        if (bits == 4) {
            const uint8_t *from = codes + at / 2;
            for (int64_t i = 0; i < here / 2; i++) {
                values[2 * i] = (float)(from[i] & 15);
                values[2 * i + 1] = (float)(from[i] >> 4);
            }
        } else
            for (int64_t i = 0; i < here; i++) values[i] = (float)codes[at + i];
        for (int64_t i = 0; i < here; i++) values[i] = (values[i] - middle) * by[i];
        if (shift)
            for (int64_t i = 0; i < here; i++) values[i] -= shift[at + i];
        convert(values, type, (char *)out + at * (type == F32 ? 4 : 2), here);
    }
}
