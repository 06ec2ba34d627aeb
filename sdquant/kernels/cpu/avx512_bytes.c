/* Codes of eight bits, or six: a conversion, or a choice among 256 floats, and the arithmetic for each weight. Where
   groups are long, the 256 values of a group are computed once, and codes choose among them. */
#include "avx512.h"

#ifdef BUILD
#include "avx512_parts.h"
#include "avx512_sink.h"
#include "numbered.h"

#if defined(__GNUC__) && !defined(__clang__)
/* Which of a table's bytes are set depends on `how` and the type, and so does which are read: GCC does not follow. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

enum { LONG = 1024 }; /* a group for which a table of its own pays */

/* A table of 256 values of 2 or 4 bytes, as tables of their first, second ... bytes. */
typedef struct {
    __m512i byte[4][4];
    __m512i last[2]; /* both bytes of what 128 stands for, where the table is of sizes */
    __m512i flip;    /* see `mirror_of` */
} Table;

INLINE void table_of(const void *values, int size, Table *out) {
    uint8_t byte[4][256];
    for (int i = 0; i < 256; i += 64 / size) {
        __m512i some = _mm512_loadu_si512((const char *)values + i * size);
        for (int k = 0; k < size; k++, some = _mm512_srli_epi64(some, 8)) {
            if (size == 2) _mm256_storeu_si256((__m256i *)(byte[k] + i), _mm512_cvtepi16_epi8(some));
            else _mm_storeu_si128((__m128i *)(byte[k] + i), _mm512_cvtepi32_epi8(some));
        }
    }
    for (int k = 0; k < size; k++)
        for (int part = 0; part < 4; part++) out->byte[k][part] = _mm512_loadu_si512(byte[k] + 64 * part);
}

/* The k-th bytes of the values of 64 codes. */
INLINE __m512i bytes_of(const Table *table, int k, __m512i codes, __mmask64 upper) {
    return _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(table->byte[k][0], codes, table->byte[k][1]), upper,
                                _mm512_permutex2var_epi8(table->byte[k][2], codes, table->byte[k][3]));
}

/* The floats of 64 codes. Bytes are put together within each 128 bits: so that all comes out in order, fours of codes
   are turned before. */
INLINE void floats_of(const Table *table, __m512i codes, __m512 *out) {
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    codes = _mm512_permutexvar_epi32(turn, codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i a = bytes_of(table, 0, codes, upper), b = bytes_of(table, 1, codes, upper);
    const __m512i c = bytes_of(table, 2, codes, upper), d = bytes_of(table, 3, codes, upper);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab, cd));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab, cd));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab_high, cd_high));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab_high, cd_high));
}

/* Where the upper half of a table of 256 floats is the lower one, but for the sign bit: 0 if in the same order, as of
   float8, 0x7f if in the opposite one, as of codes that are sorted; -1 where it is not. */
static int mirror_of(const float *values) {
    const __m512i sign = _mm512_set1_epi32((int)0x80000000);
    const __m512i turn = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int same = 1, opposite = 1;
    for (int i = 0; i < 128; i += 16) {
        const __m512i upper = _mm512_xor_si512(_mm512_loadu_si512(values + 128 + i), sign);
        const __m512i lower = _mm512_permutexvar_epi32(turn, _mm512_loadu_si512(values + 112 - i));
        same &= _mm512_cmpeq_epi32_mask(upper, _mm512_loadu_si512(values + i)) == 0xffff;
        opposite &= _mm512_cmpeq_epi32_mask(upper, lower) == 0xffff;
    }
    return same ? 0 : opposite ? 0x7f : -1;
}

/* `floats_of` for such a table, of which the upper half is used. */
INLINE void mirrored_of(const Table *table, __m512i flip, __m512i codes, __m512 *out) {
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    codes = _mm512_permutexvar_epi32(turn, codes);
    const __m512i at = _mm512_mask_mov_epi8(_mm512_xor_si512(codes, flip), _mm512_movepi8_mask(codes), codes);
    __m512i byte[4];
    for (int k = 0; k < 4; k++) byte[k] = _mm512_permutex2var_epi8(table->byte[k][2], at, table->byte[k][3]);
    byte[3] = _mm512_ternarylogic_epi32(byte[3], codes, _mm512_set1_epi8((char)0x80), 0xd2); /* a ^ (~codes & sign) */
    const __m512i ab = _mm512_unpacklo_epi8(byte[0], byte[1]), cd = _mm512_unpacklo_epi8(byte[2], byte[3]);
    const __m512i ab_high = _mm512_unpackhi_epi8(byte[0], byte[1]), cd_high = _mm512_unpackhi_epi8(byte[2], byte[3]);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab, cd));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab, cd));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab_high, cd_high));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab_high, cd_high));
}

/* The same for halves. */
INLINE void halves_at(const Table *table, __m512i codes, __m512i *out) {
    codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i low = bytes_of(table, 0, codes, upper), high = bytes_of(table, 1, codes, upper);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

INLINE __m512i codes_of(const uint8_t *codes, int64_t left) {
    return left >= 64 ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(((__mmask64)1 << left) - 1, codes);
}

INLINE void take_floats(Sink *sink, int m, int64_t at, int64_t left, const __m512 *values) {
#define TAKE(k) take(sink, m, F32, at + 16 * k, left - 16 * k, k & 1, _mm512_castps_si512(values[k]));
    FOUR(TAKE)
#undef TAKE
}

/* 256 halves, or as many as there are in `count` vectors, as a table. */
INLINE void table_of_halves(const __m512i *halves, int count, Table *out) {
    static const uint8_t EVEN[64] = {
#define E(i) 2 * (i), 2 * (i) + 2, 2 * (i) + 4, 2 * (i) + 6, 2 * (i) + 8, 2 * (i) + 10, 2 * (i) + 12, 2 * (i) + 14
        E(0), E(8), E(16), E(24), E(32), E(40), E(48), E(56)
#undef E
    };
    const __m512i even = _mm512_loadu_si512(EVEN), odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    for (int i = 0; i < count / 2; i++) {
        out->byte[0][i] = _mm512_permutex2var_epi8(halves[2 * i], even, halves[2 * i + 1]);
        out->byte[1][i] = _mm512_permutex2var_epi8(halves[2 * i], odd, halves[2 * i + 1]);
    }
}

/* The halves of 64 signed codes by a table of their sizes. */
INLINE void halves_by_size(const Table *table, __m512i codes, __m512i *out) {
    codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
    const __m512i size = _mm512_abs_epi8(codes), minus = _mm512_set1_epi8((char)0x80);
    const __mmask64 last = _mm512_movepi8_mask(size); /* -128, whose size is none of the table's */
    __m512i low = _mm512_permutex2var_epi8(table->byte[0][0], size, table->byte[0][1]);
    __m512i high = _mm512_permutex2var_epi8(table->byte[1][0], size, table->byte[1][1]);
    low = _mm512_mask_mov_epi8(low, last, table->last[0]);
    high = _mm512_mask_mov_epi8(high, last, table->last[1]);
    high = _mm512_ternarylogic_epi32(high, codes, minus, 0x78); /* high ^ (codes & minus) */
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* 64 weights, `at` from the one at hand, of which `left` count. */
INLINE void take_values(Sink *sink, int m, Type type, int64_t at, int64_t left, const __m512 *values) {
    if (type == F32) {
        take_floats(sink, m, at, left, values);
        return;
    }
#define TAKE(k)                                                                                                      \
    {                                                                                                                \
        const __m512 a = values[2 * k], b = values[2 * k + 1];                                                       \
        const __m512i halves =                                                                                       \
            type == BF16 ? (__m512i)_mm512_cvtne2ps_pbh(b, a)                                                        \
                         : _mm512_inserti64x4(_mm512_castsi256_si512(halves_of(a, F16)), halves_of(b, F16), 1);      \
        take(sink, m, type, at + 32 * k, left - 32 * k, k, halves);                                                  \
    }
    TWO(TAKE)
#undef TAKE
}

typedef enum { SIGNED, UNSIGNED, LOOK_UP, MIRRORED, OWN, BY_SIZE } How; /* the last two: by a table of a group's own values */

/* What 64 codes, of which `left` count, stand for, less a common zero. Four loads that widen are faster than one that is
   taken apart. */
INLINE void numbers_of(How how, const Table *table, int has_zero, float zero, const uint8_t *codes, int64_t left,
                       __m512 *out) {
    if (how == LOOK_UP) {
        floats_of(table, codes_of(codes, left), out);
        return;
    }
    if (how == MIRRORED) {
        mirrored_of(table, table->flip, codes_of(codes, left), out);
        return;
    }
#define NUMBERS(k)                                                                                           \
    {                                                                                                        \
        const __m128i some = left >= 64 ? _mm_loadu_si128((const __m128i *)codes + k)                        \
                                        : _mm_maskz_loadu_epi8(first_of(left - 16 * k), codes + 16 * k);     \
        const __m512i wide = how == SIGNED ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some);        \
        out[k] = _mm512_cvtepi32_ps(wide);                                                                   \
        if (has_zero) out[k] = _mm512_sub_ps(out[k], _mm512_set1_ps(zero));                                  \
    }
    FOUR(NUMBERS)
#undef NUMBERS
}

/* `step(i, left)` for each 64 weights of a run, and for what is left: where all 64 are there the compiler knows it. */
#define EACH_64(count, step)                          \
    {                                                 \
        int64_t i = 0;                                \
        for (; i + 64 <= (count); i += 64) step(i, 64) \
        if (i < (count)) step(i, (count) - i)         \
    }

/* A run of one group, or, if not 0, of groups from that one on of which `each` are 64 weights, two or four. */
INLINE void run512(const Rules *rules, int plain, int own_zero, How how, Type type, const Table *table, int has_zero,
                   float zero, const Groups *groups, int64_t group, int each, const uint8_t *codes, int64_t count,
                   int64_t ahead, Sink *to, int m) {
    Sink local = held(to, m), *sink = &local;
#define STEP(i, left)                                                                                  \
    {                                                                                                  \
        __m512 values[4];                                                                              \
        _mm_prefetch((const char *)codes + i + ahead, _MM_HINT_T1);                                    \
        numbers_of(how, table, has_zero, zero, codes + i, left, values);                               \
        const int64_t first = group + i / 64 * each;                                                   \
        FOUR(SCALED)                                                                                   \
        take_values(sink, m, type, i, left, values);                                                   \
    }
#define SCALED(k) values[k] = scaled(rules, plain, own_zero, values[k], groups, first + k * each / 4);
    EACH_64(count, STEP)
#undef SCALED
#undef STEP
    *to = held(&local, m);
}

/* The same, by a table of its values. */
INLINE void run_by_table(How how, Type type, const Table *table, const uint8_t *codes, int64_t count, int64_t ahead,
                         Sink *to, int m) {
    Sink local = held(to, m), *sink = &local;
#define STEP(i, left)                                                                                    \
    {                                                                                                    \
        __m512 floats[4];                                                                                \
        __m512i halves[2];                                                                               \
        _mm_prefetch((const char *)codes + i + ahead, _MM_HINT_T1);                                      \
        if (type == F32) {                                                                               \
            floats_of(table, codes_of(codes + i, left), floats);                                         \
            take_floats(sink, m, i, left, floats);                                                       \
        } else {                                                                                         \
            if (how == BY_SIZE) halves_by_size(table, codes_of(codes + i, left), halves);                \
            else halves_at(table, codes_of(codes + i, left), halves);                                    \
            take(sink, m, type, i, left, 0, halves[0]);                                                  \
            take(sink, m, type, i + 32, left - 32, 1, halves[1]);                                        \
        }                                                                                                \
    }
    EACH_64(count, STEP)
#undef STEP
    *to = held(&local, m);
}

/* The table of a group: of 256 codes, or of the sizes 0 to 128. `numbers`: what they stand for, less a common zero. */
INLINE void own_table(const Rules *rules, int own_zero, How how, Type type, const float *numbers, const Groups *groups,
                      Table *out) {
    const int count = how == BY_SIZE ? 4 : 8;
    if (type == F32) {
        float values[256];
        for (int i = 0; i < 256; i += 16)
            _mm512_storeu_ps(values + i, scaled(rules, 0, own_zero, _mm512_loadu_ps(numbers + i), groups, 0));
        table_of(values, 4, out);
        return;
    }
    __m512i halves[8];
    for (int i = 0; i < count; i++) {
        const __m512 a = scaled(rules, 0, own_zero, _mm512_loadu_ps(numbers + 32 * i), groups, 0);
        const __m512 b = scaled(rules, 0, own_zero, _mm512_loadu_ps(numbers + 32 * i + 16), groups, 0);
        halves[i] = _mm512_inserti64x4(_mm512_castsi256_si512(halves_of(a, type)), halves_of(b, type), 1);
    }
    table_of_halves(halves, count, out);
    if (how != BY_SIZE) return;
    const __m256i last = halves_of(scaled(rules, 0, own_zero, _mm512_set1_ps(128), groups, 0), type);
    const int both = _mm256_extract_epi16(last, 0);
    out->last[0] = _mm512_set1_epi8((char)both);
    out->last[1] = _mm512_set1_epi8((char)(both >> 8));
}

INLINE void strips(const Form *form, const Parts *parts, How how, Type type, int64_t first, int64_t count, Sink *to,
                   int m) {
    uint8_t spare[STRIP + SPARE];
    float numbers[256];
    Groups groups;
    Table table;
    Sink sink = *to;
    int64_t of_table = -1; /* the group that it is for */
    const Rules rules = rules_of(form, type);
    const int own_zero = form->zeros >= 0, bits = bits_of_code(form->packing), unpacked = bits < 8;
    const int64_t ahead = unpacked ? 0 : parts->ahead;
    const float zero = own_zero ? 0 : form->zero;
    if (how == LOOK_UP || how == MIRRORED) table_of(form->table, 4, &table);
    if (how == MIRRORED) table.flip = _mm512_set1_epi8((char)mirror_of(form->table));
    const int tabled = how == OWN || how == BY_SIZE, size = how == BY_SIZE ? 128 : 256;
    for (int i = 0; tabled && i < size; i++) {
        const float number = (float)(form->packing == SIGNED_BYTES ? (int8_t)i : i);
        numbers[i] = (form->looked_up ? form->table[i] : number) - zero;
    }
    while (count > 0) {
        int64_t run = tabled || count < STRIP ? count : STRIP; /* a table's codes are bytes, and used where they lie */
        const int64_t group = first / form->group, into = first - group * form->group;
        if (tabled && form->group - into < run) run = form->group - into;
        if (unpacked) ask(form, parts, first, run, bits);
        else ask_scales(form, parts, first, run);
        if (!groups_at(form, parts, group, (into + run - 1) / form->group + 1, &groups)) {
            if (run > STRIP) run = STRIP;
            take_plain(&sink, m, form, parts, first, run, type);
            move(&sink, m, type, run);
        } else if (tabled) {
            if (of_table != group) own_table(&rules, own_zero, how, type, numbers, &groups, &table);
            of_table = group;
            run_by_table(how, type, &table, parts->codes + first, run, ahead, &sink, m);
            move(&sink, m, type, run);
        } else {
            const uint8_t *codes = unpack512(form, parts, first, run, spare);
            const int each = form->group == 32 ? 2 : form->group == 16 ? 4 : 1;
            const int several = each > 1 && !into; /* groups side by side: one by one they are too short */
            if (several) {
#define RUNS(plain, own_zero, has_zero)                                                                        \
    run512(&rules, plain, own_zero, how, type, &table, has_zero, zero, &groups, 0, each, codes, run, ahead, &sink, m)
                if (rules.plain && zero == 0) RUNS(1, 0, 0);
                else if (rules.plain) RUNS(1, 0, 1);
                else RUNS(0, own_zero, 1);
#undef RUNS
                move(&sink, m, type, run);
            }
            for (int64_t i = several ? run : 0, g = 0; i < run; g++) {
                const int64_t end = (g + 1) * form->group - into, size = (end < run ? end : run) - i;
#define RUN(plain, own_zero, has_zero)                                                                         \
    run512(&rules, plain, own_zero, how, type, &table, has_zero, zero, &groups, g, 0, codes + i, size, ahead, &sink, m)
                if (rules.plain && zero == 0) RUN(1, 0, 0);
                else if (rules.plain) RUN(1, 0, 1);
                else RUN(0, own_zero, 1);
#undef RUN
                move(&sink, m, type, size);
                i += size;
            }
        }
        first += run;
        count -= run;
    }
    *to = sink;
}

SINK_FUNCTIONS(SIGNED)
SINK_FUNCTIONS(UNSIGNED)
SINK_FUNCTIONS(LOOK_UP)
SINK_FUNCTIONS(MIRRORED)
SINK_FUNCTIONS(OWN)
SINK_FUNCTIONS(BY_SIZE)

/* Whether a group's own values are computed once; and whether those of codes are those of their sizes, but for the
   sign: then there are half as many. */
static How how_of(const Form *form, Type type) {
    if (form->group < LONG || bits_of_code(form->packing) < 8)
        return form->packing == SIGNED_BYTES ? SIGNED : form->looked_up ? LOOK_UP : UNSIGNED;
    const int odd = form->packing == SIGNED_BYTES && !form->looked_up && form->zeros < 0 && form->zero == 0;
    return odd && form->shift == NONE && !form->fused && type != F32 ? BY_SIZE : OWN;
}

static Sunk *function_of(const Form *form, Type type, int m) {
    switch (how_of(form, type)) {
    case SIGNED: return functions_SIGNED[type][m];
    case UNSIGNED: return functions_UNSIGNED[type][m];
    case LOOK_UP: return mirror_of(form->table) < 0 ? functions_LOOK_UP[type][m] : functions_MIRRORED[type][m];
    case OWN: return functions_OWN[type][m];
    default: return functions_BY_SIZE[type][m];
    }
}

void bytes512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    function_of(form, type, 0)(form, parts, first, count, out, 0, 0, 0);
}

void bytes_and_dot512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, const void *x,
                      int64_t stride, int m, float *sums) {
    function_of(form, type, m)(form, parts, first, count, 0, x, stride, sums);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
