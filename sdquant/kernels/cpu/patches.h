#ifndef SDQUANT_PATCHES_H
#define SDQUANT_PATCHES_H

#include <stdint.h>

/* Images [b, channels, high, wide] of numbers of 2 or 4 bytes, and how a kernel goes over them. */
typedef struct {
    int64_t size;
    const void *x;
    int64_t channels, high, wide;
    int64_t out_high, out_wide, kernel_high, kernel_wide;
    int64_t step[2], pad[2], spread[2]; /* stride, padding and dilation, vertical and horizontal */
} Images;

/* Rows start .. stop of [b * out_high * out_wide, channels * kernel_high * kernel_wide]. */
void patches(const Images *from, int64_t start, int64_t stop, void *out);

#endif
