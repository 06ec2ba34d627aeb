/* For any machine. */
#include "blocks.h"
#include "runs.h"
#include "portable.h"
#include "by_turns.h"
#include "expand.h"
#include "rotate.h"
#include "integers.h"

static Decode *decoder(const Form *form) { return form->packing < CODED ? decode_plain : portable_blocks(form); }

const Kernels portable_kernels = {"portable", decoder, 0, 0, dots, PANEL_ROWS, convert, widen, quantize, finish, 0, 0, 0, &rotation_portable, expand_portable, 0, divide, turns_of_scales};
