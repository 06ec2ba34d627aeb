/* Compiles what follows for AVX2 with FMA and F16C, where the compiler can; then BUILD is defined. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#define BUILD 1
#define INLINE static inline __attribute__((always_inline))
#endif
