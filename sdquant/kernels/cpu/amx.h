/* Compiles what follows for AMX, where the compiler can; form.h defines AMX there. Eight tiles of 16 rows of 64 bytes;
   each thread loads their shapes before it multiplies and gives them up afterwards, as oneDNN does. */
#ifndef SDQUANT_AMX_H
#define SDQUANT_AMX_H
#include "form.h"

#ifdef AMX
#define WANTED "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx512vnni,amx-tile,amx-int8,amx-bf16,fma,f16c,prfchw"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target(WANTED))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx512vnni,amx-tile,amx-int8,amx-bf16,fma,f16c,prfchw")
#endif
#include <immintrin.h>
#define INLINE static inline __attribute__((always_inline))

enum { TILE_ROWS = 16, TILE_BYTES = 64 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

static const Tiles WHOLE_TILES __attribute__((aligned(64))) = {
    .palette = 1,
    .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

/* The compiler does not know what a tile is loaded from: what was stored before must be in memory. */
#define MEMORY_IS_WRITTEN __asm__ volatile("" ::: "memory")

/* Adds products in bf16 to the sums in tiles 0 to 3: two tiles at `a` and `a1` by two at `b` and `b1`, `steps` times.
   Rows of a are `a_row` bytes apart, those of b `b_row`; from step to step it is `a_step` and `b_step`. */
INLINE void multiply_tiles(const char *a, const char *a1, int64_t a_row, int64_t a_step, const char *b, const char *b1,
                           int64_t b_row, int64_t b_step, int64_t steps) {
    for (int64_t s = 0; s < steps; s++, a += a_step, a1 += a_step, b += b_step, b1 += b_step) {
        _tile_loadd(4, a, a_row);
        _tile_loadd(6, b, b_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1, b_row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1, a_row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

INLINE void zero_tiles(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Tiles 0 to 3 to [16][16] of float each. */
INLINE void store_tiles(float *to, float *to1, float *to2, float *to3) {
    _tile_stored(0, to, TILE_BYTES);
    _tile_stored(1, to1, TILE_BYTES);
    _tile_stored(2, to2, TILE_BYTES);
    _tile_stored(3, to3, TILE_BYTES);
}
#endif
#endif
