/* Products in 8-bit integers: blocks of activations that stay in the second cache, by panels of the weight. */
#include "int8.h"
#include "rotate.h"

/* Panels of the weight are made where they are used for so many blocks of activations: for more, more often than once,
   they would have to be made again, or to be kept, and reading all activations for each panel still costs less (measured
   on Zen5). */
enum {
    BLOCKS = 2,
    LINE = 64,
    LEAST_RUN = 64,  /* columns that have one scale; RUN of kernels/int8_reference.py */
    LINES = 16,      /* rows of activations that are quantized before they are laid out */
    FAR = 32 * LINE, /* rows that are multiples of it apart are in two of the 64 sets of the first cache */
};

static int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

int64_t padded(int64_t columns) { return up(columns, int8_kernels()->unit) * int8_kernels()->code; }

int64_t scales_in(const Weight *weight) {
    const Form *form = weight->form;
    if (!(weight->coding & BY_RUN)) return 1;
    return weight->coding & AGAIN ? form->columns / AGAIN_RUN : form->columns / form->group * form->taps;
}

int64_t panel_bytes(int64_t columns) {
    return (int8_kernels()->rows ? (up(columns, LINE) / LINE | 1) * LINE : up(columns, int8_kernels()->unit)) * PANEL;
}

/* Panels that a group is multiplied with before the next group is. */
static int64_t beside(int64_t columns) {
    const int64_t many = int8_kernels()->beside / panel_bytes(columns);
    return many > 1 ? many : 1;
}

int64_t block_rows(int64_t columns) {
    const int64_t tall = int8_kernels()->tall, rows = int8_kernels()->block / padded(columns) / tall * tall;
    return rows < 4 * tall ? 4 * tall : rows;
}

int64_t most_rows(int64_t columns) { return BLOCKS * block_rows(columns); }

static int64_t codes_bytes(int64_t columns) { return LINES * (up(columns, LINE) + LINE); }

/* With the rows of a group as floats, for rotating or dividing them, and one more. */
static int64_t line_bytes(int64_t columns) {
    return codes_bytes(columns) + LINE + (int8_kernels()->tall + 1) * columns * 4;
}

/* A panel; floats and codes of PANEL rows for quantizing again; scales and numbers of a panel; the codes, scales and
   sums of a block. */
static int64_t again_bytes(int64_t columns) { return up(columns * 4, LINE) + up(PANEL * up(columns, 64), LINE); }

/* Numbers that panels have for their rows. */
static int64_t numbers_of(int64_t columns) { return beside(columns) * PANEL * (columns / LEAST_RUN + 1); }

int64_t spare_bytes(int64_t columns) {
    const int64_t rows = block_rows(columns);
    return beside(columns) * panel_bytes(columns) + numbers_of(columns) * 8 + again_bytes(columns) + rows * 8 +
           (rows + TALLEST) * padded(columns) + line_bytes(columns) + 16 * LINE;
}

typedef struct {
    uint8_t *panel;
    char *again;
    float *scale;
    int32_t *minus;
    int8_t *codes, *line;
    float *row_scale;
    int32_t *row_sum;
} Spare;

static void *part(char **from, int64_t bytes) {
    char *here = (char *)(((uintptr_t)*from + LINE - 1) / LINE * LINE);
    *from = here + bytes;
    return here;
}

static Spare split(char *spare, int64_t columns) {
    const int64_t rows = block_rows(columns);
    Spare made;
    made.panel = part(&spare, beside(columns) * panel_bytes(columns));
    made.again = part(&spare, again_bytes(columns));
    made.scale = part(&spare, numbers_of(columns) * 4);
    made.minus = part(&spare, numbers_of(columns) * 4);
    made.codes = part(&spare, (rows + TALLEST) * padded(columns)); /* groups may be stored whole */
    made.line = part(&spare, line_bytes(columns));
    made.row_scale = part(&spare, rows * 4);
    made.row_sum = part(&spare, rows * 4);
    return made;
}

int64_t groups_of(int64_t m) { return (m + int8_kernels()->tall - 1) / int8_kernels()->tall; }

int64_t begin_of(int64_t m, int64_t groups, int64_t group) {
    const int64_t at = group * int8_kernels()->tall;
    return int8_kernels()->even ? m * group / groups : at < m ? at : m;
}

/* Some rows from `start` on, rotated, in the memory of `to`. Those of a branch keep their type. */
static void rotate(const Source *from, int64_t start, int64_t rows, Source *to) {
    const int64_t columns = from->columns, size = from->type == F32 ? 4 : 2;
    char *here = (char *)to->x, *spare = here + rows * columns * 4;
    to->type = from->branch ? from->type : F32, to->stride = columns;
    for (int64_t i = 0; i < rows; i++, here += columns * (to->type == F32 ? 4 : 2)) {
        const char *x = (const char *)from->x + (start + i) * from->stride * size;
        if (to->type == F32) rotate_row(from->type, x, columns, from->rotation, (float *)here);
        else rotate_rows(from->type, x, 1, columns, from->rotation, (float *)spare, here);
    }
}

void quantize_groups(const Source *from, int64_t start, int64_t m, int64_t begin, int64_t end, int8_t *codes,
                     float *row_scale, int32_t *row_sum, char *spare) {
    const int64_t groups = groups_of(m), columns = from->columns, wide = padded(columns);
    const int64_t bytes = columns * (from->type == F32 ? 4 : 2);
    int8_t *line = part(&spare, codes_bytes(columns));
    Source of = *from;
    void *floats = part(&spare, (int8_kernels()->tall + 1) * columns * 4);
    if (from->rotation) of.x = floats;
    else of.divided = floats;
    for (int64_t g = begin; g < end; g++) {
        const int64_t first = begin_of(m, groups, g), rows = begin_of(m, groups, g + 1) - first;
        if (from->rotation) rotate(from, start + first, rows, &of);
        int8_kernels()->quantize(&of, from->rotation ? 0 : start + first, (int)rows, line, codes + first * wide,
                                 row_scale + first, row_sum + first);
        if (!from->branch) continue;
        const char *x = from->rotation ? of.x : (const char *)from->x + (start + first) * bytes;
        kernels()->narrow->down(from->branch, x, rows, from->branch->between + first * from->branch->rank);
    }
}

/* Adds the branch of m rows, the first of which is `row` of the results, to `count` columns of these from `column` on. */
static void add_branch(const Target *to, int64_t row, int64_t m, int64_t column, int64_t count) {
    char *out = (char *)to->out + (row * to->row_step + column) * (to->type == F32 ? 4 : 2);
    if (to->branch) kernels()->narrow->up(to->branch, to->branch->between, m, column, count, out, to->row_step);
}

int lies_right(const Weight *weight) {
    const int64_t columns = weight->form->columns;
    const int as_they_are = !(weight->coding & MADE) && weight->taps == 1;
    return int8_kernels()->rows && as_they_are && columns % LINE == 0 && columns % FAR &&
           weight->form->rows % PANEL == 0 && (uintptr_t)weight->parts->codes % LINE == 0;
}

/* Those of a weight: `made`, or its rows from `row`. */
static Panels panels_of(const Weight *weight, const uint8_t *made, int64_t row) {
    const int64_t columns = weight->form->columns;
    const int is_signed = weight->coding & MADE || weight->form->packing == SIGNED_BYTES;
    const int64_t runs = weight->coding & BY_RUN ? scales_in(weight) : 0;
    if (!lies_right(weight)) return (Panels){made, panel_bytes(columns), is_signed, runs};
    return (Panels){weight->parts->codes + row * columns, PANEL * columns, is_signed, runs};
}

void stage(const Weight *weight, int64_t start, int64_t stop, uint8_t *panels, float *scale, int32_t *minus,
           char *spare) {
    const int64_t columns = weight->form->columns, bytes = panel_bytes(columns), each = scales_in(weight);
    const int right = lies_right(weight);
    char *again = part(&spare, again_bytes(columns));
    for (int64_t row = start; row < stop; row += PANEL)
        int8_kernels()->panel(weight, row, right ? 0 : panels + row / PANEL * bytes, scale + row * each,
                              minus + row * each, again);
}

Place place_of(const Place *first, const Panels *panels, int64_t row, int64_t panel, int64_t weights) {
    Place here = *first;
    here.row_scale += row, here.row_sum += row, here.row += row;
    const int64_t before = panel * PANEL * (panels->runs ? panels->runs : 1);
    here.scale += before, here.minus += before, here.column += panel * PANEL;
    here.count = (int)(weights - panel * PANEL < PANEL ? weights - panel * PANEL : PANEL);
    return here;
}

void multiply_rows(const Weight *weight, const Source *from, int64_t start, int64_t stop, const uint8_t *made,
                   const float *scale, const int32_t *minus, const Target *to, char *spare) {
    const int64_t columns = from->columns, most = block_rows(columns), weights = weight->form->rows;
    const Spare have = split(spare, columns);
    const Panels all = panels_of(weight, made, 0);
    const int64_t blocks = (stop - start + most - 1) / most, scales = scales_in(weight);
    const int64_t wide = beside(columns) * PANEL;
    const int64_t each = up((stop - start + blocks - 1) / blocks, int8_kernels()->tall);
    for (int64_t row = start; row < stop; row += each) {
        const int64_t m = stop - row < each ? stop - row : each;
        quantize_groups(from, row, m, 0, groups_of(m), have.codes, have.row_scale, have.row_sum, (char *)have.line);
        for (int64_t column = 0; column < weights; column += wide) {
            const int64_t here = weights - column < wide ? weights - column : wide, bytes = wide / PANEL * all.bytes;
            const Panels panels = {all.at + column / PANEL * all.bytes, all.bytes, all.is_signed, all.runs};
            const char *ahead = column + wide < weights ? (const char *)panels.at + bytes : 0;
            const Place place = {.row_scale = have.row_scale, .scale = scale + column * scales, .row_sum = have.row_sum,
                                 .minus = minus + column * scales, .to = to, .row = row, .column = column};
            if (!int8_kernels()->multiply(&panels, here, have.codes, m, columns, &place, ahead, ahead ? bytes : 0))
                add_branch(to, row, m, column, here);
        }
    }
}

void multiply_panels(const Weight *weight, int64_t start, int64_t stop, int64_t m, const int8_t *codes,
                     const float *row_scale, const int32_t *row_sum, const Target *to, char *spare) {
    const int64_t columns = weight->form->columns;
    const Spare have = split(spare, columns);
    const int64_t wide = beside(columns) * PANEL, bytes = panel_bytes(columns), scales = scales_in(weight);
    const int right = lies_right(weight);
    for (int64_t row = start; row < stop; row += wide) {
        const int64_t here = stop - row < wide ? stop - row : wide;
        const Panels panels = panels_of(weight, have.panel, row);
        for (int64_t at = 0; at < here; at += PANEL)
            int8_kernels()->panel(weight, row + at, right ? 0 : have.panel + at / PANEL * bytes,
                                  have.scale + at * scales, have.minus + at * scales, have.again);
        const char *ahead = 0;
        if (!(weight->coding & MADE) && row + wide < stop)
            ahead = (const char *)weight->parts->codes + (row + wide) * columns;
        const Place place = {.row_scale = row_scale, .scale = have.scale, .row_sum = row_sum, .minus = have.minus, .to = to,
                             .column = row};
        if (!int8_kernels()->multiply(&panels, here, codes, m, columns, &place, ahead, ahead ? wide * columns : 0))
            add_branch(to, 0, m, row, here);
    }
}
