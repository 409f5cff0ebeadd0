/* Training beyond the sums that prediction has, too: gradients of the kernels that members own, and norm layers.

   As the kernels of prediction, compiled once for each set of instructions; and here, too, an item of work writes its own
   part of the result, and every sum is taken in one order: the bits are the same for any number of threads. */
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "training.h"
#include "vectors.h"

#define INPUT_BYTES (20 * 1024)     /* of one channel that is copied for its kernels: stays in the first cache */
#define GRADIENT_BYTES (768 * 1024) /* of the gradients that all kernels of a pass read: stays in the second cache */
#define CHANNELS_OF_ITEM 8          /* inputs whose kernels are one item of work */

/* The tile of outputs that is read at once. */
#define MOST 4
#define ROWS 2
#define COLUMNS (LANES == 16 ? 4 : 2)
#define FEW 4 /* outputs of a kernel of one tap that are taken together: an input is loaded once for them */

/* The outermost row or column that a tile reads lies outside the map: zeros need no multiplication. */
enum { TOP = 1, LEFT = 2, BOTTOM = 4, RIGHT = 8, ALL_EDGES = 15 };

/* ---- gradients of kernels ---- */

/* Some blocks of images and a band of rows at a time: one input channel of them is copied, zeros around it, and stays in
   the first cache; the gradients of the outputs stream past it. */
typedef struct {
    int columns;               /* of a tile */
    int band, blocks;          /* rows of outputs and blocks of images in a pass */
    int64_t bands, groups;     /* how many there are */
    int rows, width, wide;     /* of the copied inputs; and columns of the gradients, whole tiles */
    int64_t block;             /* floats of one block in the copy */
    int64_t out_block;         /* the same of the gradients, if they must be copied */
    int ragged;                /* tiles reach beyond the gradients, which are then copied, too */
} Passes;

static Passes passes_of(const KernelGradient *c) {
    Passes p = {.columns = c->output_width <= 2 ? 2 : COLUMNS};
    p.wide = up(c->output_width, p.columns) * p.columns;
    p.width = c->stride_x * (p.wide - 1) + c->kernel_width;
    const int64_t line = (int64_t)c->outputs * p.wide * LANES * (int64_t)sizeof(float);
    for (p.band = up(c->output_height, ROWS) * ROWS;; p.band = up(p.band, 2 * ROWS) * ROWS) {
        p.rows = c->stride_y * (p.band - 1) + c->kernel_height;
        p.block = (int64_t)p.rows * p.width * LANES;
        if (p.band == ROWS || (p.block * (int64_t)sizeof(float) <= INPUT_BYTES && line * p.band <= GRADIENT_BYTES)) break;
    }
    const int64_t fit = least(INPUT_BYTES / (p.block * (int64_t)sizeof(float)), GRADIENT_BYTES / (line * p.band));
    p.blocks = least(c->blocks, fit > 1 ? fit : 1);
    p.bands = up(c->output_height, p.band);
    p.groups = up(c->blocks, p.blocks);
    p.ragged = p.wide != c->output_width || c->output_height % ROWS;
    p.out_block = (int64_t)p.band * p.wide * LANES;
    return p;
}

/* One channel of some blocks of images, from a row and a column that may lie outside the map; zeros there. */
static void copy_map(const float *map, int64_t next, int height, int width, int top, int left, int blocks, int rows, int columns, float *to) {
    const int begin = left < 0 ? least(columns, -left) : 0, end = least(columns, width - left);
    for (int block = 0; block < blocks; block++, map += next)
        for (int row = 0; row < rows; row++, to += (int64_t)columns * LANES) {
            const int y = top + row;
            if (y < 0 || y >= height || end <= begin) {
                memset(to, 0, sizeof(float) * LANES * columns);
                continue;
            }
            const float *from = map + ((int64_t)y * width + left) * LANES;
            int column = 0;
            for (; column < begin; column++) store(to + column * LANES, splat(0));
            for (; column < end; column++) store(to + column * LANES, load(from + column * LANES));
            for (; column < columns; column++) store(to + column * LANES, splat(0));
        }
}

/* Replace vectors by the sums of their lanes, side by side; `count` may be rounded up. */
static void add_lanes(float *values, int64_t count) {
#ifdef PICK
    for (int64_t i = 0; i < count; i += LANES) {
        vector v[LANES]; /* two become one, until one is left */
        UNROLL for (int j = 0; j < LANES; j++) v[j] = load(values + (i + j) * LANES);
#if LANES == 16
        UNROLL for (int j = 0; j < 8; j++)
            v[j] = PICK(v[j], v[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   PICK(v[j], v[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        UNROLL for (int j = 0; j < 4; j++)
            v[j] = PICK(v[j], v[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                   PICK(v[j], v[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        UNROLL for (int j = 0; j < 2; j++)
            v[j] = PICK(v[j], v[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   PICK(v[j], v[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        v[0] = PICK(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               PICK(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif LANES == 8
        UNROLL for (int j = 0; j < 4; j++)
            v[j] = PICK(v[j], v[j + 4], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(v[j], v[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        UNROLL for (int j = 0; j < 2; j++)
            v[j] = PICK(v[j], v[j + 2], 0, 1, 8, 9, 4, 5, 12, 13) + PICK(v[j], v[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        v[0] = PICK(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
        UNROLL for (int j = 0; j < 2; j++) v[j] = PICK(v[j], v[j + 2], 0, 1, 4, 5) + PICK(v[j], v[j + 2], 2, 3, 6, 7);
        v[0] = PICK(v[0], v[1], 0, 4, 2, 6) + PICK(v[0], v[1], 1, 5, 3, 7);
#endif
        store(values + i, v[0]);
    }
#else
    for (int64_t i = 0; i < count; i++) {
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += values[i * LANES + lane];
        values[i] = sum;
    }
#endif
}

/* All nine taps of a kernel on one tile of the outputs. */
ALWAYS void tile_gradient(vector sums[9], const float *in, const float *out, int64_t in_line, int64_t out_line, const int columns,
                          const int step, const int edges) {
    const int last_row = step * (ROWS - 1) + 2, last_column = step * (columns - 1) + 2;
    vector gradient[ROWS][MOST];
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < columns; j++) gradient[i][j] = load(out + i * out_line + j * LANES);
    UNROLL for (int row = 0; row <= last_row; row++, in += in_line) {
        if ((edges & TOP && row == 0) || (edges & BOTTOM && row == last_row)) continue;
        KEEP_POINTER(in);
        UNROLL for (int column = 0; column <= last_column; column++) {
            if ((edges & LEFT && column == 0) || (edges & RIGHT && column == last_column)) continue;
            const vector input = load(in + column * LANES);
            UNROLL for (int i = 0; i < ROWS; i++)
                UNROLL for (int j = 0; j < columns; j++) {
                    const int ky = row - i * step, kx = column - j * step;
                    if (ky >= 0 && ky < 3 && kx >= 0 && kx < 3) ADD_PRODUCT(sums[ky * 3 + kx], input, gradient[i][j]);
                }
        }
    }
}

/* What a pass reads: the copy of an input channel, and where the gradients of the outputs begin. */
typedef struct {
    const float *input, *gradient;
    int64_t in_line, in_block, out_line, out_block, out_channel; /* floats from one to the next */
    int blocks, band, wide;
} Read;

/* All nine taps of a kernel. */
ALWAYS void nine_taps(const Read *r, const float *out, float *to, const int columns, const int step, const int edges) {
    vector sums[9];
    UNROLL for (int tap = 0; tap < 9; tap++) sums[tap] = splat(0);
    const float *in_block = r->input;
    for (int block = 0; block < r->blocks; block++, in_block += r->in_block, out += r->out_block)
        for (int y = 0; y < r->band; y += ROWS) {
            const float *in = in_block + y * step * r->in_line, *from = out + y * r->out_line;
            for (int x = 0; x < r->wide; x += columns, in += columns * step * LANES, from += columns * LANES)
                tile_gradient(sums, in, from, r->in_line, r->out_line, columns, step, edges);
        }
    UNROLL for (int tap = 0; tap < 9; tap++) store(to + tap * LANES, sums[tap]);
}

typedef void NineTaps(const Read *, const float *, float *);
#define NINE_TAPS(columns, step, edges) \
    static void nine_taps_##columns##_##step##_##edges(const Read *r, const float *out, float *to) { \
        nine_taps(r, out, to, columns, step, edges); \
    }
NINE_TAPS(2, 1, 0)
NINE_TAPS(2, 1, 15)
NINE_TAPS(2, 2, 0)
#if LANES == 16
NINE_TAPS(4, 1, 0)
NINE_TAPS(4, 2, 0)
#endif

/* NULL: the taps are taken one by one. */
static NineTaps *nine_taps_of(const KernelGradient *c, const Passes *p) {
    if (c->kernel_height != 3 || c->kernel_width != 3 || c->stride_y != c->stride_x || c->stride_x > 2) return NULL;
#if LANES == 16
    if (p->columns == 4) return c->stride_x == 1 ? nine_taps_4_1_0 : nine_taps_4_2_0;
#endif
    if (c->stride_x == 2) return nine_taps_2_2_0;
    const int tile_is_map = c->output_height == 2 && c->output_width == 2 && c->padding_y == 1 && c->padding_x == 1 && c->height == 2 && c->width == 2;
    return tile_is_map ? nine_taps_2_1_15 : nine_taps_2_1_0;
}

/* One tap of the kernels of FEW outputs: `to` has room for them, `taps` vectors apart. */
ALWAYS void one_tap(const KernelGradient *c, const Read *r, const float *const out[FEW], int tap, int taps, float *to, const int few) {
    const int64_t right = (int64_t)c->stride_x * LANES, down = c->stride_y * r->in_line;
    vector sums[FEW][2];
    UNROLL for (int i = 0; i < few; i++) sums[i][0] = sums[i][1] = splat(0);
    for (int block = 0; block < r->blocks; block++)
        for (int row = 0; row < r->band; row++) {
            const float *in = r->input + block * r->in_block + row * down + tap / c->kernel_width * r->in_line + (int64_t)(tap % c->kernel_width) * LANES;
            const int64_t at = block * r->out_block + row * r->out_line;
            for (int x = 0; x < r->wide; x += 2, in += 2 * right) {
                const vector even = load(in), odd = load(in + right);
                UNROLL for (int i = 0; i < few; i++) {
                    ADD_PRODUCT_FROM(sums[i][0], even, out[i] + at + x * LANES);
                    ADD_PRODUCT_FROM(sums[i][1], odd, out[i] + at + x * LANES + LANES);
                }
            }
        }
    UNROLL for (int i = 0; i < few; i++) store(to + (int64_t)i * taps * LANES, sums[i][0] + sums[i][1]);
}

static void each_tap(const KernelGradient *c, const Read *r, const int32_t *places, int count, float *to) {
    const int taps = c->kernel_height * c->kernel_width;
    int k = 0;
    for (; k + FEW <= count; k += FEW) {
        const float *out[FEW];
        for (int i = 0; i < FEW; i++) out[i] = r->gradient + places[k + i] * r->out_channel;
        for (int tap = 0; tap < taps; tap++) one_tap(c, r, out, tap, taps, to + ((int64_t)k * taps + tap) * LANES, FEW);
    }
    for (; k < count; k++) {
        const float *out[FEW] = {r->gradient + places[k] * r->out_channel};
        for (int tap = 0; tap < taps; tap++) one_tap(c, r, out, tap, taps, to + ((int64_t)k * taps + tap) * LANES, 1);
    }
}

static int64_t gradient_items(const KernelGradient *c) { return (int64_t)c->members * up(c->channels, CHANNELS_OF_ITEM); }

static int64_t gradient_scratch(const KernelGradient *c) {
    const Passes p = passes_of(c);
    const int64_t vectors = up((int64_t)c->outputs * c->kernel_height * c->kernel_width, LANES) * LANES * LANES;
    return (p.block * p.blocks + (p.ragged ? p.out_block * p.blocks * c->outputs : 0) + vectors) * (int64_t)sizeof(float);
}

/* The kernels of some input channels of a member. */
static void gradient_item(const KernelGradient *c, int64_t item, float *scratch) {
    const Passes p = passes_of(c);
    const int64_t items = up(c->channels, CHANNELS_OF_ITEM), map = (int64_t)c->height * c->width * LANES;
    const int64_t out_map = (int64_t)c->output_height * c->output_width * LANES;
    const int member = item / items, first = item % items * CHANNELS_OF_ITEM, last = least(first + CHANNELS_OF_ITEM, c->channels);
    const int taps = c->kernel_height * c->kernel_width;
    const float *input = c->input + member * c->input_member_stride;
    const float *gradient = c->gradient + member * c->gradient_member_stride;
    const int32_t *starts = c->starts + (int64_t)member * (c->channels + 1);
    float *copied = scratch + p.block * p.blocks, *vectors = copied + (p.ragged ? p.out_block * p.blocks * c->outputs : 0);
    NineTaps *nine = nine_taps_of(c, &p);
    for (int64_t pass = 0; pass < p.groups * p.bands; pass++) {
        const int block = pass / p.bands * p.blocks, y = pass % p.bands * p.band;
        Read r = {.input = scratch, .in_line = (int64_t)p.width * LANES, .in_block = p.block, .wide = p.wide, .band = p.band};
        r.blocks = least(p.blocks, c->blocks - block);
        if (p.ragged) {
            for (int output = 0; output < c->outputs; output++)
                copy_map(gradient + ((int64_t)block * c->outputs + output) * out_map, c->outputs * out_map, c->output_height, c->output_width,
                         y, 0, r.blocks, p.band, p.wide, copied + output * p.out_block * p.blocks);
            r.gradient = copied;
            r.out_line = (int64_t)p.wide * LANES;
            r.out_block = p.out_block;
            r.out_channel = p.out_block * p.blocks;
        } else {
            r.band = least(p.band, c->output_height - y);
            r.out_line = (int64_t)c->output_width * LANES;
            r.out_block = c->outputs * out_map;
            r.out_channel = out_map;
            r.gradient = gradient + block * r.out_block + y * r.out_line;
        }
        for (int channel = first; channel < last; channel++) {
            const int start = starts[channel], count = starts[channel + 1] - start;
            if (!count) continue;
            copy_map(input + ((int64_t)block * c->channels + channel) * map, c->channels * map, c->height, c->width,
                     y * c->stride_y - c->padding_y, -c->padding_x, r.blocks, p.rows, p.width, scratch);
            if (nine)
                for (int k = 0; k < count; k++) {
                    const float *next = r.gradient + c->places[start + (k + 1 < count ? k + 1 : k)] * r.out_channel;
                    for (int b = 0; b < r.blocks; b++) /* outputs lie so far apart that the CPU does not expect them */
                        UNROLL for (int line = 0; line < 4; line++) __builtin_prefetch(next + b * r.out_block + line * LANES);
                    nine(&r, r.gradient + c->places[start + k] * r.out_channel, vectors + (int64_t)k * 9 * LANES);
                }
            else
                each_tap(c, &r, c->places + start, count, vectors);
            add_lanes(vectors, (int64_t)count * taps);
            for (int k = 0; k < count; k++) {
                const float *sums = vectors + (int64_t)k * taps;
                float *to = c->to + (int64_t)c->rows[start + k] * taps;
                for (int tap = 0; tap < taps; tap++) to[tap] = pass ? to[tap] + sums[tap] : sums[tap];
            }
        }
    }
}

/* ---- norm layers ---- */

/* Do something with every vector of a channel at `at`, in four chains `i`; and then something, after so many vectors that a
   sum of floats does not lose digits. */
#define EMPTY_AFTER 512
#define EACH_VECTOR(n, channel, each, then) \
    for (int64_t block = 0, since = 0; block < (n)->blocks; block++) { \
        int64_t at = (block * (n)->channels + (channel)) * (n)->pixels; \
        const int64_t last = at + (n)->pixels; \
        while (at + 4 * LANES <= last) UNROLL for (int i = 0; i < 4; i++, at += LANES) { each; } \
        for (const int i = 0; at < last; at += LANES) { each; } \
        since += (n)->pixels / LANES; \
        if (since < EMPTY_AFTER && block < (n)->blocks - 1) continue; \
        since = 0; \
        then; \
    }

/* Empty four chains of sums into one number. */
static double emptied(vector chains[4]) {
    float lanes[LANES];
    store(lanes, (chains[0] + chains[1]) + (chains[2] + chains[3]));
    UNROLL for (int i = 0; i < 4; i++) chains[i] = splat(0);
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

#define NORMED ((load(n->input + at) - mean) * factor + shift)

static void norm_forward(const Norm *n, int64_t channel) {
    const double count = (double)n->blocks * n->pixels;
    vector chains[4] = {{0}, {0}, {0}, {0}}, others[4] = {{0}, {0}, {0}, {0}};
    double sum = 0, squares = 0;
    /* Squares are taken from the mean of the first block, so that one pass suffices and no digits are lost. */
    const Norm first = {.input = n->input, .blocks = 1, .channels = n->channels, .pixels = n->pixels};
    EACH_VECTOR(&first, channel, chains[i] += load(n->input + at), sum += emptied(chains))
    const float middle = sum / n->pixels;
    sum = 0;
    EACH_VECTOR(n, channel, const vector off = load(n->input + at) - splat(middle); chains[i] += off; others[i] += off * off,
                sum += emptied(chains); squares += emptied(others))
    const vector mean = splat(n->mean[channel] = middle + sum / count);
    n->variance[channel] = fmax(0, squares / count - sum / count * (sum / count));
    const double inverse = 1 / sqrt(n->variance[channel] + n->epsilon);
    const vector factor = splat(n->weight[channel] * inverse), shift = splat(n->bias[channel]);
    if (n->residual && n->relu)
        EACH_VECTOR(n, channel, store(n->output + at, positive(NORMED + load(n->residual + at))), )
    else if (n->residual)
        EACH_VECTOR(n, channel, store(n->output + at, NORMED + load(n->residual + at)), )
    else if (n->relu)
        EACH_VECTOR(n, channel, store(n->output + at, positive(NORMED)), )
    else
        EACH_VECTOR(n, channel, store(n->output + at, NORMED), )
}

static void norm_backward(const Norm *n, int64_t channel) {
    const double count = (double)n->blocks * n->pixels, inverse = 1 / sqrt(n->variance[channel] + n->epsilon);
    const vector mean = splat(n->mean[channel]), factor = splat(n->weight[channel] * inverse), shift = splat(n->bias[channel]);
    vector chains[4] = {{0}, {0}, {0}, {0}}, others[4] = {{0}, {0}, {0}, {0}};
    double sum = 0, product = 0;
#define SUM_UP(through, then) \
    EACH_VECTOR(n, channel, const vector passed = through; then chains[i] += passed; others[i] += passed * (load(n->input + at) - mean), \
                sum += emptied(chains); product += emptied(others))
#define POSITIVE(output) ((vector)((mask)load(n->gradient + at) & (mask)((output) > splat(0))))
    if (n->relu && n->to_residual) SUM_UP(POSITIVE(load(n->output + at)), store(n->to_residual + at, passed);)
    else if (n->relu) SUM_UP(POSITIVE(NORMED), )
    else SUM_UP(load(n->gradient + at), )
    n->to_bias[channel] = sum;
    n->to_weight[channel] = product * inverse;
    const vector level = splat(sum / count), slope = splat(product * inverse * inverse / count);
#define TO_INPUT(passed) EACH_VECTOR(n, channel, store(n->to_input + at, ((passed) - level - (load(n->input + at) - mean) * slope) * factor), )
    if (n->relu && n->to_residual) TO_INPUT(load(n->to_residual + at))
    else if (n->relu) TO_INPUT(POSITIVE(NORMED)) /* read from memory, the outputs would cost more */
    else TO_INPUT(load(n->gradient + at))
}

/* One channel of one member. */
static void norm_item(const Norm *n, int64_t item) {
    const int64_t member = item / n->channels, maps = member * n->blocks * n->channels * n->pixels, row = member * n->channels;
    Norm own = *n;
    own.input += maps;
    own.output = n->output ? n->output + maps : NULL;
    own.residual = n->residual ? n->residual + maps : NULL;
    own.weight += row;
    own.bias += row;
    own.mean += row;
    own.variance += row;
    if (n->backward) {
        own.gradient += maps;
        own.to_residual = n->to_residual ? n->to_residual + maps : NULL;
        own.to_input += member * n->to_input_member_stride;
        own.to_weight += row;
        own.to_bias += row;
        norm_backward(&own, item % n->channels);
    } else {
        norm_forward(&own, item % n->channels);
    }
}

const TrainingKernels TRAINING = {
    .gradient_items = gradient_items,
    .gradient_scratch = gradient_scratch,
    .gradient_item = gradient_item,
    .norm_item = norm_item,
};
