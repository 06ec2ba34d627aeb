/* Attention by AMX; see attention_parts.h. */
#include "amx.h"

#ifdef AMX
#include "attention_parts.h"

static void score(const Attention *a, const Room *room, int64_t key, int64_t keys) {
    const int64_t group = key / STEP, groups = up(keys, STEP);
    (void)a;
    MEMORY_IS_WRITTEN;
    for (int64_t g = 0; g < groups; g++) {
        const char *k = room->keys + (group + g) * 2 * room->steps * TILE;
        float *to = room->scores + g * STEP * 16, *to1 = to + BLOCK * 16;
        zero_tiles();
        multiply_tiles(k, k + room->steps * TILE, TILE_BYTES, TILE, room->queries, room->queries + TILE, TILE_BYTES,
                       SIDES * TILE, room->steps);
        store_tiles(to, to1, to + 256, to1 + 256);
    }
    MEMORY_IS_WRITTEN;
}

static void gather(const Attention *a, const Room *room, int64_t key, int64_t keys) {
    const int64_t group = key / STEP, groups = up(keys, STEP);
    (void)a;
    MEMORY_IS_WRITTEN;
    for (int64_t s = 0; s < room->steps; s++) {
        float *sums = room->sums + s * STEP * 16, *sums1 = sums + room->steps * STEP * 16;
        const char *v = room->values + (group * room->steps + s) * 2 * TILE, *p = room->shares;
        _tile_loadd(0, sums, TILE_BYTES);
        _tile_loadd(1, sums1, TILE_BYTES);
        _tile_loadd(2, sums + 256, TILE_BYTES);
        _tile_loadd(3, sums1 + 256, TILE_BYTES);
        multiply_tiles(v, v + TILE, TILE_BYTES, room->steps * 2 * TILE, p, p + BLOCK / 2 * TILE_BYTES, TILE_BYTES,
                       TILE, groups);
        store_tiles(sums, sums1, sums + 256, sums1 + 256);
    }
    MEMORY_IS_WRITTEN;
}

int attend_amx(const Attention *a, int64_t start, int64_t stop) {
    _tile_loadconfig(&WHOLE_TILES);
    const int done = attend(a, start, stop, score, gather);
    _tile_release();
    return done;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
