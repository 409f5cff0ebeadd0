/* Convolutions whose outputs have about one kernel each, as depthwise layers do: a channel at a time, so that only what a kernel reads is copied.

   A strip of a channel lies with zeros around it, its rows and columns apart by their remainders by the stride: every tap then finds its inputs
   for all outputs of the strip in a row, from its own offset on. What lies between two rows of outputs is computed in vain. */
#include <string.h>
#include "owned.h"
#include "vectors.h"

#define STRIP_FLOATS(lanes) ((lanes) == 1 ? 16384 : LANES == 4 ? 2048 : 4096) /* of a copy: it stays in the first cache, or in the second one if pixels fill the vectors */

typedef struct {
    int columns, rows;   /* of outputs */
    int across, down;    /* remainders by the stride */
    int wide, lines;     /* pixels of a line of the copy, and lines, of one remainder */
    int64_t size, sums;  /* floats of the copy of a channel, and of its sums */
} Strip;

static Strip strip_of(const Convolution *c) {
    Strip s = {.across = least(c->stride_x, c->kernel_width), .down = least(c->stride_y, c->kernel_height)};
    for (int pieces = 1;; pieces++) {
        s.columns = up(c->output_width, pieces);
        s.wide = s.columns + (c->kernel_width - 1) / c->stride_x;
        const int64_t line = (int64_t)s.across * s.down * s.wide * c->lanes, halo = (c->kernel_height - 1) / c->stride_y;
        const int64_t fit = STRIP_FLOATS(c->lanes) / line - halo;
        s.rows = fit < 1 ? 1 : least(c->output_height, up(c->output_height, up(c->output_height, fit)));
        s.lines = s.rows + halo;
        if (s.columns == 1 || s.rows == c->output_height || s.rows >= s.columns) break;
    }
    s.sums = up(((int64_t)(s.rows - 1) * s.wide + s.columns) * c->lanes, LANES) * LANES;
    s.size = up((int64_t)s.across * s.down * s.lines * s.wide * c->lanes, LANES) * LANES + LANES; /* the last vector may read on */
    return s;
}

/* Whether copies of single channels are fewer than those of all channels for each column of the kernel. */
static int is_sparse(const Convolution *c) {
    const int64_t lists = up(c->channels, c->group) * c->outputs;
    int64_t kernels = 0;
    for (int member = 0; member < c->members; member++) kernels += c->starts[member * (lists + 1) + lists] - c->starts[member * (lists + 1)];
    const int usual = c->output_pixel_stride == c->lanes && c->output_row_stride == (int64_t)c->output_width * c->lanes;
    return c->whole && usual && c->kernel_height * c->kernel_width > 1 && kernels <= (int64_t)c->members * (c->channels > c->outputs ? c->channels : c->outputs);
}

ALWAYS void copy_floats(float *to, const float *from, int64_t count) {
    if (count >= LANES) {
        for (int64_t i = 0; i + LANES < count; i += LANES) store(to + i, load(from + i));
        store(to + count - LANES, load(from + count - LANES));
    } else if (count >= 8) {
        memcpy(to, from, 32), memcpy(to + count - 8, from + count - 8, 32);
    } else if (count >= 4) {
        memcpy(to, from, 16), memcpy(to + count - 4, from + count - 4, 16);
    } else
        for (int64_t i = 0; i < count; i++) to[i] = from[i];
}

/* Every second number. */
ALWAYS void copy_even(float *to, const float *from, int64_t count) {
    int64_t i = 0;
#ifdef PICK
    if (count > LANES) { /* the last vector begins one number earlier, because the last number may end the memory */
        for (; i + LANES < count; i += LANES) store(to + i, EVEN(load(from + 2 * i), load(from + 2 * i + LANES)));
        i = count - LANES;
        store(to + i, ODD(load(from + 2 * i - 1), load(from + 2 * i - 1 + LANES)));
        return;
    }
#endif
    for (; i < count; i++) to[i] = from[2 * i];
}

/* Copy a strip that begins at a row and a column of outputs. Zeros around the map are written if `zeros`, else they are there. */
ALWAYS void copy_strip(const Convolution *c, const Strip *s, const float *map, int y, int x, int zeros, float *to, const int unit, const int step) {
    for (int down = 0; down < s->down; down++)
        for (int across = 0; across < s->across; across++) {
            const int left = x * step + across - c->padding_x, top = y * c->stride_y + down - c->padding_y;
            const int outside = least(left < 0 ? up(-left, step) : 0, s->wide);
            const int inside = c->width > left ? least(s->wide, up(c->width - left, step)) : 0;
            const float *from = map + ((int64_t)top * c->width + left + outside * step) * unit;
            for (int line = 0; line < s->lines; line++, to += s->wide * unit, from += (int64_t)c->stride_y * c->width * unit) {
                const int from_y = top + line * c->stride_y, there = from_y >= 0 && from_y < c->height && inside > outside;
                if (zeros)
                    for (int i = 0; i < s->wide; i++)
                        if (!there || i < outside || i >= inside) {
                            if (unit == 1) to[i] = 0;
                            else store(to + i * LANES, splat(0));
                        }
                if (!there) continue;
                if (unit > 1)
                    for (int i = 0; i < inside - outside; i++) store(to + (outside + i) * LANES, load(from + i * step * LANES));
                else if (step == 1)
                    copy_floats(to + outside, from, inside - outside);
                else if (step == 2)
                    copy_even(to + outside, from, inside - outside);
                else
                    for (int i = 0; i < inside - outside; i++) to[outside + i] = from[i * step];
            }
        }
}

/* Sums of some vectors of outputs: those so far and the products of one kernel. */
ALWAYS void sums_of_vectors(float *sums, const float *from, const int32_t *offsets, const float *values, const float *bias, const int taps, const int vectors) {
    vector s[12];
    UNROLL for (int i = 0; i < vectors; i++) s[i] = bias ? splat(*bias) : load(sums + i * LANES);
    for (int tap = 0; tap < taps; tap++) {
        const float *p = from + offsets[tap];
        const vector weight = splat(values[tap]);
        KEEP_POINTER(p);
        UNROLL for (int i = 0; i < vectors; i++) ADD_PRODUCT_FROM(s[i], weight, p + i * LANES);
    }
    UNROLL for (int i = 0; i < vectors; i++) store(sums + i * LANES, s[i]);
}

static void channel_sums(const Convolution *c, int vectors, const float *from, const int32_t *offsets, const float *values, const float *bias, float *sums) {
    const int taps = c->kernel_height * c->kernel_width;
    for (int left = vectors, most = up(vectors, up(vectors, 12)), here; left; left -= here, from += here * LANES, sums += here * LANES) {
        here = least(left, most); /* parts of about the same length: a short one would wait for each product */
        switch (here) {
#define TAKE(n) case n: sums_of_vectors(sums, from, offsets, values, bias, taps, n); break;
        TAKE(1) TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7) TAKE(8) TAKE(9) TAKE(10) TAKE(11) TAKE(12)
#undef TAKE
        }
    }
}

static void write_strip(const Convolution *c, const Strip *s, const float *sums, int64_t at, int rows, int columns) {
    const int64_t count = (int64_t)columns * c->lanes;
    for (int row = 0; row < rows; row++, sums += (int64_t)s->wide * c->lanes, at += c->output_row_stride) {
        float *to = c->output + at;
        if (!c->residual) {
            copy_floats(to, sums, count);
            continue;
        }
        for (int64_t i = 0; i < count; i++) to[i] = activated_number(sums[i] + c->residual[at + i], c->relu);
    }
}

static int64_t channels_scratch(const Convolution *c) {
    const Strip s = strip_of(c);
    return (s.size + s.sums + c->kernel_height * c->kernel_width) * (int64_t)sizeof(float);
}

/* Compute some outputs of one member and one block of images. */
static void channels_item(const Convolution *c, int member, int image, int first, int last, float *scratch) {
    const Strip s = strip_of(c);
    const int taps = c->kernel_height * c->kernel_width, groups = up(c->channels, c->group);
    const int64_t map = (int64_t)c->height * c->width * c->lanes, plane = (int64_t)s.lines * s.wide * c->lanes;
    const float *input = c->input + member * c->input_member_stride + (int64_t)image * c->channels * map;
    const int zeros = s.rows < c->output_height || s.columns < c->output_width; /* else they are the same for all channels */
    float *sums = scratch + s.size;
    int32_t *offsets = (int32_t *)(sums + s.sums);
    memset(scratch, 0, sizeof(float) * s.size);
    for (int tap = 0; tap < taps; tap++) {
        const int ky = tap / c->kernel_width, kx = tap % c->kernel_width;
        offsets[tap] = (ky % c->stride_y * s.across + kx % c->stride_x) * plane + ((int64_t)(ky / c->stride_y) * s.wide + kx / c->stride_x) * c->lanes;
    }
    for (int output = first; output < last; output++) {
        const float *bias = c->bias + (int64_t)member * c->outputs + output;
        for (int y = 0; y < c->output_height; y += s.rows)
            for (int x = 0; x < c->output_width; x += s.columns) {
                const int rows = least(s.rows, c->output_height - y), columns = least(s.columns, c->output_width - x);
                const int vectors = up(((int64_t)(rows - 1) * s.wide + columns) * c->lanes, LANES);
                const float *begin = bias;
                for (int group = 0; group < groups; group++) {
                    const int32_t *start = c->starts + member * ((int64_t)groups * c->outputs + 1) + group * c->outputs + output;
                    for (int k = start[0]; k < start[1]; k++, begin = NULL) {
                        const float *channel = input + (group * c->group + c->places[k]) * map;
#define COPY(step) (c->lanes == 1 ? copy_strip(c, &s, channel, y, x, zeros, scratch, 1, step) : copy_strip(c, &s, channel, y, x, zeros, scratch, LANES, step))
                        if (c->stride_x == 1) COPY(1);
                        else if (c->stride_x == 2) COPY(2);
                        else COPY(c->stride_x);
                        channel_sums(c, vectors, scratch, offsets, c->values + (int64_t)k * taps, begin, sums);
                    }
                }
                if (begin) for (int i = 0; i < vectors; i++) store(sums + i * LANES, splat(*bias));
                if (c->relu && !c->residual) for (int i = 0; i < vectors; i++) store(sums + i * LANES, activated(load(sums + i * LANES), c->relu));
                const int64_t at = ((int64_t)member * c->images + image) * c->outputs * c->output_channel_stride + output * c->output_channel_stride;
                write_strip(c, &s, sums, at + y * c->output_row_stride + x * c->output_pixel_stride, rows, columns);
            }
    }
}
