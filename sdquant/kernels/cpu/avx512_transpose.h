/* For files that define INLINE and include immintrin.h. */
#ifndef SDQUANT_AVX512_TRANSPOSE_H
#define SDQUANT_AVX512_TRANSPOSE_H

#define TURN(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)

/* A square of 16 x 16 numbers of 32 bits, turned. */
INLINE void transpose(__m512i *a) {
    __m512i b[16];
    TURN(i, 8) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    TURN(i, 4) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    TURN(i, 4) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
    TURN(i, 8) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88);
        a[8 + i] = _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd);
    }
}

#undef TURN
#endif
