/* Random layers through the native library, each array exactly as long as it must be: AddressSanitizer finds every read or
   write beyond its end, UndefinedBehaviorSanitizer what C does not define. Values are compared with plain loops. `make memcheck`. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../src/plures/native/owned.h"

const Kernels *plures_kernels(const char *);
int plures_convolution(const Kernels *, const Convolution *, int threads);
int plures_rows(const Kernels *, const Rows *, int threads);
int plures_unpack(const Digits *, int threads);
int plures_place(const Placing *);
int plures_digests(Message *, int count, int threads);
int plures_steps(const Kernels *, const int *kinds, const void *const *layers, int steps, int members, int threads);

static void step(int kind, const void *layer, int members, int threads) { plures_steps(plures_kernels("portable"), &kind, &layer, 1, members, threads); }

static uint64_t state = 88172645463325252u;
static int below(int n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int)((state >> 11) % n);
}
static float *numbers(int64_t count) {
    float *made = malloc(sizeof(float) * count);
    for (int64_t i = 0; i < count; i++) made[i] = below(2001) / 1000.0f - 1;
    return made;
}

static double convolution(int lanes) {
    const int many = below(6) == 0;          /* kernels of each channel: enough for Winograd's */
    const int usual = many || below(2); /* 3x3 kernels over maps of even size, which may be read where they are */
    const int members = 2 + below(3), images = 1 + below(usual && !many ? 6 : 2), channels = many ? 20 + below(30) : 1 + below(40), outputs = many ? 20 + below(130) : 1 + below(10), k = usual ? 3 : 1 + below(5);
    const int stride = many ? 1 : 1 + below(usual ? 2 : 3), padding = many ? below(4) : usual ? 1 : below(3), whole = usual || below(2), relu = below(3) ? below(2) : 6, taps = k * k, group = 1 + below(channels);
    const int most = below(4) ? 12 : 80; /* large maps are cut into strips */
    int height = many ? 3 + below(10) : usual ? (1 << (1 + below(3))) * stride : 1 + below(most), width = many ? 3 + below(16) : usual ? (below(2) ? height : (1 << below(4)) * stride) : 1 + below(most);
    if (height + 2 * padding < k) height = k;
    if (width + 2 * padding < k) width = k;
    const int out_height = (height + 2 * padding - k) / stride + 1, out_width = (width + 2 * padding - k) / stride + 1;
    const int groups = (channels + group - 1) / group, each = whole ? taps : 1;
    const int64_t map = (int64_t)height * width * lanes, out_map = (int64_t)out_height * out_width * lanes;
    unsigned char *owner = malloc((int64_t)outputs * channels * taps);
    int64_t entries = 0, at = 0, list = 0;
    for (int i = 0; i < outputs * channels; i++) {
        const int of_kernel = below(members + 1); /* the last one is nobody */
        for (int t = 0; t < taps; t++) owner[i * taps + t] = whole ? of_kernel : below(members + 1);
        for (int t = 0; t < (whole ? 1 : taps); t++) entries += owner[i * taps + t] < members;
    }
    int32_t *starts = malloc(sizeof(int32_t) * members * (groups * outputs + 1));
    uint16_t *places = malloc(sizeof(uint16_t) * entries);
    float *values = numbers(entries * each), *weight = calloc((int64_t)members * outputs * channels * taps, sizeof(float));
    for (int m = 0; m < members; m++, starts[list++] = (int32_t)at)
        for (int g = 0; g < groups; g++)
            for (int o = 0; o < outputs; o++) {
                starts[list++] = (int32_t)at;
                for (int c = g * group; c < channels && c < (g + 1) * group; c++)
                    for (int t = 0; t < (whole ? 1 : taps); t++) {
                        const int64_t kernel = (int64_t)(o * channels + c) * taps, own = (int64_t)m * outputs * channels * taps + kernel;
                        if (owner[kernel + t] != m) continue;
                        for (int i = 0; i < each; i++) weight[own + t + i] = values[at * each + i];
                        places[at++] = (uint16_t)(whole ? c - g * group : (c - g * group) * taps + t);
                    }
            }
    float *x = numbers(members * images * channels * map), *bias = numbers(members * outputs);
    float *added = numbers(members * images * outputs * out_map), *y = numbers(members * images * outputs * out_map);
    const Convolution layer = {x, added, values, bias, starts, places, y, images * channels * map,
                               (int64_t)out_height * out_width * lanes, (int64_t)out_width * lanes, lanes, members, images, channels, height, width, outputs,
                               out_height, out_width, k, k, stride, stride, padding, padding, lanes, group, whole, relu};
    const Kernels *kernels = plures_kernels("portable");
    if (lanes == 1 || lanes == LANES || kernels->joins_halves(&layer)) plures_convolution(kernels, &layer, 1 + below(3));
    double worst = 0;
    for (int m = 0; m < members; m++)
        for (int n = 0; n < images; n++)
            for (int o = 0; o < outputs; o++)
                for (int64_t p = 0; p < out_map; p++) {
                    const int lane = p % lanes, column = p / lanes % out_width, row = p / lanes / out_width;
                    const int64_t place = ((int64_t)(m * images + n) * outputs + o) * out_map + p;
                    double sum = bias[m * outputs + o] + added[place];
                    for (int c = 0; c < channels; c++)
                        for (int t = 0; t < taps; t++) {
                            const int from_y = row * stride + t / k - padding, from_x = column * stride + t % k - padding;
                            if (from_y < 0 || from_y >= height || from_x < 0 || from_x >= width) continue;
                            const int64_t from = ((int64_t)(m * images + n) * channels + c) * map;
                            sum += (double)weight[((int64_t)(m * outputs + o) * channels + c) * taps + t] *
                                   x[from + ((int64_t)from_y * width + from_x) * lanes + lane];
                        }
                    if (relu) sum = fmax(0, relu == 6 ? fmin(sum, 6) : sum);
                    worst = fmax(worst, lanes == 8 && LANES == 16 && !kernels->joins_halves(&layer) ? 0 : fabs(sum - y[place]));
                }
    free(owner), free(starts), free(places), free(values), free(weight), free(x), free(bias), free(added), free(y);
    return worst;
}

/* Two layers, forward and back, compared with plain loops; `blocks` only forward. */
static double rows(void) {
    const int members = 1 + below(3), count = 1 + below(3 + LANES * 5), blocks = below(2), kept = !blocks && below(2), shared = below(2), group[2] = {1 + below(20), 1 + below(20)};
    const int widths[3] = {1 + below(70), 1 + below(40), 1 + below(20)}, tile = 64;
    Linear layers[2];
    unsigned char *owners[2];
    float *weights[2], *biases[2], *dense[2];
    void *held[16];
    int much = 0;
    for (int i = 0; i < 2; i++) {
        const int inputs = widths[i], outputs = widths[i + 1], own = i == 1 && below(2), in_blocks = blocks && !own, lists = in_blocks ? (outputs + 7) / 8 : outputs;
        const int64_t all = (int64_t)inputs * outputs;
        const int size = group[i] < inputs ? group[i] : inputs, groups = (inputs + size - 1) / size, back = group[i] < outputs ? group[i] : outputs, back_groups = (outputs + back - 1) / back;
        owners[i] = malloc(all), biases[i] = numbers(members * outputs), dense[i] = calloc(members * all, sizeof(float));
        for (int o = 0; o < outputs; o++)
            for (int k = 0; k < inputs; k++) owners[i][o * inputs + k] = in_blocks && o % 8 ? owners[i][(o - o % 8) * inputs + k] : below(members + 1);
        int32_t *starts = malloc(sizeof(int32_t) * members * (groups * lists + 1)), *back_starts = malloc(sizeof(int32_t) * members * (back_groups * inputs + 1));
        uint16_t *places = malloc(sizeof(uint16_t) * (members * all + 1)), *back_places = malloc(sizeof(uint16_t) * (members * all + 1));
        int at = 0, list = 0, back_at = 0, back_list = 0;
        weights[i] = numbers(in_blocks ? members * (all + 8 * inputs) : own ? members * all : all);
        for (int m = 0; m < members; m++, starts[list++] = at)
            for (int g = 0; g < groups; g++)
                for (int l = 0; l < lists; l++) {
                    starts[list++] = at;
                    for (int k = g * size; k < inputs && k < (g + 1) * size; k++) {
                        if (!own && owners[i][l * (in_blocks ? 8 : 1) * inputs + k] != m) continue;
                        for (int o = l * (in_blocks ? 8 : 1); o < outputs && o < (in_blocks ? l * 8 + 8 : l + 1); o++)
                            dense[i][m * all + o * inputs + k] = in_blocks ? weights[i][at * 8 + o % 8] : weights[i][(own ? m * all : 0) + o * inputs + k];
                        places[at++] = (uint16_t)(k - g * size);
                    }
                }
        for (int m = 0; m < members; m++, back_starts[back_list++] = back_at)
            for (int g = 0; g < back_groups; g++)
                for (int k = 0; k < inputs; k++) {
                    back_starts[back_list++] = back_at;
                    for (int o = g * back; o < outputs && o < (g + 1) * back; o++)
                        if (own || owners[i][o * inputs + k] == m) back_places[back_at++] = (uint16_t)(o - g * back);
                }
        layers[i] = (Linear){.forward = {weights[i], own || in_blocks ? NULL : owners[i], starts, places, groups * lists + 1, own ? all : 0, inputs, 1, inputs, outputs, size, in_blocks ? 8 : 1},
                             .backward = {weights[i], NULL, back_starts, back_places, back_groups * inputs + 1, own ? all : 0, 1, inputs, outputs, inputs, back, 1},
                             .bias = biases[i], .bias_stride = outputs, .relu = 1 - i};
        layers[i].to_weight = numbers(own ? members * all : all), layers[i].to_bias = numbers(members * outputs);
        held[much++] = starts, held[much++] = places, held[much++] = back_starts, held[much++] = back_places, held[much++] = layers[i].to_weight, held[much++] = layers[i].to_bias;
    }
    float *x = numbers((int64_t)members * count * widths[0]), *y = numbers((int64_t)members * count * widths[2]), *to_x = numbers((int64_t)members * count * widths[0]);
    float *memory = kept ? numbers((int64_t)members * ((count + tile - 1) / tile) * tile * (widths[0] + widths[1] + widths[2])) : NULL;
    Rows chain = {.input = x, .output = y, .kept = memory, .layers = layers, .input_member_stride = shared ? 0 : (int64_t)count * widths[0], .members = members, .rows = count, .count = 2};
    plures_rows(plures_kernels("portable"), &chain, 1 + below(3));
    double worst = 0;
    for (int m = 0; m < members; m++)
        for (int r = 0; r < count; r++) {
            const float *from = x + ((shared ? 0 : (int64_t)m * count) + r) * widths[0];
            double hidden[64];
            for (int o = 0; o < widths[1]; o++) {
                double sum = biases[0][m * widths[1] + o];
                for (int k = 0; k < widths[0]; k++) sum += (double)dense[0][((int64_t)m * widths[1] + o) * widths[0] + k] * from[k];
                hidden[o] = sum > 0 ? sum : 0;
            }
            for (int o = 0; o < widths[2]; o++) {
                double sum = biases[1][m * widths[2] + o];
                for (int k = 0; k < widths[1]; k++) sum += (double)dense[1][((int64_t)m * widths[2] + o) * widths[1] + k] * hidden[k];
                worst = fmax(worst, fabs(sum - y[((int64_t)m * count + r) * widths[2] + o]) / 10);
            }
        }
    if (kept) { /* gradients are compared with torch elsewhere: here only what is read and written counts */
        chain.backward = 1, chain.input = NULL, chain.to_input = below(2) ? to_x : NULL;
        plures_rows(plures_kernels("portable"), &chain, 1 + below(3));
    }
    for (int i = 0; i < 2; i++) free(owners[i]), free(weights[i]), free(biases[i]), free(dense[i]);
    for (int i = 0; i < much; i++) free(held[i]);
    free(x), free(y), free(to_x), free(memory);
    return worst;
}

static double gradient(void) {
    const int members = 1 + below(3), blocks = 1 + below(6), channels = 1 + below(20), outputs = 1 + below(10), usual = below(2), shared = below(2);
    const int k = usual ? 3 : 1 + below(4), kw = usual ? 3 : 1 + below(4), taps = k * kw;
    const int stride = usual ? 1 + below(2) : 1 + below(3), padding = usual ? 1 : below(3), all = outputs * channels;
    const int height = k + below(10), width = kw + below(10), out_height = (height + 2 * padding - k) / stride + 1, out_width = (width + 2 * padding - kw) / stride + 1;
    const int64_t map = (int64_t)height * width * LANES, out_map = (int64_t)out_height * out_width * LANES;
    int32_t *starts = malloc(sizeof(int32_t) * members * (channels + 1)), *places = malloc(sizeof(int32_t) * members * all), *rows = malloc(sizeof(int32_t) * members * all);
    int at = 0, list = 0;
    for (int m = 0; m < members; m++, starts[list++] = at)
        for (int c = 0; c < channels; c++) {
            starts[list++] = at;
            for (int o = 0; o < outputs; o++)
                if (below(2)) places[at] = o, rows[at++] = (m * outputs + o) * channels + c;
        }
    places = realloc(places, sizeof(int32_t) * (at ? at : 1)), rows = realloc(rows, sizeof(int32_t) * (at ? at : 1));
    float *x = numbers((shared ? 1 : members) * blocks * channels * map), *given = numbers(members * blocks * outputs * out_map);
    float *to = numbers((int64_t)members * all * taps);
    const KernelGradient layer = {x, given, to, starts, places, rows, shared ? 0 : blocks * channels * map, blocks * outputs * out_map, members, blocks, channels,
                                  height, width, outputs, out_height, out_width, k, kw, stride, stride, padding, padding};
    step(STEP_GRADIENT, &layer, members, 1 + below(3));
    double worst = 0;
    for (int m = 0; m < members; m++)
        for (int c = 0; c < channels; c++)
            for (int i = starts[m * (channels + 1) + c]; i < starts[m * (channels + 1) + c + 1]; i++)
                for (int t = 0; t < taps; t++) {
                    double sum = 0;
                    for (int n = 0; n < blocks; n++)
                        for (int64_t p = 0; p < out_map; p++) {
                            const int lane = p % LANES, y = p / LANES / out_width * stride + t / kw - padding, z = p / LANES % out_width * stride + t % kw - padding;
                            if (y < 0 || y >= height || z < 0 || z >= width) continue;
                            sum += (double)given[((int64_t)(m * blocks + n) * outputs + places[i]) * out_map + p] *
                                   x[((int64_t)((shared ? 0 : m) * blocks + n) * channels + c) * map + ((int64_t)y * width + z) * LANES + lane];
                        }
                    worst = fmax(worst, fabs(to[(int64_t)rows[i] * taps + t] - sum) / 10);
                }
    free(starts), free(places), free(rows), free(x), free(given), free(to);
    return worst;
}

/* Compared with torch elsewhere: here only what is read and written counts. */
static void norm(void) {
    const int64_t blocks = 1 + below(3), channels = 1 + below(5), pixels = (1 + below(9)) * LANES, members = 1 + below(3), all = members * blocks * channels * pixels;
    const int relu = below(2), added = below(2);
    float *a[7], *c[6];
    for (int i = 0; i < 7; i++) a[i] = numbers(all);
    for (int i = 0; i < 6; i++) c[i] = numbers(members * channels);
    Norm layer = {.input = a[0], .residual = added ? a[1] : NULL, .weight = c[0], .bias = c[1], .gradient = a[2], .output = a[3],
                  .mean = c[2], .variance = c[3], .to_residual = relu && added ? a[4] : NULL, .to_input = a[5], .to_weight = c[4],
                  .to_bias = c[5], .members = members, .blocks = blocks, .channels = channels, .pixels = pixels, .to_input_member_stride = below(2) * blocks * channels * pixels, .epsilon = 1e-5, .relu = relu};
    step(STEP_NORM, &layer, members, 1 + below(3));
    layer.backward = 1;
    step(STEP_NORM, &layer, members, 1 + below(3));
    for (int i = 0; i < 7; i++) free(a[i]);
    for (int i = 0; i < 6; i++) free(c[i]);
}

/* Owners and values of a file, in arrays of the very sizes; returns how many entries are wrong. */
static int files(void) {
    const int members = 2 + below(5), rows = 1 + below(30), columns = 1 + below(30), size = 1 + below(40), block = below(2) ? 8 : 1;
    const int owned = (rows + block - 1) / block * columns, per_word = (int)(64 / log2(members));
    const int64_t words = (owned + per_word - 1) / per_word;
    uint64_t *packed = calloc(words, sizeof *packed);
    uint8_t *owners = malloc(owned), *wanted = malloc(owned);
    char *weight = malloc((size_t)rows * columns * size), *values[7];
    const char *ends[512] = {0};
    int64_t held[7] = {0};
    int wrong = 0;
    for (int i = 0; i < owned; i++) wanted[i] = (uint8_t)below(members);
    for (int64_t i = owned - 1; i >= 0; i--) packed[i / per_word] = packed[i / per_word] * members + wanted[i];
    plures_unpack(&(Digits){packed, owners, owned, members, per_word}, 1);
    for (int i = 0; i < owned; i++) wrong += owners[i] != wanted[i];
    for (int i = 0; i < rows * columns; i++) held[owners[i / columns / block * columns + i % columns]]++;
    for (int m = 0; m < members; m++) {
        values[m] = malloc(held[m] * size + 1);
        memset(values[m], m + 1, held[m] * size);
        ends[m] = values[m], ends[256 + m] = values[m] + held[m] * size;
    }
    Placing placing = {owners, weight, ends, rows, columns, size, block};
    wrong += plures_place(&placing) != 1;
    for (int64_t i = 0; i < (int64_t)rows * columns * size; i++) wrong += weight[i] != 1 + owners[i / size / columns / block * columns + i / size % columns];
    const int some = owners[0]; /* one value too few is found, and not read */
    ends[256 + some] -= size;
    wrong += plures_place(&placing) != 0;

    const int count = 1 + below(9);
    Message messages[9];
    for (int i = 0; i < count; i++) {
        const int label = below(64), bytes = below(300);
        char *text = malloc(label + 1);
        uint8_t *data = malloc(bytes ? bytes : 1);
        memset(text, 'x', label), text[label] = 0, memset(data, i, bytes);
        messages[i] = (Message){.label = text, .data = data, .bytes = bytes};
    }
    plures_digests(messages, count, 1 + below(3)); /* what they are is compared with Python's */
    for (int i = 0; i < count; i++) free((void *)messages[i].label), free((void *)messages[i].data);
    for (int m = 0; m < members; m++) free(values[m]);
    free(packed), free(owners), free(wanted), free(weight);
    return wrong;
}

int main(void) {
    double worst = 0;
    int wrong = 0;
    for (int i = 0; i < 300; i++) {
        worst = fmax(worst, convolution(i % 2 ? 1 : i % 4 && LANES == 16 ? 8 : LANES));
        worst = fmax(worst, rows());
        worst = fmax(worst, gradient());
        norm();
        wrong += files();
    }
    printf("%d lanes: 300 random layers; largest difference from plain loops %.1e\n", LANES, worst);
    if (wrong) printf("%d entries of files are wrong\n", wrong);
    return worst > 1e-3 || wrong;
}
