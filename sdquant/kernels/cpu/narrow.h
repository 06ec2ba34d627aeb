/* The two products of a low-rank branch, out += (x down) up^T, at the speed of wide ones.

   A library's product lays out the smaller matrix anew in each call and has tiles for large ones: for 77 rows it takes
   three times as long as its multiplications. Here `down` is laid out once for all rows, and `up` where it is used, 32
   columns of results at a time; of twelve rows and fewer the former is, too, in the first cache. The sums of a row depend on nothing but that row.

   Numbers are floats, summed one by one, or bf16, summed in pairs; both are units of 32 bits. What is between the two
   products is rounded to their type, and each row of it takes 4 bytes a number.

   Floats may be multiplied as two bf16 each, the nearest one and the nearest to what it leaves, if less than 2^-16 of a
   product does not matter: beside products in 8-bit integers, as no tiles multiply floats. Factors are floats then, or
   bf16, as files have them. */
#ifndef SDQUANT_NARROW_H
#define SDQUANT_NARROW_H

#include "form.h"

/* `type`: F32 or BF16, of all numbers; the latter are even numbers of inputs and of terms, and at most NARROW_MOST of
   those. */
typedef struct Branch {
    Type type;
    int64_t inputs, rank;
    const void *down;     /* [inputs, rank] or, where `turned`, [rank, inputs] */
    int turned;
    int halves;           /* of each number of the factors, where floats are multiplied so: 2, or 1 of bf16; else 0. There is
                             `laid` then, and the rank is an even number */
    const uint32_t *laid; /* as `lay` has it; NULL: laid out where it is used, for few rows */
    const void *up;       /* [outputs, rank] */
    uint32_t *between;    /* of all rows, or of those of a block: [rows, rank] */
} Branch;

/* What a product does beside that with the weight, whose inputs `smooth` divides, if it is not NULL; those of the branch
   are not divided, and `between` is computed. */
typedef struct Beside {
    Divisors smooth;
    Branch branch;
} Beside;

enum { NARROW_WIDE = 32, NARROW_MOST = 512 }; /* the rank of floats in halves is at most half of that */

typedef struct Narrow {
    int types; /* bits 1 << type */
    /* `down` to `laid`: [tiles][units of inputs][NARROW_WIDE]; in halves [tiles][inputs / 32][halves][16][NARROW_WIDE]. */
    void (*lay)(const Branch *branch, uint32_t *laid);
    /* Rows of x, contiguous, times down, to `between` [rows, rank], of 4 bytes each. */
    void (*down)(const Branch *branch, const void *x, int64_t rows, uint32_t *between);
    /* out += `between` times rows first .. first + count of up, for `rows` rows, `step` elements apart; `out` is where the
       first of these columns is. */
    void (*up)(const Branch *branch, const uint32_t *between, int64_t rows, int64_t first, int64_t count, void *out,
               int64_t step);
} Narrow;
extern const Narrow narrow512, narrow_amx;

/* Those of narrow512. */
void lay512(const Branch *branch, uint32_t *laid);
void down512(const Branch *branch, const void *x, int64_t rows, uint32_t *between);
void up512(const Branch *branch, const uint32_t *between, int64_t rows, int64_t first, int64_t count, void *out, int64_t step);

#endif
