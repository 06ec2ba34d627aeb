/* Attention by AVX-512's products of bf16; see attention_parts.h. */
#include "avx512.h"

#ifdef BUILD
#include <stdint.h>

#include "attention_parts.h"

enum { EIGHT = 8 }; /* rows of a tile at a time, by sixteen queries of each side: their sums stay in registers */
#define EACH(i) _Pragma("GCC unroll 8") for (int i = 0; i < EIGHT; i++)

INLINE __m512bh pair_at(const char *at) {
    int32_t both;
    memcpy(&both, at, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* Products of eight rows at `a`, of `pairs` pairs, with the vectors at `b` and, `b_side` bytes on, of the other side, to
   eight vectors at `to` and `to_side` floats on; added to what is there if there is `more`. Sixteen pairs are a step. */
INLINE void multiply(const char *a, int64_t a_step, const char *b, int64_t b_side, int64_t b_step, int64_t pairs,
                     float *to, int64_t to_side, int more) {
    __m512 sum[EIGHT], other[EIGHT];
    EACH(i) sum[i] = more ? _mm512_load_ps(to + i * 16) : _mm512_setzero_ps();
    EACH(i) other[i] = more ? _mm512_load_ps(to + to_side + i * 16) : _mm512_setzero_ps();
    for (; pairs > 0; pairs -= 16, a += a_step, b += b_step)
        for (int64_t j = 0; j < (pairs < 16 ? pairs : 16); j++) {
            const __m512bh here = (__m512bh)_mm512_load_si512(b + j * TILE_BYTES);
            const __m512bh there = (__m512bh)_mm512_load_si512(b + b_side + j * TILE_BYTES);
            EACH(i) {
                const __m512bh one = pair_at(a + i * TILE_BYTES + j * 4);
                sum[i] = _mm512_dpbf16_ps(sum[i], one, here);
                other[i] = _mm512_dpbf16_ps(other[i], one, there);
            }
        }
    EACH(i) _mm512_store_ps(to + i * 16, sum[i]);
    EACH(i) _mm512_store_ps(to + to_side + i * 16, other[i]);
}

static void score(const Attention *a, const Room *room, int64_t key, int64_t keys) {
    for (int64_t at = 0; at < keys; at += EIGHT) {
        const char *k = room->keys + (key + at) / TILE_ROWS * room->steps * TILE + at % TILE_ROWS * TILE_BYTES;
        multiply(k, TILE, room->queries, TILE, SIDES * TILE, up(a->width, 2), room->scores + at * 16, BLOCK * 16, 0);
    }
}

static void gather(const Attention *a, const Room *room, int64_t key, int64_t keys) {
    for (int64_t c = 0; c < a->width; c += EIGHT) {
        const char *v = room->values + (key / STEP * room->steps * 2 + c / TILE_ROWS) * TILE + c % TILE_ROWS * TILE_BYTES;
        multiply(v, room->steps * 2 * TILE, room->shares, BLOCK / 2 * TILE_BYTES, TILE, up(keys, 2),
                 room->sums + c * 16, room->steps * STEP * 16, 1);
    }
}

int attend_avx512(const Attention *a, int64_t start, int64_t stop) { return attend(a, start, stop, score, gather); }
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
