/* GGUF's block types in portable C: a block of each to signed bytes, with a scale and a shift for every sixteen.

   A weight is code * scale + shift. Both operations are exact or rounded once, however they are compiled, because codes
   have few bits: see blocks.h. A type without shifts leaves them at -0, which changes no number, a zero's sign included.

   Codes are unpacked eight at a time, as the bytes of 64-bit words: this is vector code after compilation, and not slow
   where it is none. Layouts: `backends/_gguf_decode.py` and `core/ggml_iq.py`. */
#ifndef SDQUANT_BLOCKS_UNPACK_H
#define SDQUANT_BLOCKS_UNPACK_H

#include "blocks.h"

#define UNPACK(name) \
    static inline void unpack_##name(const uint8_t *restrict b, unpacked *restrict out, const int8_t *restrict grid)

static inline uint64_t word_at(const void *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline void put_word(int8_t *to, uint64_t word) { memcpy(to, &word, 8); }

/* Bytes below 0x80, less `zero` each: with the highest bit set, none borrows from the next. Here and not in a pass of
   its own, which would wait for the bytes to be written. */
static inline void put_codes(int8_t *to, uint64_t codes, uint64_t zero) {
    put_word(to, zero ? ((codes | 0x80 * ONES) - zero * ONES) ^ 0x80 * ONES : codes);
}

/* Each of `count` bytes shifted right, masked by as many bits as are left in it. */
static inline void fields(const uint8_t *restrict from, int count, int shift, uint64_t mask, uint64_t zero,
                          int8_t *restrict to) {
    for (int i = 0; i < count; i += 8) put_codes(to + i, word_at(from + i) >> shift & mask * ONES, zero);
}

/* The low halves of `count` bytes, then the high ones. */
static inline void nibbles(const uint8_t *from, int count, uint64_t zero, int8_t *to) {
    fields(from, count, 0, 15, zero, to);
    fields(from, count, 4, 15, zero, to + count);
}

/* Bit i of a byte as byte i of a word, 0 or 1: a copy of the byte in each, of which byte i keeps bit i; adding 0x7f
   carries any bit but the highest into it. */
static inline uint64_t spread_bits(uint8_t bits) {
    const uint64_t own = bits * ONES & 0x8040201008040201u;
    return (((own & 0x7f * ONES) + 0x7f * ONES) | own) >> 7 & ONES;
}

#ifndef FIVES
#define FIVES fives
/* The nibbles of 16 bytes with a fifth bit each, from the four bytes before them, less `zero`. */
static inline void fives(const uint8_t *from, uint64_t zero, int8_t *to) {
    for (int i = 0; i < 4; i++) {
        const uint64_t four = word_at(from + 4 + i % 2 * 8) >> (i / 2 * 4) & 15 * ONES;
        put_codes(to + 8 * i, four | spread_bits(from[i]) << 4, zero);
    }
}
#endif

static inline void fill(float *from, int count, float value) {
    for (int i = 0; i < count; i++) from[i] = value;
}

static inline void legacy_scales(unpacked *out, const uint8_t *b, int shifted) {
    fill(out->scale, 2, half_at(b));
    if (shifted)
        fill(out->shift, 2, half_at(b + 2));
}

UNPACK(q8_0) {
    (void)grid;
    memcpy(out->codes, b + 2, 32);
    legacy_scales(out, b, 0);
}

UNPACK(q4_0) {
    (void)grid;
    nibbles(b + 2, 16, 8, out->codes);
    legacy_scales(out, b, 0);
}

UNPACK(q4_1) {
    (void)grid;
    nibbles(b + 4, 16, 0, out->codes);
    legacy_scales(out, b, 1);
}

UNPACK(q5_0) {
    (void)grid;
    FIVES(b + 2, 16, out->codes);
    legacy_scales(out, b, 0);
}

UNPACK(q5_1) {
    (void)grid;
    FIVES(b + 4, 0, out->codes);
    legacy_scales(out, b, 1);
}

UNPACK(q2_k) {
    const float scale = half_at(b + 80), minimum = half_at(b + 82);
    (void)grid;
    for (int sub = 0; sub < 8; sub++) /* of each 32 bytes: the lowest two bits of all, then the next two */
        fields(b + 16 + 32 * (sub / 4), 32, sub % 4 * 2, 3, 0, out->codes + 32 * sub);
    for (int sub = 0; sub < 16; sub++) {
        out->scale[sub] = scale * (float)(b[sub] & 15);
        out->shift[sub] = -(minimum * (float)(b[sub] >> 4));
    }
}

#ifndef JOIN
#define JOIN join
/* 32 codes, less `zero`: the bits `low` from its bytes shifted right, and above them, `by` bits up, those of `high`. */
static inline void join(const uint8_t *low, int low_shift, uint64_t low_mask, const uint8_t *high, int high_shift,
                        uint64_t high_mask, int by, uint64_t zero, int8_t *to) {
    for (int i = 0; i < 32; i += 8) {
        const uint64_t lowest = word_at(low + i) >> low_shift & low_mask * ONES;
        put_codes(to + i, lowest | (word_at(high + i) >> high_shift & high_mask * ONES) << by, zero);
    }
}
#endif

UNPACK(q3_k) {
    const float scale = half_at(b + 108);
    uint8_t six[16];
    (void)grid;
    for (int sub = 0; sub < 8; sub++) /* a set high bit means no offset */
        JOIN(b + 32 + 32 * (sub / 4), sub % 4 * 2, 3, b, sub, 1, 2, 4, out->codes + 32 * sub);
    q3_scales(b + 96, six);
    for (int sub = 0; sub < 16; sub++) out->scale[sub] = scale * (float)(six[sub] - 32);
}

static inline void six_bit_scales(unpacked *out, const uint8_t *b) {
    const float scale = half_at(b), minimum = half_at(b + 2);
    uint8_t six[16];
    six_bits(b + 4, six);
    for (int sub = 0; sub < 8; sub++) {
        fill(out->scale + 2 * sub, 2, scale * (float)six[sub]);
        fill(out->shift + 2 * sub, 2, -(minimum * (float)six[8 + sub]));
    }
}

UNPACK(q4_k) {
    (void)grid;
    for (int pair = 0; pair < 4; pair++) nibbles(b + 16 + 32 * pair, 32, 0, out->codes + 64 * pair);
    six_bit_scales(out, b);
}

UNPACK(q5_k) {
    (void)grid;
    for (int sub = 0; sub < 8; sub++)
        JOIN(b + 48 + 32 * (sub / 2), sub % 2 * 4, 15, b + 16, sub, 1, 4, 0, out->codes + 32 * sub);
    six_bit_scales(out, b);
}

UNPACK(q6_k) {
    const float scale = half_at(b + 208);
    (void)grid;
    for (int sub = 0; sub < 8; sub++) { /* a half: low nibbles of 64 bytes, high ones; two bits more in 32 bytes */
        const uint8_t *four = b + 64 * (sub / 4) + 32 * (sub % 2), *two = b + 128 + 32 * (sub / 4);
        JOIN(four, sub % 4 / 2 * 4, 15, two, sub % 4 * 2, 3, 4, 32, out->codes + 32 * sub);
    }
    for (int sub = 0; sub < 16; sub++) out->scale[sub] = scale * (float)(int8_t)b[192 + sub];
}

static const int8_t non_linear[16] = {NON_LINEAR}, e2m1[16] = {E2M1};

#ifndef CHOOSE
#define CHOOSE choose_from
/* What the low halves of `count` bytes, 8 or 16, stand for, then the high ones: at once, as what is written in small pieces
   cannot be read in larger ones before it is in memory. */
static inline void choose_from(const int8_t *table, const uint8_t *from, int count, int8_t *to) {
    for (int i = 0; i < count; i++) to[i] = table[from[i] & 15], to[count + i] = table[from[i] >> 4];
}
#endif

UNPACK(iq4_nl) {
    (void)grid;
    CHOOSE(non_linear, b + 2, 16, out->codes);
    legacy_scales(out, b, 0);
}

UNPACK(iq4_xs) {
    const float scale = half_at(b);
    const int high = u16(b + 2);
    (void)grid;
    for (int sub = 0; sub < 8; sub++) {
        const int six = (b[4 + sub / 2] >> (sub % 2 * 4) & 15) | (high >> (2 * sub) & 3) << 4;
        CHOOSE(non_linear, b + 8 + 16 * sub, 16, out->codes + 32 * sub);
        fill(out->scale + 2 * sub, 2, scale * (float)(six - 32));
    }
}

UNPACK(mxfp4) {
    (void)grid;
    CHOOSE(e2m1, b + 1, 16, out->codes);
    fill(out->scale, 2, e8m0_half(b[0]));
}

UNPACK(nvfp4) {
    (void)grid;
    for (int sub = 0; sub < 4; sub++) {
        CHOOSE(e2m1, b + 4 + 8 * sub, 8, out->codes + 16 * sub);
        out->scale[sub] = e4m3_half(b[sub]);
    }
}

/* Five numbers of 0, 1, 2 in a byte, as the digits of a fraction with the base 3: the first is the whole part of three
   times the byte over 256, and what is left of that the next byte. */
static inline int8_t *digits(const uint8_t *from, int count, int most, int8_t *to) {
    uint8_t left[32];
    memcpy(left, from, (size_t)count);
    for (int digit = 0; digit < most; digit++, to += count)
        for (int i = 0; i < count; i++) {
            to[i] = (int8_t)((left[i] >= 86) + (left[i] >= 171) - 1);
            left[i] = (uint8_t)(left[i] + left[i] + left[i]);
        }
    return to;
}

UNPACK(tq1_0) {
    (void)grid;
    digits(b + 48, 4, 4, digits(b + 32, 16, 5, digits(b, 32, 5, out->codes)));
    fill(out->scale, 16, half_at(b + 52));
}

UNPACK(tq2_0) {
    (void)grid;
    for (int sub = 0; sub < 8; sub++) fields(b + 32 * (sub / 4), 32, sub % 4 * 2, 3, 1, out->codes + 32 * sub);
    fill(out->scale, 16, half_at(b + 64));
}

#ifndef ROWS
#define ROWS rows
/* Four rows of a grid with eight weights each, numbers from 1 to 127, negative where a bit is set: the complement, and
   one more, which carries into no other. */
static inline void rows(const uint64_t *of_eight, uint32_t signs, int8_t *to) {
    for (int i = 0; i < 4; i++) {
        const uint64_t bits = spread_bits((uint8_t)(signs >> 8 * i));
        put_word(to + 8 * i, (of_eight[i] ^ bits * 0xff) + bits);
    }
}
#endif

static inline void rows_of_8(const int8_t *grid, int a, int b, int c, int d, uint32_t signs, int8_t *to) {
    const uint64_t of_eight[] = {word_at(grid + 8 * a), word_at(grid + 8 * b), word_at(grid + 8 * c), word_at(grid + 8 * d)};
    ROWS(of_eight, signs, to);
}

/* Two rows of a grid with four weights each. */
static inline uint64_t two_rows(const int8_t *grid, int first, int next) {
    return u32((const uint8_t *)grid + 4 * first) | (uint64_t)u32((const uint8_t *)grid + 4 * next) << 32;
}

/* Eight rows of a grid with four weights each: the low bytes of their indices, and a ninth bit of each. */
static inline void rows_of_4(const int8_t *grid, const uint8_t *low, int ninth, uint32_t signs, int8_t *to) {
    uint64_t of_eight[4];
    for (int i = 0; i < 4; i++, low += 2, ninth >>= 2)
        of_eight[i] = two_rows(grid, low[0] | (ninth << 8 & 256), low[1] | (ninth << 7 & 256));
    ROWS(of_eight, signs, to);
}

UNPACK(iq3_s) {
    const float scale = half_at(b);
    for (int sub = 0; sub < 8; sub++) {
        rows_of_4(grid, b + 2 + 8 * sub, b[66 + sub], u32(b + 74 + 4 * sub), out->codes + 32 * sub);
        fill(out->scale + 2 * sub, 2, scale * (float)(1 + 2 * (b[106 + sub / 2] >> (sub % 2 * 4) & 15)));
    }
}

UNPACK(iq3_xxs) {
    const float scale = half_at(b);
    for (int sub = 0; sub < 8; sub++) {
        const uint32_t high = u32(b + 66 + 4 * sub);
        rows_of_4(grid, b + 2 + 8 * sub, 0, even_signs(high), out->codes + 32 * sub);
        fill(out->scale + 2 * sub, 2, scale * (0.5f + (float)(high >> 28)) * 0.5f);
    }
}

/* IQ2's scales of 16 weights, in bytes: half precision times (code + 1/2) / 4. */
static inline void half_scales(unpacked *out, float scale, const uint8_t *codes) {
    for (int sub = 0; sub < 16; sub++)
        out->scale[sub] = scale * (0.5f + (float)(codes[sub / 2] >> (sub % 2 * 4) & 15)) * 0.25f;
}

UNPACK(iq2_s) {
    for (int sub = 0; sub < 8; sub++) {
        const uint8_t *low = b + 2 + 4 * sub;
        const int high = b[66 + sub] << 8;
        rows_of_8(grid, low[0] | (high & 0x300), low[1] | (high >> 2 & 0x300), low[2] | (high >> 4 & 0x300),
                  low[3] | (high >> 6 & 0x300), u32(b + 34 + 4 * sub), out->codes + 32 * sub);
    }
    half_scales(out, half_at(b), b + 74);
}

UNPACK(iq2_xs) {
    for (int sub = 0; sub < 8; sub++) {
        const uint64_t four = word_at(b + 2 + 8 * sub); /* of 16 bits each: an index of 9, 7 signs */
        const uint32_t sevens = (uint32_t)(four >> 9 & 127) | (uint32_t)(four >> 25 & 127) << 7 |
                                (uint32_t)(four >> 41 & 127) << 14 | (uint32_t)(four >> 57) << 21;
        rows_of_8(grid, four & 511, four >> 16 & 511, four >> 32 & 511, four >> 48 & 511, even_signs(sevens),
                  out->codes + 32 * sub);
    }
    half_scales(out, half_at(b), b + 66);
}

UNPACK(iq2_xxs) {
    const float scale = half_at(b);
    for (int sub = 0; sub < 8; sub++) {
        const uint8_t *low = b + 2 + 8 * sub;
        const uint32_t high = u32(low + 4);
        rows_of_8(grid, low[0], low[1], low[2], low[3], even_signs(high), out->codes + 32 * sub);
        fill(out->scale + 2 * sub, 2, scale * (0.5f + (float)(high >> 28)) * 0.25f);
    }
}

#ifndef EIGHTHS
#define EIGHTHS eighths
/* IQ1's weights are -1, 0, 1 shifted by an eighth: up, or down where the highest bit of a row's four in `down` is set.
   Eight times as much are whole numbers. Eight times a byte has no bit in the lowest three, where one is put; one less
   than each byte is that with the highest bits set, so that none borrows from the next, and put right afterwards. */
static inline void eighths(const uint64_t *of_eight, uint32_t down, int8_t *to) {
    const uint64_t high = 0x80 * ONES;
    for (int i = 0; i < 4; i++) {
        const uint64_t whole = of_eight[i] << 3 & 0xf8 * ONES, less = ((whole | high) - ONES) ^ (~whole & high);
        put_word(to + 8 * i, down >> (4 * i + 3) & 1 ? less : whole | ONES);
    }
}
#endif

static inline void shifted_rows(const int8_t *grid, int a, int b, int c, int d, uint32_t down, int8_t *to) {
    const uint64_t of_eight[] = {word_at(grid + 8 * a), word_at(grid + 8 * b), word_at(grid + 8 * c), word_at(grid + 8 * d)};
    EIGHTHS(of_eight, down, to);
}

UNPACK(iq1_s) {
    const float scale = half_at(b) * 0.125f;
    for (int sub = 0; sub < 8; sub++) {
        const uint8_t *low = b + 2 + 4 * sub;
        const int high = u16(b + 34 + 2 * sub);
        shifted_rows(grid, low[0] | (high << 8 & 0x700), low[1] | (high << 5 & 0x700), low[2] | (high << 2 & 0x700),
                     low[3] | (high >> 1 & 0x700), high >> 15 ? 0xffff : 0, out->codes + 32 * sub);
        fill(out->scale + 2 * sub, 2, scale * (float)(2 * (high >> 12 & 7) + 1));
    }
}

UNPACK(iq1_m) {
    const float scale = iq1_m_scale(b + 48) * 0.125f;
    for (int sub = 0; sub < 8; sub++) {
        const uint8_t *low = b + 4 * sub;
        const int high = u16(b + 32 + 2 * sub), six = u16(b + 48 + sub / 2 * 2) >> (sub % 2 * 6);
        shifted_rows(grid, low[0] | (high << 8 & 0x700), low[1] | (high << 4 & 0x700), low[2] | (high & 0x700),
                     low[3] | (high >> 4 & 0x700), (uint32_t)high, out->codes + 32 * sub);
        out->scale[2 * sub] = scale * (float)(2 * (six & 7) + 1);
        out->scale[2 * sub + 1] = scale * (float)(2 * (six >> 3 & 7) + 1);
    }
}

#endif
