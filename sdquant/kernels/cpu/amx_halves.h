/* What amx_narrow.c takes from amx_halves.c: see narrow.h. */
#ifndef SDQUANT_AMX_HALVES_H
#define SDQUANT_AMX_HALVES_H
#include "narrow.h"

void lay_halves(const Branch *branch, uint32_t *laid);
void down_halves(const Branch *branch, const float *x, int64_t rows, uint32_t *between);
void up_halves(const Branch *branch, const uint32_t *between, int64_t rows, int64_t first, int64_t count, float *out,
               int64_t step);
/* 32 rows of `up`, or `count`, from `first` on, for `halves_sums`. */
void lay_up_halves(const Branch *branch, int64_t first, int64_t count, uint32_t *laid);
/* [rows][NARROW_WIDE], for up to BRANCH_TALL rows of `between`; changes all tiles. */
void halves_sums(const Branch *branch, const uint32_t *between, int rows, const uint32_t *laid, float *sums);

#endif
