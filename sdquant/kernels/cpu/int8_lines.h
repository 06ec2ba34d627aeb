/* Rows of activations as codes. Included with INLINE set, after int8_scales.h and what it is made of: Sums, no_sums,
   total_of, largest_in, codes_of and moved. */

/* The codes of a row or, with `type` I8, those that are there; and their sum. */
INLINE Sums line_at(Type type, const void *from, int64_t count, float factor, int8_t *to, Sums sum) {
    return type == I8 ? moved(from, count, to, sum) : codes_of(type, from, count, factor, to, sum);
}

/* One row of activations into `line`. */
INLINE void line_of(Type type, const Source *from, int64_t row, int8_t *line, float *scale, int32_t *sum) {
    const int64_t size = type == F32 ? 4 : type == I8 ? 1 : 2;
    Sums sums = no_sums();
    if (!from->patches) {
        const char *x = (const char *)from->x + row * from->stride * size;
        if (from->smooth) {
            const Divisors by = {from->smooth, from->smooth + from->columns};
            kernels()->divide(type, x, &by, from->columns, from->divided);
            x = from->divided;
        }
        const float largest = type == I8 ? 0 : largest_in(type, x, from->columns);
        sums = line_at(type, x, from->columns, factor_of(largest), line, sums);
        *scale = type == I8 ? from->scale[row / from->each] : step_of(largest);
    } else {
        const int64_t channels = from->channels, across = from->out_wide, down = from->out_high;
        const int64_t image = row / (across * down), y = row / across % down, x = row % across;
        const int64_t top = y * from->step[0] - from->pad[0], left = x * from->step[1] - from->pad[1];
        uint32_t most = 0;
        for (int64_t i = 0; i < from->kernel_high && type != I8; i++)
            for (int64_t j = 0; j < from->kernel_wide; j++) {
                const int64_t v = top + i * from->spread[0], h = left + j * from->spread[1];
                if (v < 0 || h < 0 || v >= from->high || h >= from->wide) continue;
                const uint32_t here = bits_of(from->largest[(image * from->high + v) * from->wide + h]);
                most = here > most ? here : most;
            }
        const float largest = of_bits(most), factor = factor_of(largest);
        *scale = type == I8 ? from->scale[row / from->each] : step_of(largest);
        for (int64_t i = 0; i < from->kernel_high; i++)
            for (int64_t j = 0; j < from->kernel_wide; j++, line += channels) {
                const int64_t v = top + i * from->spread[0], h = left + j * from->spread[1];
                if (v < 0 || h < 0 || v >= from->high || h >= from->wide) {
                    memset(line, 0, channels);
                    continue;
                }
                const int64_t at = ((image * from->high + v) * from->wide + h) * channels;
                sums = line_at(type, (const char *)from->x + at * size, channels, factor, line, sums);
            }
    }
    *sum = total_of(sums);
}

INLINE void line_of_any(const Source *from, int64_t row, int8_t *line, float *scale, int32_t *sum) {
    if (from->type == F32) line_of(F32, from, row, line, scale, sum);
    else if (from->type == BF16) line_of(BF16, from, row, line, scale, sum);
    else if (from->type == I8) line_of(I8, from, row, line, scale, sum);
    else line_of(F16, from, row, line, scale, sum);
}
