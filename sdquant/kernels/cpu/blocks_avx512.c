/* GGUF's legacy and K types with AVX-512: `blocks_avx512.h` has the method, `blocks_unpack.h` the layouts. */
#include "avx512.h"

#ifdef BUILD
#include "blocks_avx512.h"

DECODE(q8_0) {
    const __m512 scale = halves_at(b);
    const __m256i codes = bytes32(b + 2);
    (void)grid;
    put(out, 0, _mm512_mul_ps(low_floats(codes), scale), _mm512_mul_ps(high_floats(codes), scale));
}

/* 32 weights of 32 values, (code - zero) * scale. */
INLINE void scaled_codes(sink out, int64_t at, __m256i codes, int zero, __m512 scale) {
    look_up(out, at, table_of(_mm512_mul_ps(counted(-zero), scale), _mm512_mul_ps(counted(16 - zero), scale), out.type),
            codes);
}

/* code * scale + shift: the products are exact, so that fusing changes no bit. */
INLINE void shifted_codes(sink out, int64_t at, __m256i codes, __m512 scale, __m512 shift) {
    look_up(out, at,
            table_of(_mm512_fmadd_ps(counted(0), scale, shift), _mm512_fmadd_ps(counted(16), scale, shift), out.type),
            codes);
}

DECODE(q4_0) {
    const __m512 values = _mm512_mul_ps(counted(-8), halves_at(b));
    (void)grid;
    look_up(out, 0, table_of(values, values, out.type), nibbles(b + 2));
}

DECODE(q4_1) {
    const __m512 values = _mm512_fmadd_ps(counted(0), halves_at(b), halves_at(b + 2));
    (void)grid;
    look_up(out, 0, table_of(values, values, out.type), nibbles(b + 4));
}

DECODE(q5_0) {
    (void)grid;
    scaled_codes(out, 0, _mm256_or_si256(nibbles(b + 6), fifth_bits(u32(b + 2))), 16, halves_at(b));
}

DECODE(q5_1) {
    const __m256i codes = _mm256_or_si256(nibbles(b + 8), fifth_bits(u32(b + 4)));
    (void)grid;
    shifted_codes(out, 0, codes, halves_at(b), halves_at(b + 2));
}

/* Sub-blocks of 16 weights with four values each: a table of 32 holds those of eight, in which a code finds its own
   by three bits more. */
DECODE(q2_k) {
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)b));
    const __m512 scales = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(15))), halves_at(b + 80));
    const __m512 minimums = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(pairs, 4)), halves_at(b + 82));
    const __m512i fours = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512 code = _mm512_cvtepi32_ps(_mm512_set4_epi32(3, 2, 1, 0));
    (void)grid;
    for (int part = 0; part < 2; part++) {
        const __m256i bytes = bytes32(b + 16 + 32 * part);
        const __m512i first = _mm512_add_epi32(fours, _mm512_set1_epi32(8 * part));
        const __m512i next = _mm512_add_epi32(first, _mm512_set1_epi32(4));
        const __m512 low = _mm512_fmsub_ps(code, _mm512_permutexvar_ps(first, scales), _mm512_permutexvar_ps(first, minimums));
        const __m512 high = _mm512_fmsub_ps(code, _mm512_permutexvar_ps(next, scales), _mm512_permutexvar_ps(next, minimums));
        const table values = table_of(low, high, out.type);
        for (int two = 0; two < 4; two++) {
            const __m256i own = _mm256_inserti128_si256(_mm256_set1_epi8((char)(8 * two)), _mm_set1_epi8((char)(8 * two + 4)), 1);
            look_up(out, 128 * part + 32 * two, values, _mm256_or_si256(shifted_bytes(bytes, 2 * two, 3), own));
        }
    }
}

/* The same with eight values each: a table of 32 is four sub-blocks'. */
DECODE(q3_k) {
    uint8_t six[16];
    q3_scales(b + 96, six);
    const __m512 scales = _mm512_mul_ps(_mm512_sub_ps(sixteen(six), _mm512_set1_ps(32)), halves_at(b + 108));
    const __m512i eights = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512 code = _mm512_cvtepi32_ps(_mm512_set_epi32(3, 2, 1, 0, -1, -2, -3, -4, 3, 2, 1, 0, -1, -2, -3, -4));
    const __m256i own = _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi8(8), 1), high = bytes32(b);
    const __m256i four = _mm256_set1_epi8(4);
    (void)grid;
    for (int pair = 0; pair < 4; pair++) {
        const __m256i bytes = bytes32(b + 32 + 32 * (pair / 2));
        const __m512i first = _mm512_add_epi32(eights, _mm512_set1_epi32(4 * pair));
        const __m512i next = _mm512_add_epi32(first, _mm512_set1_epi32(2));
        const table values = table_of(_mm512_mul_ps(code, _mm512_permutexvar_ps(first, scales)),
                                      _mm512_mul_ps(code, _mm512_permutexvar_ps(next, scales)), out.type);
        for (int two = 0; two < 2; two++) {
            const __mmask32 set = _mm256_test_epi8_mask(high, _mm256_set1_epi8((char)(1 << (2 * pair + two))));
            const __m256i low = shifted_bytes(bytes, pair % 2 * 4 + 2 * two, 3);
            const __m256i codes = _mm256_mask_add_epi8(low, set, low, four);
            look_up(out, 64 * pair + 32 * two, values,
                    _mm256_or_si256(_mm256_or_si256(codes, own), _mm256_set1_epi8((char)(16 * two))));
        }
    }
}

/* The scales in lanes 0 to 7, the minimums in 8 to 15, each times its fp16 number. */
INLINE __m512 scales_and_minimums(const uint8_t *b) {
    uint8_t six[16];
    six_bits(b + 4, six);
    return _mm512_mul_ps(sixteen(six), _mm512_mask_mov_ps(halves_at(b), 0xff00, halves_at(b + 2)));
}

DECODE(q4_k) {
    const __m512 all = scales_and_minimums(b);
    (void)grid;
    for (int pair = 0; pair < 4; pair++) {
        const __m256i bytes = bytes32(b + 16 + 32 * pair);
        const int low = 2 * pair, high = low + 1;
        const table values = table_of(_mm512_fmsub_ps(counted(0), spread(all, low), spread(all, 8 + low)),
                                      _mm512_fmsub_ps(counted(0), spread(all, high), spread(all, 8 + high)), out.type);
        look_up(out, 64 * pair, values, shifted_bytes(bytes, 0, 15));
        look_up(out, 64 * pair + 32, values, _mm256_or_si256(shifted_bytes(bytes, 4, 15), _mm256_set1_epi8(16)));
    }
}

DECODE(q5_k) {
    const __m512 all = scales_and_minimums(b);
    const __m512 sign = _mm512_set1_ps(-0.0f);
    const __m256i fifth = bytes32(b + 16), sixteen_more = _mm256_set1_epi8(16);
    (void)grid;
    for (int sub = 0; sub < 8; sub++) {
        const __m256i low = shifted_bytes(bytes32(b + 48 + 32 * (sub / 2)), sub % 2 * 4, 15);
        const __mmask32 set = _mm256_test_epi8_mask(fifth, _mm256_set1_epi8((char)(1 << sub)));
        const __m256i codes = _mm256_mask_add_epi8(low, set, low, sixteen_more);
        shifted_codes(out, 32 * sub, codes, spread(all, sub), _mm512_xor_ps(sign, spread(all, 8 + sub)));
    }
}

/* 64 values each are too many for a table: the codes themselves become floats. */
DECODE(q6_k) {
    const __m512i signs = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(b + 192)));
    const __m512 scales = _mm512_mul_ps(_mm512_cvtepi32_ps(signs), halves_at(b + 208));
    (void)grid;
    for (int sub = 0; sub < 8; sub++) {
        const int half = sub / 4, part = sub % 4;
        const __m256i low = shifted_bytes(bytes32(b + 64 * half + 32 * (part % 2)), part / 2 * 4, 15);
        const __m256i two = shifted_bytes(bytes32(b + 128 + 32 * half), 2 * part, 3);
        const __m256i codes = _mm256_sub_epi8(_mm256_or_si256(low, _mm256_slli_epi16(two, 4)), _mm256_set1_epi8(32));
        put(out, 32 * sub, _mm512_mul_ps(low_floats(codes), spread(scales, 2 * sub)),
            _mm512_mul_ps(high_floats(codes), spread(scales, 2 * sub + 1)));
    }
}

DEFINE(q8_0, 32, 34)
DEFINE(q4_0, 32, 18)
DEFINE(q4_1, 32, 20)
DEFINE(q5_0, 32, 22)
DEFINE(q5_1, 32, 24)
DEFINE(q2_k, 256, 84)
DEFINE(q3_k, 256, 110)
DEFINE(q4_k, 256, 144)
DEFINE(q5_k, 256, 176)
DEFINE(q6_k, 256, 210)

#define DECODER(name) avx512_##name
DEFINE_BLOCKS(avx512_blocks)
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
