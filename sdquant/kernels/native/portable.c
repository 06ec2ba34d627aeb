/* For any machine. */
#define PLUS(a, b, c) ((a) + (b) * (c))
#include "portable.h"

const Kernels portable_kernels = {"portable", decoder, 0, dots, 4, convert};
