/* GGUF's rarer types with AVX-512: `blocks_avx512.h` has the method, `blocks_unpack.h` the layouts. */
#include "avx512.h"

#ifdef BUILD
#include "blocks_avx512.h"

INLINE __m512 floats16(const int8_t *numbers) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)numbers)));
}

static const int8_t non_linear[16] = {NON_LINEAR}, e2m1[16] = {E2M1};

DECODE(iq4_nl) {
    const __m512 values = _mm512_mul_ps(floats16(non_linear), halves_at(b));
    (void)grid;
    look_up(out, 0, table_of(values, values, out.type), nibbles(b + 2));
}

DECODE(iq4_xs) {
    const uint64_t low = u32(b + 4), high = u16(b + 2);
    const __m128i lanes = _mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m128i twos = _mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i four = _mm512_and_si512(
        _mm512_srlv_epi32(_mm512_set1_epi32((int)low), _mm512_cvtepi8_epi32(lanes)), _mm512_set1_epi32(15));
    const __m512i two = _mm512_and_si512(
        _mm512_srlv_epi32(_mm512_set1_epi32((int)high), _mm512_cvtepi8_epi32(twos)), _mm512_set1_epi32(3));
    const __m512i six = _mm512_sub_epi32(_mm512_or_si512(four, _mm512_slli_epi32(two, 4)), _mm512_set1_epi32(32));
    const __m512 scales = _mm512_mul_ps(halves_at(b), _mm512_cvtepi32_ps(six)), values = floats16(non_linear);
    const __m256i next = _mm256_set1_epi8(16);
    (void)grid;
    for (int sub = 0; sub < 8; sub += 2) {
        const table both = table_of(_mm512_mul_ps(values, spread(scales, sub)),
                                    _mm512_mul_ps(values, spread(scales, sub + 1)), out.type);
        look_up(out, 32 * sub, both, nibbles(b + 8 + 16 * sub));
        look_up(out, 32 * sub + 32, both, _mm256_or_si256(nibbles(b + 24 + 16 * sub), next));
    }
}

/* Sixteen floats to bfloat16 by integers, for numbers that may be subnormal (and are no NaN). */
INLINE __m256i subnormal_words(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

DECODE(mxfp4) {
    const __m512 values = _mm512_mul_ps(floats16(e2m1), _mm512_set1_ps(e8m0_half(b[0])));
    table made = table_of(values, values, out.type);
    (void)grid;
    if (out.type == BF16)
        made.halves = _mm512_castsi256_si512(subnormal_words(values));
    look_up(out, 0, made, nibbles(b + 1));
}

DECODE(nvfp4) {
    const __m512 values = floats16(e2m1);
    const __m256i own = _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi8(16), 1);
    (void)grid;
    for (int sub = 0; sub < 4; sub += 2) { /* 8 bytes: 8 low halves, then 8 high ones */
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(b + 4 + 8 * sub));
        const __m128i high = _mm_srli_epi16(bytes, 4);
        const __m256i halves = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi64(bytes, high)),
                                                       _mm_unpackhi_epi64(bytes, high), 1);
        const table both = table_of(_mm512_mul_ps(values, _mm512_set1_ps(e4m3_half(b[sub]))),
                                    _mm512_mul_ps(values, _mm512_set1_ps(e4m3_half(b[sub + 1]))), out.type);
        look_up(out, 16 * sub, both, _mm256_or_si256(_mm256_and_si256(halves, _mm256_set1_epi8(15)), own));
    }
}

/* -1, 0 and 1 from bytes that are digits as fractions, multiplied by 3 ** k already: times 3, its ninth and tenth bit. */
INLINE __m256i digits(__m256i fractions) {
    const __m512i wide = _mm512_cvtepu8_epi16(fractions);
    const __m512i three = _mm512_add_epi16(wide, _mm512_add_epi16(wide, wide));
    return _mm256_sub_epi8(_mm512_cvtepi16_epi8(_mm512_srli_epi16(three, 8)), _mm256_set1_epi8(1));
}

INLINE __m256i times_three(__m256i bytes) { return _mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes)); }

DECODE(tq1_0) {
    const __m512 scale = halves_at(b + 52);
    uint8_t last[96]; /* the five digits of 16 bytes, then the four of 4 bytes */
    __m256i first = bytes32(b);
    __m128i next = _mm_loadu_si128((const __m128i *)(b + 32));
    uint32_t four = u32(b + 48);
    (void)grid;
    for (int digit = 0; digit < 5; digit++, first = times_three(first)) {
        put_bytes(out, 32 * digit, digits(first), scale, scale);
        _mm_storeu_si128((__m128i *)(last + 16 * digit), next);
        next = _mm_add_epi8(next, _mm_add_epi8(next, next));
        if (digit < 4)
            memcpy(last + 80 + 4 * digit, &four, 4);
        /* Four bytes times three, none carrying into the next. */
        four = (((four & 0x00ff00ff) * 3) & 0x00ff00ff) | ((((four >> 8) & 0x00ff00ff) * 3) & 0x00ff00ff) << 8;
    }
    for (int part = 0; part < 3; part++)
        put_bytes(out, 160 + 32 * part, digits(bytes32(last + 32 * part)), scale, scale);
}

DECODE(tq2_0) {
    const __m512 values = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_set4_epi32(2, 1, 0, -1)), halves_at(b + 64));
    const table made = table_of(values, values, out.type);
    (void)grid;
    for (int sub = 0; sub < 8; sub++)
        look_up(out, 32 * sub, made, shifted_bytes(bytes32(b + 32 * (sub / 4)), sub % 4 * 2, 3));
}

DEFINE(iq4_nl, 32, 18)
DEFINE(iq4_xs, 256, 136)
DEFINE(mxfp4, 32, 17)
DEFINE(nvfp4, 64, 36)
DEFINE(tq1_0, 256, 54)
DEFINE(tq2_0, 256, 66)
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
