/* What the weights of a group have in common. */
#ifndef SDQUANT_SCALES_H
#define SDQUANT_SCALES_H

#include "floats.h"

/* The scale of a group; 1 where there is none. */
static inline float scale_of(const Form *form, const Parts *parts, int64_t group) {
    if (form->scale == NONE) return 1.0f;
    if (form->scale < NESTED) return load(parts->scale, form->scale, group);
    const float inner = form->dynamic[((const uint8_t *)parts->scale)[group]];
    return form->scale == NESTED ? inner * parts->nested[group >> 8] + form->offset : inner;
}

static inline float zero_of(const Form *form, const Parts *parts, int64_t group) {
    switch (form->zeros) {
    case SIGNED_BYTES: return (float)((const int8_t *)parts->zeros)[group];
    case BYTES: return (float)parts->zeros[group];
    case NIBBLES_LOW: return (float)(parts->zeros[group >> 1] >> (group & 1 ? 4 : 0) & 15);
    default: return form->zero;
    }
}

/* What is added after scaling. */
static inline float shift_of(const Form *form, const Parts *parts, int64_t group) {
    if (form->shift == NONE) return 0.0f;
    float shift = load(parts->shift, form->shift, group);
    return form->added ? shift : -shift;
}

#endif
