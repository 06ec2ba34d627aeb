/* The rotation of kernels/hadamard.py: runs of `group` numbers times the regular Hadamard matrix, `group` a power of 4.

   The matrix is a Kronecker product of matrices of four rows, so numbers are combined in fours that are 1 apart, then 4,
   16 and so on: log4(group) steps of two sums a number. Each result is a sum of all numbers of its group with signs, in
   one order of pairs, divided by the root of their number: rotate_bounds.h wants it so. */
#ifndef SDQUANT_ROTATE_H
#define SDQUANT_ROTATE_H

#include "form.h"

/* `count` floats at x, whole groups, in place. */
typedef void Rotate(float *x, int64_t count, int64_t group);
Rotate rotate_portable;

/* How one instruction set does it. The other functions are for groups of 16 and more; each gets `count` numbers, whole
   groups, and gives one number for a group. */
typedef struct Rotation {
    Rotate *rotate;
    /* How far the results of rotating x may be from those of another order of sums. */
    void (*bounds)(const float *x, int64_t count, int64_t group, float *bounds);
    void (*largest)(const float *y, int64_t count, int64_t group, float *largest); /* sizes */
    /* Integers nearest to y / scale, ties to even, from `least` to `most`; and whether numbers within the bound of y may
       have others. */
    void (*codes)(const float *y, int64_t count, int64_t group, float scale, const float *bounds, float least, float most,
                  int8_t *codes, uint8_t *open);
    /* `count` numbers of `type`, as floats at `to`, which may be x; NULL: by `rotate`. */
    void (*row)(Type type, const void *x, int64_t count, int64_t group, float *to);
} Rotation;
extern const Rotation rotation_portable, rotation_avx2, rotation_avx512;

/* A row of `columns` numbers of `type`, as floats at `to`. */
void rotate_row(Type type, const void *x, int64_t columns, int64_t group, float *to);
/* Rows of x [rows, columns] to `out`, of the same type. `spare` [columns]; not used for F32. */
void rotate_rows(Type type, const void *x, int64_t rows, int64_t columns, int64_t group, float *spare, void *out);

/* To quantize rows as if they were rotated by a product with the matrix, whose sums have an order of their own.
   First rows of x [rows, columns] to `out`, floats, with the bound and the largest size of each group [rows, groups]. */
void rotate_rows_within(Type type, const void *x, int64_t rows, int64_t columns, int64_t group, float *out,
                        float *largest, float *bounds);
/* Then, with the scales of rows, to codes; `open` [rows, groups]: whether the order decides some code of a group. */
void code_rows_within(const float *y, int64_t rows, int64_t columns, int64_t group, const float *scale,
                      const float *bounds, int64_t least, int64_t most, int8_t *codes, uint8_t *open);

#endif
