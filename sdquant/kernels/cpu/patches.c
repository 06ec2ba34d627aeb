/* What outputs of a convolution see, copied out. */
#include "patches.h"

#include <string.h>

/* One row of patches, [channels, kernel_high, kernel_wide], of numbers of `size` bytes. */
static inline void patch(const Images *from, int64_t row, size_t size, char *out) {
    const int64_t across = from->out_wide, down = from->out_high, pixels = from->high * from->wide;
    const int64_t image = row / (across * down), y = row / across % down, x = row % across;
    const int64_t top = y * from->step[0] - from->pad[0], left = x * from->step[1] - from->pad[1];
    const char *channel = (const char *)from->x + image * from->channels * pixels * (int64_t)size;
    for (int64_t c = 0; c < from->channels; c++, channel += pixels * (int64_t)size)
        for (int64_t i = 0; i < from->kernel_high; i++) {
            const int64_t v = top + i * from->spread[0];
            for (int64_t j = 0; j < from->kernel_wide; j++, out += size) {
                const int64_t h = left + j * from->spread[1];
                if (v < 0 || h < 0 || v >= from->high || h >= from->wide) memset(out, 0, size);
                else memcpy(out, channel + (v * from->wide + h) * (int64_t)size, size);
            }
        }
}

void patches(const Images *from, int64_t start, int64_t stop, void *out) {
    const int64_t each = from->channels * from->kernel_high * from->kernel_wide * from->size;
    for (int64_t row = start; row < stop; row++) {
        char *to = (char *)out + row * each;
        if (from->size == 2) patch(from, row, 2, to);
        else patch(from, row, 4, to);
    }
}
