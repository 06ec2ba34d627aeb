/* Products in integers, but for the product: rows of floats to int8 codes, and sums back to floats. Formulas and the order
   of their roundings are those of kernels/int8_linear.py. Included after portable.h, once for each instruction set. */

/* One row of k: codes, the scale, and the sum of the codes. */
static void quantize(Type type, const void *x, int64_t k, int8_t *codes, float *scale, int32_t *sum) {
    float wide[TILE];
    uint32_t most = 0; /* the largest size, as bits, which grow with it; those of NaN are above all */
    for (int64_t start = 0; start < k; start += TILE) {
        const int64_t count = k - start < TILE ? k - start : TILE;
        const float *values = (const float *)x + start;
        if (type != F32) widen(x, type, start, wide, count), values = wide;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t size = bits_of(values[i]) & 0x7fffffff;
            most = size > most ? size : most;
        }
    }
    const float largest = of_bits(most);
    const int zero = largest < 0x1p-100f;
    const float factor = zero ? 0.0f : 127.0f / largest;
    int32_t total = 0;
    for (int64_t start = 0; start < k; start += TILE) {
        const int64_t count = k - start < TILE ? k - start : TILE;
        const float *values = (const float *)x + start;
        if (type != F32) widen(x, type, start, wide, count), values = wide;
        for (int64_t i = 0; i < count; i++) {
            /* The sum has no bits below one: it is rounded, and its last byte is the code. */
            const int8_t code = (int8_t)bits_of(values[i] * factor + 0x1.8p23f);
            codes[start + i] = code;
            total += code;
        }
    }
    *scale = zero ? 0.0f : largest / 127.0f;
    *sum = total;
}

/* n sums of one row of activations to floats of `type`: (total + sum * added) * scale * scales + bias. `added` and `bias`
   may be NULL. */
static void finish(const int32_t *totals, int32_t sum, const int32_t *added, float scale, const float *scales,
                   const float *bias, int64_t n, Type type, void *out) {
    float values[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        const int32_t *from = totals + start;
        if (added)
            for (int64_t i = 0; i < count; i++) values[i] = (float)(from[i] + sum * added[start + i]);
        else
            for (int64_t i = 0; i < count; i++) values[i] = (float)from[i];
        for (int64_t i = 0; i < count; i++) values[i] = values[i] * scale * scales[start + i];
        if (bias)
            for (int64_t i = 0; i < count; i++) values[i] = values[i] + bias[start + i];
        convert(values, type, (char *)out + start * (type == F32 ? 4 : 2), count);
    }
}
