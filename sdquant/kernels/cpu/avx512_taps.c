/* Weights of convolutions of 3 x 3, turned from [in, 9] to [9, in]: 576 bytes at a time, split in three twice. */
#include "avx512.h"

#ifdef BUILD
#include "int8.h"

/* 192 bytes: out[k] has those at 3 i + k. */
INLINE void split(const __m512i *from, __m512i *out) {
    uint8_t at[64];
#pragma GCC unroll 3
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 64; i++) at[i] = (uint8_t)(3 * i + k);
        const __m512i index = _mm512_loadu_si512(at); /* its six low bits count; those above say which of the three */
        const __mmask64 second = _mm512_test_epi8_mask(index, _mm512_set1_epi8(64));
        const __mmask64 third = _mm512_movepi8_mask(index);
        out[k] = _mm512_permutexvar_epi8(index, from[0]);
        out[k] = _mm512_mask_permutexvar_epi8(out[k], second, index, from[1]);
        out[k] = _mm512_mask_permutexvar_epi8(out[k], third, index, from[2]);
    }
}

int64_t nine_taps512(const uint8_t *from, int64_t in, uint8_t *to) {
    int64_t c = 0;
    for (; c + 64 <= in; c += 64, from += 9 * 64) {
        __m512i all[9], once[3][3];
        for (int i = 0; i < 9; i++) all[i] = _mm512_loadu_si512(from + 64 * i);
        for (int i = 0; i < 3; i++) {
            __m512i third[3];
            split(all + 3 * i, third);
            for (int k = 0; k < 3; k++) once[k][i] = third[k];
        }
        for (int k = 0; k < 3; k++) {
            __m512i third[3];
            split(once[k], third);
            for (int a = 0; a < 3; a++) _mm512_storeu_si512(to + (3 * a + k) * in + c, third[a]);
        }
    }
    return c;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
