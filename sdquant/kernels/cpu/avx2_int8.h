/* Products in 8-bit integers with AVX2 alone: what avx2_int8.c puts together. One instruction multiplies and adds two
   columns of eight rows of the weight with those of one row of activations, as integers of 16 bits.

   A panel has its first half of PANEL rows and then the others, of each for every two columns the two codes of each row,
   signed; a group up to six rows, and for every two columns two codes of each row, of 16 bits. */
#ifndef SDQUANT_AVX2_INT8_H
#define SDQUANT_AVX2_INT8_H

#include "int8.h"

enum { HALF = PANEL / 2 };

/* avx2_codes.c */
QuantizeGroup quantize_avx2;
QuantizeLine quantize_line_avx2;
QuantizeRuns quantize_runs_avx2;
Largest largest_avx2;
CodesOf codes_avx2;
NumbersOf numbers_avx2;
ChannelsLast last_avx2;

/* avx2_panels.c */
MakePanel panel_avx2;

#endif
