/* Runs of floats from one type to another. */
#ifndef SDQUANT_RUNS_H
#define SDQUANT_RUNS_H

#include <string.h>

#include "floats.h"

/* float32 to `type`. */
static inline void convert(const float *from, Type type, void *to, int64_t count) {
    uint16_t *halves = to;
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_bf16(from[i]);
    else if (type == F16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_f16(from[i]);
    else
        memcpy(to, from, count * sizeof *from);
}

/* `type` to float32, from an element on. */
static inline void widen(const void *from, Type type, int64_t start, float *to, int64_t count) {
    const uint16_t *halves = (const uint16_t *)from + start;
    if (type == F32)
        memcpy(to, (const float *)from + start, count * sizeof *to);
    else if (type == BF16)
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(halves[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = from_f16(halves[i]);
}

/* float32 to `type` and back. */
static inline void round_run(float *values, Type type, int64_t count) {
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) values[i] = from_bf16(to_bf16(values[i]));
    else if (type == F16)
        for (int64_t i = 0; i < count; i++) values[i] = from_f16(to_f16(values[i]));
}

#endif
