/* Codes that are whole numbers of two to eight bits, in the order of the weights: 32 at a time as eights of numbers. For files
   that include avx2.h. */
#ifndef SDQUANT_AVX2_BITS_H
#define SDQUANT_AVX2_BITS_H

#include <string.h>

#include "codes.h"

enum { IN_ORDER = 32, BEYOND = 4 }; /* codes at a time; bytes behind them that are read as well */

/* Bytes from which on a code of these bits has its own: of each eight, which are as many bytes. Two for each code. */
INLINE __m256i starts(int bits) {
#define OF(i) (char)((i) * bits / 8), (char)((i) * bits / 8 + 1), -1, -1
    return _mm256_setr_epi8(OF(0), OF(1), OF(2), OF(3), OF(4), OF(5), OF(6), OF(7));
#undef OF
}

/* And by how much it is shifted there, or in a word that has all eight. */
INLINE __m256i shifts(int bits, int within) {
    return _mm256_setr_epi32(0, bits % within, 2 * bits % within, 3 * bits % within, 4 * bits % within, 5 * bits % within,
                             6 * bits % within, 7 * bits % within);
}

INLINE __m256i word_at(const uint8_t *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return _mm256_set1_epi32(word);
}

/* Four codes of six bits in three bytes, see sdnq6_of: 32 of them as bytes. */
INLINE __m256i bytes_of_sdnq6(const uint8_t *from) {
    const __m256i threes = _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1,
                                            0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    const __m128i low = _mm_loadu_si128((const __m128i *)from), high = _mm_loadu_si128((const __m128i *)(from + 12));
    const __m256i words = _mm256_shuffle_epi8(_mm256_set_m128i(high, low), threes);
    const __m256i own = _mm256_and_si256(words, _mm256_set1_epi32(0x3f3f3f));
    const __m256i a = _mm256_and_si256(_mm256_slli_epi32(words, 22), _mm256_set1_epi32(0x30000000));
    const __m256i b = _mm256_and_si256(_mm256_slli_epi32(words, 12), _mm256_set1_epi32(0x0c000000));
    const __m256i c = _mm256_and_si256(_mm256_slli_epi32(words, 2), _mm256_set1_epi32(0x03000000));
    return _mm256_or_si256(_mm256_or_si256(own, a), _mm256_or_si256(b, c));
}

/* Eight codes of three bits in three bytes, see sdnq3_of. */
INLINE __m256i eight_of_sdnq3(const uint8_t *from) {
    const __m256i word = word_at(from);
    const __m256i low = _mm256_srlv_epi32(word, _mm256_setr_epi32(0, 8, 16, 3, 11, 19, 6, 14));
    const __m256i high = _mm256_srlv_epi32(word, _mm256_setr_epi32(0, 0, 0, 0, 0, 0, 20, 21));
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_setr_epi32(7, 7, 7, 7, 7, 7, 3, 3)),
                           _mm256_and_si256(high, _mm256_setr_epi32(0, 0, 0, 0, 0, 0, 4, 4)));
}

/* 32 codes. `plane`: of PLANES2, which bits of each byte. */
INLINE void codes_in_order(Packing packing, const uint8_t *from, int plane, __m256i *out) {
    const int bits = bits_of_code(packing);
    uint8_t bytes[IN_ORDER];
    if (packing == SDNQ6) {
        _mm256_storeu_si256((__m256i *)bytes, bytes_of_sdnq6(from));
        from = bytes;
    }
    for (int i = 0; i < 4; i++) {
        if (packing == SIGNED_BYTES || packing == BYTES || packing == SDNQ6 || packing == PLANES2) {
            const __m128i eight = _mm_loadl_epi64((const __m128i *)(from + 8 * i));
            out[i] = packing == SIGNED_BYTES ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight);
            if (packing == PLANES2)
                out[i] = _mm256_and_si256(_mm256_srl_epi32(out[i], _mm_cvtsi32_si128(2 * plane)), _mm256_set1_epi32(3));
        } else if (packing == SDNQ3) {
            out[i] = eight_of_sdnq3(from + 3 * i);
        } else if (bits <= 4) {
            const __m256i one = _mm256_srlv_epi32(word_at(from + bits * i), shifts(bits, 32));
            out[i] = _mm256_and_si256(one, _mm256_set1_epi32((1 << bits) - 1));
        } else {
            const __m128i eight = _mm_loadl_epi64((const __m128i *)(from + bits * i));
            const __m256i pairs = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(eight), starts(bits));
            out[i] = _mm256_and_si256(_mm256_srlv_epi32(pairs, shifts(bits, 8)), _mm256_set1_epi32((1 << bits) - 1));
        }
    }
}

#endif
