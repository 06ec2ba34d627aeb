/* What the AVX-512 decoders share: 32 numbers at a time, in the type that is wanted.

   Included after avx512.h. The trick of the 4-bit types: the weights of a sub-block have only 16 values. They are computed once, rounded once,
   and the codes look them up, 32 of them in one instruction (a permutation whose indices are the codes). */
#ifndef SDQUANT_BLOCKS_AVX512_H
#define SDQUANT_BLOCKS_AVX512_H

#include "blocks.h"

/* Where numbers go; `type` is a constant after inlining. */
typedef struct {
    void *to;
    Type type;
} sink;

/* The float16 at an address, sixteen times. */
INLINE __m512 halves_at(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_set1_epi16((short)u16(at))); }

/* 32 floats to 32 halves of the wanted kind. The instruction for bfloat16 makes zeros of subnormal numbers, which only
   MXFP4 has: see `subnormal_words`. */
INLINE __m512i words(__m512 low, __m512 high, Type type) {
    if (type == BF16)
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
                              _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
}

INLINE void put(sink out, int64_t at, __m512 low, __m512 high) {
    if (out.type == F32) {
        _mm512_storeu_ps((float *)out.to + at, low);
        _mm512_storeu_ps((float *)out.to + at + 16, high);
    } else {
        _mm512_storeu_si512((uint16_t *)out.to + at, words(low, high, out.type));
    }
}

/* A table of 32 floats, and as halves. */
typedef struct {
    __m512 low, high;
    __m512i halves;
} table;

INLINE table table_of(__m512 low, __m512 high, Type type) {
    const table made = {low, high, type == F32 ? _mm512_setzero_si512() : words(low, high, type)};
    return made;
}

/* 32 codes, one in each byte, below 32. */
INLINE void look_up(sink out, int64_t at, table from, __m256i codes) {
    if (out.type == F32) {
        const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes));
        const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1));
        _mm512_storeu_ps((float *)out.to + at, _mm512_permutex2var_ps(from.low, low, from.high));
        _mm512_storeu_ps((float *)out.to + at + 16, _mm512_permutex2var_ps(from.low, high, from.high));
    } else {
        _mm512_storeu_si512((uint16_t *)out.to + at, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes), from.halves));
    }
}

/* 32 signed bytes as floats, the first 16 and the last 16. */
INLINE __m512 low_floats(__m256i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
}

INLINE __m512 high_floats(__m256i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
}

/* 32 signed bytes, each half times a number of its own. */
INLINE void put_bytes(sink out, int64_t at, __m256i bytes, __m512 low, __m512 high) {
    put(out, at, _mm512_mul_ps(low_floats(bytes), low), _mm512_mul_ps(high_floats(bytes), high));
}

/* 16 unsigned bytes as floats. */
INLINE __m512 sixteen(const uint8_t *bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
}

/* Number `lane` of sixteen, sixteen times. */
INLINE __m512 spread(__m512 from, int lane) { return _mm512_permutexvar_ps(_mm512_set1_epi32(lane), from); }

/* The first sixteen codes as floats, 0 to 15, and the next. */
INLINE __m512 counted(int from) {
    const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(numbers, _mm512_set1_epi32(from)));
}

INLINE __m256i bytes32(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }

/* Each byte shifted right and masked: bits that come in from the byte above are masked off, as mask >> shift is 0xff
   or less only where the caller's codes fit. */
INLINE __m256i shifted_bytes(__m256i bytes, int shift, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(bytes, (unsigned)shift), _mm256_set1_epi8((char)mask));
}

/* 16 bytes to 32 4-bit codes: the low halves come first. */
INLINE __m256i nibbles(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

/* Bit i of a number as bit 4 of byte i. */
INLINE __m256i fifth_bits(uint32_t bits) { return _mm256_maskz_set1_epi8(bits, 16); }

/* Blocks are too small for the processor to see that memory is read in order: they are asked for in time. Measured, a
   product with one row, cold: half the time that it takes without. */
INLINE void ask_for(const uint8_t *at, int bytes) {
    for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char *)at + line, _MM_HINT_T0);
}

/* The decoder of a type: the inlined function of a block three times, each for one type of floats. */
#define DECODE(name) INLINE void name(const uint8_t *b, sink out, const int8_t *grid)

#define EACH_BLOCK(name, weights, bytes, type, number) \
    for (number *to = out; count > 0; count -= weights, from += bytes, to += weights) { \
        ask_for(from + ahead, bytes); \
        name(from, (sink){to, type}, (const int8_t *)parts->zeros); \
    }

#define DEFINE(name, weights, bytes) \
    void avx512_##name(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) { \
        const uint8_t *from = parts->codes + first / weights * bytes; \
        const int64_t ahead = parts->ahead / weights * bytes; \
        (void)form; \
        if (type == F32) EACH_BLOCK(name, weights, bytes, F32, float) \
        else if (type == BF16) EACH_BLOCK(name, weights, bytes, BF16, uint16_t) \
        else EACH_BLOCK(name, weights, bytes, F16, uint16_t) \
    }

#define DECLARE(name, weights, bytes) Decode avx512_##name;
BLOCK_TYPES(DECLARE)

#endif
