/* GGUF's block types with AVX2 and F16C: unpacked by the portable code, scaled and rounded sixteen at a time. */
#include "avx2.h"

#ifdef BUILD
#include "blocks.h"

/* 4-bit codes, a multiple of sixteen, through a table. */
static inline void look_up(int8_t *codes, int count, const int8_t *table) {
    const __m128i values = _mm_loadu_si128((const __m128i *)table);
    for (int i = 0; i < count; i += 16) {
        __m128i *at = (__m128i *)(codes + i);
        _mm_storeu_si128(at, _mm_shuffle_epi8(values, _mm_loadu_si128(at)));
    }
}

#define LOOK_UP look_up
#include "blocks_unpack.h"

static inline __m256 eight(const unpacked *from, int at) {
    const __m256 codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from->codes + at))));
    return _mm256_fmadd_ps(codes, _mm256_set1_ps(from->scale[at / 16]), _mm256_set1_ps(from->shift[at / 16]));
}

/* The upper halves of floats, rounded to the nearest, ties to even. A NaN, which only a scale that is one makes, may
   become another number: the loader refuses such blocks. */
static inline __m256i upper(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}

static inline void finish(const unpacked *from, int count, Type type, void *out) {
    for (int i = 0; i < count; i += 16) {
        const __m256 a = eight(from, i), b = eight(from, i + 8);
        if (type == F32) {
            _mm256_storeu_ps((float *)out + i, a);
            _mm256_storeu_ps((float *)out + i + 8, b);
        } else if (type == BF16) {
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper(a), upper(b)), 0xd8);
            _mm256_storeu_si256((__m256i *)((uint16_t *)out + i), both);
        } else {
            _mm_storeu_si128((__m128i *)((uint16_t *)out + i), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
            _mm_storeu_si128((__m128i *)((uint16_t *)out + i + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
        }
    }
}

#define FINISH finish
#define BLOCKS avx2_blocks
#include "blocks_portable.h"

#define DEFINE_UNPACK(name, weights, bytes) \
    static void name##_unpacked(const uint8_t *from, unpacked *out, const int8_t *grid) { unpack_##name(from, out, grid); }
BLOCK_TYPES(DEFINE_UNPACK)

#define UNPACK_ROW(name, weights, bytes) {PACKING_##name, weights, bytes, name##_unpacked},

Unpack *avx2_unpack(const Form *form, int *bytes) {
    static const struct { int packing, weights, bytes; Unpack *unpack; } rows[] = {BLOCK_TYPES(UNPACK_ROW)};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].packing == (int)form->packing && rows[i].weights == form->group) {
            *bytes = rows[i].bytes;
            return rows[i].unpack;
        }
    return 0;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
