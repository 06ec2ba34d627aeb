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
#endif
#endif
