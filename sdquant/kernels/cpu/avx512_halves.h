/* Numbers of 16 bits for AVX-512 without its instructions for bf16. Included after immintrin.h, with INLINE set. */
INLINE __mmask16 first_of(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

/* Sixteen floats as numbers of 16 bits, to the nearest, ties to even. */
INLINE __m256i half_of(Type type, __m512 y) {
    if (type == F16) return _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    even = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(even);
}

/* Sixteen floats, to the nearest bf16. */
INLINE __m512 to_bf16s(__m512 y) {
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512 cut = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000)));
    return _mm512_mask_mov_ps(cut, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), _mm512_set1_ps(NAN));
}
