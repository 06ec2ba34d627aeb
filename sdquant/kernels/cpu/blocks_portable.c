/* GGUF's block types on any machine. */
#define BLOCKS portable_blocks
#include "blocks_portable.h"
