/* Chains of linear layers of all members, over rows of plain memory: predictions, and gradients over the weights that each member owns.

   A tile of rows is turned, so that rows fill the vectors and every weight is multiplied with whole vectors, and stays so through all layers of a
   chain. An item writes its own part of the result, and every sum has one order: the bits are the same for any number of threads. */
#include <string.h>
#include "owned.h"
#include "vectors.h"

#ifndef MOST_VECTORS
#define MOST_VECTORS 4 /* of rows in a tile */
#endif

#ifdef PICK
#if LANES == 16
#define LOW(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define LOW(a, b) PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LOW(a, b) PICK(a, b, 0, 4, 1, 5)
#define HIGH(a, b) PICK(a, b, 2, 6, 3, 7)
#endif
/* Rounds of adding up lanes: each adds one half of the lanes of two vectors to the other half, first within four lanes, then across them. */
#if LANES == 16
#define FIRST(a, b) (PICK(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) + PICK(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31))
#define SECOND(a, b) (PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define THIRD(a, b) (PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOURTH(a, b) THIRD(a, b)
#elif LANES == 8
#define FIRST(a, b) (PICK(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + PICK(a, b, 2, 10, 3, 11, 6, 14, 7, 15))
#define SECOND(a, b) (PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define THIRD(a, b) (PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define FOURTH(a, b) (a)
#else
#define FIRST(a, b) (PICK(a, b, 0, 4, 1, 5) + PICK(a, b, 2, 6, 3, 7))
#define SECOND(a, b) (PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7))
#define THIRD(a, b) (a)
#define FOURTH(a, b) (a)
#endif
#endif

/* Turn a square of LANES rows: rounds of interleaving one half of the vectors with the other. */
ALWAYS void turn_square(const float *from, int64_t from_line, float *to, int64_t to_line) {
#ifdef PICK
    vector v[LANES], w[LANES];
    UNROLL for (int i = 0; i < LANES; i++) v[i] = load(from + i * from_line);
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            w[2 * i] = LOW(v[i], v[i + LANES / 2]);
            w[2 * i + 1] = HIGH(v[i], v[i + LANES / 2]);
        }
        UNROLL for (int i = 0; i < LANES; i++) v[i] = w[i];
    }
    UNROLL for (int i = 0; i < LANES; i++) store(to + i * to_line, v[i]);
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * to_line + i] = from[i * from_line + j];
#endif
}

/* Turn a matrix of rows and columns. */
static void turn(const float *from, int rows, int columns, int64_t from_line, float *to, int64_t to_line) {
    const int whole_rows = rows / LANES * LANES, whole_columns = columns / LANES * LANES;
    for (int i = 0; i < whole_rows; i += LANES)
        for (int j = 0; j < whole_columns; j += LANES) turn_square(from + i * from_line + j, from_line, to + j * to_line + i, to_line);
    for (int i = 0; i < rows; i++)
        for (int j = i < whole_rows ? whole_columns : 0; j < columns; j++) to[j * to_line + i] = from[i * from_line + j];
}

#define SINGLY 3 /* so few rows are multiplied one by one, and inputs fill the vectors */

/* Vectors of rows in a tile; 0 if it is a single row. Other rows are padded to whole vectors. */
static int vectors_of(const Rows *c) {
    if (c->rows <= SINGLY && !c->kept) return 0;
    return c->rows <= LANES ? 1 : c->rows <= 2 * LANES || MOST_VECTORS < 4 ? 2 : 4;
}

static int tile_of(const Rows *c) { return vectors_of(c) ? vectors_of(c) * LANES : 1; }

/* A tile of rows, [column][row of the tile], zeros if there are no more rows. */
static void turned_tile(const float *rows, int count, int columns, float *to, int tile) {
    if (count < tile) memset(to, 0, sizeof(float) * tile * columns);
    if (tile == 1) memcpy(to, rows, sizeof(float) * columns);
    else turn(rows, count, columns, columns, to, tile);
}

/* The sums of one list, each of `vectors` vectors of rows. Few vectors take several chains of sums, or every product would wait for the one before. */
ALWAYS void list_sums(vector *sums, const float *x, const uint16_t *places, const int count, const float *weights, const int64_t stride, const int vectors) {
    const int chains = 4 / vectors > 1 ? 4 : 2, tile = vectors * LANES;
    vector parts[4][MOST_VECTORS];
    UNROLL for (int chain = 0; chain < chains; chain++)
        UNROLL for (int v = 0; v < vectors; v++) parts[chain][v] = splat(0);
#define TAKE(chain, k) \
    do { \
        const float *from = x + (int64_t)places[k] * tile; \
        const vector weight = splat(weights[places[k] * stride]); \
        KEEP_POINTER(from); \
        UNROLL for (int v = 0; v < vectors; v++) ADD_PRODUCT_FROM(parts[chain][v], weight, from + v * LANES); \
    } while (0)
    int k = 0;
    for (; k + chains <= count; k += chains)
        UNROLL for (int chain = 0; chain < chains; chain++) TAKE(chain, k + chain);
    UNROLL for (int chain = 0; chain < chains - 1; chain++)
        if (k + chain < count) TAKE(chain, k + chain);
#undef TAKE
    UNROLL for (int v = 0; v < vectors; v++) {
        UNROLL for (int chain = 1; chain < chains; chain += 2) parts[chain - 1][v] += parts[chain][v];
        if (chains == 4) parts[0][v] += parts[2][v];
        sums[v] += parts[0][v];
    }
}

/* The same of eight outputs that have their weights together. */
ALWAYS void block_sums(vector *sums, const float *x, const uint16_t *places, const int count, const float *weights, const int vectors, const int tile) {
    for (int k = 0; k < count; k++, weights += 8) {
        const float *from = x + (int64_t)places[k] * tile;
        vector inputs[2];
        UNROLL for (int v = 0; v < vectors; v++) inputs[v] = load(from + v * LANES);
        UNROLL for (int i = 0; i < 8; i++) {
            const vector weight = splat(weights[i]);
            UNROLL for (int v = 0; v < vectors; v++) ADD_PRODUCT(sums[i * vectors + v], inputs[v], weight);
        }
    }
}

#define AT_ONCE (LANES == 16 && MOST_VECTORS > 1 ? 2 : 1) /* vectors of rows whose sums of eight outputs fit into the registers */
enum { FORWARD, BACKWARD, BLOCKS };

typedef struct {
    const Lists *lists;
    const float *bias, *weight; /* of the member */
    const int32_t *starts;
    int id, relu;
} Layer;

/* Sums of all outputs of one member, over a tile of rows, to `y`: x and y are [input or output][row of the tile]. */
ALWAYS void layer_sums(const Layer *layer, const float *x, float *y, const int vectors, const int kind) {
    const Lists *l = layer->lists;
    const int tile = vectors * LANES, groups = up(l->inputs, l->group), each = kind == BLOCKS ? 8 : 1, lists = up(l->outputs, each);
    const int wide = each == 1 || vectors < AT_ONCE ? vectors : AT_ONCE; /* vectors at a time */
    const int32_t *starts = layer->starts;
    for (int group = 0; group < groups; group++, x += (int64_t)l->group * tile)
        for (int list = 0; list < lists; list++, starts++) {
            const int first = list * each, count = least(each, l->outputs - first), last = group == groups - 1, length = starts[1] - starts[0];
            const uint16_t *places = l->places + starts[0];
            for (int part = 0; part < vectors; part += wide) {
                vector sums[8 * AT_ONCE > MOST_VECTORS ? 8 * AT_ONCE : MOST_VECTORS];
                float *to = y + (int64_t)first * tile + part * LANES;
                UNROLL for (int i = 0; i < each; i++)
                    UNROLL for (int v = 0; v < wide; v++)
                        sums[i * wide + v] = i >= count ? splat(0) : group ? load(to + i * tile + v * LANES) : splat(layer->bias ? layer->bias[first + i] : 0);
                if (kind == BLOCKS)
                    block_sums(sums, x + part * LANES, places, length, layer->weight + (int64_t)starts[0] * 8, wide, tile);
                else
                    list_sums(sums, x, places, length, layer->weight + list * l->output_stride + (int64_t)group * l->group * l->input_stride, kind == FORWARD ? 1 : l->input_stride, vectors);
                if (layer->relu && last) UNROLL for (int i = 0; i < each * wide; i++) sums[i] = positive(sums[i]);
                UNROLL for (int i = 0; i < each; i++)
                    if (i < count) UNROLL for (int v = 0; v < wide; v++) store(to + i * tile + v * LANES, sums[i * wide + v]);
            }
        }
}

typedef void LayerSums(const Layer *, const float *x, float *y);
#define SUMS_OF(vectors, kind) \
    static void sums_##vectors##_##kind(const Layer *l, const float *x, float *y) { layer_sums(l, x, y, vectors, kind); }
SUMS_OF(1, FORWARD) SUMS_OF(1, BACKWARD) SUMS_OF(1, BLOCKS) SUMS_OF(2, FORWARD) SUMS_OF(2, BACKWARD) SUMS_OF(2, BLOCKS)
SUMS_OF(4, FORWARD) SUMS_OF(4, BACKWARD) SUMS_OF(4, BLOCKS)

/* Add up the lanes of vectors, a power of two up to LANES: the sum of the first one is the first lane of the result. */
ALWAYS vector sums_of_lanes(vector *v, const int count) {
#ifdef PICK
    UNROLL for (int i = 0; i < count; i += 2) v[i / 2] = FIRST(v[i], v[i + (count > 1)]);
    UNROLL for (int i = 0; i < (count + 1) / 2; i += 2) v[i / 2] = SECOND(v[i], v[i + (count > 2)]);
    UNROLL for (int i = 0; i < (count + 3) / 4; i += 2) v[i / 2] = THIRD(v[i], v[i + (count > 4)]);
    return FOURTH(v[0], v[count > 8]);
#else
    vector result = splat(0);
    for (int i = 0; i < count; i++)
        for (int lane = 0; lane < LANES; lane++) result[i] += v[i][lane];
    return result;
#endif
}

/* The sums of a single row: weights of others are taken as zero, and so is what is not a number in their places. */
static void row_sums(const Layer *layer, const float *x, float *y) {
    const Lists *l = layer->lists;
    const int whole = l->inputs / LANES * LANES;
    const mask mine = layer->id - (mask){0};
    for (int first = 0; first < l->outputs; first += LANES) {
        const int count = least(LANES, l->outputs - first);
        vector sums[LANES];
        for (int i = 0; i < LANES; i++) {
            const int64_t row = first + (i < count ? i : 0);
            const float *weight = layer->weight + row * l->inputs;
            const uint8_t *owners = l->owners ? l->owners + row * l->inputs : NULL;
            vector sum = splat(0), other = splat(0);
#define TAKE(sum, at) \
    do { \
        vector w = load(weight + (at)), in = load(x + (at)); \
        if (owners) { \
            const mask own = widened(owners + (at)) == mine; \
            w = (vector)((mask)w & own), in = (vector)((mask)in & own); \
        } \
        ADD_PRODUCT(sum, w, in); \
    } while (0)
            int at = 0;
            for (; at + LANES < whole; at += 2 * LANES) {
                TAKE(sum, at);
                TAKE(other, at + LANES);
            }
            if (at < whole) TAKE(sum, at);
#undef TAKE
            sum += other;
            for (at = whole; at < l->inputs; at++)
                if (!owners || owners[at] == layer->id) sum[0] += weight[at] * x[at];
            sums[i] = sum;
        }
        const vector found = sums_of_lanes(sums, LANES);
        for (int i = 0; i < count; i++) {
            const float sum = found[i] + (layer->bias ? layer->bias[first + i] : 0);
            y[first + i] = layer->relu && sum < 0 ? 0 : sum;
        }
    }
}

/* The sums of a single row: four chains of blocks of eight outputs, whatever LANES is, or each product would wait for the one before. */
static void row_blocks(const Layer *layer, const float *x, float *y) {
    const Lists *l = layer->lists;
    const int groups = up(l->inputs, l->group), lists = up(l->outputs, 8);
    for (int list = 0; list < lists; list++) {
        eight sums[4] = {{0}, {0}, {0}, {0}};
        for (int group = 0; group < groups; group++) {
            const int32_t *starts = layer->starts + group * lists + list;
            const float *weight = layer->weight + (int64_t)starts[0] * 8, *from = x + group * l->group;
            int k = starts[0];
            for (; k + 4 <= starts[1]; k += 4, weight += 32)
                UNROLL for (int i = 0; i < 4; i++) sums[i] += ((const eight *)weight)[i] * (from[l->places[k + i]] - (eight){0});
            for (; k < starts[1]; k++, weight += 8) sums[0] += *(const eight *)weight * (from[l->places[k]] - (eight){0});
        }
        sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (int i = 0; i < 8 && list * 8 + i < l->outputs; i++) {
            const float sum = sums[0][i] + (layer->bias ? layer->bias[list * 8 + i] : 0);
            y[list * 8 + i] = layer->relu && sum < 0 ? 0 : sum;
        }
    }
}

static void run_layer(const Rows *c, const Lists *l, const Linear *of, int64_t member, const float *x, float *y) {
    static LayerSums *const ways[3][3] = {{sums_1_FORWARD, sums_1_BACKWARD, sums_1_BLOCKS}, {sums_2_FORWARD, sums_2_BACKWARD, sums_2_BLOCKS}, {sums_4_FORWARD, sums_4_BACKWARD, sums_4_BLOCKS}};
    const int vectors = vectors_of(c), kind = l->each == 8 ? BLOCKS : l == &of->backward ? BACKWARD : FORWARD;
    Layer layer = {.lists = l, .id = c->ids ? c->ids[member] : member, .starts = l->starts + member * l->starts_stride};
    layer.weight = l->weight + layer.id * l->member_stride;
    if (kind != BACKWARD) layer.bias = of->bias ? of->bias + member * of->bias_stride : NULL, layer.relu = of->relu;
    if (vectors) ways[vectors / 2][kind](&layer, x, y);
    else if (kind == BLOCKS) row_blocks(&layer, x, y);
    else row_sums(&layer, x, y);
}

static int64_t widest(const Rows *c) {
    int most = c->layers[0].forward.inputs;
    for (int i = 0; i < c->count; i++)
        if (c->layers[i].forward.outputs > most) most = c->layers[i].forward.outputs;
    return most;
}

/* Floats of a row whose inputs and outputs of all layers are kept. */
static int64_t kept_width(const Rows *c) {
    int64_t width = c->layers[0].forward.inputs;
    for (int i = 0; i < c->count; i++) width += c->layers[i].forward.outputs;
    return width;
}

static int64_t rows_items(const Rows *c) { return c->backward ? c->members : c->members * up(c->rows, tile_of(c)); }

static int64_t rows_scratch(const Rows *c) { return (int64_t)sizeof(float) * 2 * tile_of(c) * widest(c); }

/* One member and one tile of rows, through all layers. */
static void rows_forward(const Rows *c, int64_t item, float *scratch) {
    const int tile = tile_of(c);
    const int64_t tiles = up(c->rows, tile), member = item / tiles, first = item % tiles * tile, half = widest(c) * tile;
    const int count = least(tile, c->rows - first), inputs = c->layers[0].forward.inputs;
    float *x = c->kept ? c->kept + item * kept_width(c) * tile : scratch;
    turned_tile(c->input + member * c->input_member_stride + first * inputs, count, inputs, x, tile);
    for (int i = 0; i < c->count; i++) {
        const Linear *l = c->layers + i;
        float *y = c->kept ? x + (int64_t)l->forward.inputs * tile : scratch + (i % 2 ? 0 : half);
        run_layer(c, &l->forward, l, member, x, y);
        x = y;
    }
    const int outputs = c->layers[c->count - 1].forward.outputs;
    turn(x, outputs, count, tile, c->output + (member * c->rows + first) * outputs, outputs);
}

#define TOGETHER 4 /* weights whose lanes are added up at once: lists are short, and more would often be too many */

/* The gradient of the weights of one member: for each, the product of what goes in and the gradient of what comes out, over a tile of rows. */
ALWAYS void weight_gradient(const Linear *layer, int64_t member, const float *x, const float *gradient, const int more, const int vectors) {
    const Lists *l = &layer->forward;
    const int tile = vectors * LANES, groups = up(l->inputs, l->group);
    const int32_t *starts = l->starts + member * l->starts_stride;
    const uint16_t *places = l->places;
    for (int group = 0; group < groups; group++, x += (int64_t)l->group * tile)
        for (int output = 0; output < l->outputs; output++, starts++) {
            float *row = layer->to_weight + member * l->member_stride + output * l->output_stride + group * l->group;
            const int end = starts[1];
            vector g[MOST_VECTORS];
            UNROLL for (int v = 0; v < vectors; v++) g[v] = load(gradient + (int64_t)output * tile + v * LANES);
            for (int k = starts[0]; k < end; k += TOGETHER) {
                vector sums[TOGETHER];
                float found[LANES], *to[TOGETHER];
                UNROLL for (int i = 0; i < TOGETHER; i++) { /* the last weight of a list stands for those that are missing */
                    const int64_t place = places[least(k + i, end - 1)];
                    const float *from = x + place * tile;
                    KEEP_POINTER(from);
                    vector sum = g[0] * load(from);
                    UNROLL for (int v = 1; v < vectors; v++) ADD_PRODUCT_FROM(sum, g[v], from + v * LANES);
                    sums[i] = sum; /* in the array, it would be written with every product */
                    to[i] = row + place;
                }
                store(found, sums_of_lanes(sums, TOGETHER));
                if (more) UNROLL for (int i = 0; i < TOGETHER; i++) found[i] += *to[i];
                UNROLL for (int i = 0; i < TOGETHER; i++) *to[i] = found[i];
            }
        }
}

/* The gradients of one member: of its weights, of its biases, and of what it was given. */
static void rows_backward(const Rows *c, int64_t member, float *scratch) {
    const int vectors = vectors_of(c), tile = vectors * LANES, inputs = c->layers[0].forward.inputs, outputs = c->layers[c->count - 1].forward.outputs;
    const int64_t tiles = up(c->rows, tile), half = widest(c) * tile;
    for (int64_t first = 0; first < c->rows; first += tile) {
        const int count = least(tile, c->rows - first);
        const float *kept = c->kept + (member * tiles + first / tile + 1) * kept_width(c) * tile;
        float *gradient = scratch, *next = scratch + half;
        turned_tile(c->output + (member * c->rows + first) * outputs, count, outputs, gradient, tile);
        for (int i = c->count; i--;) {
            const Linear *l = c->layers + i;
            const float *y = kept - (int64_t)l->forward.outputs * tile, *x = y - (int64_t)l->forward.inputs * tile;
            kept = y;
            for (int output = 0; output < l->forward.outputs; output++) {
                vector sum = splat(0);
                for (int v = 0; v < vectors; v++) {
                    const int64_t at = (int64_t)output * tile + v * LANES;
                    vector g = load(gradient + at);
                    if (l->relu) {
                        g = (vector)((mask)g & (mask)(load(y + at) > splat(0)));
                        store(gradient + at, g);
                    }
                    sum += g;
                }
                if (l->to_bias) {
                    float *to = l->to_bias + member * l->bias_stride + output;
                    *to = sums_of_lanes(&sum, 1)[0] + (first ? *to : 0);
                }
            }
            if (l->to_weight) {
                if (vectors == 1) weight_gradient(l, member, x, gradient, first > 0, 1);
                else if (vectors == 2) weight_gradient(l, member, x, gradient, first > 0, 2);
                else weight_gradient(l, member, x, gradient, first > 0, 4);
            }
            if (i == 0 && !c->to_input) break;
            run_layer(c, &l->backward, l, member, gradient, next);
            float *swapped = gradient;
            gradient = next, next = swapped;
        }
        if (c->to_input) turn(gradient, inputs, count, tile, c->to_input + (member * c->rows + first) * inputs, inputs);
    }
}

static void rows_item(const Rows *c, int64_t item, float *scratch) {
    if (c->backward) rows_backward(c, item, scratch);
    else rows_forward(c, item, scratch);
}
