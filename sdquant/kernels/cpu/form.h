/* Packed weights as C sees them: a `Form` of sdquant/core/packed_layout.py, and the addresses of its parts.

   Files: module.c is what Python calls; isa.c chooses between the `Kernels` of portable.c, avx2.c and avx512.c, which
   put together what portable.h, blocks_*.c and avx512_*.c have; packings.c names the packings; product.c works on whole
   rows with any of them. */
#ifndef SDQUANT_FORM_H
#define SDQUANT_FORM_H

#include <stdint.h>

/* Whether there are kernels for AMX; Linux gives its use when it is asked (isa.c). */
#if defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12))
#define AMX 1
#endif

/* Types of floats. NESTED are scales that are uint8 codes themselves, with scales of their own; LOOKED_UP such codes
   without. I8 are activations that are codes (int8.h). */
typedef enum { NONE = -1, F32 = 0, BF16 = 1, F16 = 2, NESTED = 3, LOOKED_UP = 4, I8 = 5 } Type;

/* float8 is BYTES with a table. GGUF's block types follow after CODED: see packings.c. */
typedef enum {
    SIGNED_BYTES,
    BYTES,
    NIBBLES_LOW,
    NIBBLES_HIGH,
    PLANES4,
    PLANES2,
    THREES,
    SDNQ6,
    SDNQ3,
    TWOS, /* as THREES: eight codes in as many bytes as a code has bits */
    FIVES,
    SIXES,
    SEVENS,
    CODED, /* those above are codes with scales in parts of their own */
} Packing;

/* Which float8 a table of 256 is, so that its numbers need not be looked up: float8.c. E4M3_SORTED is bitsandbytes', whose
   codes go from the lowest number to the highest. */
typedef enum { NO_FLOAT8, E4M3_BITS, E5M2_BITS, E4M3_SORTED } Float8Kind;

/* Sizes are codes without their sign. Of `least` to `most`, and of zero, the table has float8's own numbers times `factor`:
   to the last bit if `exact`, else nearly. Others, as those of NaN and infinity, are looked up. */
typedef struct {
    Float8Kind kind;
    int exact;
    uint8_t least, most;
    float factor;
} Float8;

/* `taps`: scales of a group, by turns; more than one only for codes of `packing` below CODED whose `zero` is a number and
   whose scales are not nested. */
typedef struct {
    int64_t rows, columns, group, taps;
    Packing packing;
    Type scale, shift;   /* of those parts; NONE where there is none */
    Type arithmetic;     /* what each operation is rounded to */
    int zeros;           /* packing of the zero points: SIGNED_BYTES, BYTES, NIBBLES_LOW; -1 where `zero` is it */
    int added, fused;    /* see core/packed_layout.py */
    int looked_up;       /* whether a code stands for its entry in `table` */
    float zero, factor, offset;
    Float8 float8;       /* of `table` */
    float table[256];
    float dynamic[256];  /* what codes of scales stand for */
} Form;

/* Addresses of the parts; NULL where there is none. */
typedef struct {
    const uint8_t *codes;
    const void *scale, *shift;
    const float *nested;
    const uint8_t *zeros; /* for a block type of GGUF its grid: see blocks.h */
    int64_t ahead; /* while some weights are read, those so many further on are asked for; 0: none */
    const struct Beside *beside; /* see narrow.h; NULL but for a `product` that takes it */
} Parts;

/* Weights first .. first + count, in memory order, into `out` of `type`. For packings above CODED both are multiples of
   the block's size. */
typedef void Decode(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out);

/* sums[j * stride_sums + i] += the product of row j of x (of m) and row i of w (of n), both of `type`, k long. Strides
   in elements. w begins at a multiple of 64 bytes, and has as many rows as the kernels like; those beyond n are any. */
typedef void Dots(Type type, const void *w, int64_t stride_w, int n, const void *x, int64_t stride_x, int m, int64_t k,
                  float *sums, int64_t stride_sums);

/* sums[j] += the product of weights first .. first + count, all of one row, and as many of each row of x, of `type`, m
   rows, `stride` bytes apart. m is 1 or FEW. */
typedef void DecodeAndDot(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const void *x,
                          int64_t stride, int m, float *sums);

/* See integers.h. */
typedef void Quantize(Type type, const void *x, int64_t k, int8_t *codes, float *scale, int32_t *sum);
typedef void Finish(const int32_t *totals, int32_t sum, const int32_t *added, float scale, const float *scales,
                    const float *bias, int64_t n, Type type, void *out);

/* Columns of out [m, rows] for rows start .. stop, from x [m, columns] and bias [rows] or NULL; all of `type`. 0: no
   memory. */
typedef int Product(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, const void *x, int64_t m,
                    const void *bias, void *out);

/* What columns of activations are divided by, and one divided by that: [columns] each. Where activations are of bf16,
   reciprocals that are zero, too small for all their bits or infinite are NaN instead, and those of divisors with more than
   eleven bits: avx512_divide.h divides there. */
typedef struct {
    const float *by, *reciprocal;
} Divisors;

/* How one instruction set does it. */
typedef struct {
    const char *name;
    Decode *(*decoder)(const Form *form); /* NULL for a packing that it cannot read */
    DecodeAndDot *(*dotter)(const Form *form); /* NULL where `decoder` and `dots` are to do it */
    int (*turned)(const Form *form, Type type); /* whether `dotter` wants rows of x turned, see `evens_first`; NULL: none */
    Dots *dots; /* NULL where `product` is for every type */
    int rows; /* of weights that `dots` likes to get at once, at most PANEL_ROWS */
    void (*convert)(const float *from, Type type, void *to, int64_t count); /* rounds to the nearest, ties to even */
    void (*widen)(const void *from, Type type, int64_t start, float *to, int64_t count); /* `type` from an element on */
    Quantize *quantize;
    Finish *finish;
    Product *product; /* of more rows than `dotter` takes; NULL where `dots` does it */
    int products;     /* the types that it is for: bits 1 << type */
    int (*unrounded)(const Form *form, Type type); /* whether `product` has weights that are not rounded; NULL: never */
    const struct Rotation *rotation; /* see rotate.h */
    void (*expand)(const uint8_t *low, const uint8_t *high, const float *table, const float *scales, int64_t groups,
                   int64_t group, int8_t *out); /* see expand.h */
    const struct Narrow *narrow; /* see narrow.h; NULL: none */
    void (*divide)(Type type, const void *x, const Divisors *by, int64_t count, void *to); /* see by_turns.h */
    void (*decode_by_turns)(const uint8_t *codes, int64_t bits, float middle, const float *scale, const float *shift,
                            int64_t count, Type type, void *out);
    int least; /* rows of activations from which `product` is used; fewer are left to `dots` */
    int beside; /* whether `product` takes what is beside a weight */
} Kernels;

enum {
    PANEL_ROWS = 12,
    FEW = 2,
    MOST_TAPS = 128,
    AHEAD = 8192, /* weights: how far ahead memory is asked for what is read in one sweep */
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels, amx_kernels;

/* packings.c */
int packing_of(const char *name); /* -1: unknown */
int planes_of(Packing packing);   /* how many rows share a byte */
int64_t packed_bytes(const Form *form, int64_t weights); /* of whole blocks, or of codes of several rows */

/* float8.c */
Float8 float8_of(const float *table);

/* isa.c */
const Kernels *kernels(void);
int choose(const char *name); /* an instruction set by name, "" for the best; 0: this machine lacks it */

int amd(void);

/* product.c */
void decode_rows(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *out);
/* Rows start to stop, in their own order, into `out` [stop - start, columns]. */
void decode_part(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *out);
/* The same, rounded to `type` and as floats again. */
void decode_rounded(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *out);
Product product_rows;
/* The order in which rows are worked through: rows that share bytes follow each other. */
int64_t row_at(const Form *form, int planes, int64_t i);
/* Of each 64 numbers of 16 bits those at even places first, then the others. */
void evens_first(const uint16_t *from, int64_t count, uint16_t *to);
void recode_rows(const Form *form, Parts *parts, int64_t start, int64_t stop, float *row, int8_t *codes, float *scales);

#endif
