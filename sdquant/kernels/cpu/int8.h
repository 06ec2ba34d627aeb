/* Products in 8-bit integers: what compute="int8" does, whose numbers sdquant/kernels/int8_linear.py has.

   A weight is multiplied in panels of PANEL rows, of whose codes `minus` is to be subtracted; activations are signed
   codes, in groups of rows. Columns of activations are padded with codes of zero.

   Where a row has several scales, columns are in runs that share one: sums of a run are integers, the sum of all runs,
   each times its scale, is a float. `minus` has then what VNNI begins the sums of a run with.

   With VNNI one instruction multiplies and adds sixteen rows and four columns of the weight with four columns of one row
   of activations. A panel has for each four columns PANEL rows of four codes, as numbers from 0 to 255; a group up to
   twelve rows, and for each four columns four codes of each row. With AMX it is sixteen rows and 64 columns of both: a
   panel has rows as the weight has them, often those of the weight itself; a group up to 32 rows in tiles of sixteen.

   With AVX2 alone: avx2_int8.h.

   int8.c goes through panels and groups; int8_rows.h has rows of weights and int8_lines.h rows of activations, of which
   *_panels.c and *_codes.c make panels and groups; *_int8.c multiply. */
#ifndef SDQUANT_INT8_H
#define SDQUANT_INT8_H

#include "form.h"
#include "narrow.h"

enum {
    PANEL = 32,
    TALLEST = 32,
    AGAIN_RUN = 256, /* columns that get one scale when they are quantized again by run */
};

/* What is multiplied: codes that are bytes, as they are, or, with AGAIN, a weight quantized again, or, with UNPACKED,
   integers of fewer bits; with a scale for a row or, with BY_RUN, for each run of columns. Numbers of Coding in
   kernels/base.py. */
typedef enum { AGAIN = 1, BY_RUN = 2, UNPACKED = 4, MADE = AGAIN | UNPACKED } Coding;

/* A weight for such products. */
typedef struct {
    const Form *form;
    Parts *parts;
    int coding; /* of `Coding` */
    int64_t taps; /* positions of a convolution's kernel: columns are [in, taps] in the parts, [taps, in] here */
} Weight;

/* Where activations come from: rows [m, columns], or the patches of images [b, high, wide, channels]. Of type I8 they are
   codes already, `each` rows (or all patches of an image) of which have a scale. */
typedef struct {
    Type type;
    const void *x;
    int64_t columns, stride; /* of rows, in elements */
    int patches;             /* whether the fields below count */
    int64_t high, wide, channels;
    int64_t out_high, out_wide, kernel_high, kernel_wide;
    int64_t step[2], pad[2], spread[2]; /* stride, padding and dilation, vertical and horizontal */
    const float *largest;               /* of the channels of each pixel; NaN where one is */
    int shifted;                        /* whether VNNI gets its codes 128 higher, as numbers from 0 to 255 */
    const float *scale;
    int64_t each;
    int64_t rotation;    /* how many columns of a row of floats are rotated together, see rotate.h; 0: none */
    const float *smooth; /* what columns are divided by, of F32 or BF16 and not rotated, then as many reciprocals; NULL: nothing */
    const Branch *branch; /* what rows, rotated but not divided, are multiplied by, too; NULL: nothing */
    void *divided;        /* where there is `smooth`: memory for one row of quotients */
} Source;

/* Where results go: out[row * row_step + column * column_step]; images are `image` rows, `image_step` apart. In elements.
   */
typedef struct {
    Type type;
    void *out;
    int64_t row_step, column_step, image, image_step;
    const float *bias; /* or NULL */
    int64_t bytes;     /* of all results */
    int by_steps;      /* whether the sum, and it times either scale, is rounded to bf16 where results are, and a result is
                          rounded before its bias is added: the numbers of sdquant/rules/core/dot_general.py */
    const float *of_runs; /* where activations, too, have a scale for each run of columns: those, [m, runs]; else NULL */
    const Branch *branch; /* what is added to results that lie in rows; NULL: nothing */
} Target;

/* Panels: where the first is, the bytes of each, whether codes are signed, and runs of columns where there are several
   scales, else 0. */
typedef struct {
    const uint8_t *at;
    int64_t bytes;
    int is_signed;
    int64_t runs;
} Panels;

/* What the results of one group and panel have in common: of the panel's rows `count` are real. `scale` and `minus` are
   [PANEL], or [runs, PANEL]. */
typedef struct {
    const float *row_scale, *scale;
    const int32_t *row_sum, *minus;
    const Target *to;
    int64_t row, column;
    int count;
    const float *branch; /* sums of a branch, [TALLEST][PANEL], which are added to floats; or NULL */
} Place;

/* Integers low .. high, or floats of eight bits in that range, the numbers of `bound` units and more being the last. */
typedef enum { INTEGERS, E4M3, E5M2 } Kind;
typedef struct {
    float bound, low, high;
    int64_t known; /* whether scales are known: -1 no, 0 one for all rows, 1 for each */
    Kind kind;
} Codes;

/* What an instruction set has functions for. */

/* Rows of activations first .. first + rows, one group, as codes, their scales and sums; `line` [line_bytes] is spare. */
typedef void QuantizeGroup(const Source *from, int64_t first, int rows, int8_t *line, int8_t *codes, float *scale,
                           int32_t *sum);
/* One of these rows, in order. */
typedef void QuantizeLine(const Source *from, int64_t row, int8_t *line, float *scale, int32_t *sum);
/* Runs of AGAIN_RUN floats as codes, and their scales, `step` apart. */
typedef void QuantizeRuns(const float *x, int64_t runs, int8_t *to, float *scale, int64_t step);
/* The largest magnitude in each of `count` rows of x, [count, columns]; NaN where one is. */
typedef void Largest(Type type, const void *x, int64_t columns, int64_t count, float *out);
/* Rows of x, [count, columns], as codes by the rules of sdquant/rules: see `codes512`. */
typedef void CodesOf(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, float *scale,
                     int8_t *out);
/* What such codes stand for, of the type of x (F32 for F16): see `numbers512`. */
typedef void NumbersOf(Type type, const void *x, int64_t columns, int64_t count, const Codes *how, int decoded,
                       float *scale, void *out);
/* Pixels start .. stop of an image [channels, pixels] to the same of [pixels, channels]. */
typedef void ChannelsLast(Type type, const void *x, int64_t channels, int64_t pixels, int64_t start, int64_t stop,
                          void *out);
/* Rows of the weight start .. start + PANEL, as far as there are such, as a panel; NULL where the weight's rows are taken
   as they lie. `spare`: see int8.c. */
typedef void MakePanel(const Weight *weight, int64_t start, uint8_t *panel, float *scale, int32_t *minus, void *spare);
/* The groups of m rows by the panels of `weights` columns; `place` is that of the first of both. `ahead`: memory that will
   be wanted. Returns whether the branch, if there is one, is in the results. */
typedef int Multiply(const Panels *panels, int64_t weights, const int8_t *codes, int64_t m, int64_t columns,
                      const Place *place, const char *ahead, int64_t ahead_bytes);

typedef struct {
    const char *name;
    int tall;   /* rows of a group at most, which is at most TALLEST */
    int even;   /* whether groups should be as large as each other; else all but the last are `tall` */
    int unit;   /* columns of activations are padded to a multiple of this */
    int code;   /* bytes of a code of activations */
    int rows;   /* whether panels are rows; those that are made are an odd number of lines apart, so that rows which are
                   read side by side are in different sets of the cache */
    int block;  /* bytes of activations that stay in the second cache */
    int beside; /* bytes of panels that a group is multiplied with before the next one is, so that results lie together */
    QuantizeGroup *quantize;
    Largest *largest;
    CodesOf *codes;
    NumbersOf *numbers;
    ChannelsLast *last;
    MakePanel *panel;
    Multiply *multiply;
} Int8;

extern const Int8 avx2_int8, avx512_int8, amx_int8;

/* avx512_codes.c: all of `Int8` that is done with activations alone, and what AMX and panels share of it. */
QuantizeGroup quantize512;
QuantizeLine quantize_line512;
QuantizeRuns quantize_runs512;
Largest largest512;
CodesOf codes512;
NumbersOf numbers512;
ChannelsLast last512;

/* avx512_int8.c: sums [rows, PANEL] to where they belong, as results; of floats those of all runs, each with its scale. */
void results512(const int32_t *sums, int rows, const Place *place);
void float_results512(const float *sums, int rows, const Place *place);
/* With `of_runs`: sums [rows, PANEL] of run r of so many, scaled, are added to `kept`. */
void add_run512(const int32_t *sums, int rows, const Place *place, int64_t r, int64_t runs, float (*kept)[PANEL]);

/* avx512_panels.c: for VNNI and for AMX. */
MakePanel panel512, rows512;

/* avx512_taps.c: bytes [in, 9] as [9, in], for as many of the inputs as it says. */
int64_t nine_taps512(const uint8_t *from, int64_t in, uint8_t *to);

/* The kernels of this machine, or NULL. */
const Int8 *int8_kernels(void);

/* Groups of m rows, and the first row of one; what the results of a group and a panel have in common. */
int64_t groups_of(int64_t m);
int64_t begin_of(int64_t m, int64_t groups, int64_t group);
Place place_of(const Place *first, const Panels *panels, int64_t row, int64_t panel, int64_t weights);

/* Scales that a row of the weight has. */
int64_t scales_in(const Weight *weight);

/* Bytes of the codes of a row of activations, with what they are padded with; of a panel; and of `spare` for one thread.
   */
int64_t padded(int64_t columns);
int64_t panel_bytes(int64_t columns);
int64_t spare_bytes(int64_t columns);

/* Whether panels are rows of the weight itself: whole tiles of it, at whole lines, and not so far apart that they share
   sets of the first cache. */
int lies_right(const Weight *weight);

/* Rows of the weight start .. stop (multiples of PANEL, but for the last) as panels at `panels`, which is not used where
   it lies right. */
void stage(const Weight *weight, int64_t start, int64_t stop, uint8_t *panels, float *scale, int32_t *minus,
           char *spare);

/* Rows of activations start .. stop times a weight that is staged: all of its rows. */
void multiply_rows(const Weight *weight, const Source *from, int64_t start, int64_t stop, const uint8_t *panels,
                   const float *scale, const int32_t *minus, const Target *to, char *spare);

/* All m rows of activations, at most `most_rows` and quantized already, times rows start .. stop of a weight that is not.
   */
void multiply_panels(const Weight *weight, int64_t start, int64_t stop, int64_t m, const int8_t *codes,
                     const float *row_scale, const int32_t *row_sum, const Target *to, char *spare);

/* m rows as groups begin .. end of a block's. */
void quantize_groups(const Source *from, int64_t start, int64_t m, int64_t begin, int64_t end, int8_t *codes,
                     float *row_scale, int32_t *row_sum, char *spare);

/* Rows of activations whose codes stay in the second cache; and up to which panels of the weight are made where they are
   used. */
int64_t block_rows(int64_t columns);
int64_t most_rows(int64_t columns);

#endif
