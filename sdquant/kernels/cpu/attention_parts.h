/* Attention in bf16 with sums in float32, without the scores ever being in memory as a whole: all but its products.

   Everything is worked on turned: scores are [keys, queries], results [width, queries], so that a vector holds one key's
   scores for sixteen queries, and largest ones and sums are those of vectors. Keys are tiles as they are; queries are
   laid out in pairs of columns, values turned, once for a head.

   Of 32 queries the scores with a block of keys are made, turned into shares, and multiplied with the values. Shares are
   2 ** (score - base), where each query's base is its largest score so far: where that grows, former results are scaled
   down. What is left in the end is a division by the sum of the shares. (Online softmax: Milakov and Gimelshein, 2018.)

   For files that define INLINE and include immintrin.h, for AVX-512 with bf16. */
#ifndef SDQUANT_ATTENTION_PARTS_H
#define SDQUANT_ATTENTION_PARTS_H
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "avx512_transpose.h"

#ifndef SDQUANT_AMX_H
enum { TILE_ROWS = 16, TILE_BYTES = 64 };
#endif
enum {
    STEP = 32,                       /* columns of a tile */
    TILE = TILE_ROWS * TILE_BYTES,
    BLOCK = 256,                     /* keys: their scores and shares stay in the first cache */
    SIDES = QUERIES / TILE_ROWS,
};
#define LEAST (-120.0f) /* exponents of two: less is nothing, and would be slow */

/* What one thread works with; `steps` of width and `groups` of 32 keys, padded with zeros. */
typedef struct {
    int64_t steps, groups;
    char *keys;    /* [groups * 2][steps] tiles of sixteen keys */
    char *values;  /* [groups][steps * 2] tiles of sixteen columns by 32 keys */
    char *queries; /* [steps][SIDES] tiles of sixteen pairs of columns by sixteen queries */
    float *scores; /* [SIDES][BLOCK] vectors of sixteen queries */
    char *shares;  /* [SIDES][BLOCK / 2] vectors of sixteen queries by two keys */
    float *sums;   /* [SIDES][steps * 32] vectors of sixteen queries */
} Room;

static int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to; }

static const uint16_t *row_of(const Rows *rows, int64_t heads, int64_t head, int64_t row) {
    return rows->at + head / heads * rows->step[0] + head % heads * rows->step[1] + row * rows->step[2];
}

INLINE __mmask32 columns_from(int64_t width, int64_t step) {
    const int64_t here = width - step * STEP;
    return here >= STEP ? 0xffffffffu : ((__mmask32)1 << here) - 1;
}

static void lay_keys(const Attention *a, int64_t head, const Room *room) {
    for (int64_t key = 0; key < room->groups * STEP; key++) {
        char *to = room->keys + key / TILE_ROWS * room->steps * TILE + key % TILE_ROWS * TILE_BYTES;
        const uint16_t *from = row_of(&a->k, a->heads, head, key);
        for (int64_t s = 0; s < room->steps; s++, to += TILE)
            _mm512_store_si512(to, key < a->keys ? _mm512_maskz_loadu_epi16(columns_from(a->width, s), from + s * STEP)
                                                 : _mm512_setzero_si512());
    }
}

static void lay_queries(const Attention *a, int64_t head, int64_t first, const Room *room) {
    for (int64_t s = 0; s < room->steps; s++)
        for (int side = 0; side < SIDES; side++) {
            __m512i q[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) {
                const int64_t row = first + side * TILE_ROWS + i;
                q[i] = row < a->queries ? _mm512_maskz_loadu_epi16(columns_from(a->width, s),
                                                                   row_of(&a->q, a->heads, head, row) + s * STEP)
                                        : _mm512_setzero_si512();
            }
            transpose(q);
            char *to = room->queries + (s * SIDES + side) * TILE;
            for (int i = 0; i < TILE_ROWS; i++) _mm512_store_si512(to + i * TILE_BYTES, q[i]);
        }
}

/* Keys in pairs, each pair's columns side by side, turned: columns of 32 keys each. */
static void lay_values(const Attention *a, int64_t head, const Room *room) {
    uint16_t order[2][STEP];
    for (int i = 0; i < STEP; i++)
        for (int half = 0; half < 2; half++) order[half][i] = (uint16_t)(half * 16 + i / 2 + i % 2 * STEP);
    const __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
    for (int64_t group = 0; group < room->groups; group++)
        for (int64_t s = 0; s < room->steps; s++) {
            const __mmask32 mask = columns_from(a->width, s);
            __m512i first[TILE_ROWS], second[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) {
                __m512i pair[2];
                for (int j = 0; j < 2; j++) {
                    const int64_t key = group * STEP + 2 * i + j;
                    pair[j] = key < a->keys
                                  ? _mm512_maskz_loadu_epi16(mask, row_of(&a->v, a->heads, head, key) + s * STEP)
                                  : _mm512_setzero_si512();
                }
                first[i] = _mm512_permutex2var_epi16(pair[0], low, pair[1]);
                second[i] = _mm512_permutex2var_epi16(pair[0], high, pair[1]);
            }
            transpose(first);
            transpose(second);
            char *to = room->values + (group * room->steps + s) * 2 * TILE;
            for (int i = 0; i < TILE_ROWS; i++) {
                _mm512_store_si512(to + i * TILE_BYTES, first[i]);
                _mm512_store_si512(to + TILE + i * TILE_BYTES, second[i]);
            }
        }
}

/* 2 ** x for x at most 0, to 1e-4 of it, which is less than what rounding to bf16 takes; NaN stays NaN. */
INLINE __m512 power(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f); /* 1.5 * 2 ** 23: what is added to it is rounded */
    x = _mm512_max_ps(_mm512_set1_ps(LEAST), x);
    const __m512 n = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(n, magic));
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.05517144f), _mm512_set1_ps(0.24261081f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.69326099f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.99992809f));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}

/* The largest of `keys` vectors, each place by itself. */
INLINE __m512 largest_of(const float *scores, int64_t keys) {
    __m512 most[4];
    for (int i = 0; i < 4; i++) most[i] = _mm512_load_ps(scores + (i < keys ? i : 0) * 16);
    int64_t key = 4;
    for (; key + 4 <= keys; key += 4)
        for (int i = 0; i < 4; i++) most[i] = _mm512_max_ps(most[i], _mm512_load_ps(scores + (key + i) * 16));
    for (; key < keys; key++) most[0] = _mm512_max_ps(most[0], _mm512_load_ps(scores + key * 16));
    return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

/* Two keys' shares of sixteen queries, in pairs. */
INLINE void pair(char *to, __m512i order, __m512 a, __m512 b) {
    _mm512_store_si512(to, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
}

/* Scores of `keys` keys and one side as shares; those of no key, up to 32, are zero. `base` and `total` are the queries'
   so far. */
static void share(const Room *room, int64_t keys, int side, float scale, __m512 *base, __m512 *total, int first) {
    const float *scores = room->scores + side * BLOCK * 16;
    char *shares = room->shares + side * BLOCK / 2 * TILE_BYTES;
    const __m512 factor = _mm512_set1_ps(scale), largest = _mm512_mul_ps(largest_of(scores, keys), factor);
    const __mmask16 above = _mm512_cmp_ps_mask(largest, *base, _CMP_GT_OQ);
    if (first) {
        *base = largest;
    } else if (above) {
        const __m512 less = _mm512_mask_mov_ps(_mm512_set1_ps(1), above, power(_mm512_sub_ps(*base, largest)));
        *total = _mm512_mul_ps(*total, less);
        *base = _mm512_mask_mov_ps(*base, above, largest);
        float *sums = room->sums + side * room->steps * STEP * 16;
        for (int64_t c = 0; c < room->steps * STEP; c++, sums += 16)
            _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), less));
    }
    const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), *base);
    uint16_t places[STEP];
    for (int i = 0; i < STEP; i++) places[i] = (uint16_t)(i / 2 + i % 2 * 16);
    const __m512i order = _mm512_loadu_si512(places);
    __m512 sums[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm512_setzero_ps();
    int64_t key = 0;
    for (; key + 4 <= keys; key += 4, scores += 64, shares += 2 * TILE_BYTES) {
        __m512 p[4];
        for (int i = 0; i < 4; i++) p[i] = power(_mm512_fmadd_ps(_mm512_load_ps(scores + i * 16), factor, minus));
        for (int i = 0; i < 4; i++) sums[i] = _mm512_add_ps(sums[i], p[i]);
        pair(shares, order, p[0], p[1]);
        pair(shares + TILE_BYTES, order, p[2], p[3]);
    }
    for (; key < keys || key % STEP; key += 2, scores += 32, shares += TILE_BYTES) {
        __m512 p[2];
        for (int i = 0; i < 2; i++) {
            p[i] = _mm512_setzero_ps();
            if (key + i < keys) p[i] = power(_mm512_fmadd_ps(_mm512_load_ps(scores + i * 16), factor, minus));
            sums[i] = _mm512_add_ps(sums[i], p[i]);
        }
        pair(shares, order, p[0], p[1]);
    }
    for (int i = 0; i < 4; i++) *total = _mm512_add_ps(*total, sums[i]);
}

/* Sums of a side, divided by the shares' totals and turned, to the queries from `first` on. */
static void put(const Attention *a, int64_t head, int64_t first, const Room *room, int side, __m512 total) {
    const __m512 each = _mm512_div_ps(_mm512_set1_ps(1), total);
    for (int64_t c = 0; c < a->width; c += TILE_ROWS) {
        __m512i tile[TILE_ROWS];
        const float *from = room->sums + (side * room->steps * STEP + c) * 16;
        for (int i = 0; i < TILE_ROWS; i++)
            tile[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + i * 16), each));
        transpose(tile);
        const __mmask16 mask = a->width - c >= TILE_ROWS ? 0xffff : (__mmask16)((1u << (a->width - c)) - 1);
        for (int i = 0; i < TILE_ROWS && first + i < a->queries; i++)
            _mm256_mask_storeu_epi16((uint16_t *)row_of(&a->out, a->heads, head, first + i) + c, mask,
                                     (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(tile[i])));
    }
}

typedef void Multiply(const Attention *a, const Room *room, int64_t key, int64_t keys);

/* `score`: of keys from `key` on with the queries, to the scores; `gather`: of their values with the shares, to the sums.
   0: no memory. */
INLINE int attend(const Attention *a, int64_t start, int64_t stop, Multiply *score, Multiply *gather) {
    const int64_t steps = up(a->width, STEP), groups = up(a->keys, STEP), blocks = up(a->queries, QUERIES);
    const int64_t laid = groups * 2 * steps * TILE, sums = steps * 2 * SIDES * TILE;
    char *memory = malloc(2 * laid + steps * SIDES * TILE + BLOCK * SIDES * 64 + BLOCK * SIDES * 32 + sums + TILE_BYTES);
    if (!memory) return 0;
    Room room = {.steps = steps, .groups = groups};
    room.keys = memory + (TILE_BYTES - (intptr_t)memory % TILE_BYTES);
    room.values = room.keys + laid;
    room.queries = room.values + laid;
    room.scores = (float *)(room.queries + steps * SIDES * TILE);
    room.shares = (char *)(room.scores + BLOCK * SIDES * 16);
    room.sums = (float *)(room.shares + BLOCK * SIDES * 32);
    const float scale = a->scale * 1.44269504f; /* log2(e) */
    int64_t head = -1;
    for (int64_t at = start; at < stop; at++) {
        const int64_t first = at % blocks * QUERIES;
        if (at / blocks != head) {
            head = at / blocks;
            lay_keys(a, head, &room);
            lay_values(a, head, &room);
        }
        lay_queries(a, head, first, &room);
        memset(room.sums, 0, sums);
        __m512 base[SIDES], total[SIDES];
        for (int side = 0; side < SIDES; side++) base[side] = total[side] = _mm512_setzero_ps();
        for (int64_t key = 0; key < a->keys; key += BLOCK) {
            const int64_t here = a->keys - key < BLOCK ? a->keys - key : BLOCK;
            score(a, &room, key, here);
            for (int side = 0; side < SIDES; side++)
                share(&room, here, side, scale, &base[side], &total[side], key == 0);
            gather(a, &room, key, here);
        }
        for (int side = 0; side < SIDES; side++) put(a, head, first + side * TILE_ROWS, &room, side, total[side]);
    }
    free(memory);
    return 1;
}
#endif
