/* Linear layers of all members, over rows of plain memory: sums and gradients over the single weights that each member owns.

   A tile of rows is turned, so that rows fill the vectors and every weight is multiplied with whole vectors. An item writes its own part of
   the result, and every sum has one order: the bits are the same for any number of threads. */
#include <string.h>
#include "training.h"
#include "vectors.h"

#define TILE (4 * LANES) /* rows that are turned at a time */

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

/* A tile of rows, [column][row of the tile], zeros where there are no more rows. */
static void turned_tile(const float *rows, int count, int columns, float *to) {
    turn(rows, count, columns, columns, to, TILE);
    if (count < TILE)
        for (int column = 0; column < columns; column++) memset(to + (int64_t)column * TILE + count, 0, sizeof(float) * (TILE - count));
}

static int64_t rows_items(const Rows *c) { return c->to_weight ? c->members : c->members * up(c->rows, TILE); }

static int64_t rows_scratch(const Rows *c) { return (int64_t)sizeof(float) * TILE * (c->inputs + c->outputs); }

/* The sums of one member and one tile of rows. */
static void rows_sums(const Rows *c, int64_t item, float *scratch) {
    const int64_t tiles = up(c->rows, TILE), member = item / tiles, first = item % tiles * TILE;
    const int count = least(TILE, c->rows - first), groups = up(c->inputs, c->group);
    const int32_t *starts = c->starts + member * ((int64_t)groups * c->outputs + 1);
    float *x = scratch, *y = scratch + (int64_t)c->inputs * TILE;
    turned_tile(c->input + member * c->input_member_stride + first * c->inputs, count, c->inputs, x);
    for (int group = 0; group < groups; group++, x += (int64_t)c->group * TILE)
        for (int output = 0; output < c->outputs; output++, starts++) {
            float *to = y + (int64_t)output * TILE;
            vector sums[4];
            if (group)
                UNROLL for (int v = 0; v < 4; v++) sums[v] = load(to + v * LANES);
            else
                UNROLL for (int v = 0; v < 4; v++) sums[v] = splat(c->bias ? c->bias[member * c->outputs + output] : 0);
            for (int64_t k = starts[0]; k < starts[1]; k++) {
                const float *from = x + (int64_t)c->places[k] * TILE;
                const vector weight = splat(c->weight[c->at[k]]);
                UNROLL for (int v = 0; v < 4; v++) ADD_PRODUCT_FROM(sums[v], weight, from + v * LANES);
            }
            UNROLL for (int v = 0; v < 4; v++) store(to + v * LANES, sums[v]);
        }
    turn(y, c->outputs, count, TILE, c->output + (member * c->rows + first) * c->outputs, c->outputs);
}

/* Add up the lanes of LANES vectors: the sum of the first one is the first lane of the result. */
ALWAYS vector sums_of_lanes(vector v[LANES]) {
#ifdef PICK
    UNROLL for (int half = LANES / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) v[i] = LOW(v[i], v[i + half]) + HIGH(v[i], v[i + half]);
    return v[0];
#else
    vector result = splat(0);
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) result[i] += v[i][lane];
    return result;
#endif
}

/* The gradient of all weights of one member: for each, the product of what goes in and the gradient of what comes out, over all rows. */
static void rows_gradient(const Rows *c, int64_t member, float *scratch) {
    const int groups = up(c->inputs, c->group);
    float *gradient = scratch + (int64_t)c->inputs * TILE;
    for (int64_t first = 0; first < c->rows; first += TILE) {
        const int count = least(TILE, c->rows - first);
        const int32_t *starts = c->starts + member * ((int64_t)groups * c->outputs + 1);
        const float *x = scratch;
        turned_tile(c->input + member * c->input_member_stride + first * c->inputs, count, c->inputs, scratch);
        turned_tile(c->output + (member * c->rows + first) * c->outputs, count, c->outputs, gradient);
        for (int group = 0; group < groups; group++, x += (int64_t)c->group * TILE)
            for (int output = 0; output < c->outputs; output++, starts++) {
                vector g[4];
                UNROLL for (int v = 0; v < 4; v++) g[v] = load(gradient + (int64_t)output * TILE + v * LANES);
                for (int64_t k = starts[0]; k < starts[1]; k += LANES) {
                    const int64_t here = least(LANES, starts[1] - k);
                    vector sums[LANES];
                    UNROLL for (int i = 0; i < LANES; i++) {
                        const float *from = x + (int64_t)c->places[i < here ? k + i : k] * TILE;
                        sums[i] = g[0] * load(from);
                        UNROLL for (int v = 1; v < 4; v++) ADD_PRODUCT_FROM(sums[i], g[v], from + v * LANES);
                    }
                    const vector found = sums_of_lanes(sums);
                    for (int i = 0; i < here; i++) {
                        float *to = c->to_weight + c->at[k + i];
                        *to = first ? *to + found[i] : found[i];
                    }
                }
            }
    }
}

static void rows_item(const Rows *c, int64_t item, float *scratch) {
    if (c->to_weight) rows_gradient(c, item, scratch);
    else rows_sums(c, item, scratch);
}
