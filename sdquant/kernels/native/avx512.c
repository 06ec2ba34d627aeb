/* Kernels for AVX-512 with VBMI and BF16: those of the parts in avx512_*.c. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "blocks.h"
#include "portable.h"

static Decode *decoder512(const Form *form) { return form->packing < CODED ? decode512 : avx512_blocks(form); }

const Kernels avx512_kernels = {"avx512bf16", decoder512, dots512, 4, PANEL_ROWS, convert};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
