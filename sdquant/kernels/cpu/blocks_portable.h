/* Decoders of GGUF's block types over `unpack_*`; included once for each instruction set that has no better way.

   Set before: BLOCKS, the function to define; optionally FINISH, which turns an unpacked block's `count` numbers into
   `type` at `out`. */
#include "blocks_unpack.h"

#ifndef FINISH
#define FINISH finish
static inline void finish(const unpacked *from, int count, Type type, void *out) {
    float values[256];
    uint16_t *halves = out;
    for (int i = 0; i < count; i += 16)
        for (int k = i; k < i + 16; k++) values[k] = (float)from->codes[k] * from->scale[i / 16] + from->shift[i / 16];
    if (type == BF16)
        for (int i = 0; i < count; i++) halves[i] = to_bf16(values[i]);
    else if (type == F16)
        for (int i = 0; i < count; i++) halves[i] = to_f16(values[i]);
    else
        memcpy(out, values, (size_t)count * sizeof *values);
}
#endif

#define DEFINE(name, weights, bytes) \
    static void name##_blocks(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, \
                              void *out) { \
        const uint8_t *from = parts->codes + first / weights * bytes; \
        const size_t step = (size_t)weights * (type == F32 ? 4 : 2); \
        unpacked block; \
        (void)form; \
        fill(block.shift, 16, -0.0f); \
        for (char *to = out; count > 0; count -= weights, from += bytes, to += step) { \
            unpack_##name(from, &block, (const int8_t *)parts->zeros); \
            FINISH(&block, weights, type, to); \
        } \
    }
BLOCK_TYPES(DEFINE)

#define DECODER(name) name##_blocks
DEFINE_BLOCKS(BLOCKS)
