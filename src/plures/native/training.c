/* Training under masks of whole kernels: sums over the kernels that a mask keeps, their gradients, and norm layers.

   As the kernels of prediction, compiled once for each set of instructions; and here, too, an item of work writes its own
   part of the result, and every sum is taken in one order: the bits are the same for any number of threads. */
#include <math.h>
#include <stddef.h>
#include "training.h"
#include "vectors.h"

#define WINDOW_BYTES (192 * 1024)   /* of inputs that are copied for a run of tiles: stays in the second cache */
#define GRADIENT_BYTES (512 * 1024) /* of inputs that are copied for the gradients of kernels */

/* The tile of outputs whose sums stay in registers: rows, columns, blocks of images. A map of 2 x 2 has too few pixels. */
#define MOST 4
#if LANES == 16
#define EACH_KIND(of) of(large, 4, 4, 1) of(small, 2, 2, 4)
#define GRADIENT_COLUMNS 4
#else
#define EACH_KIND(of) of(large, 2, 4, 1) of(small, 2, 2, 2)
#define GRADIENT_COLUMNS 2
#endif
#define GRADIENT_ROWS 2

/* The outermost row or column that a tile reads lies outside the map: zeros need no multiplication. */
enum { TOP = 1, LEFT = 2, BOTTOM = 4, RIGHT = 8, ALL_EDGES = 15 };

/* ---- what is read is copied to one place, zeros around the map ---- */

typedef struct {
    int top, left, rows, columns;  /* in the map */
    int64_t pixel, block, channel; /* floats from one to the next in the copy */
} Window;

/* Some channels of some blocks of images. */
static void copy_window(const Window *w, const Maps *maps, int channel, int channels, int first, int blocks, int all, float *to) {
    const int64_t map = (int64_t)maps->height * maps->width * LANES;
    const int real = least(blocks, all - first);
    const int begin = least(w->columns, w->left < 0 ? -w->left : 0), end = least(w->columns, maps->width - w->left);
    for (int i = 0; i < channels; i++, to += w->channel) {
        float *p = to;
        const float *from = maps->values + ((int64_t)first * maps->channels + channel + i) * map;
        for (int row = 0; row < w->rows; row++) {
            const int y = w->top + row, inside = y >= 0 && y < maps->height;
            for (int column = 0; column < w->columns; column++, p += w->pixel) {
                const int some = inside && column >= begin && column < end ? real : 0;
                const float *pixel = from + (some ? ((int64_t)y * maps->width + w->left + column) * LANES : 0);
                int block = 0;
                for (; block < some; block++) store(p + block * w->block, load(pixel + block * maps->channels * map));
                for (; block < blocks; block++) store(p + block * w->block, splat(0));
            }
        }
    }
}

/* ---- sums ---- */

typedef struct {
    const MaskedConvolution *layer;
    const float *window;          /* where the tile begins in it; it may lie before the copy, if the edges are skipped */
    int64_t channel, line;        /* of the window, in floats */
    float *to;                    /* where the tile begins in the output, for its first channel */
    int below, beside, blocks;    /* how much of the tile is inside the map, and how many of its blocks have images */
} Tile;

/* Whole 3x3 kernels: an input that is loaded once serves the three taps of a row. */
ALWAYS void three_by_three(vector sums[MOST][MOST][MOST], const float *p, const float *kernel, int64_t line, const int rows,
                           const int columns, const int blocks, const int step, const int edges, const int flipped) {
    const int last_row = step * (rows - 1) + 2, last_column = step * (columns - 1) + 2;
    UNROLL for (int ky = 0; ky < 3; ky++) {
        vector weight[3];
        UNROLL for (int kx = 0; kx < 3; kx++) weight[kx] = splat(kernel[flipped ? 8 - ky * 3 - kx : ky * 3 + kx]);
        UNROLL for (int to_row = 0; to_row < rows; to_row++) {
            const int row = to_row * step + ky;
            if ((edges & TOP && row == 0) || (edges & BOTTOM && row == last_row)) continue;
            UNROLL for (int column = 0; column <= last_column; column++) {
                if ((edges & LEFT && column == 0) || (edges & RIGHT && column == last_column)) continue;
                UNROLL for (int block = 0; block < blocks; block++) {
                    const vector input = load(p + row * line + (column * blocks + block) * LANES);
                    UNROLL for (int kx = 0; kx < 3; kx++) {
                        const int to = column - kx;
                        if (to >= 0 && to % step == 0 && to / step < columns) ADD_PRODUCT(sums[to_row][to / step][block], input, weight[kx]);
                    }
                }
            }
        }
    }
}

#define EACH_SUM(i, j, b, rows, columns, blocks) \
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < columns; j++) UNROLL for (int b = 0; b < blocks; b++)

/* All outputs of a tile. `step` is the stride of 3x3 kernels, and 0 for all others. */
ALWAYS void tile(const Tile *t, const int rows, const int columns, const int blocks, const int step, const int edges, const int flipped) {
    const MaskedConvolution *c = t->layer;
    const int taps = c->kernel_height * c->kernel_width, channels = c->output.channels;
    const int64_t map = (int64_t)c->output.height * c->output.width * LANES, row = (int64_t)c->output.width * LANES;
    float *to = t->to;
    for (int output = 0; output < channels; output++, to += map) {
        vector sums[MOST][MOST][MOST];
        const vector start = splat(c->bias ? c->bias[output] : 0);
        EACH_SUM(i, j, b, rows, columns, blocks) sums[i][j][b] = start;
        for (int k = c->starts[output]; k < c->starts[output + 1]; k++) {
            const float *p = t->window + c->places[k] * t->channel;
            const float *kernel = c->weight + output * c->output_stride + c->places[k] * c->input_stride;
            if (step)
                three_by_three(sums, p, kernel, t->line, rows, columns, blocks, step, edges, flipped);
            else
                for (int tap = 0; tap < taps; tap++) {
                    const vector weight = splat(kernel[c->flipped ? taps - 1 - tap : tap]);
                    const float *q = p + tap / c->kernel_width * t->line + (int64_t)(tap % c->kernel_width) * blocks * LANES;
                    EACH_SUM(i, j, b, rows, columns, blocks)
                        sums[i][j][b] += weight * load(q + i * c->stride * t->line + (j * c->stride * blocks + b) * LANES);
                }
        }
        EACH_SUM(i, j, b, rows, columns, blocks)
            if (i < t->below && j < t->beside && b < t->blocks) store(to + i * row + j * LANES + b * channels * map, sums[i][j][b]);
    }
}

typedef void TileFunction(const Tile *);
#define TILE_OF(name, r, c, b, step, edges, flipped) \
    static void name##_##step##_##edges##_##flipped(const Tile *t) { tile(t, r, c, b, step, edges, flipped); }
#define NAME_OF(name, r, c, b, step, edges, flipped) [edges + 16 * flipped] = name##_##step##_##edges##_##flipped,
#define EACH_EDGE_OF_LARGE(of, flipped, ...) \
    of(__VA_ARGS__, 1, 0, flipped) of(__VA_ARGS__, 1, 1, flipped) of(__VA_ARGS__, 1, 2, flipped) of(__VA_ARGS__, 1, 3, flipped) \
    of(__VA_ARGS__, 1, 4, flipped) of(__VA_ARGS__, 1, 5, flipped) of(__VA_ARGS__, 1, 6, flipped) of(__VA_ARGS__, 1, 7, flipped) \
    of(__VA_ARGS__, 1, 8, flipped) of(__VA_ARGS__, 1, 9, flipped) of(__VA_ARGS__, 1, 10, flipped) of(__VA_ARGS__, 1, 11, flipped) \
    of(__VA_ARGS__, 1, 12, flipped) of(__VA_ARGS__, 1, 13, flipped) of(__VA_ARGS__, 1, 14, flipped) of(__VA_ARGS__, 1, 15, flipped)
#define EACH_EDGE_OF_SMALL(of, flipped, ...) of(__VA_ARGS__, 1, 0, flipped) of(__VA_ARGS__, 1, 15, flipped) /* its map is one tile */
#define EACH_EDGE_large(of, ...) EACH_EDGE_OF_LARGE(of, 0, __VA_ARGS__) EACH_EDGE_OF_LARGE(of, 1, __VA_ARGS__)
#define EACH_EDGE_small(of, ...) EACH_EDGE_OF_SMALL(of, 0, __VA_ARGS__) EACH_EDGE_OF_SMALL(of, 1, __VA_ARGS__)

typedef struct {
    int rows, columns, blocks;
    TileFunction *by_edges[32]; /* of 3x3 kernels with stride 1, not flipped and flipped; those that are missing skip nothing */
    TileFunction *stride_2, *other;
} Kind;
#define KIND(name, r, c, b) \
    EACH_EDGE_##name(TILE_OF, name, r, c, b) \
    TILE_OF(name, r, c, b, 2, 0, 0) TILE_OF(name, r, c, b, 0, 0, 0) \
    static const Kind name = {r, c, b, {EACH_EDGE_##name(NAME_OF, name, r, c, b)}, name##_2_0_0, name##_0_0_0};
EACH_KIND(KIND)

typedef struct {
    const Kind *kind;
    int step;   /* of 3x3 kernels: 1 or 2; 0: all other layers */
    int direct; /* tiles fill the map, and skip what is around it: what they read need not be copied */
    int snug;   /* one tile is the map, of several blocks of images: nothing around it is copied */
    int tiles;  /* in a run, side by side */
    int64_t groups, bands, runs;
    Window window; /* of a run: its size */
} Cut;

static Cut cut_of(const MaskedConvolution *c) {
    Cut cut = {0};
    cut.kind = c->output.height <= small.rows && c->output.width <= small.columns ? &small : &large;
    const int three = c->kernel_height == 3 && c->kernel_width == 3;
    cut.step = three && (c->stride == 1 || (c->stride == 2 && !c->flipped)) ? c->stride : 0;
    const int same = cut.step == 1 && c->padding_y == 1 && c->padding_x == 1 && c->input.height == c->output.height && c->input.width == c->output.width;
    cut.direct = same && cut.kind == &large && c->input.height % large.rows == 0 && c->input.width % large.columns == 0;
    cut.snug = same && cut.kind == &small && c->input.height == small.rows && c->input.width == small.columns;
    cut.window.rows = cut.snug ? c->input.height : c->stride * (cut.kind->rows - 1) + c->kernel_height;
    cut.window.pixel = cut.kind->blocks * LANES;
    cut.window.block = LANES;
    const int most = up(c->output.width, cut.kind->columns);
    for (cut.tiles = most;; cut.tiles--) {
        cut.window.columns = cut.snug ? c->input.width : c->stride * (cut.tiles * cut.kind->columns - 1) + c->kernel_width;
        cut.window.channel = cut.window.rows * cut.window.columns * cut.window.pixel;
        if (cut.tiles == 1 || cut.window.channel * c->input.channels * (int64_t)sizeof(float) <= WINDOW_BYTES) break;
    }
    cut.groups = up(c->blocks, cut.kind->blocks);
    cut.bands = up(c->output.height, cut.kind->rows);
    cut.runs = up(most, cut.tiles);
    return cut;
}

static int64_t sums_items(const MaskedConvolution *c) {
    const Cut cut = cut_of(c);
    return cut.groups * cut.bands * cut.runs;
}

static int64_t sums_scratch(const MaskedConvolution *c) {
    const Cut cut = cut_of(c);
    return cut.direct ? 0 : cut.window.channel * c->input.channels * (int64_t)sizeof(float);
}

static TileFunction *function_of(const Cut *cut, int edges, int flipped) {
    if (cut->step != 1) return cut->step == 2 ? cut->kind->stride_2 : cut->kind->other;
    TileFunction *found = cut->kind->by_edges[edges + 16 * flipped];
    return found ? found : cut->kind->by_edges[16 * flipped];
}

/* A run of tiles, for all outputs. */
static void sums_item(const MaskedConvolution *c, int64_t item, float *scratch) {
    const Cut cut = cut_of(c);
    const int run = item % cut.runs, band = item / cut.runs % cut.bands, first = item / cut.runs / cut.bands * cut.kind->blocks;
    const int y = band * cut.kind->rows;
    int x = run * cut.tiles * cut.kind->columns;
    Window w = cut.window;
    w.top = cut.snug ? 0 : y * c->stride - c->padding_y;
    w.left = cut.snug ? 0 : x * c->stride - c->padding_x;
    Tile t = {.layer = c, .line = w.columns * w.pixel, .channel = w.channel};
    const float *source; /* where the first tile begins; before the map or the copy, if that is skipped */
    if (cut.direct) {
        t.line = (int64_t)c->input.width * LANES;
        t.channel = t.line * c->input.height;
        source = c->input.values + first * c->input.channels * t.channel + ((int64_t)w.top * c->input.width + w.left) * LANES;
    } else {
        copy_window(&w, &c->input, 0, c->input.channels, first, cut.kind->blocks, c->blocks, scratch);
        source = cut.snug ? scratch - t.line - w.pixel : scratch;
    }
    t.below = least(cut.kind->rows, c->output.height - y);
    t.blocks = least(cut.kind->blocks, c->blocks - first);
    const int64_t map = (int64_t)c->output.height * c->output.width * LANES;
    t.to = c->output.values + first * c->output.channels * map + ((int64_t)y * c->output.width + x) * LANES;
    const int rows = cut.snug ? TOP | BOTTOM : (w.top < 0 ? TOP : 0) | (w.top + w.rows > c->input.height ? BOTTOM : 0);
    for (int i = 0; i < cut.tiles && x < c->output.width; i++, x += cut.kind->columns, t.to += cut.kind->columns * LANES) {
        const int from = i * cut.kind->columns * c->stride, end = w.left + from + c->stride * (cut.kind->columns - 1) + c->kernel_width;
        const int edges = cut.snug ? ALL_EDGES : rows | (w.left + from < 0 ? LEFT : 0) | (end > c->input.width ? RIGHT : 0);
        t.window = source + from * w.pixel;
        t.beside = least(cut.kind->columns, c->output.width - x);
        function_of(&cut, edges, c->flipped)(&t);
    }
}

/* ---- gradients of kernels ---- */

/* Inputs of all channels, for some blocks of images and a band of rows, are copied once for all kernels. */
typedef struct {
    int columns, blocks, band; /* columns of a tile; blocks of images and rows of outputs in the copies */
    int64_t groups, bands;
    Window inputs, outputs;
} Passes;

static Passes passes_of(const MaskedConvolution *c) {
    Passes p = {0};
    p.columns = c->output.width <= 2 ? 2 : GRADIENT_COLUMNS;
    p.outputs.columns = up(c->output.width, p.columns) * p.columns;
    p.inputs.left = -c->padding_x;
    p.inputs.columns = c->stride * (p.outputs.columns - 1) + c->kernel_width;
    p.inputs.pixel = p.outputs.pixel = LANES;
    for (p.band = up(c->output.height, GRADIENT_ROWS) * GRADIENT_ROWS;; p.band = up(p.band, 2 * GRADIENT_ROWS) * GRADIENT_ROWS) {
        p.inputs.rows = c->stride * (p.band - 1) + c->kernel_height;
        p.inputs.channel = (int64_t)p.inputs.rows * p.inputs.columns * LANES;
        p.inputs.block = p.inputs.channel * c->input.channels;
        if (p.band == GRADIENT_ROWS || p.inputs.block * (int64_t)sizeof(float) <= GRADIENT_BYTES) break;
    }
    p.outputs.rows = p.band;
    p.outputs.block = (int64_t)p.band * p.outputs.columns * LANES;
    const int64_t fit = GRADIENT_BYTES / (p.inputs.block * (int64_t)sizeof(float));
    p.blocks = least(c->blocks, fit > 1 ? fit : 1);
    p.groups = up(c->blocks, p.blocks);
    p.bands = up(c->output.height, p.band);
    return p;
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
    const int last_row = step * (GRADIENT_ROWS - 1) + 2, last_column = step * (columns - 1) + 2;
    vector gradient[GRADIENT_ROWS][MOST];
    UNROLL for (int i = 0; i < GRADIENT_ROWS; i++)
        UNROLL for (int j = 0; j < columns; j++) gradient[i][j] = load(out + i * out_line + j * LANES);
    UNROLL for (int row = 0; row <= last_row; row++, in += in_line) {
        if ((edges & TOP && row == 0) || (edges & BOTTOM && row == last_row)) continue;
        KEEP_POINTER(in);
        UNROLL for (int column = 0; column <= last_column; column++) {
            if ((edges & LEFT && column == 0) || (edges & RIGHT && column == last_column)) continue;
            const vector input = load(in + column * LANES);
            UNROLL for (int i = 0; i < GRADIENT_ROWS; i++)
                UNROLL for (int j = 0; j < columns; j++) {
                    const int ky = row - i * step, kx = column - j * step;
                    if (ky >= 0 && ky < 3 && kx >= 0 && kx < 3) ADD_PRODUCT(sums[ky * 3 + kx], input, gradient[i][j]);
                }
        }
    }
}

/* All nine taps of a kernel, over the copies of its input and of the gradient of its output. */
ALWAYS void nine_taps(const Passes *p, const float *inputs, const float *outputs, float *to, const int columns, const int step, const int edges) {
    const int64_t in_line = p->inputs.columns * LANES, out_line = p->outputs.columns * LANES;
    vector sums[9];
    UNROLL for (int tap = 0; tap < 9; tap++) sums[tap] = splat(0);
    for (int block = 0; block < p->blocks; block++, inputs += p->inputs.block, outputs += p->outputs.block)
        for (int y = 0; y < p->band; y += GRADIENT_ROWS) {
            const float *in = inputs + y * step * in_line, *out = outputs + y * out_line;
            for (int x = 0; x < p->outputs.columns; x += columns, in += columns * step * LANES, out += columns * LANES)
                tile_gradient(sums, in, out, in_line, out_line, columns, step, edges);
        }
    UNROLL for (int tap = 0; tap < 9; tap++) store(to + tap * LANES, sums[tap]);
}

/* One tap of a kernel of any size. Columns are even in number. */
static void one_tap(const MaskedConvolution *c, const Passes *p, const float *inputs, const float *outputs, int tap, float *to) {
    const int ky = tap / c->kernel_width, kx = tap % c->kernel_width;
    vector even = splat(0), odd = splat(0);
    for (int block = 0; block < p->blocks; block++, inputs += p->inputs.block, outputs += p->outputs.block)
        for (int row = 0; row < p->band; row++) {
            const float *in = inputs + ((int64_t)(row * c->stride + ky) * p->inputs.columns + kx) * LANES;
            const float *out = outputs + (int64_t)row * p->outputs.columns * LANES;
            for (int x = 0; x < p->outputs.columns; x += 2, in += 2 * c->stride * LANES, out += 2 * LANES) {
                even += load(in) * load(out);
                odd += load(in + c->stride * LANES) * load(out + LANES);
            }
        }
    store(to, even + odd);
}

typedef void NineTaps(const Passes *, const float *, const float *, float *);
#define NINE_TAPS(columns, step, edges) \
    static void nine_taps_##columns##_##step##_##edges(const Passes *p, const float *inputs, const float *outputs, float *to) { \
        nine_taps(p, inputs, outputs, to, columns, step, edges); \
    }
NINE_TAPS(2, 1, 0)
NINE_TAPS(2, 1, 15)
NINE_TAPS(2, 2, 0)
#if GRADIENT_COLUMNS == 4
NINE_TAPS(4, 1, 0)
NINE_TAPS(4, 2, 0)
#endif

/* NULL: the taps are taken one by one. */
static NineTaps *nine_taps_of(const MaskedConvolution *c, const Passes *p) {
    if (c->kernel_height != 3 || c->kernel_width != 3 || c->stride > 2) return NULL;
#if GRADIENT_COLUMNS == 4
    if (p->columns == 4) return c->stride == 1 ? nine_taps_4_1_0 : nine_taps_4_2_0;
#endif
    if (c->stride == 2) return nine_taps_2_2_0;
    const int tile_is_map = c->output.height == 2 && c->output.width == 2 && c->padding_y == 1 && c->padding_x == 1;
    return tile_is_map ? nine_taps_2_1_15 : nine_taps_2_1_0;
}

static int64_t gradient_scratch(const MaskedConvolution *c) {
    const Passes p = passes_of(c);
    const int64_t vectors = up((int64_t)c->input.channels * c->kernel_height * c->kernel_width, LANES) * LANES;
    return ((p.inputs.block + p.outputs.block) * p.blocks + vectors * LANES) * (int64_t)sizeof(float);
}

/* The kernels of some outputs. */
static void gradient_item(const MaskedConvolution *c, int64_t items, int64_t item, float *scratch) {
    Passes p = passes_of(c);
    const int each = up(c->output.channels, items), taps = c->kernel_height * c->kernel_width;
    float *outputs = scratch + p.inputs.block * p.blocks, *vectors = outputs + p.outputs.block * p.blocks;
    NineTaps *nine = nine_taps_of(c, &p);
    for (int64_t pass = 0; pass < p.groups * p.bands; pass++) {
        const int block = pass / p.bands * p.blocks, y = pass % p.bands * p.band;
        p.outputs.top = y;
        p.inputs.top = y * c->stride - c->padding_y;
        copy_window(&p.inputs, &c->input, 0, c->input.channels, block, p.blocks, c->blocks, scratch);
        for (int output = item * each; output < c->output.channels && output < (item + 1) * each; output++) {
            const int start = c->starts[output], count = c->starts[output + 1] - start;
            if (!count) continue;
            copy_window(&p.outputs, &c->output, output, 1, block, p.blocks, c->blocks, outputs);
            for (int k = 0; k < count; k++) {
                const float *inputs = scratch + c->places[start + k] * p.inputs.channel;
                float *to = vectors + (int64_t)k * taps * LANES;
                if (nine)
                    nine(&p, inputs, outputs, to);
                else
                    for (int tap = 0; tap < taps; tap++) one_tap(c, &p, inputs, outputs, tap, to + tap * LANES);
            }
            add_lanes(vectors, (int64_t)count * taps);
            for (int k = 0; k < count; k++) {
                const float *sums = vectors + (int64_t)k * taps;
                float *to = c->weight + output * c->output_stride + c->places[start + k] * c->input_stride;
                for (int tap = 0; tap < taps; tap++) to[tap] = pass ? to[tap] + sums[tap] : sums[tap];
            }
        }
    }
}

/* ---- norm layers ---- */

/* Do something with every vector of a channel at `at`, in four chains `i`; and then something with every block. */
#define EACH_VECTOR(n, channel, each, then) \
    for (int64_t block = 0; block < (n)->blocks; block++) { \
        int64_t at = (block * (n)->channels + (channel)) * (n)->pixels; \
        const int64_t last = at + (n)->pixels; \
        while (at + 4 * LANES <= last) UNROLL for (int i = 0; i < 4; i++, at += LANES) { each; } \
        for (const int i = 0; at < last; at += LANES) { each; } \
        then; \
    }

/* Empty four chains of sums into one number: a long sum of floats would lose digits. */
static double emptied(vector chains[4]) {
    float lanes[LANES];
    store(lanes, (chains[0] + chains[1]) + (chains[2] + chains[3]));
    UNROLL for (int i = 0; i < 4; i++) chains[i] = splat(0);
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

static void norm_forward(const Norm *n, int64_t channel) {
    const double count = (double)n->blocks * n->pixels;
    vector chains[4] = {{0}, {0}, {0}, {0}};
    double sum = 0, squares = 0;
    EACH_VECTOR(n, channel, chains[i] += load(n->input + at), sum += emptied(chains))
    const vector mean = splat(sum / count);
    EACH_VECTOR(n, channel, const vector off = load(n->input + at) - mean; chains[i] += off * off, squares += emptied(chains))
    n->mean[channel] = sum / count;
    n->variance[channel] = squares / count;
    const vector factor = splat(n->weight[channel] / sqrt(n->variance[channel] + n->epsilon)), shift = splat(n->bias[channel]);
#define NORMED ((load(n->input + at) - mean) * factor + shift)
    if (n->residual && n->relu)
        EACH_VECTOR(n, channel, store(n->output + at, positive(NORMED + load(n->residual + at))), )
    else if (n->residual)
        EACH_VECTOR(n, channel, store(n->output + at, NORMED + load(n->residual + at)), )
    else if (n->relu)
        EACH_VECTOR(n, channel, store(n->output + at, positive(NORMED)), )
    else
        EACH_VECTOR(n, channel, store(n->output + at, NORMED), )
#undef NORMED
}

static void norm_backward(const Norm *n, int64_t channel) {
    const double count = (double)n->blocks * n->pixels, inverse = 1 / sqrt(n->variance[channel] + n->epsilon);
    const vector mean = splat(n->mean[channel]);
    vector chains[4] = {{0}, {0}, {0}, {0}}, others[4] = {{0}, {0}, {0}, {0}};
    double sum = 0, product = 0;
    const float *passed = n->gradient;
    if (n->relu) {
        passed = n->to_residual;
        EACH_VECTOR(n, channel,
                    const vector through = (vector)((mask)load(n->gradient + at) & (mask)(load(n->output + at) > splat(0)));
                    store(n->to_residual + at, through); chains[i] += through; others[i] += through * (load(n->input + at) - mean),
                    sum += emptied(chains); product += emptied(others))
    } else
        EACH_VECTOR(n, channel, chains[i] += load(passed + at); others[i] += load(passed + at) * (load(n->input + at) - mean),
                    sum += emptied(chains); product += emptied(others))
    n->to_bias[channel] = sum;
    n->to_weight[channel] = product * inverse;
    const vector factor = splat(n->weight[channel] * inverse), level = splat(sum / count), slope = splat(product * inverse * inverse / count);
    EACH_VECTOR(n, channel, store(n->to_input + at, (load(passed + at) - level - (load(n->input + at) - mean) * slope) * factor), )
}

static void norm_item(const Norm *n, int64_t channel) { (n->backward ? norm_backward : norm_forward)(n, channel); }

const TrainingKernels TRAINING = {
    .sums_items = sums_items,
    .sums_scratch = sums_scratch,
    .sums_item = sums_item,
    .gradient_scratch = gradient_scratch,
    .gradient_item = gradient_item,
    .norm_item = norm_item,
};
