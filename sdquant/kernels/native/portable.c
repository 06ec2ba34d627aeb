/* For any machine. */
#define KERNELS portable_kernels
#define NAME "portable"
#define PLUS(a, b, c) ((a) + (b) * (c))
#include "portable.h"
