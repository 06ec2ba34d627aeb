/* For any machine. */
#define KERNELS portable_kernels
#define NAME "portable"
#define BLOCKS portable_blocks
#define PLUS(a, b, c) ((a) + (b) * (c))
#include "portable.h"
