/* Rotations in plain C, and the choice of those for this machine. */
#include "rotate.h"

#define INLINE static inline
#include "rotate_bounds.h"

void rotate_portable(float *x, int64_t count, int64_t group) {
    for (int64_t apart = 1; apart < group; apart *= 4)
        for (int64_t from = 0; from < count; from += 4 * apart)
            for (int64_t i = from; i < from + apart; i++) {
                const float a = x[i] * 0.5f, b = x[i + apart] * 0.5f;
                const float c = x[i + 2 * apart] * 0.5f, d = x[i + 3 * apart] * 0.5f;
                x[i] = (a + b) + (c - d), x[i + apart] = (a + b) - (c - d);
                x[i + 2 * apart] = (c + d) + (a - b), x[i + 3 * apart] = (c + d) - (a - b);
            }
}

static void bounds_portable(const float *x, int64_t count, int64_t group, float *bounds) {
    bounds_of(x, count, group, bounds);
}

static void largest_portable(const float *y, int64_t count, int64_t group, float *largest) {
    largest_sizes(y, count, group, largest);
}

static void codes_portable(const float *y, int64_t count, int64_t group, float scale, const float *bounds, float least,
                           float most, int8_t *codes, uint8_t *open) {
    codes_within(y, count, group, scale, bounds, least, most, codes, open);
}

const Rotation rotation_portable = {rotate_portable, bounds_portable, largest_portable, codes_portable, 0};

void rotate_row(Type type, const void *x, int64_t columns, int64_t group, float *to) {
    const Rotation *with = kernels()->rotation;
    if (with->row) {
        with->row(type, x, columns, group, to);
        return;
    }
    kernels()->widen(x, type, 0, to, columns);
    with->rotate(to, columns, group);
}

void rotate_rows(Type type, const void *x, int64_t rows, int64_t columns, int64_t group, float *spare, void *out) {
    const int64_t bytes = columns * (type == F32 ? 4 : 2);
    for (int64_t i = 0; i < rows; i++) {
        char *to = (char *)out + i * bytes;
        float *floats = type == F32 ? (float *)to : spare;
        rotate_row(type, (const char *)x + i * bytes, columns, group, floats);
        if (type != F32) kernels()->convert(floats, type, to, columns);
    }
}

void rotate_rows_within(Type type, const void *x, int64_t rows, int64_t columns, int64_t group, float *out,
                        float *largest, float *bounds) {
    const int64_t bytes = columns * (type == F32 ? 4 : 2), groups = columns / group;
    const Rotation *with = kernels()->rotation;
    for (int64_t i = 0; i < rows; i++, out += columns, largest += groups, bounds += groups) {
        kernels()->widen((const char *)x + i * bytes, type, 0, out, columns);
        with->bounds(out, columns, group, bounds);
        with->rotate(out, columns, group);
        with->largest(out, columns, group, largest);
        for (int64_t g = 0; g < groups; g++)
            if (bounds[g] > FLT_MAX) largest[g] = 0.0f; /* it may be NaN */
    }
}

void code_rows_within(const float *y, int64_t rows, int64_t columns, int64_t group, const float *scale,
                      const float *bounds, int64_t least, int64_t most, int8_t *codes, uint8_t *open) {
    const int64_t groups = columns / group;
    for (int64_t i = 0; i < rows; i++)
        kernels()->rotation->codes(y + i * columns, columns, group, scale[i], bounds + i * groups, (float)least,
                                   (float)most, codes + i * columns, open + i * groups);
}
