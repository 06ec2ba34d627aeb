/* GGUF's types whose codes select rows of a grid, with AVX-512: IQ1 to IQ3. What a block's sub-blocks have of their own
   (indices, signs, scales) is computed for all at once and read back from memory, where one of it is one instruction. */
#include "avx512.h"

#ifdef BUILD
#include "blocks_avx512.h"

/* Rows of eight weights: the bytes of `grid` at which four of them begin. */
INLINE __m256i rows_at(const int8_t *grid, const uint16_t *at) {
    const double *of[4] = {(const double *)(grid + at[0]), (const double *)(grid + at[1]), (const double *)(grid + at[2]),
                           (const double *)(grid + at[3])};
    const __m128d low = _mm_loadh_pd(_mm_load_sd(of[0]), of[1]), high = _mm_loadh_pd(_mm_load_sd(of[2]), of[3]);
    return _mm256_castpd_si256(_mm256_insertf128_pd(_mm256_castpd128_pd256(low), high, 1));
}

/* Where rows of eight begin, from the low bytes of 32 indices and what lies above, whose upper bits are any. */
INLINE void places(const uint8_t *low, __m512i above, int bits, uint16_t *to) {
    const __m512i kept = _mm512_and_si512(above, _mm512_set1_epi16((short)((1 << bits) - 1)));
    const __m512i index = _mm512_or_si512(_mm512_cvtepu8_epi16(bytes32(low)), _mm512_slli_epi16(kept, 8));
    _mm512_storeu_si512(to, _mm512_slli_epi16(index, 3));
}

/* 8 numbers of 16 bits, each four times, shifted right by 0, 1, 2 and 3 times `step`. */
INLINE __m512i fourfold(__m128i numbers, int step) {
    const __m512i every = _mm512_set_epi16(7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1,
                                           0, 0, 0, 0);
    const int64_t shifts = (int64_t)step << 16 | (int64_t)(2 * step) << 32 | (int64_t)(3 * step) << 48;
    return _mm512_srlv_epi16(_mm512_permutexvar_epi16(every, _mm512_castsi128_si512(numbers)), _mm512_set1_epi64(shifts));
}

/* `even_signs` of eight numbers. */
INLINE void even_signs_of(__m256i bits, uint32_t *to) {
#define KEPT(shift, mask) _mm256_and_si256(_mm256_slli_epi32(bits, shift), _mm256_set1_epi32(mask))
    const __m256i seven = _mm256_or_si256(_mm256_or_si256(KEPT(0, 0x7f), KEPT(1, 0x7f00)),
                                          _mm256_or_si256(KEPT(2, 0x7f0000), KEPT(3, 0x7f000000)));
#undef KEPT
    __m256i odd = _mm256_xor_si256(seven, _mm256_srli_epi32(seven, 4));
    odd = _mm256_xor_si256(odd, _mm256_srli_epi32(odd, 2));
    odd = _mm256_xor_si256(odd, _mm256_srli_epi32(odd, 1));
    odd = _mm256_slli_epi32(_mm256_and_si256(odd, _mm256_set1_epi32(0x01010101)), 7);
    _mm256_storeu_si256((__m256i *)to, _mm256_or_si256(seven, odd));
}

/* Scales of eight sub-blocks: half precision times (code + 1/2) times `part`. */
INLINE __m256 half_scales(float scale, __m256i codes, float part) {
    const __m256 number = _mm256_add_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(0.5f));
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(scale), number), _mm256_set1_ps(part));
}

/* The same of IQ2's sixteen, of 16 weights each, whose codes are halves of bytes. */
INLINE void scales_of_pairs(float scale, const uint8_t *codes, float *to) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
    const __m512i both = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)));
    const __m512 number = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15))), _mm512_set1_ps(0.5f));
    _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(scale), number), _mm512_set1_ps(0.25f)));
}

/* `look_up`, and the signs of what is found. */
INLINE void look_up_signed(sink out, int64_t at, table from, __m256i codes, __mmask32 minus) {
    if (out.type == F32) {
        const __m512i sign = _mm512_set1_epi32((int)0x80000000);
        const __m512i low = _mm512_castps_si512(_mm512_permutex2var_ps(
            from.low, _mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)), from.high));
        const __m512i high = _mm512_castps_si512(_mm512_permutex2var_ps(
            from.low, _mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)), from.high));
        _mm512_storeu_si512((float *)out.to + at, _mm512_mask_xor_epi32(low, (__mmask16)minus, low, sign));
        _mm512_storeu_si512((float *)out.to + at + 16, _mm512_mask_xor_epi32(high, (__mmask16)(minus >> 16), high, sign));
    } else {
        const __m512i found = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes), from.halves);
        _mm512_storeu_si512((uint16_t *)out.to + at,
                            _mm512_mask_add_epi16(found, minus, found, _mm512_set1_epi16((short)0x8000)));
    }
}

INLINE __m512 eight_values(int a, int b, int c, int d, int e, int f, int g, int h) {
    return _mm512_cvtepi32_ps(_mm512_set_epi32(h, g, f, e, d, c, b, a, h, g, f, e, d, c, b, a));
}

/* IQ2's weights are one of three numbers: a table has those of eight scales, and an unused fourth of each. */
INLINE table table_of_threes(const float *scales, Type type) {
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_set4_epi32(0, 43, 25, 8)), all = _mm512_castps256_ps512(_mm256_loadu_ps(scales));
    const __m512i first = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i next = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    return table_of(_mm512_mul_ps(numbers, _mm512_permutexvar_ps(first, all)),
                    _mm512_mul_ps(numbers, _mm512_permutexvar_ps(next, all)), type);
}

/* All of a block: where its rows are, its signs, and a scale for each 16 weights. */
INLINE void put_threes(sink out, const int8_t *grid, const uint16_t *at, const uint8_t *signs, const float *scales) {
    for (int half = 0; half < 2; half++) {
        const table made = table_of_threes(scales + 8 * half, out.type);
        for (int two = 0; two < 4; two++) {
            const int sub = 4 * half + two;
            const __m256i own = _mm256_inserti128_si256(_mm256_set1_epi8((char)(8 * two)), _mm_set1_epi8((char)(8 * two + 4)), 1);
            const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(rows_at(grid, at + 4 * sub), 4), _mm256_set1_epi8(3));
            look_up_signed(out, 32 * sub, made, _mm256_or_si256(codes, own), u32(signs + 4 * sub));
        }
    }
}

DECODE(iq2_s) {
    uint16_t at[32];
    float own[16];
    places(b + 2, fourfold(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(b + 66))), 2), 2, at);
    scales_of_pairs(half_at(b), b + 74, own);
    put_threes(out, grid, at, b + 34, own);
}

DECODE(iq2_xs) {
    uint16_t at[32];
    uint32_t signs[8];
    float own[16];
    const __m512i codes = _mm512_loadu_si512(b + 2), seven = _mm512_srli_epi16(codes, 9);
    __m512i odd = _mm512_xor_si512(seven, _mm512_srli_epi16(seven, 4));
    odd = _mm512_xor_si512(odd, _mm512_srli_epi16(odd, 2));
    odd = _mm512_xor_si512(odd, _mm512_srli_epi16(odd, 1));
    _mm256_storeu_si256((__m256i *)signs, _mm512_cvtepi16_epi8(_mm512_or_si512(seven, _mm512_slli_epi16(odd, 7))));
    _mm512_storeu_si512(at, _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(511)), 3));
    scales_of_pairs(half_at(b), b + 66, own);
    put_threes(out, grid, at, (const uint8_t *)signs, own);
}

DECODE(iq2_xxs) {
    uint16_t at[32];
    uint32_t signs[8];
    float own[16];
    const __m512i all = _mm512_loadu_si512(b + 2), twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m256i low = _mm512_cvtepi64_epi32(all), high = _mm512_cvtepi64_epi32(_mm512_srli_epi64(all, 32));
    _mm512_storeu_si512(at, _mm512_slli_epi16(_mm512_cvtepu8_epi16(low), 3));
    even_signs_of(high, signs);
    const __m512 scales = _mm512_castps256_ps512(half_scales(half_at(b), _mm256_srli_epi32(high, 28), 0.25f));
    _mm512_storeu_ps(own, _mm512_permutexvar_ps(twice, scales));
    put_threes(out, grid, at, (const uint8_t *)signs, own);
}

/* IQ1: eight times a weight is the grid's number times 8, and 1 more or less; the scale is divided by 8 instead. All
   of it is exact. A table has those numbers of four scales, the lesser ones last, where a grid's -1 counts as 3. */
INLINE table table_of_eighths(const float *scales, Type type) {
    const __m512 numbers = eight_values(1, 9, 0, -7, -1, 7, 0, -9), all = _mm512_castps128_ps512(_mm_loadu_ps(scales));
    const __m512i first = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i next = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    return table_of(_mm512_mul_ps(numbers, _mm512_permutexvar_ps(first, all)),
                    _mm512_mul_ps(numbers, _mm512_permutexvar_ps(next, all)), type);
}

/* Codes of four rows: of the scale of each half in a table, and, where `less`, of the lesser numbers. */
INLINE __m256i codes_of_eighths(__m256i rows, __mmask8 less, int low, int high) {
    const __m256i own = _mm256_inserti128_si256(_mm256_set1_epi8((char)(8 * low)), _mm_set1_epi8((char)(8 * high)), 1);
    const __m256i codes = _mm256_or_si256(_mm256_and_si256(rows, _mm256_set1_epi8(3)), own);
    return _mm256_mask_or_epi64(codes, less, codes, _mm256_set1_epi8(4));
}

DECODE(iq1_s) {
    uint16_t at[32];
    float own[8];
    const __m128i high = _mm_loadu_si128((const __m128i *)(b + 34));
    const __m256i three = _mm256_and_si256(_mm256_srli_epi32(_mm256_cvtepu16_epi32(high), 12), _mm256_set1_epi32(7));
    const __m256i number = _mm256_add_epi32(_mm256_add_epi32(three, three), _mm256_set1_epi32(1));
    const __mmask8 less = _mm_movepi16_mask(high);
    places(b + 2, fourfold(high, 3), 3, at);
    _mm256_storeu_ps(own, _mm256_mul_ps(_mm256_set1_ps(half_at(b) * 0.125f), _mm256_cvtepi32_ps(number)));
    for (int half = 0; half < 2; half++) {
        const table made = table_of_eighths(own + 4 * half, out.type);
        for (int i = 0, sub = 4 * half; i < 4; i++, sub++)
            look_up(out, 32 * sub, made, codes_of_eighths(rows_at(grid, at + 4 * sub), less >> sub & 1 ? 15 : 0, i, i));
    }
}

DECODE(iq1_m) {
    uint16_t at[32];
    float own[16];
    const __m512i four = fourfold(_mm_loadu_si128((const __m128i *)(b + 32)), 4);
    const __mmask32 less = _mm512_test_epi16_mask(four, _mm512_set1_epi16(8));
    const __m256i scales = _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(b + 48))); /* four threes in each */
    const __m512i every = _mm512_set_epi32(6, 6, 6, 6, 4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0);
    const __m512i shifts = _mm512_broadcast_i32x4(_mm_set_epi32(9, 6, 3, 0));
    const __m512i three = _mm512_and_si512(
        _mm512_srlv_epi32(_mm512_permutexvar_epi32(every, _mm512_castsi256_si512(scales)), shifts), _mm512_set1_epi32(7));
    const __m512i number = _mm512_add_epi32(_mm512_add_epi32(three, three), _mm512_set1_epi32(1));
    places(b, four, 3, at);
    _mm512_storeu_ps(own, _mm512_mul_ps(_mm512_set1_ps(iq1_m_scale(b + 48) * 0.125f), _mm512_cvtepi32_ps(number)));
    for (int pair = 0; pair < 4; pair++) {
        const table made = table_of_eighths(own + 4 * pair, out.type);
        for (int i = 0, sub = 2 * pair; i < 2; i++, sub++)
            look_up(out, 32 * sub, made,
                    codes_of_eighths(rows_at(grid, at + 4 * sub), less >> 4 * sub & 15, 2 * i, 2 * i + 1));
    }
}

/* IQ3's rows of four weights: the k-th of 256 rows each, in four vectors. What is there are numbers from 0 to 7, of the
   eight values that all weights of a type have. */
typedef struct {
    __m512i of[4][4];
} planes;

INLINE void planes_of_grid(const int8_t *grid, int shift, planes *out) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
    const __m512i together = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (int part = 0; part < 4; part++) {
        __m512i a[4];
        for (int i = 0; i < 4; i++) { /* 16 rows: their first weights, then their second ones ... */
            const __m512i rows = _mm512_loadu_si512(grid + 256 * part + 64 * i);
            const __m512i codes = _mm512_and_si512(_mm512_srli_epi16(rows, (unsigned)shift), _mm512_set1_epi8(7));
            a[i] = _mm512_permutexvar_epi32(together, _mm512_shuffle_epi8(codes, turn));
        }
        const __m512i ab = _mm512_shuffle_i32x4(a[0], a[1], 0x44), cd = _mm512_shuffle_i32x4(a[2], a[3], 0x44);
        const __m512i ab_high = _mm512_shuffle_i32x4(a[0], a[1], 0xee), cd_high = _mm512_shuffle_i32x4(a[2], a[3], 0xee);
        out->of[0][part] = _mm512_shuffle_i32x4(ab, cd, 0x88);
        out->of[1][part] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        out->of[2][part] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
        out->of[3][part] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
    }
}

/* The k-th weights of 64 rows. */
INLINE __m512i weights_of(const planes *grid, int k, __m512i rows, __mmask64 upper) {
    return _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(grid->of[k][0], rows, grid->of[k][1]), upper,
                                _mm512_permutex2var_epi8(grid->of[k][2], rows, grid->of[k][3]));
}

/* A block's codes, from its rows of 256 or, with `ninth` bits, of 512. Bytes are put together within each 128 bits: so that
   all comes out in order, fours of rows are turned before. */
INLINE void codes_of_rows(const planes *grid, int both, const uint8_t *from, uint64_t ninth, __m512i *out) {
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i rows = _mm512_permutexvar_epi32(turn, _mm512_loadu_si512(from));
    const __mmask64 upper = _mm512_movepi8_mask(rows);
    __mmask64 other = 0;
    if (both) other = _mm512_movepi8_mask(_mm512_permutexvar_epi32(turn, _mm512_movm_epi8(ninth)));
    __m512i k[4];
    for (int i = 0; i < 4; i++) {
        k[i] = weights_of(grid, i, rows, upper);
        if (both) k[i] = _mm512_mask_mov_epi8(k[i], other, weights_of(grid + 1, i, rows, upper));
    }
    const __m512i low = _mm512_unpacklo_epi8(k[0], k[1]), next = _mm512_unpacklo_epi8(k[2], k[3]);
    const __m512i high = _mm512_unpackhi_epi8(k[0], k[1]), last = _mm512_unpackhi_epi8(k[2], k[3]);
    out[0] = _mm512_unpacklo_epi16(low, next);
    out[1] = _mm512_unpackhi_epi16(low, next);
    out[2] = _mm512_unpacklo_epi16(high, last);
    out[3] = _mm512_unpackhi_epi16(high, last);
}

/* All of a block: a table has the eight values of four sub-blocks, times their scales. */
INLINE void put_block(sink out, __m512 values, __m256 scales, __m512i *codes, const uint8_t *signs) {
    const __m512i pair = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512 all = _mm512_castps256_ps512(scales);
    for (int half = 0; half < 2; half++) {
        const __m512i first = _mm512_add_epi32(pair, _mm512_set1_epi32(4 * half)), next = _mm512_add_epi32(first, _mm512_set1_epi32(2));
        const table made = table_of(_mm512_mul_ps(values, _mm512_permutexvar_ps(first, all)),
                                    _mm512_mul_ps(values, _mm512_permutexvar_ps(next, all)), out.type);
        for (int two = 0; two < 2; two++) {
            const __m256i own = _mm256_set1_epi8((char)(16 * two)), other = _mm256_set1_epi8((char)(16 * two + 8));
            const int sub = 4 * half + 2 * two;
            const __m512i here = codes[2 * half + two];
            look_up_signed(out, 32 * sub, made, _mm256_or_si256(_mm512_castsi512_si256(here), own), u32(signs + 4 * sub));
            look_up_signed(out, 32 * sub + 32, made, _mm256_or_si256(_mm512_extracti64x4_epi64(here, 1), other),
                           u32(signs + 4 * sub + 4));
        }
    }
}

INLINE void iq3_s(const uint8_t *b, sink out, const planes *grid) {
    const __m256i shifts = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    const __m256i four = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)u32(b + 106)), shifts), _mm256_set1_epi32(15));
    const __m256i number = _mm256_add_epi32(_mm256_add_epi32(four, four), _mm256_set1_epi32(1));
    uint64_t ninth;
    __m512i codes[4];
    memcpy(&ninth, b + 66, 8);
    codes_of_rows(grid, 1, b + 2, ninth, codes);
    put_block(out, eight_values(1, 3, 5, 7, 9, 11, 13, 15),
              _mm256_mul_ps(_mm256_set1_ps(half_at(b)), _mm256_cvtepi32_ps(number)), codes, b + 74);
}

INLINE void iq3_xxs(const uint8_t *b, sink out, const planes *grid) {
    const __m256i high = bytes32(b + 66);
    uint32_t signs[8];
    __m512i codes[4];
    even_signs_of(high, signs);
    codes_of_rows(grid, 0, b + 2, 0, codes);
    put_block(out, eight_values(4, 12, 20, 28, 36, 44, 52, 62),
              half_scales(half_at(b), _mm256_srli_epi32(high, 28), 0.5f), codes, (const uint8_t *)signs);
}

#define EACH_BY_PLANES(name, bytes, type, number) \
    for (number *to = out; count > 0; count -= 256, from += bytes, to += 256) { \
        ask_for(from + ahead, bytes); \
        name(from, (sink){to, type}, grid); \
    }

#define DEFINE_BY_PLANES(name, bytes, shift, parts_of) \
    void avx512_##name(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) { \
        const uint8_t *from = parts->codes + first / 256 * bytes; \
        const int64_t ahead = parts->ahead / 256 * bytes; \
        planes grid[parts_of]; \
        (void)form; \
        for (int i = 0; i < parts_of; i++) planes_of_grid((const int8_t *)parts->zeros + 1024 * i, shift, grid + i); \
        if (type == F32) EACH_BY_PLANES(name, bytes, F32, float) \
        else if (type == BF16) EACH_BY_PLANES(name, bytes, BF16, uint16_t) \
        else EACH_BY_PLANES(name, bytes, F16, uint16_t) \
    }

DEFINE_BY_PLANES(iq3_s, 110, 1, 2)
DEFINE_BY_PLANES(iq3_xxs, 98, 3, 1)
DEFINE(iq2_s, 256, 82)
DEFINE(iq2_xs, 256, 74)
DEFINE(iq2_xxs, 256, 66)
DEFINE(iq1_s, 256, 50)
DEFINE(iq1_m, 256, 56)
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
