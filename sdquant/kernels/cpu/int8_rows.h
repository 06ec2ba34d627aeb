/* Rows of a weight as codes, and their scales. Included after codes.h, int8.h, scales.h, and what it is made of: `unpacked`
   (the codes of a row from `first`, one to a byte; bits above a code's own are any), `nine_taps` (for as many of the inputs
   as it says, what `by_tap` does), QUANTIZE_RUNS and QUANTIZE_LINE. */

/* Bytes [in, taps] as [taps, in]. */
static void by_tap(const uint8_t *from, int64_t columns, int64_t taps, uint8_t *to) {
    const int64_t in = columns / taps;
    const int64_t done = taps == 9 ? nine_taps(from, in, to) : 0;
    for (int64_t t = 0; t < taps; t++)
        for (int64_t c = done; c < in; c++) to[t * in + c] = from[c * taps + t];
}

static int count_of(const Weight *weight, int64_t start) {
    const int64_t left = weight->form->rows - start;
    return (int)(left < PANEL ? left : PANEL);
}

/* All scales of a panel's rows, by run. Those that are quantized again get them then. */
static void scales_by_run(const Weight *weight, int64_t start, float *scale) {
    const Form *form = weight->form;
    const int64_t runs = scales_in(weight), groups = runs / form->taps;
    const int count = weight->coding & AGAIN ? 0 : count_of(weight, start);
    for (int64_t t = 0; t < form->taps; t++)
        for (int64_t g = 0; g < groups; g++, scale += PANEL)
            for (int i = 0; i < PANEL; i++) {
                const int64_t at = (start + i) * runs + g * form->taps + t;
                scale[i] = i < count ? scale_of(form, weight->parts, at) * form->factor : 0.0f;
            }
}

/* Scales of a panel's rows, and what is to be subtracted from their codes; `more` of it for all. Rows that are quantized
   again get their scales then. */
static void scales_of(const Weight *weight, int64_t start, int more, float *scale, int32_t *minus) {
    const Form *form = weight->form;
    const int64_t shared = form->group / form->columns; /* rows with one scale */
    const int count = count_of(weight, start);
    for (int i = 0; i < PANEL; i++) {
        const int codes = i < count && !(weight->coding & AGAIN), minus_zero = codes && !(weight->coding & UNPACKED);
        const int64_t group = codes ? (start + i) / shared : 0;
        scale[i] = codes ? scale_of(form, weight->parts, group) * form->factor : 0.0f;
        minus[i] = (minus_zero ? (int)zero_of(form, weight->parts, group) : 0) + more;
    }
}

/* Integers of fewer than eight bits, of one row of the weight, at `to`. `spare` [columns * 4]. */
static void integers_of(const Weight *weight, int64_t row, int8_t *to, uint8_t *spare) {
    const int64_t columns = weight->form->columns, first = row * columns;
    const uint8_t *from = unpacked(weight, first, spare);
    const uint8_t kept = (uint8_t)((1 << bits_of_code(weight->form->packing)) - 1), zero = (uint8_t)weight->form->zero;
    for (int64_t i = 0; i < columns; i++) to[i] = (int8_t)((from[i] & kept) - zero);
}

/* Codes of a panel's rows, `stride` bytes apart, columns in the order of the activations'. `floats` [columns] is spare. */
static void codes_of(const Weight *weight, int64_t start, uint8_t *to, int64_t stride, float *scale, float *floats) {
    const int64_t columns = weight->form->columns;
    const int count = count_of(weight, start);
    Decode *decode = kernels()->decoder(weight->form);
    for (int i = 0; i < count; i++, to += stride) {
        const uint8_t *from = weight->parts->codes + (start + i) * columns;
        if (weight->coding & UNPACKED) {
            int8_t *made = weight->taps > 1 ? (int8_t *)floats : (int8_t *)to;
            integers_of(weight, start + i, made, (uint8_t *)(floats + columns / 2)); /* behind them, for unaligned rows */
            from = (const uint8_t *)made;
        } else if (weight->coding & AGAIN) {
            const Source row = {.type = F32, .x = floats, .columns = columns, .stride = columns};
            int8_t *made = weight->taps > 1 ? (int8_t *)floats : (int8_t *)to; /* where their floats were, or at once */
            int32_t sum;
            decode(weight->form, weight->parts, (start + i) * columns, columns, F32, floats);
            if (weight->coding & BY_RUN) QUANTIZE_RUNS(floats, scales_in(weight), made, scale + i, PANEL);
            else QUANTIZE_LINE(&row, 0, made, scale + i, &sum);
            from = (const uint8_t *)made;
        }
        if (weight->taps > 1) by_tap(from, columns, weight->taps, to);
        else if (from != to) memcpy(to, from, columns);
    }
}
