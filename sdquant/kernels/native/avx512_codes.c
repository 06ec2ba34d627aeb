/* Codes with scales in parts of their own.

   Of up to four bits: the sixteen values of a group are computed once, and codes choose among them (one instruction for
   32 weights of 16 bits). Of eight bits: a conversion, or a choice among 256 floats, and the arithmetic for each. */
#include "avx512.h"

#ifdef BUILD
#include <math.h>

#include "avx512_parts.h"
#include "portable.h"

enum { STRIP = 1024, AHEAD = 2048 }; /* weights at a time; bytes of codes that are asked for before they are read */

/* What the groups of a strip have. */
typedef struct {
    float scale[STRIP], zero[STRIP], shift[STRIP];
} Groups;

/* BF16's instructions take the smallest floats for zero, and NaN has many forms. Whether none can come of this. */
INLINE __mmask16 tame(__m512 value, __mmask16 valid) {
    const __m512 size = _mm512_abs_ps(value);
    const __mmask16 fits = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-80f), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p80f), _CMP_LE_OQ);
    return (fits | _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_EQ_OQ) | (__mmask16)~valid);
}

INLINE __m512 floats_at(const void *from, Type type, int64_t at, __mmask16 valid) {
    if (type == F32) return _mm512_maskz_loadu_ps(valid, (const float *)from + at);
    const __m256i halves = _mm256_maskz_loadu_epi16(valid, (const uint16_t *)from + at);
    if (type == F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Those of groups first .. first + count; 0 if they are not tame. */
static int groups_at(const Form *form, const Parts *parts, int64_t first, int64_t count, Groups *out) {
    for (int64_t i = 0; i < count; i += 16) {
        const int64_t left = count - i;
        const __mmask16 valid = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
        __mmask16 fits = 0xffff;
        __m512 scale = _mm512_set1_ps(1.0f), shift = _mm512_setzero_ps();
        if (form->scale == NESTED) {
            const __m128i codes = _mm_maskz_loadu_epi8(valid, (const uint8_t *)parts->scale + first + i);
            const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i outer = _mm512_srli_epi32(_mm512_add_epi32(_mm512_set1_epi32((int)((first + i) & 255)), lanes), 8);
            const __m512 zeros = _mm512_setzero_ps();
            scale = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(codes), form->dynamic, 4);
            scale = _mm512_mul_ps(scale, _mm512_mask_i32gather_ps(zeros, valid, outer, parts->nested + ((first + i) >> 8), 4));
            scale = _mm512_add_ps(scale, _mm512_set1_ps(form->offset));
        } else if (form->scale != NONE) {
            scale = floats_at(parts->scale, form->scale, first + i, valid);
        }
        if (form->shift != NONE) {
            shift = floats_at(parts->shift, form->shift, first + i, valid);
            if (!form->added) shift = _mm512_sub_ps(_mm512_set1_ps(-0.0f), shift);
        }
        fits = tame(scale, valid) & tame(shift, valid);
        if (fits != 0xffff) return 0;
        _mm512_mask_storeu_ps(out->scale + i, valid, scale);
        _mm512_mask_storeu_ps(out->shift + i, valid, shift);
    }
    for (int64_t i = 0; i < count; i++) out->zero[i] = zero_of(form, parts, first + i);
    return 1;
}

INLINE __m512 round512(__m512 value, Type type) {
    if (type == BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
    if (type == F16) return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return value;
}

/* Numbers of a group become its weights, before the last rounding. */
INLINE __m512 scaled(const Form *form, __m512 number, __m512 scale, __m512 zero, __m512 shift) {
    const __m512 code = _mm512_sub_ps(number, zero);
    if (form->fused) return round512(_mm512_fmadd_ps(code, scale, shift), form->arithmetic);
    __m512 value = round512(_mm512_mul_ps(code, scale), form->arithmetic);
    if (form->factor != 1.0f) value = round512(_mm512_mul_ps(value, _mm512_set1_ps(form->factor)), form->arithmetic);
    if (form->shift != NONE) value = round512(_mm512_add_ps(value, shift), form->arithmetic);
    return value;
}

INLINE __m256i halves_of(__m512 value, Type type) {
    return type == BF16 ? (__m256i)_mm512_cvtneps_pbh(value)
                        : _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Sixteen weights, or as many as are valid, to their place. */
INLINE void put(__m512 value, Type type, char *out, int64_t at, __mmask16 valid) {
    if (type == F32) _mm512_mask_storeu_ps((float *)out + at, valid, value);
    else _mm256_mask_storeu_epi16((uint16_t *)out + at, valid, halves_of(value, type));
}

INLINE __mmask16 first_of(int64_t count) { return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1 << count) - 1) : 0; }

/* A run of a group, whose codes choose among sixteen values. */
INLINE void choose512(__m512 values, Type type, const uint8_t *codes, int64_t count, char *out) {
    int64_t i = 0;
    if (type == F32) {
        for (; i < count; i += 16) {
            const __mmask16 valid = first_of(count - i);
            const __m512i index = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(valid, codes + i));
            _mm512_mask_storeu_ps((float *)out + i, valid, _mm512_permutexvar_ps(index, values));
        }
        return;
    }
    const __m512i both = _mm512_broadcast_i64x4(halves_of(values, type));
    uint16_t *halves = (uint16_t *)out;
    for (; i + 32 <= count; i += 32) {
        const __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)));
        _mm512_storeu_si512(halves + i, _mm512_permutexvar_epi16(index, both));
    }
    if (i < count) {
        const __mmask32 valid = ((__mmask32)1 << (count - i)) - 1;
        const __m512i index = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(valid, codes + i));
        _mm512_mask_storeu_epi16(halves + i, valid, _mm512_permutexvar_epi16(index, both));
    }
}

/* A run of a group, whose codes are numbers of eight bits, or six. */
INLINE void compute512(const Form *form, int negative, Type type, const uint8_t *codes, int64_t count, __m512 scale,
                       __m512 zero, __m512 shift, char *out) {
    const __m128i mask = _mm_set1_epi8(form->packing == SDNQ6 ? 63 : -1);
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 valid = first_of(count - i);
        const __m128i code = _mm_and_si128(_mm_maskz_loadu_epi8(valid, codes + i), mask);
        const __m512 number = _mm512_cvtepi32_ps(negative ? _mm512_cvtepi8_epi32(code) : _mm512_cvtepu8_epi32(code));
        put(scaled(form, number, scale, zero, shift), type, out, i, valid);
    }
}

/* A table of 256 floats, as the four tables of their bytes. */
typedef struct {
    __m512i byte[4][4];
} Table;

static void table512(const float *table, Table *out) {
    uint8_t byte[4][256];
    for (int i = 0; i < 256; i++) {
        const uint32_t bits = bits_of(table[i]);
        for (int k = 0; k < 4; k++) byte[k][i] = (uint8_t)(bits >> (8 * k));
    }
    for (int k = 0; k < 4; k++)
        for (int part = 0; part < 4; part++) out->byte[k][part] = _mm512_loadu_si512(byte[k] + 64 * part);
}

/* The entries of 64 codes, in their order. */
INLINE void look_up(const Table *table, __m512i codes, __m512 *out) {
    /* Bytes are put together within each 128 bits: so that all comes out in order, fours of codes are turned before. */
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    codes = _mm512_permutexvar_epi32(turn, codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    __m512i byte[4];
    for (int k = 0; k < 4; k++)
        byte[k] = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(table->byte[k][0], codes, table->byte[k][1]), upper,
                                       _mm512_permutex2var_epi8(table->byte[k][2], codes, table->byte[k][3]));
    const __m512i low = _mm512_unpacklo_epi8(byte[0], byte[1]), low_of_high = _mm512_unpacklo_epi8(byte[2], byte[3]);
    const __m512i high = _mm512_unpackhi_epi8(byte[0], byte[1]), high_of_high = _mm512_unpackhi_epi8(byte[2], byte[3]);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, low_of_high));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, low_of_high));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(high, high_of_high));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(high, high_of_high));
}

INLINE void look_up512(const Form *form, const Table *table, Type type, const uint8_t *codes, int64_t count,
                       __m512 scale, __m512 zero, __m512 shift, char *out) {
    for (int64_t i = 0; i < count; i += 64) {
        const int64_t left = count - i;
        const __mmask64 valid = left >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
        __m512 number[4];
        look_up(table, _mm512_maskz_loadu_epi8(valid, codes + i), number);
        for (int k = 0; k < 4; k++)
            put(scaled(form, number[k], scale, zero, shift), type, out, i + 16 * k, first_of(left - 16 * k));
    }
}

typedef enum { CHOOSE, COMPUTE, COMPUTE_SIGNED, LOOK_UP } How;

/* A strip: weights whose groups are known and whose codes are bytes. `into`: where in its group the first one is. */
INLINE void strip(const Form *form, How how, Type type, const Groups *groups, const Table *table, __m512 numbers,
                  const uint8_t *codes, int64_t into, int64_t count, char *out) {
    const int64_t size = type == F32 ? 4 : 2;
    for (int64_t group = 0; count > 0; group++) {
        const int64_t run = form->group - into < count ? form->group - into : count;
        const __m512 scale = _mm512_set1_ps(groups->scale[group]), zero = _mm512_set1_ps(groups->zero[group]);
        const __m512 shift = _mm512_set1_ps(groups->shift[group]);
        if (how == CHOOSE) choose512(scaled(form, numbers, scale, zero, shift), type, codes, run, out);
        else if (how == LOOK_UP) look_up512(form, table, type, codes, run, scale, zero, shift, out);
        else compute512(form, how == COMPUTE_SIGNED, type, codes, run, scale, zero, shift, out);
        into = 0;
        codes += run;
        out += run * size;
        count -= run;
    }
}

INLINE void strips(const Form *form, const Parts *parts, How how, Type type, int64_t first, int64_t count, char *out) {
    uint8_t spare[STRIP + SPARE];
    Groups groups;
    Table table;
    __m512 numbers = _mm512_setzero_ps();
    const int planes = planes_of(form->packing);
    const int64_t held = (form->rows * form->columns / form->group + planes - 1) / planes * form->group;
    if (how == LOOK_UP) table512(form->table, &table);
    if (how == CHOOSE) {
        const int bits = form->packing == PLANES2 ? 2 : form->packing == THREES || form->packing == SDNQ3 ? 3 : 4;
        float base[16];
        for (int i = 0; i < 16; i++) base[i] = form->looked_up ? form->table[i] : (float)(i & ((1 << bits) - 1));
        numbers = _mm512_loadu_ps(base);
    }
    while (count > 0) {
        int64_t run = count < STRIP ? count : STRIP;
        if (planes > 1 && held - first % held < run) run = held - first % held;
        const int64_t group = first / form->group, last = (first + run - 1) / form->group;
        if (groups_at(form, parts, group, last - group + 1, &groups)) {
            const uint8_t *codes = unpack512(form, parts, first, run, spare);
            strip(form, how, type, &groups, &table, numbers, codes, first - group * form->group, run, out);
        } else {
            decode_plain(form, parts, first, run, type, out);
        }
        first += run;
        count -= run;
        out += run * (type == F32 ? 4 : 2);
    }
}

INLINE void typed(const Form *form, const Parts *parts, How how, Type type, int64_t first, int64_t count, void *out) {
    if (type == BF16) strips(form, parts, how, BF16, first, count, out);
    else if (type == F16) strips(form, parts, how, F16, first, count, out);
    else strips(form, parts, how, F32, first, count, out);
}

void decode512(const Form *form, const Parts *parts, int64_t first, int64_t count, Type type, void *out) {
    if (form->packing == SIGNED_BYTES) typed(form, parts, COMPUTE_SIGNED, type, first, count, out);
    else if (form->packing == SDNQ6) typed(form, parts, COMPUTE, type, first, count, out);
    else if (form->packing != BYTES) typed(form, parts, CHOOSE, type, first, count, out);
    else if (form->looked_up) typed(form, parts, LOOK_UP, type, first, count, out);
    else typed(form, parts, COMPUTE, type, first, count, out);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
