/* Rotations in plain C, and the choice of those for this machine. */
#include "rotate.h"

void rotate_portable(float *x, int64_t count, int64_t group) {
    for (int64_t apart = 1; apart < group; apart *= 4)
        for (int64_t from = 0; from < count; from += 4 * apart)
            for (int64_t i = from; i < from + apart; i++) {
                const float a = x[i], b = x[i + apart], c = x[i + 2 * apart], d = x[i + 3 * apart];
                const float half = ((a + b) + (c + d)) * 0.5f;
                x[i] = half - d, x[i + apart] = half - c, x[i + 2 * apart] = half - b, x[i + 3 * apart] = half - a;
            }
}

void rotate_row(Type type, const void *x, int64_t columns, int64_t group, float *to) {
    kernels()->widen(x, type, 0, to, columns);
    kernels()->rotate(to, columns, group);
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
