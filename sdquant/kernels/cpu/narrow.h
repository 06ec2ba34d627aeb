/* Products of floats with few columns or few terms, such as the two of a low-rank branch, at the speed of wide ones.

   A library's product lays out the smaller matrix anew in each call and has tiles for large ones: for 77 rows it takes
   three times as long as its multiplications. */
#ifndef SDQUANT_NARROW_H
#define SDQUANT_NARROW_H

#include "form.h"

/* out [rows, columns] = x [rows, terms] times a matrix [terms, columns], or, where it `adds`, += that. The matrix lies so
   at `by`, or, where `turned`, as [columns, terms]. */
typedef void MultiplyNarrow(const float *x, int64_t rows, int64_t terms, const float *by, int turned, int64_t columns,
                            int adds, float *out);
MultiplyNarrow multiply_narrow512;

#endif
