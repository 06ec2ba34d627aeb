/* Codes of a few bits, one to a byte, 64 at a time. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"

/* The first `count` bytes (any number); zeros after them. */
INLINE __m512i bytes(const uint8_t *from, int64_t count) {
    if (count >= 64) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8(count > 0 ? ((__mmask64)1 << count) - 1 : 0, from);
}

INLINE __m256i half(const uint8_t *from, int64_t count) {
    if (count >= 32) return _mm256_loadu_si256((const __m256i *)from);
    return _mm256_maskz_loadu_epi8(count > 0 ? ((__mmask32)1 << count) - 1 : 0, from);
}

/* Two codes a byte. `late`: whether the first is in the high half. */
INLINE void nibbles(const uint8_t *from, int64_t count, int late, uint8_t *out) {
    for (int64_t i = 0; i < count; i += 32) {
        const __m512i pair = _mm512_cvtepu8_epi16(half(from + i, count - i));
        const __m512i other = _mm512_slli_epi16(pair, late ? 8 : 4);
        _mm512_storeu_si512(out + 2 * i, _mm512_or_si512(late ? _mm512_srli_epi16(pair, 4) : pair, other));
    }
}

/* Bytes 3i, 3i + 1, 3i + 2 of 64 into the low bytes of the i-th eight (of 8) or four (of 16). */
INLINE __m512i spread(__m512i packed, int unit) {
    static const uint8_t EIGHTS[64] = {
#define E(i) 3 * i, 3 * i + 1, 3 * i + 2, 63, 63, 63, 63, 63
        E(0), E(1), E(2), E(3), E(4), E(5), E(6), E(7)
#undef E
    };
    static const uint8_t FOURS[64] = {
#define F(i) 3 * i, 3 * i + 1, 3 * i + 2, 63
        F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#undef F
    };
    return _mm512_permutexvar_epi8(_mm512_loadu_si512(unit == 8 ? EIGHTS : FOURS), packed);
}

/* Eight fields of eight bits from each 64, which begin at these bits. */
INLINE __m512i fields(__m512i eights, int a, int b, int c, int d, int e, int f, int g, int h) {
    const uint64_t at = (uint64_t)a | (uint64_t)b << 8 | (uint64_t)c << 16 | (uint64_t)d << 24 | (uint64_t)e << 32 |
                        (uint64_t)f << 40 | (uint64_t)g << 48 | (uint64_t)h << 56;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)at), eights);
}

INLINE __m512i threes(__m512i packed) { return fields(spread(packed, 8), 0, 3, 6, 9, 12, 15, 18, 21); }

INLINE __m512i sdnq3(__m512i packed) {
    const __m512i eights = spread(packed, 8);
    /* The last two codes have two bits at the top of a byte, and a third one in the third byte. */
    const __m512i most = fields(eights, 0, 8, 16, 3, 11, 19, 6, 14), third = fields(eights, 0, 0, 0, 0, 0, 0, 20, 21);
    const __m512i kept = _mm512_set1_epi64(0x0303070707070707), added = _mm512_set1_epi64(0x0404000000000000);
    return _mm512_or_si512(_mm512_and_si512(most, kept), _mm512_and_si512(third, added));
}

INLINE __m512i sdnq6(__m512i packed) {
    const __m512i fours = spread(packed, 4);
    const __m512i high = _mm512_and_si512(_mm512_slli_epi32(fours, 22), _mm512_set1_epi32(0x30000000));
    const __m512i middle = _mm512_and_si512(_mm512_slli_epi32(fours, 12), _mm512_set1_epi32(0x0c000000));
    const __m512i low = _mm512_and_si512(_mm512_slli_epi32(fours, 2), _mm512_set1_epi32(0x03000000));
    const __m512i first = _mm512_and_si512(fours, _mm512_set1_epi32(0x003f3f3f));
    return _mm512_or_si512(_mm512_or_si512(first, high), _mm512_or_si512(middle, low));
}

/* Eight codes of `bits` bits from each of eight units of as many bytes. */
INLINE __m512i eights(__m512i packed, int bits) {
    const __m512i each = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                            _mm512_set1_epi64(bits * 0x0101010101010101));
    const __m512i at = _mm512_add_epi64(each, _mm512_set1_epi64(0x0706050403020100)); /* of 64 bits, byte by byte */
    const __m512i codes = fields(_mm512_permutexvar_epi8(at, packed), 0, bits, 2 * bits, 3 * bits, 4 * bits, 5 * bits,
                                 6 * bits, 7 * bits);
    return _mm512_and_si512(codes, _mm512_set1_epi8((char)((1 << bits) - 1)));
}

const uint8_t *unpack512(const Form *form, const Parts *parts, int64_t first, int64_t count, uint8_t *spare) {
    const Packing packing = form->packing;
    const uint8_t *from = parts->codes;
    switch (packing) {
    case NIBBLES_LOW:
    case NIBBLES_HIGH: {
        const int64_t early = first & 1, size = (early + count + 1) / 2;
        from += first >> 1;
        if (packing == NIBBLES_LOW) nibbles(from, size, 0, spare);
        else nibbles(from, size, 1, spare);
        return spare + early;
    }
    case PLANES4:
    case PLANES2: {
        const int planes = packing == PLANES4 ? 2 : 4;
        const int64_t groups = form->rows * form->columns / form->group;
        const int64_t held = (groups + planes - 1) / planes * form->group;
        const int shift = (int)(first / held) * (8 / planes);
        from += first % held;
        if (!shift) return from;
        const __m128i by = _mm_cvtsi32_si128(shift);
        for (int64_t i = 0; i < count; i += 64)
            _mm512_storeu_si512(spare + i, _mm512_srl_epi16(bytes(from + i, count - i), by));
        return spare;
    }
    case THREES:
    case SDNQ3: {
        const int64_t early = first % 8, size = (early + count + 7) / 8 * 3;
        from += first / 8 * 3;
        uint8_t *out = spare;
        for (int64_t i = 0; i < size; i += 24, out += 64) {
            const __m512i packed = bytes(from + i, size - i < 24 ? size - i : 24);
            _mm512_storeu_si512(out, packing == THREES ? threes(packed) : sdnq3(packed));
        }
        return spare + early;
    }
    case SDNQ6: {
        const int64_t early = first % 4, size = (early + count + 3) / 4 * 3;
        from += first / 4 * 3;
        uint8_t *out = spare;
        for (int64_t i = 0; i < size; i += 48, out += 64)
            _mm512_storeu_si512(out, sdnq6(bytes(from + i, size - i < 48 ? size - i : 48)));
        return spare + early;
    }
    case TWOS:
    case FIVES:
    case SIXES:
    case SEVENS: {
        const int bits = bits_of_code(packing);
        const int64_t early = first % 8, size = (early + count + 7) / 8 * bits;
        from += first / 8 * bits;
        uint8_t *out = spare;
        for (int64_t i = 0; i < size; i += 8 * bits, out += 64) {
            const __m512i packed = bytes(from + i, size - i < 8 * bits ? size - i : 8 * bits);
            _mm512_storeu_si512(out, eights(packed, bits));
        }
        return spare + early;
    }
    default: return from + first;
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
