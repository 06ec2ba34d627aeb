/* Codes of a few bits, one to a byte. */
#ifndef SDQUANT_CODES_H
#define SDQUANT_CODES_H

#include "form.h"

#ifdef _MSC_VER
#define RESTRICT __restrict
#else
#define RESTRICT restrict
#endif

/* Bits of a code in its row; those of block types are not known here. */
static inline int bits_of_code(Packing packing) {
    switch (packing) {
    case TWOS:
    case PLANES2: return 2;
    case THREES:
    case SDNQ3: return 3;
    case NIBBLES_LOW:
    case NIBBLES_HIGH:
    case PLANES4: return 4;
    case FIVES: return 5;
    case SIXES:
    case SDNQ6: return 6;
    case SEVENS: return 7;
    default: return 8;
    }
}

/* Eight codes of so many bits: a little-endian number. */
static inline void unit_of(const uint8_t *unit, int bits, uint8_t *out) {
    uint64_t number = 0;
    for (int k = 0; k < bits; k++) number |= (uint64_t)unit[k] << (8 * k);
    for (int k = 0; k < 8; k++) out[k] = number >> (bits * k) & ((1 << bits) - 1);
}

/* Eight codes of 3 bits: a little-endian number. */
static inline void threes_of(const uint8_t *unit, uint8_t *out) {
    const uint32_t number = unit[0] | (uint32_t)unit[1] << 8 | (uint32_t)unit[2] << 16;
    for (int k = 0; k < 8; k++) out[k] = number >> (3 * k) & 7;
}

/* SDNQ's, as backends/_sdnq_codes.py has their fields. */
static inline void sdnq6_of(const uint8_t *unit, uint8_t *out) {
    for (int k = 0; k < 3; k++) out[k] = unit[k] & 63;
    out[3] = (unit[0] >> 2 & 48) + (unit[1] >> 4 & 12) + (unit[2] >> 6);
}

static inline void sdnq3_of(const uint8_t *unit, uint8_t *out) {
    for (int k = 0; k < 3; k++) {
        out[k] = unit[k] & 7;
        out[3 + k] = unit[k] >> 3 & 7;
    }
    for (int k = 0; k < 2; k++) out[6 + k] = (unit[k] >> 6) + (unit[2] >> (4 + k) & 4);
}

/* The codes of weights first .. first + count, all of one group, one to a byte: in `spare` [count] or where they
   are. */
static inline const uint8_t *codes_at(const Form *form, const Parts *parts, int64_t first, int64_t count,
                                      uint8_t *spare) {
    const uint8_t *RESTRICT from = parts->codes;
    uint8_t *RESTRICT out = spare;
    switch (form->packing) {
    case NIBBLES_LOW:
    case NIBBLES_HIGH: {
        const int early = form->packing == NIBBLES_LOW ? 0 : 4; /* the shift of a first code */
        const int odd = first & 1;
        const int64_t pairs = (count - odd) / 2;
        if (odd) *out++ = from[first >> 1] >> (4 - early) & 15;
        from += (first + odd) >> 1;
        if (early == 0)
            for (int64_t i = 0; i < pairs; i++) out[2 * i] = from[i] & 15, out[2 * i + 1] = from[i] >> 4;
        else
            for (int64_t i = 0; i < pairs; i++) out[2 * i] = from[i] >> 4, out[2 * i + 1] = from[i] & 15;
        if (2 * pairs + odd < count) out[2 * pairs] = from[pairs] >> early & 15;
        return spare;
    }
    case PLANES4:
    case PLANES2: {
        const int planes = form->packing == PLANES4 ? 2 : 4, bits = 8 / planes;
        const int64_t groups = form->rows * form->columns / form->group, held = (groups + planes - 1) / planes;
        const int64_t group = first / form->group, shift = group / held * bits;
        from += group % held * form->group + first % form->group;
        for (int64_t i = 0; i < count; i++) out[i] = from[i] >> shift & ((1 << bits) - 1);
        return spare;
    }
    case THREES:
    case SDNQ3:
    case SDNQ6: {
        const int unit = form->packing == SDNQ6 ? 4 : 8; /* codes in three bytes */
        const int early = (int)(first % unit);
        from += first / unit * 3;
        uint8_t made[8];
        for (int64_t i = -early; i < count; i += unit, from += 3) {
            uint8_t *to = i >= 0 && i + unit <= count ? out + i : made;
            if (form->packing == THREES) threes_of(from, to);
            else if (form->packing == SDNQ3) sdnq3_of(from, to);
            else sdnq6_of(from, to);
            if (to == made)
                for (int64_t k = i < 0 ? 0 : i; k < i + unit && k < count; k++) out[k] = made[k - i];
        }
        return spare;
    }
    case TWOS:
    case FIVES:
    case SIXES:
    case SEVENS: {
        const int bits = bits_of_code(form->packing), early = (int)(first % 8);
        from += first / 8 * bits;
        uint8_t made[8];
        for (int64_t i = -early; i < count; i += 8, from += bits) {
            uint8_t *to = i >= 0 && i + 8 <= count ? out + i : made;
            unit_of(from, bits, to);
            if (to == made)
                for (int64_t k = i < 0 ? 0 : i; k < i + 8 && k < count; k++) out[k] = made[k - i];
        }
        return spare;
    }
    default: return from + first;
    }
}

#endif
