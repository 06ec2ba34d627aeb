/* For any machine. */
#define PLUS(a, b, c) ((a) + (b) * (c))
#include "portable.h"

const Kernels portable_kernels = {"portable", decoder, dots, 4, 4, convert};
