/* The kernels, in vectors of LANES floats: compiled once for each set of instructions, with another NAME and other LANES.

   Nothing here depends on threads: an item of work writes its own part of the output, and every sum is taken in the order
   of the lists. So the bits are the same for any number of threads. */
#include <stddef.h>
#include <string.h>
#include "owned.h"
#include "vectors.h"
#include "rows.h"
#include "channels.h"

extern const TrainingKernels TRAINING;

/* The tile of outputs whose sums stay in registers: 16 of them with AVX2, 32 with AVX-512. */
#ifndef ROWS
#define ROWS (LANES == 16 ? 4 : 2)
#endif
#ifndef COLUMNS
#define COLUMNS 4
#endif
#define TILE (ROWS * COLUMNS)
#define LONGEST (LANES == 16 ? 16 : 12) /* vectors of pixels in a tile where lanes is 1 */

/* ---- images in the vector ---- */

/* What a run of tiles, side by side, reads is copied to one place, zeros around the map: neighbours in a tile become
   neighbours in memory, and channels do not fall on the same lines of the cache. A kernel of one tap reads only what it
   needs. Small inputs are read where they are: there, tiles end with the map. */
typedef struct {
    int high, wide, blocks;            /* of a tile: rows and columns of outputs, blocks of images */
    int tiles;                         /* side by side */
    int rows, columns, step_y, step_x; /* of the copy, per channel; step: from one output to the next */
    int skip_y, skip_x;                /* in the map, from one row or column of the copy to the next */
    int direct;                        /* nothing is copied */
    int64_t line, channel_size, block_size; /* in floats, from one to the next */
} Window;

#ifndef WINDOW_BYTES
#define WINDOW_BYTES (288 * 1024) /* stays in the second cache */
#endif
#define DIRECT_BYTES (512 * 1024) /* of a block of images: so does this */

static Window window_of(const Convolution *c) {
    const int small = c->output_height <= 2 && c->output_width <= 2 && c->images > 1; /* a tile is several maps */
    Window w = {.high = small ? 2 : ROWS, .wide = small ? 2 : COLUMNS, .blocks = small ? TILE / 4 : 1};
    w.skip_y = c->kernel_height == 1 ? c->stride_y : 1;
    w.skip_x = c->kernel_width == 1 ? c->stride_x : 1;
    w.step_y = c->stride_y / w.skip_y;
    w.step_x = c->stride_x / w.skip_x;
    w.rows = w.step_y * (w.high - 1) + c->kernel_height;
    const int64_t map = (int64_t)c->height * c->width * LANES;
    const int usual = c->whole && c->kernel_height == 3 && c->kernel_width == 3 && c->padding_y == 1 && c->padding_x == 1;
    const int even = c->stride_y == c->stride_x && c->stride_x <= 2 && c->height == c->stride_y * c->output_height && c->width == c->stride_x * c->output_width;
    w.direct = usual && even && c->output_height % w.high == 0 && c->output_width % w.wide == 0 && c->channels * map * (int64_t)sizeof(float) <= DIRECT_BYTES;
    w.tiles = up(c->output_width, w.wide) + 1;
    do {
        w.tiles--;
        w.columns = w.step_x * (w.tiles * w.wide - 1) + c->kernel_width;
        w.channel_size = (int64_t)w.rows * w.columns * LANES;
    } while (!w.direct && w.tiles > 1 && w.channel_size * c->channels * (int64_t)sizeof(float) > WINDOW_BYTES);
    w.line = (int64_t)(w.direct ? c->width : w.columns) * LANES;
    w.channel_size = w.direct ? map : w.channel_size;
    w.block_size = c->channels * w.channel_size;
    return w;
}

/* The same rows of another channel are asked for while one is copied: channels lie so far apart that the CPU does not
   expect them, and waiting for them would take as long as the copy. */
#define CHANNELS_AHEAD 2

#include "winograd.h"

static void pack_images(const Convolution *c, const Window *w, const float *map, int top, int left, float *packed) {
    const int64_t next = (int64_t)c->height * c->width * LANES;
    const int begin = left < 0 ? least(w->columns, up(-left, w->skip_x)) : 0;
    const int end = least(w->columns, up(c->width - left, w->skip_x));
    for (int channel = 0; channel < c->channels; channel++, map += next) {
        const int64_t ahead = channel + CHANNELS_AHEAD < c->channels ? CHANNELS_AHEAD * next : 0;
        for (int row = 0; row < w->rows; row++, packed += w->columns * LANES) {
            const int from_y = top + row * w->skip_y;
            if (from_y < 0 || from_y >= c->height) {
                memset(packed, 0, sizeof(float) * LANES * w->columns);
                continue;
            }
            const float *line = map + ((int64_t)from_y * c->width + left) * LANES;
            int column = 0;
            for (; column < begin; column++) store(packed + column * LANES, splat(0));
            for (; column < end; column++) {
                const float *from = line + column * w->skip_x * LANES;
                __builtin_prefetch(from + ahead);
                store(packed + column * LANES, load(from));
            }
            for (; column < w->columns; column++) store(packed + column * LANES, splat(0));
        }
    }
}

/* Which outermost rows and columns of what a tile reads lie outside the map: zeros need no multiplication. */
enum { TOP = 1, LEFT = 2, BOTTOM = 4, RIGHT = 8 };

typedef struct {
    const Convolution *layer;
    Window window;
    const float *packed;    /* where the tile begins in the window */
    float *partial;         /* sums of the groups so far */
    const int32_t *offsets; /* of taps in the window */
    int64_t output;         /* where the tile begins in the output, in floats */
    int member, below, beside, behind, first, last; /* below, beside, behind: rows, columns and blocks that there are */
} Tile;

/* Whole kernels of a size that is known here: an input that is loaded once serves the taps of a row. */
ALWAYS void whole_images(vector sums[TILE], const float *packed, const int64_t blocks[TILE / 4], const uint16_t *places, const float *values, int count,
                         int64_t channel_size, int64_t line, const int small, const int height, const int width, const int step, const int edges) {
    const int high = small ? 2 : ROWS, wide = small ? 2 : COLUMNS;
    const int last_row = step * (high - 1) + height - 1, last_column = step * (wide - 1) + width - 1;
    for (int k = 0; k < count; k++, values += height * width) {
        const float *channel = packed + places[k] * channel_size;
        UNROLL for (int ky = 0; ky < height; ky++) {
            vector weight[3];
            UNROLL for (int kx = 0; kx < width; kx++) weight[kx] = splat(values[ky * width + kx]);
            UNROLL for (int line_of = 0; line_of < TILE / wide; line_of++) {
                const int to_row = line_of % high, row = to_row * step + ky;
                const float *p = small ? channel + blocks[line_of / high] : channel;
                if ((edges & TOP && row == 0) || (edges & BOTTOM && row == last_row)) continue;
                UNROLL for (int column = 0; column <= last_column; column++) {
                    if ((edges & LEFT && column == 0) || (edges & RIGHT && column == last_column)) continue;
                    const vector input = load(p + row * line + column * LANES);
                    UNROLL for (int kx = 0; kx < width; kx++) {
                        const int to = column - kx;
                        if (to >= 0 && to % step == 0 && to / step < wide) ADD_PRODUCT(sums[line_of * wide + to / step], input, weight[kx]);
                    }
                }
            }
        }
    }
}

/* One weight on the whole tile. */
ALWAYS void tap_images(vector sums[TILE], const float *start, const int64_t blocks[TILE / 4], float value, int64_t down, const int64_t right, const int small) {
    const int high = small ? 2 : ROWS, wide = small ? 2 : COLUMNS;
    const vector weight = splat(value);
    const float *p = start;
    UNROLL for (int line = 0; line < TILE / wide; line++, p += down) {
        if (small && line % high == 0) p = start + blocks[line / high];
        KEEP_POINTER(p);
        UNROLL for (int column = 0; column < wide; column++) ADD_PRODUCT_FROM(sums[line * wide + column], weight, p + column * right);
    }
}

enum { KNOWN, WHOLE, SINGLE }; /* known: the size of whole kernels */

ALWAYS void tile_outputs(const Tile *t, const int small, const int kind, const int height, const int width, const int step, const int edges) {
    const Convolution *c = t->layer;
    const int high = small ? 2 : ROWS, wide = small ? 2 : COLUMNS;
    const int taps = c->kernel_height * c->kernel_width, groups = up(c->channels, c->group);
    const int64_t size = t->window.channel_size, line = t->window.line, down = t->window.step_y * line;
    const int64_t right = step ? step * LANES : (int64_t)t->window.step_x * LANES;
    const int64_t next = c->output_row_stride, beside = c->output_pixel_stride, behind = c->outputs * c->output_channel_stride;
    const int32_t *offsets = t->offsets;
    int64_t blocks[TILE / 4]; /* beyond the last one, it is read again */
    UNROLL for (int i = 0; i < TILE / 4; i++) blocks[i] = least(i, t->behind - 1) * t->window.block_size;
    for (int group = 0; group < groups; group++) {
        const float *channels = t->packed + group * c->group * size;
        const int32_t *starts = c->starts + t->member * ((int64_t)groups * c->outputs + 1) + group * c->outputs;
        for (int output = t->first; output < t->last; output++) {
            const int start = starts[output], count = starts[output + 1] - start;
            const uint16_t *places = c->places + start;
            const float *values = c->values + (int64_t)start * (kind == SINGLE ? 1 : taps);
            float *kept = t->partial + (int64_t)output * TILE * LANES;
            vector sums[TILE];
            if (group == 0) {
                const vector bias = splat(c->bias[(int64_t)t->member * c->outputs + output]);
                UNROLL for (int i = 0; i < TILE; i++) sums[i] = bias;
            } else {
                UNROLL for (int i = 0; i < TILE; i++) sums[i] = load(kept + i * LANES);
            }
            if (kind == KNOWN)
                whole_images(sums, channels, blocks, places, values, count, size, line, small, height, width, step, edges);
            else if (kind == WHOLE)
                for (int k = 0; k < count; k++)
                    for (int tap = 0; tap < taps; tap++)
                        tap_images(sums, channels + places[k] * size + offsets[tap], blocks, *values++, down, right, small);
            else
                for (int k = 0; k < count; k++) tap_images(sums, channels + offsets[places[k]], blocks, values[k], down, right, small);
            if (group < groups - 1) {
                UNROLL for (int i = 0; i < TILE; i++) store(kept + i * LANES, sums[i]);
                continue;
            }
            const int64_t at = t->output + output * c->output_channel_stride;
#define EACH_OUTPUT(condition, ...) \
    UNROLL for (int i = 0; i < TILE; i++) { \
        const int row = i / wide % high, column = i % wide, block = i / (high * wide); \
        const int64_t place = at + block * behind + row * next + column * beside; \
        if (condition) __VA_ARGS__; \
    }
            const int full = t->below == high && t->beside == wide && (!small || t->behind == TILE / 4);
            if (c->residual) /* what lies outside the map is added in vain */
                EACH_OUTPUT(row < t->below && column < t->beside && block < t->behind, sums[i] += load(c->residual + place))
            if (c->relu) UNROLL for (int i = 0; i < TILE; i++) sums[i] = activated(sums[i], c->relu);
            if (full)
                EACH_OUTPUT(1, store(c->output + place, sums[i]))
            else
                EACH_OUTPUT(row < t->below && column < t->beside && block < t->behind, store(c->output + place, sums[i]))
#undef EACH_OUTPUT
        }
    }
}

typedef void Outputs(const Tile *);
#define WHOLE3_OF(step, edges) static void whole3_##step##_##edges(const Tile *t) { tile_outputs(t, 0, KNOWN, 3, 3, step, edges); }
#define NAME_OF(step, edges) whole3_##step##_##edges,
#define FOUR_EDGES(of, step) of(step, 0) of(step, 1) of(step, 2) of(step, 3)
#define EACH_EDGE(of, step) \
    FOUR_EDGES(of, step) of(step, 4) of(step, 5) of(step, 6) of(step, 7) of(step, 8) of(step, 9) of(step, 10) \
    of(step, 11) of(step, 12) of(step, 13) of(step, 14) of(step, 15)
EACH_EDGE(WHOLE3_OF, 1)
FOUR_EDGES(WHOLE3_OF, 2) /* a stride of 2 over a map of even size reads nothing beyond its end */
static Outputs *const WHOLE3_TILES[] = {EACH_EDGE(NAME_OF, 1)};
static Outputs *const WHOLE3_TILES_STRIDE_2[] = {FOUR_EDGES(NAME_OF, 2)};
#define OUTPUTS_OF(name, ...) \
    static void name(const Tile *t) { tile_outputs(t, 0, __VA_ARGS__); } \
    static void name##_small(const Tile *t) { tile_outputs(t, 1, __VA_ARGS__); }
static void whole3_small(const Tile *t) { tile_outputs(t, 1, KNOWN, 3, 3, 1, TOP | LEFT | BOTTOM | RIGHT); }
static void whole3_stride_2_small(const Tile *t) { tile_outputs(t, 1, KNOWN, 3, 3, 2, TOP | LEFT); }
/* What a stride of 2 leaves of 3x3 kernels on the way back from outputs to inputs. */
OUTPUTS_OF(whole_1x2, KNOWN, 1, 2, 1, 0)
OUTPUTS_OF(whole_2x1, KNOWN, 2, 1, 1, 0)
OUTPUTS_OF(whole_2x2, KNOWN, 2, 2, 1, 0)
OUTPUTS_OF(whole_outputs, WHOLE, 0, 0, 0, 0)
OUTPUTS_OF(single_outputs_close, SINGLE, 0, 0, 1, 0)
OUTPUTS_OF(single_outputs, SINGLE, 0, 0, 0, 0)

static Outputs *outputs_of(const Convolution *c, const Window *w, int edges) {
    const int close = w->step_y == 1 && w->step_x == 1, height = c->kernel_height, width = c->kernel_width, small = w->blocks > 1;
#define SIZE(name) (small ? name##_small : name)
    if (!c->whole || height * width == 1) return w->step_x == 1 ? SIZE(single_outputs_close) : SIZE(single_outputs);
    if (height == 3 && width == 3 && close && !small) return WHOLE3_TILES[edges];
    if (height == 3 && width == 3 && close && edges == (TOP | LEFT | BOTTOM | RIGHT)) return whole3_small;
    if (height == 3 && width == 3 && w->step_y == 2 && w->step_x == 2) {
        if (!small) return WHOLE3_TILES_STRIDE_2[edges & (TOP | LEFT)];
        if ((edges & (TOP | LEFT)) == (TOP | LEFT)) return whole3_stride_2_small;
    }
    if (height > 2 || width > 2 || !close) return SIZE(whole_outputs);
    return height == 1 ? SIZE(whole_1x2) : width == 1 ? SIZE(whole_2x1) : SIZE(whole_2x2);
#undef SIZE
}

static int named_places(const Convolution *c) {
    const int taps = c->kernel_height * c->kernel_width;
    return c->whole && taps > 1 ? taps : c->group * taps;
}

/* Compute a run of tiles of one member and one or a few blocks of images, for some of the outputs. */
static void image_tiles(const Convolution *c, int member, int image, int y, int x, int first, int last, float *scratch) {
    Tile t = {.layer = c, .window = window_of(c), .member = member, .first = first, .last = last};
    const Window *w = &t.window;
    const int taps = c->kernel_height * c->kernel_width;
    const int top = y * c->stride_y - c->padding_y, left = x * c->stride_x - c->padding_x;
    t.behind = least(w->blocks, c->images - image);
    t.partial = scratch + (w->direct ? 0 : w->blocks * w->block_size);
    int32_t *offsets = (int32_t *)(t.partial + (int64_t)c->outputs * TILE * LANES);
    for (int place = 0; place < named_places(c); place++) {
        const int tap = place % taps, ky = tap / c->kernel_width, kx = tap % c->kernel_width;
        offsets[place] = place / taps * w->channel_size + ky * w->line + kx * LANES;
    }
    t.offsets = offsets;
    const int64_t map = (int64_t)c->height * c->width * LANES;
    const float *input = c->input + member * c->input_member_stride + image * c->channels * map;
    const float *read = w->direct ? input + ((int64_t)top * c->width + left) * LANES : scratch;
    if (!w->direct)
        for (int block = 0; block < t.behind; block++)
            pack_images(c, w, input + block * c->channels * map, top, left, scratch + block * w->block_size);
    t.below = least(w->high, c->output_height - y);
    const int rows = (top < 0 ? TOP : 0) | (top + w->rows > c->height ? BOTTOM : 0);
    for (int tile = 0; tile < w->tiles; tile++) {
        const int at = x + tile * w->wide, from = tile * w->wide * w->step_x;
        if (at >= c->output_width) break;
        t.packed = read + (int64_t)from * LANES;
        t.beside = least(w->wide, c->output_width - at);
        t.output = ((int64_t)member * c->images + image) * c->outputs * c->output_channel_stride + y * c->output_row_stride + at * c->output_pixel_stride;
        const int end = left + from + w->step_x * (w->wide - 1) + c->kernel_width;
        const int edges = rows | (left + from < 0 ? LEFT : 0) | (end > c->width ? RIGHT : 0);
        outputs_of(c, w, edges)(&t);
    }
}

/* ---- pixels in the vector ---- */

/* What a tile of `rows` x `columns` outputs reads, copied so that every tap finds its inputs for all outputs of the tile
   in a row: once for each column of the kernel, shifted, and for each remainder of rows by the stride. */
typedef struct {
    int rows, columns, phases, lines; /* lines: rows of inputs per copy */
    int64_t used, channel_size; /* in floats; whole vectors, so that those of 1x1 kernels lie on lines of the cache */
} Patch;

static int patch_columns(const Convolution *c) { return least(c->output_width, LONGEST * LANES); }
static int patch_rows(const Convolution *c) { return least(c->output_height, LONGEST * LANES / patch_columns(c)); }

static Patch patch_of(const Convolution *c) {
    Patch p = {.rows = patch_rows(c), .columns = patch_columns(c), .phases = least(c->stride_y, c->kernel_height)};
    p.lines = p.rows + (c->kernel_height - 1) / c->stride_y;
    p.used = (int64_t)c->kernel_width * p.phases * p.lines * p.columns;
    p.channel_size = up(p.used, LANES) * LANES;
    return p;
}

static void pack_pixels(const Convolution *c, const Patch *p, const float *map, int y, int x, float *packed) {
    const int64_t next = (int64_t)c->height * c->width;
    if (c->kernel_height * c->kernel_width == 1 && c->stride_y * c->stride_x == 1 && !c->padding_y && !c->padding_x) { /* pixels in a row */
        for (int channel = 0; channel < c->channels; channel++, map += next, packed += p->channel_size)
            copy_floats(packed, map + (int64_t)y * c->width + x, least(p->used, next - (int64_t)y * c->width - x));
        memset(packed, 0, sizeof(float) * LONGEST * LANES);
        return;
    }
    for (int channel = 0; channel < c->channels; channel++, map += next, packed += p->channel_size - p->used)
        for (int kx = 0; kx < c->kernel_width; kx++)
            for (int phase = 0; phase < p->phases; phase++)
                for (int line = 0; line < p->lines; line++, packed += p->columns) {
                    const int from_y = (y + line) * c->stride_y + phase - c->padding_y;
                    const int left = x * c->stride_x + kx - c->padding_x;
                    int column = 0;
                    if (from_y >= 0 && from_y < c->height) {
                        const float *from = map + (int64_t)from_y * c->width;
                        const int outside = left < 0 ? up(-left, c->stride_x) : 0;
                        const int inside = c->width > left ? least(p->columns, up(c->width - left, c->stride_x)) : 0;
                        for (; column < outside && column < p->columns; column++) packed[column] = 0;
                        if (c->stride_x == 1)
                            for (; column < inside; column++) packed[column] = from[left + column];
                        else
                            for (; column < inside; column++) packed[column] = from[left + column * c->stride_x];
                    }
                    for (; column < p->columns; column++) packed[column] = 0;
                }
    memset(packed, 0, sizeof(float) * LONGEST * LANES); /* the last vector may read on */
}

typedef struct {
    const Convolution *layer;
    Patch patch;
    const float *packed;
    float *partial;
    const int32_t *offsets;
    int member, image, y, x, rows, columns, first, last;
} Pixels;

ALWAYS void tap_pixels(vector *sums, const float *p, float value, const int vectors) {
    const vector weight = splat(value);
    KEEP_POINTER(p);
    UNROLL for (int i = 0; i < vectors; i++) ADD_PRODUCT_FROM(sums[i], weight, p + i * LANES);
}

/* The outputs of a tile lie in a row: it has whole rows of the map, or a part of one. */
static void write_pixels(const Pixels *t, int output, const float *sums) {
    const Convolution *c = t->layer;
    const int count = t->rows * t->columns;
    const int64_t at = (((int64_t)t->member * c->images + t->image) * c->outputs + output) * c->output_height * c->output_width + (int64_t)t->y * c->output_width + t->x;
    for (int i = 0; i < count; i += LANES) {
        const int here = least(LANES, count - i);
        vector sum = load(sums + i), added = splat(0);
        if (c->residual) {
            if (here == LANES) added = load(c->residual + at + i);
            else memcpy(&added, c->residual + at + i, sizeof(float) * here);
        }
        sum = activated(sum + added, c->relu);
        if (here == LANES) store(c->output + at + i, sum);
        else memcpy(c->output + at + i, &sum, sizeof(float) * here);
    }
}

/* Few vectors take several chains of sums each, or every product would wait for the one before. */
ALWAYS void pixel_outputs(const Pixels *t, const int kind, const int vectors) {
    const int chains = vectors >= 8 ? 1 : vectors >= 4 ? 2 : vectors == 3 ? 3 : vectors == 2 ? 4 : 8;
    const Convolution *c = t->layer;
    const int taps = kind == KNOWN ? 9 : c->kernel_height * c->kernel_width, groups = up(c->channels, c->group);
    const int64_t size = t->patch.channel_size;
    int64_t offset[9];
    if (kind == KNOWN) for (int tap = 0; tap < 9; tap++) offset[tap] = t->offsets[tap];
    for (int group = 0; group < groups; group++) {
        const float *channels = t->packed + group * c->group * size;
        const int32_t *starts = c->starts + t->member * ((int64_t)groups * c->outputs + 1) + group * c->outputs;
        for (int output = t->first; output < t->last; output++) {
            const int start = starts[output], count = starts[output + 1] - start;
            const uint16_t *places = c->places + start;
            const float *values = c->values + (int64_t)start * (kind == SINGLE ? 1 : taps);
            float *kept = t->partial + (int64_t)output * LONGEST * LANES;
            vector sums[8][LONGEST];
            UNROLL for (int chain = 1; chain < chains; chain++)
                UNROLL for (int i = 0; i < vectors; i++) sums[chain][i] = splat(0);
            if (group == 0)
                UNROLL for (int i = 0; i < vectors; i++) sums[0][i] = splat(c->bias[(int64_t)t->member * c->outputs + output]);
            else
                UNROLL for (int i = 0; i < vectors; i++) sums[0][i] = load(kept + i * LANES);
            if (kind == KNOWN) {
                for (int k = 0; k < count; k++, values += 9) {
                    const float *p = channels + places[k] * size;
                    UNROLL for (int tap = 0; tap < 9; tap++) tap_pixels(sums[tap % chains], p + offset[tap], values[tap], vectors);
                }
            } else if (kind == WHOLE) {
                for (int k = 0; k < count; k++, values += taps) {
                    const float *p = channels + places[k] * size;
                    int tap = 0;
                    for (; tap + chains <= taps; tap += chains)
                        UNROLL for (int chain = 0; chain < chains; chain++)
                            tap_pixels(sums[chain], p + t->offsets[tap + chain], values[tap + chain], vectors);
                    for (; tap < taps; tap++) tap_pixels(sums[0], p + t->offsets[tap], values[tap], vectors);
                }
            } else {
                int k = 0;
                for (; k + chains <= count; k += chains)
                    UNROLL for (int chain = 0; chain < chains; chain++)
                        tap_pixels(sums[chain], channels + t->offsets[places[k + chain]], values[k + chain], vectors);
                for (; k < count; k++) tap_pixels(sums[0], channels + t->offsets[places[k]], values[k], vectors);
            }
            UNROLL for (int chain = 1; chain < chains; chain++)
                UNROLL for (int i = 0; i < vectors; i++) sums[0][i] += sums[chain][i];
            UNROLL for (int i = 0; i < vectors; i++) store(kept + i * LANES, sums[0][i]);
            if (group == groups - 1) write_pixels(t, output, kept);
        }
    }
}

typedef void PixelOutputs(const Pixels *);
#define OF_VECTORS(n) \
    static void whole3_pixels_##n(const Pixels *t) { pixel_outputs(t, KNOWN, n); } \
    static void whole_pixels_##n(const Pixels *t) { pixel_outputs(t, WHOLE, n); } \
    static void single_pixels_##n(const Pixels *t) { pixel_outputs(t, SINGLE, n); }
OF_VECTORS(1)
OF_VECTORS(2)
OF_VECTORS(3)
OF_VECTORS(4)
OF_VECTORS(6)
OF_VECTORS(8)
OF_VECTORS(12)
OF_VECTORS(14)
OF_VECTORS(16)
static const struct {
    int vectors;
    PixelOutputs *outputs[3]; /* by kind */
} PIXEL_TILES[] = {
#define ENTRY(n) {n, {whole3_pixels_##n, whole_pixels_##n, single_pixels_##n}}
    ENTRY(1), ENTRY(2), ENTRY(3), ENTRY(4), ENTRY(6), ENTRY(8), ENTRY(12), ENTRY(14), ENTRY(16),
};

static void pixel_tile(const Convolution *c, int member, int image, int y, int x, int first, int last, float *scratch) {
    Pixels t = {.layer = c, .patch = patch_of(c), .member = member, .image = image, .y = y, .x = x, .first = first, .last = last};
    const int taps = c->kernel_height * c->kernel_width;
    t.rows = least(t.patch.rows, c->output_height - y);
    t.columns = least(t.patch.columns, c->output_width - x);
    t.packed = scratch;
    t.partial = scratch + c->channels * t.patch.channel_size + LONGEST * LANES;
    int32_t *offsets = (int32_t *)(t.partial + (int64_t)c->outputs * LONGEST * LANES);
    for (int place = 0; place < named_places(c); place++) {
        const int tap = place % taps, ky = tap / c->kernel_width, kx = tap % c->kernel_width;
        const int copy = kx * t.patch.phases + ky % c->stride_y;
        offsets[place] = place / taps * t.patch.channel_size + (copy * t.patch.lines + ky / c->stride_y) * t.patch.columns;
    }
    t.offsets = offsets;
    const float *input = c->input + member * c->input_member_stride;
    pack_pixels(c, &t.patch, input + (int64_t)image * c->channels * c->height * c->width, y, x, scratch);
    const int kind = !c->whole || taps == 1 ? SINGLE : c->kernel_height == 3 && c->kernel_width == 3 ? KNOWN : WHOLE;
    const int vectors = up(t.rows * t.patch.columns, LANES);
    int tile = 0;
    while (PIXEL_TILES[tile].vectors < vectors) tile++;
    PIXEL_TILES[tile].outputs[kind](&t);
}

/* ---- items of work of a convolution ---- */

typedef struct {
    int64_t down, across, chunks, outputs, images; /* tiles, or runs of tiles, of a map; chunks of so many outputs; images or blocks */
    int rows, columns, together;                   /* of the map, per item; together: images or blocks */
} Cut;

/* So fine that all threads have something to do. What is computed does not depend on it. */
static Cut cut_of(const Convolution *c, int threads) {
    Cut cut;
    if (winograd_pays(c)) {
        cut = (Cut){.columns = 1, .together = 1, .images = 1, .across = 1, .outputs = least(c->outputs, MOST_OUTPUTS)};
        cut.chunks = up(c->outputs, cut.outputs);
        const int64_t tiles = tiles_of(c).all, parts = threads > 1 ? up(2 * threads, c->members * cut.chunks) : 1;
        cut.rows = up(tiles, up(tiles, least(MOST_TILES, up(tiles, parts))));
        cut.down = up(tiles, cut.rows);
        return cut;
    }
    if (is_sparse(c)) {
        cut.rows = c->output_height;
        cut.columns = c->output_width;
        cut.together = 1;
    } else if (c->lanes == 1) {
        cut.rows = patch_rows(c);
        cut.columns = patch_columns(c);
        cut.together = 1;
    } else {
        const Window w = window_of(c);
        cut.rows = w.high;
        cut.columns = w.tiles * w.wide;
        cut.together = w.blocks;
    }
    cut.images = up(c->images, cut.together);
    cut.down = up(c->output_height, cut.rows);
    cut.across = up(c->output_width, cut.columns);
    const int64_t items = cut.down * cut.across * c->members * cut.images;
    const int64_t wanted = threads > 1 ? up(2 * threads, items) : 1;
    cut.outputs = up(c->outputs, least(wanted, up(c->outputs, 16)));
    cut.chunks = up(c->outputs, cut.outputs);
    return cut;
}

static int64_t convolution_items(const Convolution *c, int threads) {
    const Cut cut = cut_of(c, threads);
    return cut.down * cut.across * cut.chunks * c->members * cut.images;
}

static int64_t convolution_scratch(const Convolution *c) {
    if (winograd_pays(c)) return winograd_scratch(c);
    if (is_sparse(c)) return channels_scratch(c);
    const Window w = window_of(c);
    const int64_t packed = c->lanes == 1 ? c->channels * patch_of(c).channel_size + LONGEST * LANES : w.direct ? 0 : w.blocks * w.block_size;
    const int64_t sums = (int64_t)c->outputs * LANES * (c->lanes == 1 ? LONGEST : TILE);
    return (packed + sums + named_places(c)) * (int64_t)sizeof(float);
}

static void convolution_item(const Convolution *c, int threads, int64_t item, void *scratch) {
    const Cut cut = cut_of(c, threads);
    const int first = item % cut.chunks * cut.outputs, last = least(first + cut.outputs, c->outputs);
    item /= cut.chunks;
    if (winograd_pays(c)) {
        const int64_t begin = item % cut.down * cut.rows;
        winograd_item(c, item / cut.down, begin, least(begin + cut.rows, tiles_of(c).all), first, last, scratch);
        return;
    }
    const int x = item % cut.across * cut.columns, y = item / cut.across % cut.down * cut.rows;
    item /= cut.across * cut.down;
    const int image = item % cut.images * cut.together, member = item / cut.images;
    if (is_sparse(c)) channels_item(c, member, image, first, last, scratch);
    else (c->lanes == 1 ? pixel_tile : image_tiles)(c, member, image, y, x, first, last, scratch);
}

const Kernels NAME = {
    .lanes = LANES,
    .instructions = INSTRUCTIONS,
    .convolution_items = convolution_items,
    .convolution_scratch = convolution_scratch,
    .convolution_item = convolution_item,
    .joins_halves = winograd_pays,
    .rows_items = rows_items,
    .rows_scratch = rows_scratch,
    .rows_item = rows_item,
    .training = &TRAINING,
};
