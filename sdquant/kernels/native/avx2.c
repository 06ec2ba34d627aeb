/* The portable kernels, compiled for AVX2. */
#if (defined(__x86_64__) || defined(__i386__)) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#define BUILD 1
#elif (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#pragma GCC target("avx2,fma,f16c")
#define BUILD 1
#endif

#ifdef BUILD
#include "blocks.h"
#include "avx2_runs.h"
#define LOOK_UP16 look_up_avx2
#include "portable.h"
#include "integers.h"

static Decode *decoder(const Form *form) { return form->packing < CODED ? decode_plain : avx2_blocks(form); }

const Kernels avx2_kernels = {"avx2", decoder, 0, 0, dots, PANEL_ROWS, convert, quantize, finish, 0};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
