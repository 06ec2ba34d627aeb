/* The rotation of kernels/hadamard.py: runs of `group` numbers times the regular Hadamard matrix, `group` a power of 4.

   The matrix is a Kronecker product of matrices of four rows, so numbers are combined in fours that are 1 apart, then 4,
   16 and so on: log4(group) steps of about two operations a number. Since each row of four has one -1, half the sum of
   all less the number that has it is the row's product. */
#ifndef SDQUANT_ROTATE_H
#define SDQUANT_ROTATE_H

#include "form.h"

/* `count` floats at x, whole groups, in place. */
typedef void Rotate(float *x, int64_t count, int64_t group);
Rotate rotate_portable, rotate_avx2;

/* A row of `columns` numbers of `type`, as floats at `to`. */
void rotate_row(Type type, const void *x, int64_t columns, int64_t group, float *to);
/* Rows of x [rows, columns] to `out`, of the same type. `spare` [columns]; not used for F32. */
void rotate_rows(Type type, const void *x, int64_t rows, int64_t columns, int64_t group, float *spare, void *out);

#endif
