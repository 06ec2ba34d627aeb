/* The kernels for AVX2: the portable ones compiled for it, but for decoding and for products. */
#include "avx2.h"

#ifdef BUILD
#include "blocks.h"
#include "avx2_runs.h"
#define LOOK_UP16 look_up_avx2
#define OTHER_PRODUCTS
#include "portable.h"
#include "by_turns.h"
#include "avx2_decode.h"
#include "integers.h"
#include "expand.h"
#include "rotate.h"

static Decode *decoder(const Form *form) { return form->packing < CODED ? decoder_avx2(form) : avx2_blocks(form); }

Product product_avx2; /* avx2_product.c */
int unrounded_avx2(const Form *form, Type type);

const Kernels avx2_kernels = {"avx2", decoder, 0, 0, 0, 0, convert, widen, quantize, finish, product_avx2, 1 << F32 | 1 << BF16 | 1 << F16, unrounded_avx2, &rotation_avx2, expand_avx2, 0, divide, turns_of_scales};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
