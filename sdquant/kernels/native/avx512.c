/* Kernels for AVX-512 with BF16 and VBMI. */
#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma"))), apply_to = function)
#define BUILD 1
#elif defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma")
#define BUILD 1
#endif

#ifdef BUILD
#define KERNELS avx512_kernels
#define NAME "avx512bf16"
#define BLOCKS avx512_blocks
#define PLUS(a, b, c) __builtin_fmaf(b, c, a)
#include "portable.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
