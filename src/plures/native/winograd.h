/* 3x3 kernels over images in the vector by Winograd's F(4,3) along rows: four outputs side by side take six products for each row of a
   kernel, not twelve. Inputs become six numbers for each four outputs, kernels six for each row of three taps, and six sums become four
   outputs again; a kernel reads the numbers of its channel, whichever member and output it belongs to. (Winograd, 1980; Lavin and Gray, 2016)

   If a vector holds two times as many images as there are, it has two tiles side by side. */
#include "owned.h"
#include "vectors.h"

#define NUMBERS 6
#define WIDE 4
#define TALL (LANES == 16 ? 4 : 2) /* rows of a tile: its sums, NUMBERS * TALL vectors, stay in registers */
#define LINES (TALL + 2)
#define NUMBERS_OF_KERNEL (3 * NUMBERS) /* [row][number] */
#define MOST_TILES 8                    /* of an item: kernels are changed once for all of them */
#define MOST_OUTPUTS 128                /* of an item: their sums stay in the second cache */

typedef struct {
    int units;                 /* tiles in a vector */
    int64_t down, across, all; /* vectors of tiles */
} Tiles;

static Tiles tiles_of(const Convolution *c) {
    Tiles t = {.units = LANES / c->lanes};
    t.down = up(c->output_height, TALL);
    t.across = up(c->output_width, WIDE * t.units);
    t.all = c->images * t.down * t.across;
    return t;
}

/* Where the lists of a member begin, for one group of inputs: an output's list ends where the next one begins. */
static const int32_t *starts_of(const Convolution *c, int member, int64_t group) {
    return c->starts + member * (up(c->channels, c->group) * c->outputs + 1) + group * c->outputs;
}

/* The most kernels that a member has for so many outputs that follow one another, as items take them. */
static int64_t most_kernels(const Convolution *c, int outputs) {
    int64_t most = 0;
    for (int member = 0; member < c->members; member++)
        for (int first = 0; first < c->outputs; first += outputs) {
            const int last = least(first + outputs, c->outputs);
            int64_t kernels = 0;
            for (int64_t group = 0; group < up(c->channels, c->group); group++) kernels += starts_of(c, member, group)[last] - starts_of(c, member, group)[first];
            if (kernels > most) most = kernels;
        }
    return most;
}

/* Whether the products that it saves are worth the changes: each channel has several kernels, and each kernel several tiles. The answer
   is the same for all members, some of which have a kernel more than others: bits must not depend on which of them run together. */
static int winograd_pays(const Convolution *c) {
    const int usual = c->whole && c->kernel_height == 3 && c->kernel_width == 3 && c->stride_y == 1 && c->stride_x == 1;
    const int full = c->lanes == LANES || (LANES == 16 && c->lanes == 8);
    if (!usual || !full || c->output_height < TALL || c->output_width < WIDE || tiles_of(c).all < 2) return 0;
    const int64_t all = (int64_t)c->channels * c->outputs, kernels = most_kernels(c, c->outputs);
    return kernels && all >= 3 * ((int64_t)c->channels + c->outputs) * ((all + kernels / 2) / kernels);
}

/* Change kernels that follow one another; two floats beyond the last one are written, too. */
static float *change_kernels(const float *kernel, int64_t count, float *to) {
    const eight left = {1.0f / 4, -1.0f / 6, -1.0f / 6, 1.0f / 24, 1.0f / 24}, middle = {0, -1.0f / 6, 1.0f / 6, 1.0f / 12, -1.0f / 12};
    const eight right = {0, -1.0f / 6, -1.0f / 6, 1.0f / 6, 1.0f / 6, 1};
    for (; count; count--, kernel += 9, to += NUMBERS_OF_KERNEL)
        UNROLL for (int ky = 0; ky < 3; ky++)
            *(eight *)(to + NUMBERS * ky) = kernel[3 * ky] * left + kernel[3 * ky + 1] * middle + kernel[3 * ky + 2] * right;
    return to;
}

/* Change what a vector of tiles reads of some channels, to [channel][number][row]. Its columns from `begin` to `end` lie inside the map. */
ALWAYS void change_columns(const Convolution *c, const float *map, int channels, int top, int left, float *to, const int begin, const int end, const int units) {
    const int lanes = LANES / units;
    const int64_t line = (int64_t)c->width * lanes, next = c->height * line;
    for (int channel = 0; channel < channels; channel++, map += next, to += NUMBERS * LINES * LANES) {
        const int64_t ahead = channel + CHANNELS_AHEAD < channels ? CHANNELS_AHEAD * next : 0;
        for (int row = 0; row < LINES; row++) {
            const int y = top + row;
            vector d[NUMBERS], made[NUMBERS] = {};
            if (y >= 0 && y < c->height) {
                const float *from = map + y * line + (int64_t)left * lanes;
                UNROLL for (int i = 0; i < NUMBERS; i++) {
                    const float *one = i >= begin && i < end ? from + i * lanes : NULL;
                    const int beside = i + WIDE;
                    if (one) __builtin_prefetch(one + ahead);
                    if (units == 1) d[i] = one ? load(one) : splat(0);
                    else d[i] = load_two(one, beside >= begin && beside < end ? from + beside * lanes : NULL);
                }
                const vector a = d[4] - 4 * d[2], b = d[3] - 4 * d[1], e = d[4] - d[2], f = 2 * (d[3] - d[1]);
                made[0] = 4 * d[0] - 5 * d[2] + d[4];
                made[1] = a + b;
                made[2] = a - b;
                made[3] = e + f;
                made[4] = e - f;
                made[5] = 4 * d[1] - 5 * d[3] + d[5];
            }
            UNROLL for (int n = 0; n < NUMBERS; n++) store(to + (n * LINES + row) * LANES, made[n]);
        }
    }
}

ALWAYS void change_images(const Convolution *c, const float *map, int channels, int top, int left, float *to, const int units) {
    const int all = WIDE * units + 2, begin = left < 0 ? -left : 0, end = least(all, c->width - left);
    if (begin == 0 && end == all) change_columns(c, map, channels, top, left, to, 0, all, units);
    else if (begin == 1 && end == all) change_columns(c, map, channels, top, left, to, 1, all, units);
    else if (begin == 0 && end == all - 1) change_columns(c, map, channels, top, left, to, 0, all - 1, units);
    else if (begin == 1 && end == all - 1) change_columns(c, map, channels, top, left, to, 1, all - 1, units);
    else change_columns(c, map, channels, top, left, to, begin, end, units);
}

/* Add the products of one list of kernels to the sums, [number][row]. */
ALWAYS void add_numbers(vector sums[NUMBERS * TALL], const float *numbers, const float *kernel, const uint16_t *places, int count) {
    for (int k = 0; k < count; k++, kernel += NUMBERS_OF_KERNEL) {
        const float *from = numbers + (int64_t)places[k] * NUMBERS * LINES * LANES;
        UNROLL for (int n = 0; n < NUMBERS; n++) {
            vector weight[3];
            UNROLL for (int ky = 0; ky < 3; ky++) weight[ky] = splat(kernel[NUMBERS * ky + n]);
            UNROLL for (int row = 0; row < LINES; row++) {
                const vector number = load(from + (n * LINES + row) * LANES);
                UNROLL for (int ky = 0; ky < 3; ky++)
                    if (row >= ky && row - ky < TALL) ADD_PRODUCT(sums[n * TALL + row - ky], number, weight[ky]);
            }
        }
    }
}

/* Write the outputs that sums become, as far as they lie in the map. */
ALWAYS void write_outputs(const Convolution *c, const vector sums[NUMBERS * TALL], vector bias, int64_t at, const int rows, const int columns, const int units) {
    UNROLL for (int row = 0; row < TALL; row++) {
        if (row >= rows) break;
        const int64_t line = at + row * c->output_row_stride;
        const vector near = sums[TALL + row] + sums[2 * TALL + row], near_off = sums[TALL + row] - sums[2 * TALL + row];
        const vector far = sums[3 * TALL + row] + sums[4 * TALL + row], far_off = sums[3 * TALL + row] - sums[4 * TALL + row];
        vector made[WIDE] = {bias + sums[row] + near + far, bias + near_off + 2 * far_off, bias + near + 4 * far, bias + near_off + 8 * far_off + sums[5 * TALL + row]};
        UNROLL for (int column = 0; column < WIDE; column++) {
            if (column >= columns) break;
            const int64_t place = line + column * c->output_pixel_stride, other = place + WIDE * c->output_pixel_stride;
            const int both = column + WIDE < columns;
            if (c->residual) made[column] += units == 1 ? load(c->residual + place) : load_two(c->residual + place, both ? c->residual + other : NULL);
            made[column] = activated(made[column], c->relu);
            if (units == 1) store(c->output + place, made[column]);
            else store_two(c->output + place, both ? c->output + other : NULL, made[column]);
        }
    }
}

static int64_t winograd_scratch(const Convolution *c) {
    const int outputs = least(c->outputs, MOST_OUTPUTS);
    const int64_t sums = c->channels > c->group ? (int64_t)outputs * NUMBERS * TALL * LANES : 0;
    return (least(c->group, c->channels) * NUMBERS * LINES * LANES + sums + most_kernels(c, outputs) * NUMBERS_OF_KERNEL + 2) * (int64_t)sizeof(float);
}

/* Compute some outputs of one member, for vectors of tiles from `begin` to `end`. */
ALWAYS void winograd_tiles(const Convolution *c, int member, int64_t begin, int64_t end, int first, int last, float *scratch, const int units) {
    const Tiles tiles = tiles_of(c);
    const int64_t groups = up(c->channels, c->group), map = (int64_t)c->height * c->width * c->lanes;
    float *partial = scratch + least(c->group, c->channels) * NUMBERS * LINES * LANES;
    float *kernels = partial + (groups > 1 ? (int64_t)(last - first) * NUMBERS * TALL * LANES : 0), *unused = kernels;
    for (int64_t group = 0; group < groups; group++) {
        const int32_t *starts = starts_of(c, member, group);
        unused = change_kernels(c->values + (int64_t)starts[first] * 9, starts[last] - starts[first], unused);
    }
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t image = tile / (tiles.down * tiles.across);
        const int y = tile / tiles.across % tiles.down * TALL, x = tile % tiles.across * WIDE * units;
        const int rows = least(TALL, c->output_height - y), columns = least(WIDE * units, c->output_width - x);
        const float *input = c->input + member * c->input_member_stride + image * c->channels * map, *kernel = kernels;
        const int64_t out = (member * (int64_t)c->images + image) * c->outputs * c->output_channel_stride + y * c->output_row_stride + x * c->output_pixel_stride;
        for (int64_t group = 0; group < groups; group++) {
            const int32_t *starts = starts_of(c, member, group);
            const int channels = least(c->group, c->channels - group * c->group);
            change_images(c, input + group * c->group * map, channels, y - c->padding_y, x - c->padding_x, scratch, units);
            for (int output = first; output < last; output++) {
                const int count = starts[output + 1] - starts[output];
                float *kept = partial + (int64_t)(output - first) * NUMBERS * TALL * LANES;
                vector sums[NUMBERS * TALL];
                UNROLL for (int i = 0; i < NUMBERS * TALL; i++) sums[i] = group ? load(kept + i * LANES) : splat(0);
                add_numbers(sums, scratch, kernel, c->places + starts[output], count);
                kernel += (int64_t)count * NUMBERS_OF_KERNEL;
                if (group < groups - 1) {
                    UNROLL for (int i = 0; i < NUMBERS * TALL; i++) store(kept + i * LANES, sums[i]);
                    continue;
                }
                const vector bias = splat(c->bias[(int64_t)member * c->outputs + output]);
                const int64_t at = out + output * c->output_channel_stride;
                if (rows == TALL && columns == WIDE * units) write_outputs(c, sums, bias, at, TALL, WIDE * units, units);
                else write_outputs(c, sums, bias, at, rows, columns, units);
            }
        }
    }
}

static void winograd_item(const Convolution *c, int member, int64_t begin, int64_t end, int first, int last, float *scratch) {
    if (c->lanes == LANES) winograd_tiles(c, member, begin, end, first, last, scratch, 1);
#if LANES == 16
    else winograd_tiles(c, member, begin, end, first, last, scratch, 2);
#endif
}
