/* Quotients from reciprocals: a division takes six times as long as what is here. For files as avx512_transpose.h. */
#ifndef SDQUANT_AVX512_DIVIDE_H
#define SDQUANT_AVX512_DIVIDE_H

/* x / by, rounded to the nearest, for a `reciprocal` that is. Each of the two corrections adds what is left of x, which is
   exact, times the reciprocal: the first leaves less than one place, the second none (Markstein, "Computation of elementary
   functions on the IBM RISC System/6000 processor", 1990). What is left is not exact where numbers are very small, and
   there is no such thing for infinity and NaN: those are divided. */
INLINE __m512 quotient(__m512 x, __m512 by, __m512 reciprocal) {
    const __m512 least = _mm512_set1_ps(0x1p-90f), most = _mm512_set1_ps(0x1p90f);
    __m512 q = _mm512_mul_ps(x, reciprocal);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, by, x), reciprocal, q);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, by, x), reciprocal, q);
    const __m512 size = _mm512_abs_ps(x), of_q = _mm512_abs_ps(q);
    const __mmask16 usual = _mm512_cmp_ps_mask(size, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(size, most, _CMP_LE_OQ) &
                            _mm512_cmp_ps_mask(of_q, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(of_q, most, _CMP_LE_OQ);
    return usual == 0xffff ? q : _mm512_mask_div_ps(q, (__mmask16)~usual, x, by);
}

/* x / by for x of bf16, near enough that rounding it to bf16 gives the rounded quotient. The middle m between two numbers of
   bf16 is an odd integer of nine bits times a power of two, and x one of eight; where `by` has at most eleven bits, as bf16
   and float16 have, x differs from m * by by one at least where both are integers, so that x / by is 2^-20 of itself or more
   away from m. The product with the reciprocal is less than 2^-22 away from x / by. What has no product of all its bits is
   divided: numbers that are none, infinite, zero or small, and where the reciprocal is NaN, see `Divisors`. */
INLINE __m512 quotient_for_bf16(__m512 x, const float *by, __m512 reciprocal, __mmask16 mask) {
    enum { NO_NUMBER = 0x81, ZERO = 0x06, INFINITE = 0x18, SMALL = 0x20 };
    const __m512 q = _mm512_mul_ps(x, reciprocal);
    const __mmask16 unusual = _mm512_fpclass_ps_mask(q, NO_NUMBER | ZERO | INFINITE | SMALL);
    return unusual ? _mm512_mask_div_ps(q, unusual, x, _mm512_maskz_loadu_ps(mask, by)) : q;
}

#endif
