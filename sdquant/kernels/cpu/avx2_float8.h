/* Codes of float8 as numbers, eight at a time by the instruction for float16, where a table of 256 takes a load for each. For
   files that include avx2.h. */
#ifndef SDQUANT_AVX2_FLOAT8_H
#define SDQUANT_AVX2_FLOAT8_H

#include "form.h"

/* Sixteen codes as signs and sizes. */
INLINE __m128i signs_and_sizes(Float8Kind kind, __m128i codes) {
    if (kind != E4M3_SORTED) return codes;
    const __m128i positive = _mm_cmpgt_epi8(_mm_setzero_si128(), codes); /* the upper half of the codes */
    return _mm_xor_si128(codes, _mm_xor_si128(_mm_and_si128(positive, _mm_set1_epi8(0x7f)), _mm_set1_epi8(-1)));
}

/* The numbers of eight; of E4M3 2^-8 of them. */
INLINE __m256 eight_numbers(Float8Kind kind, __m128i eight) {
    if (kind == E5M2_BITS) return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), eight));
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(eight), 7); /* with the sign twice */
    return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xbfff)));
}

/* What those are multiplied by. */
INLINE float factor_of(Float8Kind kind, const Float8 *of) { return kind == E5M2_BITS ? of->factor : 256 * of->factor; }

/* Whether one of sixteen has to be looked up. */
INLINE int has_others(const Float8 *of, __m128i sixteen) {
    const __m128i size = _mm_and_si128(sixteen, _mm_set1_epi8(0x7f)), least = _mm_set1_epi8((char)of->least);
    const __m128i over = _mm_cmpgt_epi8(size, _mm_set1_epi8((char)of->most));
    const __m128i under = _mm_andnot_si128(_mm_cmpeq_epi8(size, _mm_setzero_si128()), _mm_cmpgt_epi8(least, size));
    return _mm_movemask_epi8(_mm_or_si128(over, under)) != 0;
}

/* Sixteen codes as numbers of the table, divided by `factor_of`. 0: one has to be looked up. */
INLINE int sixteen_numbers(Float8Kind kind, const Float8 *of, const uint8_t *codes, __m256 *numbers) {
    const __m128i sixteen = signs_and_sizes(kind, _mm_loadu_si128((const __m128i *)codes));
    if (has_others(of, sixteen)) return 0;
    numbers[0] = eight_numbers(kind, sixteen);
    numbers[1] = eight_numbers(kind, _mm_unpackhi_epi64(sixteen, sixteen));
    return 1;
}

#endif
