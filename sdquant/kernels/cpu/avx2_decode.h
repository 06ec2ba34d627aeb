/* Codes with scales in parts of their own, decoded with AVX2: the numbers of portable.h, whose `decode_plain` takes
   what is not here. Included after it. */
#include "avx2_float8.h"
#include "avx2_steps.h"

/* Sixteen that are rounded to `type`. */
INLINE void store16(__m256 a, __m256 b, Type type, void *out) {
    if (type == F32) {
        _mm256_storeu_ps(out, a);
        _mm256_storeu_ps((float *)out + 8, b);
    } else if (type == BF16) {
        const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
        const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(b), 16);
        _mm256_storeu_si256(out, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
    } else {
        _mm_storeu_si128(out, round_f16(a));
        _mm_storeu_si128((__m128i *)out + 1, round_f16(b));
    }
}

/* The codes of weights first .. first + count, as `codes_at`. */
static inline const uint8_t *codes_avx2(const Form *form, const Parts *parts, int64_t first, int64_t count,
                                        uint8_t *spare) {
    if ((form->packing != NIBBLES_LOW && form->packing != NIBBLES_HIGH) || first % 2)
        return codes_at(form, parts, first, count, spare);
    const __m128i mask = _mm_set1_epi8(15);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m128i both = _mm_loadu_si128((const __m128i *)(parts->codes + ((first + i) >> 1)));
        const __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
        const int in_order = form->packing == NIBBLES_LOW;
        const __m128i early = in_order ? low : high, late = in_order ? high : low;
        _mm_storeu_si128((__m128i *)(spare + i), _mm_unpacklo_epi8(early, late));
        _mm_storeu_si128((__m128i *)(spare + i + 16), _mm_unpackhi_epi8(early, late));
    }
    if (i < count) codes_at(form, parts, first + i, count - i, spare + i);
    return spare;
}

/* Codes of four bits and less: a group's sixteen weights are made, and each code takes one. */
static void decode_choices(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    uint8_t codes[TILE];
    float numbers[16], table[16];
    int64_t of_table = -1;
    char *to = out;
    numbers_of(form, EACH_CODE, 16, numbers);
    const __m256 low = _mm256_loadu_ps(numbers), high = _mm256_loadu_ps(numbers + 8);
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first;
        int64_t run = left < count ? left : count;
        if (run > TILE) run = TILE;
        if (group != of_table) {
            const Steps steps = steps_of(form, parts, group);
#define TABLE(arithmetic, type, ordinary) \
    store16(weights8(&steps, low, arithmetic, type, ordinary), weights8(&steps, high, arithmetic, type, ordinary), type, table)
            IN_CASES(steps, form, type, TABLE)
#undef TABLE
            of_table = group;
        }
        look_up_avx2(table, codes_avx2(form, parts, first, run, codes), run, type, to);
        to += run * (type == F32 ? 4 : 2);
        first += run;
        count -= run;
    }
}

INLINE __m256 eight_of(const uint8_t *codes, int is_signed) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

/* What sixteen codes stand for, to the last bit. 0: one has to be looked up. */
INLINE int numbers_of_bytes(Float8Kind kind, const Form *form, const uint8_t *codes, __m256 *numbers) {
    if (kind == NO_FLOAT8) {
        const int is_signed = form->packing == SIGNED_BYTES;
        numbers[0] = eight_of(codes, is_signed), numbers[1] = eight_of(codes + 8, is_signed);
        return 1;
    }
    const int all = sixteen_numbers(kind, &form->float8, codes, numbers);
    const __m256 factor = _mm256_set1_ps(factor_of(kind, &form->float8));
    for (int i = 0; all && i < 2; i++) numbers[i] = _mm256_mul_ps(numbers[i], factor);
    return all;
}

/* Any sixteen or fewer. Not inlined: GCC 12 warns of a loop over a known number of them. */
__attribute__((noinline)) static void decode_some(const Form *form, const Parts *parts, int64_t group,
                                                  const uint8_t *codes, int64_t count, Type type, char *to) {
    float values[16];
    numbers_of(form, codes, count, values);
    scale_run(form, parts, group, count, values);
    convert(values, type, to, count);
}

INLINE void decode_run(const Steps *steps, Float8Kind kind, const Form *form, const Parts *parts, int64_t group,
                       const uint8_t *codes, int64_t run, Type arithmetic, Type type, int ordinary, char *to) {
    const int size = type == F32 ? 4 : 2;
    for (int64_t i = 0; i < run; i += 16) {
        __m256 numbers[2];
        if (!numbers_of_bytes(kind, form, codes + i, numbers)) {
            decode_some(form, parts, group, codes + i, 16, type, to + i * size);
            continue;
        }
        const __m256 a = weights8(steps, numbers[0], arithmetic, type, ordinary);
        const __m256 b = weights8(steps, numbers[1], arithmetic, type, ordinary);
        store16(a, b, type, to + i * size);
    }
}

/* Bytes that are numbers, or float8: no table. */
INLINE void decode_numbers(Float8Kind kind, const Form *form, const Parts *parts, int64_t first, int64_t count, Type type,
                           void *out) {
    const int size = type == F32 ? 4 : 2;
    char *to = out;
    while (count > 0) {
        const int64_t group = first / form->group, left = (group + 1) * form->group - first;
        const int64_t run = left < count ? left : count, most = run / 16 * 16;
        const uint8_t *codes = parts->codes + first;
        const Steps steps = steps_of(form, parts, group);
#define RUN(arithmetic, type, ordinary) \
    decode_run(&steps, kind, form, parts, group, codes, most, arithmetic, type, ordinary, to)
        IN_CASES(steps, form, type, RUN)
#undef RUN
        if (most < run) decode_some(form, parts, group, codes + most, run - most, type, to + most * size);
        to += run * size;
        first += run;
        count -= run;
    }
}

#define DECODER(name, kind) \
    static void name(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) { \
        decode_numbers(kind, form, parts, first, count, type, out); \
    }
DECODER(decode_bytes, NO_FLOAT8)
DECODER(decode_e4m3, E4M3_BITS)
DECODER(decode_e5m2, E5M2_BITS)

static Decode *decoder_of_table(const Form *form) {
    if (!form->float8.exact || form->zeros >= 0) return decode_plain;
    return form->float8.kind == E4M3_BITS ? decode_e4m3 : form->float8.kind == E5M2_BITS ? decode_e5m2 : decode_plain;
}

/* The decoder for codes with one scale a group. */
static Decode *decoder_avx2(const Form *form) {
    if (form->taps > 1) return decode_plain;
    if (form->packing == SIGNED_BYTES) return form->looked_up ? decode_plain : decode_bytes;
    if (form->packing == BYTES) return form->looked_up ? decoder_of_table(form) : decode_bytes;
    return bits_of_code(form->packing) <= 4 && form->group >= SHORT ? decode_choices : decode_plain;
}
