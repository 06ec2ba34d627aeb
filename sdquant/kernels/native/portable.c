/* For any machine. */
#define PLUS(a, b, c) ((a) + (b) * (c))
#include "blocks.h"
#include "portable.h"
#include "integers.h"

static Decode *portable_decoder(const Form *form) { return form->packing < CODED ? decode_plain : portable_blocks(form); }

const Kernels portable_kernels = {"portable", portable_decoder, 0, dots, 4, convert, quantize, finish};
