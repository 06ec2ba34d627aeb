/* The arithmetic of a group's weights, eight at a time. For files that include avx2.h. */
#ifndef SDQUANT_AVX2_STEPS_H
#define SDQUANT_AVX2_STEPS_H

#include <math.h>

#include "avx2_runs.h"
#include "scales.h"

/* What is done to the numbers of a group, in the order of `scale_run` of portable.h. */
typedef struct {
    __m256 zero, scale, factor, shift;
    int subtracted, scaled, multiplied, shifted, fused;
    int ordinary; /* whether no weight is NaN, infinite, or too small or large for `nearest_bf16` or, where that is the
                     arithmetic, `nearest_f16`, whatever its code */
} Steps;

/* Whether a scale or shift is zero, or from 2^-100 to 2^90. */
INLINE int ordinary(float value) { return value == 0 || (bits_of(value) >> 23 & 255) - 27u <= 190u; }

/* Whether products of a float16 scale with whole numbers of up to eight bits are numbers of float16, with room for a shift.
   Those that are none of its normal numbers are multiples of its smallest, and stay as they are. */
INLINE int ordinary_f16(float scale) { return fabsf(scale) <= 64; }

/* Whether such products, and a shift, are all that is computed, in float16. */
INLINE int whole_f16(const Form *form) {
    return form->scale == F16 && (form->shift == NONE || form->shift == F16) && !form->looked_up && form->factor == 1.0f &&
           !form->fused;
}

INLINE Steps steps_of(const Form *form, const Parts *parts, int64_t group) {
    const float zero = zero_of(form, parts, group), scale = scale_of(form, parts, group);
    const float shift = shift_of(form, parts, group);
    return (Steps){
        .zero = _mm256_set1_ps(zero),
        .scale = _mm256_set1_ps(scale),
        .factor = _mm256_set1_ps(form->factor),
        .shift = _mm256_set1_ps(shift),
        .subtracted = zero != 0,
        .scaled = form->scale != NONE,
        .multiplied = form->factor != 1.0f,
        .shifted = form->shift != NONE,
        .fused = form->fused,
        .ordinary = form->arithmetic == F16 ? whole_f16(form) && ordinary_f16(scale) && fabsf(shift) <= 16384
                                            : ordinary(scale) && ordinary(shift),
    };
}

/* Whether there is nothing but a scale, a zero point and a factor, and not both of these. */
INLINE int have_few_steps(const Steps *steps) {
    return steps->scaled && !steps->shifted && !steps->fused && !(steps->subtracted && steps->multiplied);
}

/* Such steps as the compiler may know them. */
INLINE Steps known_steps(const Steps *steps, int subtracted, int multiplied) {
    return (Steps){.zero = steps->zero, .scale = steps->scale, .factor = steps->factor, .subtracted = subtracted,
                   .scaled = 1, .multiplied = multiplied};
}

/* To the nearest bfloat16, ties to even, of zeros and numbers from 2^-126 to 2^110: Veltkamp's splitting, whose results were
   held against round_bf16's for every such float. */
INLINE __m256 nearest_bf16(__m256 values) {
    const __m256 larger = _mm256_mul_ps(values, _mm256_set1_ps(65537.0f));
    return _mm256_sub_ps(larger, _mm256_sub_ps(larger, values));
}

/* The same to float16, of numbers from 2^-14 to 2^15 and of multiples of 2^-24: held against the instruction for all of
   these. */
INLINE __m256 nearest_f16(__m256 values) {
    const __m256 larger = _mm256_mul_ps(values, _mm256_set1_ps(8193.0f));
    return _mm256_sub_ps(larger, _mm256_sub_ps(larger, values));
}

/* Rounded to the type and back. */
INLINE __m256 rounded8(__m256 values, Type type, int ordinary) {
    if (type == F32) return values;
    if (type == F16) return ordinary ? nearest_f16(values) : _mm256_cvtph_ps(round_f16(values));
    if (ordinary) return nearest_bf16(values);
    return _mm256_castsi256_ps(_mm256_and_si256(round_bf16(values), _mm256_set1_epi32((int)0xffff0000)));
}

/* Numbers to weights, rounded to `type`. The last three arguments are known to the compiler: see IN_CASES. */
INLINE __m256 weights8(const Steps *steps, __m256 values, Type arithmetic, Type type, int ordinary) {
    if (steps->subtracted) values = _mm256_sub_ps(values, steps->zero);
    if (steps->fused) {
        values = rounded8(_mm256_fmadd_ps(values, steps->scale, steps->shift), arithmetic, ordinary);
    } else {
        if (steps->scaled) values = rounded8(_mm256_mul_ps(values, steps->scale), arithmetic, ordinary);
        if (steps->multiplied) values = rounded8(_mm256_mul_ps(values, steps->factor), arithmetic, ordinary);
        if (steps->shifted) values = rounded8(_mm256_add_ps(values, steps->shift), arithmetic, ordinary);
    }
    /* What is rounded stays as it is; codes without a scale are not. */
    return arithmetic == type && (type == F32 || steps->scaled) ? values : rounded8(values, type, ordinary);
}

/* RUN(arithmetic, type, ordinary), with constants where it is worth it. */
#define IN_CASES(steps, form, type, RUN) \
    if ((type) == BF16 && (steps).ordinary && (form)->arithmetic == F32) { \
        RUN(F32, BF16, 1); \
    } else if ((type) == BF16 && (steps).ordinary && (form)->arithmetic == BF16) { \
        RUN(BF16, BF16, 1); \
    } else if ((type) == BF16 && (steps).ordinary && (form)->arithmetic == F16) { \
        RUN(F16, BF16, 1); \
    } else if ((type) == F32 && (form)->arithmetic == F32) { \
        RUN(F32, F32, 0); \
    } else if ((type) == F32 && (steps).ordinary && (form)->arithmetic == F16) { \
        RUN(F16, F32, 1); \
    } else { \
        RUN((form)->arithmetic, type, 0); \
    }

#endif
