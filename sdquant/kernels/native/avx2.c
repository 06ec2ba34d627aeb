/* The portable kernels, compiled for AVX2. */
#if (defined(__x86_64__) || defined(__i386__)) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define BUILD 1
#elif (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#pragma GCC target("avx2,fma")
#define BUILD 1
#endif

#ifdef BUILD
#define PLUS(a, b, c) __builtin_fmaf(b, c, a)
#include "avx2_tables.h"
#include "blocks.h"
#define LOOK_UP16 look_up_avx2
#include "portable.h"
#include "integers.h"

static Decode *avx2_decoder(const Form *form) { return form->packing < CODED ? decode_plain : avx2_blocks(form); }

const Kernels avx2_kernels = {"avx2", avx2_decoder, 0, dots, 4, convert, quantize, finish};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
