/* GGUF's block types: their names and sizes, and what the files of decoders share.

   Files: blocks_unpack.h and blocks_portable.h decode on any machine, blocks_avx512.h and the two files beside it with
   AVX-512. Layouts are ggml's; the arithmetic is gguf-py's, whose bits every decoder gives: float32, and one rounding at
   the end. The products are of few-bit numbers: 11 bits of a float16, up to 7 of a scale, up to 8 of a code. Where a
   comment says "exact", they fit float32's 24 bits, and the addition that follows may be fused with them or not. */
#ifndef SDQUANT_BLOCKS_H
#define SDQUANT_BLOCKS_H

#include "floats.h"

/* Name as in core/gguf_types.py, weights and bytes of a block. */
#define BLOCK_TYPES(X) \
    X(q8_0, 32, 34) X(q4_0, 32, 18) X(q4_1, 32, 20) X(q5_0, 32, 22) X(q5_1, 32, 24) X(q2_k, 256, 84) \
    X(q3_k, 256, 110) X(q4_k, 256, 144) X(q5_k, 256, 176) X(q6_k, 256, 210) X(iq4_nl, 32, 18) X(iq4_xs, 256, 136) \
    X(mxfp4, 32, 17) X(nvfp4, 64, 36) X(tq1_0, 256, 54) X(tq2_0, 256, 66) X(iq3_s, 256, 110) X(iq3_xxs, 256, 98) \
    X(iq2_s, 256, 82) X(iq2_xs, 256, 74) X(iq2_xxs, 256, 66) X(iq1_s, 256, 50) X(iq1_m, 256, 56)

#define BLOCK_PACKING(name, weights, bytes) PACKING_##name,
enum { BEFORE_BLOCKS = CODED, BLOCK_TYPES(BLOCK_PACKING) };

/* A block of any type: its codes as signed bytes, and what every sixteen of them are scaled and shifted by. */
typedef struct {
    int8_t codes[256];
    float scale[16], shift[16];
} unpacked;

/* The decoder of a form in one instruction set; NULL for a form that is no block type. `Parts.zeros` is the grid of a
   type that has one: its table of rows of small weights, int8. */
Decode *portable_blocks(const Form *form);
Decode *avx2_blocks(const Form *form);
Decode *avx512_blocks(const Form *form);

/* A block at `from` unpacked, `grid` as in `Parts.zeros`. Types without shifts leave those as they are. */
typedef void Unpack(const uint8_t *from, unpacked *out, const int8_t *grid);

/* The public function of an instruction set, from DECODER(name), its decoder of a type. A form whose groups are no
   blocks is refused. */
#define BLOCK_ROW(name, weights, bytes) {PACKING_##name, weights, DECODER(name)},
#define DEFINE_BLOCKS(function) \
    Decode *function(const Form *form) { \
        static const struct { int packing, weights; Decode *decode; } rows[] = {BLOCK_TYPES(BLOCK_ROW)}; \
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) \
            if (rows[i].packing == (int)form->packing && rows[i].weights == form->group) return rows[i].decode; \
        return 0; \
    }

#define ONES 0x0101010101010101u /* times a byte: eight of it */

static inline uint16_t u16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

static inline uint32_t u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline float half_at(const uint8_t *at) { return from_f16(u16(at)); }

/* IQ4's sixteen values and twice those of a float with 2 + 1 bits. */
#define NON_LINEAR -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define E2M1 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

/* MXFP4: half of 2 ** (code - 127), which is subnormal for the two smallest codes. */
static inline float e8m0_half(uint8_t code) {
    return of_bits(code < 2 ? 0x00200000u << code : (uint32_t)(code - 1) << 23);
}

/* NVFP4: half of an E4M3 number without a sign; the code of NaN counts as nothing. */
static inline float e4m3_half(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if (code == 0x7f) return 0.0f;
    if (exponent == 0) return (float)mantissa * 0x1p-10f;
    return (float)(8 + mantissa) * of_bits((uint32_t)(exponent - 7 - 3 - 1 + 127) << 23);
}

/* The 6-bit scales [0..8) and minimums [8..16) of Q4_K and Q5_K from their 12 bytes: the first four of each kind have
   six bits of a byte, the last four share bytes, and their upper two bits are the upper bits of the first four's. */
static inline void six_bits(const uint8_t *from, uint8_t *to) {
    const uint32_t scale = u32(from), minimum = u32(from + 4), both = u32(from + 8);
    const uint32_t made[4] = {
        scale & 0x3f3f3f3f,
        (both & 0x0f0f0f0f) | (scale >> 2 & 0x30303030),
        minimum & 0x3f3f3f3f,
        (both >> 4 & 0x0f0f0f0f) | (minimum >> 2 & 0x30303030),
    };
    memcpy(to, made, 16);
}

/* The sixteen 6-bit scales of Q3_K from their 12 bytes: low nibbles, high nibbles, then two bits each. Unsigned: 32 is
   nothing. */
static inline void q3_scales(const uint8_t *from, uint8_t *to) {
    const uint32_t a = u32(from), b = u32(from + 4), two = u32(from + 8);
    const uint32_t made[4] = {
        (a & 0x0f0f0f0f) | (two << 4 & 0x30303030),
        (b & 0x0f0f0f0f) | (two << 2 & 0x30303030),
        (a >> 4 & 0x0f0f0f0f) | (two & 0x30303030),
        (b >> 4 & 0x0f0f0f0f) | (two >> 2 & 0x30303030),
    };
    memcpy(to, made, 16);
}

/* Four times 7 bits to four bytes of signs, each with an eighth bit that makes the number of ones even. */
static inline uint32_t even_signs(uint32_t bits) {
    const uint32_t seven = (bits & 0x7f) | (bits << 1 & 0x7f00) | (bits << 2 & 0x7f0000) | (bits << 3 & 0x7f000000);
    uint32_t odd = seven ^ seven >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return seven | (odd & 0x01010101) << 7;
}

/* IQ1_M keeps its fp16 scale in the upper four bits of four numbers. */
static inline float iq1_m_scale(const uint8_t *scales) {
    uint16_t bits = 0;
    for (int part = 0; part < 4; part++)
        bits |= (uint16_t)(u16(scales + 2 * part) >> 12 << 4 * part);
    return from_f16(bits);
}

#endif
