/* Names of packings, as sdquant/core/packed_layout.py has them. */
#include "blocks.h"
#include "codes.h"

#include <string.h>

static const struct {
    const char *name;
    int packing;
} NAMES[] = {
    {"int8", SIGNED_BYTES}, {"uint8", BYTES},         {"float8_e4m3fn", BYTES}, {"float8_e5m2", BYTES},
    {"nibbles-low", NIBBLES_LOW}, {"nibbles-high", NIBBLES_HIGH}, {"planes4", PLANES4}, {"planes2", PLANES2},
    {"threes", THREES},     {"sdnq6", SDNQ6},         {"sdnq3", SDNQ3},
    {"twos", TWOS},         {"fives", FIVES},         {"sixes", SIXES},         {"sevens", SEVENS},
#define BLOCK_NAME(name, weights, bytes) {#name, PACKING_##name},
    BLOCK_TYPES(BLOCK_NAME)
};

int packing_of(const char *name) {
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (!strcmp(NAMES[i].name, name)) return NAMES[i].packing;
    return -1;
}

int planes_of(Packing packing) { return packing == PLANES4 ? 2 : packing == PLANES2 ? 4 : 1; }

int64_t packed_bytes(const Form *form, int64_t weights) {
    switch ((int)form->packing) {
#define BLOCK_BYTES(name, weights_of, bytes) case PACKING_##name: return weights / (weights_of) * (bytes);
    BLOCK_TYPES(BLOCK_BYTES)
    default: return weights * bits_of_code(form->packing) / 8;
    }
}
