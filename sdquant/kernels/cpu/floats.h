/* Halves and bfloat16 in plain C, without branches, so that loops over them become vector code. */
#ifndef SDQUANT_FLOATS_H
#define SDQUANT_FLOATS_H

#include <stdint.h>
#include <string.h>

#include "form.h"

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even);
}

static inline float from_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }

static inline uint16_t to_f16(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    uint32_t large = size > 0x7f800000 ? 0x7e00 : 0x7c00;                       /* NaN, infinity */
    uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3f000000;                /* the sum rounds at 2^-24 */
    uint32_t middle = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;   /* exponent 127 - 15 less */
    return (uint16_t)(sign | (size >= 0x47800000 ? large : size < 0x38800000 ? small : middle));
}

static inline float from_f16(uint16_t half) {
    uint32_t size = (uint32_t)(half & 0x7fff) << 13, exponent = size & 0x0f800000;
    uint32_t usual = size + 0x38000000;
    uint32_t small = bits_of(of_bits(size + 0x38800000) - of_bits(0x38800000));
    uint32_t found = exponent == 0x0f800000 ? usual + 0x38000000 : exponent == 0 ? small : usual;
    return of_bits(found | (uint32_t)(half & 0x8000) << 16);
}

/* Rounded to the type and back. */
static inline float rounded(float value, Type type) {
    return type == BF16 ? from_bf16(to_bf16(value)) : type == F16 ? from_f16(to_f16(value)) : value;
}

static inline float load(const void *from, Type type, int64_t i) {
    return type == BF16  ? from_bf16(((const uint16_t *)from)[i])
           : type == F16 ? from_f16(((const uint16_t *)from)[i])
                         : ((const float *)from)[i];
}

/* A sum, with the bias of its row of the weight, to its place: out[j, row] of `type`. */
static inline void put_sum(float sum, Type type, const void *bias, void *out, int64_t j, int64_t row, int64_t rows) {
    const int64_t at = j * rows + row;
    if (bias) sum += load(bias, type, row);
    if (type == F32) ((float *)out)[at] = sum;
    else ((uint16_t *)out)[at] = type == BF16 ? to_bf16(sum) : to_f16(sum);
}

#endif
