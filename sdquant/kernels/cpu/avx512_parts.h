/* What avx512.c puts together. */
#ifndef SDQUANT_AVX512_PARTS_H
#define SDQUANT_AVX512_PARTS_H

#include "codes.h"
#include "form.h"

Decode choose512;       /* avx512_choose.c: codes of up to four bits */
Decode bytes512;        /* avx512_bytes.c: those of more */
Decode turns512;        /* avx512_turns.c: those of groups with several scales */
Decode decode_plain512; /* avx512.c: any, slowly, to the last bit */
DecodeAndDot choose_and_dot512, bytes_and_dot512;
DecodeAndDot nibbles_and_dot512; /* avx512_nibbles.c: for m > 0, where */
int whole512(const Form *form, Type type);
int turned512(const Form *form, Type type);
Dots dots512;           /* avx512_dots.c */
Product product_avx512; /* avx512_product.c: of bf16, with more than a few rows */
Product product_amx;    /* amx.c */

enum { SPARE = 128 };

/* avx512_unpack.c: the codes of weights first .. first + count, all of one plane, one to a byte: in `spare` [count + SPARE]
   or where they are. Bits above a code's own are any. */
const uint8_t *unpack512(const Form *form, const Parts *parts, int64_t first, int64_t count, uint8_t *spare);

#endif
