/* Kernels for AVX-512 with VBMI and BF16: what the files avx512_*.c have. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "avx2_runs.h"
#include "blocks.h"
#define LOOK_UP16 look_up_avx2
#define OTHER_PRODUCTS
#include "portable.h"
#include "by_turns.h"
#include "integers.h"
#include "expand.h"
#include "narrow.h"
#include "rotate.h"

void decode_plain512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    decode_plain(form, parts, first, count, type, out);
}

static Decode *decoder512(const Form *form) {
    if (form->taps > 1) return turns512;
    if (form->packing >= CODED) return avx512_blocks(form);
    return bits_of_code(form->packing) > 4 ? bytes512 : choose512;
}

static DecodeAndDot *dotter512(const Form *form) {
    Decode *decode = decoder512(form);
    return decode == bytes512 ? bytes_and_dot512 : decode == choose512 ? choose_and_dot512 : 0;
}

enum {
    ROWS = 4,  /* of weights, by six of activations: see avx512_dots.c */
    TALL = 32, /* rows of activations from which turning weights pays */
};

const Kernels avx512_kernels = {"avx512bf16", decoder512, dotter512, turned512, dots512, ROWS, convert, widen, quantize, finish, product_avx512, 1 << BF16, 0, &rotation_avx2, expand_avx2, &narrow512, divide, turns_of_scales, TALL};

#ifdef AMX
/* The same, but for products of more rows. */
const Kernels amx_kernels = {"amx", decoder512, dotter512, turned512, dots512, PANEL_ROWS, convert, widen, quantize, finish, product_amx, 1 << BF16, 0, &rotation_avx2, expand_avx2, &narrow_amx, divide, turns_of_scales};
#endif
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
