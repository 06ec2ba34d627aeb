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
#include "avx512_divide.h"

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

enum { NEXT = 2560 }; /* bytes, as in avx512_codes.c */

/* `divide` of by_turns.h. */
static void divide512(Type type, const void *x, const Divisors *divisors, int64_t count, void *to) {
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        const __m512 reciprocal = _mm512_mask_loadu_ps(_mm512_set1_ps(1), mask, divisors->reciprocal + i);
        if (type == F32) {
            _mm_prefetch((const char *)x + 4 * i + NEXT, _MM_HINT_T0); /* of rows that follow; maybe nobody's */
            const __m512 of = _mm512_mask_loadu_ps(_mm512_set1_ps(1), mask, (const float *)x + i);
            const __m512 by = _mm512_mask_loadu_ps(_mm512_set1_ps(1), mask, divisors->by + i);
            _mm512_mask_storeu_ps((float *)to + i, mask, quotient(of, by, reciprocal));
            continue;
        }
        if (i % 32 == 0) _mm_prefetch((const char *)x + 2 * i + NEXT, _MM_HINT_T0);
        const __m256i halves = _mm256_mask_loadu_epi16(_mm256_set1_epi16(0x3f80), mask, (const uint16_t *)x + i);
        const __m512 of = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(quotient_for_bf16(of, divisors->by + i, reciprocal, mask));
        _mm256_mask_storeu_epi16((uint16_t *)to + i, mask, rounded);
    }
}

enum {
    ROWS = 4,  /* of weights, by six of activations: see avx512_dots.c */
    TALL = 32, /* rows of activations from which turning weights pays */
};

const Kernels avx512_kernels = {"avx512bf16", decoder512, dotter512, turned512, dots512, ROWS, convert, widen, quantize, finish, product_avx512, 1 << BF16, 0, &rotation_avx512, expand_avx2, &narrow512, divide512, turns_of_scales, TALL};

#ifdef AMX
/* The same, but for products of more rows. */
const Kernels amx_kernels = {"amx", decoder512, dotter512, turned512, dots512, PANEL_ROWS, convert, widen, quantize, finish, product_amx, 1 << BF16, 0, &rotation_avx512, expand_avx2, &narrow_amx, divide512, turns_of_scales, 0, 1};
#endif
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
