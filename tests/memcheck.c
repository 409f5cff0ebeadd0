/* Random layers through the native library, each array exactly as long as it must be: AddressSanitizer finds every read or
   write beyond its end, UndefinedBehaviorSanitizer what C does not define. Values are compared with plain loops. `make memcheck`. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "../src/plures/native/owned.h"

const Kernels *plures_kernels(const char *);
int plures_convolution(const Kernels *, const Convolution *, int threads);
int plures_block_linear(const Kernels *, const BlockLinear *, int threads);
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
    const int usual = below(2); /* 3x3 kernels over maps of even size, which may be read where they are */
    const int members = 2 + below(3), images = 1 + below(usual ? 6 : 2), channels = 1 + below(40), outputs = 1 + below(10), k = usual ? 3 : 1 + below(4);
    const int stride = 1 + below(usual ? 2 : 3), padding = usual ? 1 : below(3), whole = usual || below(2), taps = k * k, group = 1 + below(channels);
    int height = usual ? (1 << (1 + below(3))) * stride : 1 + below(12), width = usual ? (below(2) ? height : (1 << below(4)) * stride) : 1 + below(12);
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
    const Convolution layer = {x, added, values, bias, starts, places, y, images * channels * map, (int64_t)height * width, 1,
                               (int64_t)out_height * out_width * lanes, (int64_t)out_width * lanes, lanes, members, images, channels, height, width, outputs,
                               out_height, out_width, k, k, stride, stride, padding, padding, lanes, group, whole, 0};
    plures_convolution(plures_kernels("portable"), &layer, 1 + below(3));
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
                    worst = fmax(worst, fabs(sum - y[place]));
                }
    free(owner), free(starts), free(places), free(values), free(weight), free(x), free(bias), free(added), free(y);
    return worst;
}

static void linear(void) {
    const int members = 2, rows = 1 + below(30), inputs = 1 + below(40), outputs = 1 + below(20), group = 1 + below(inputs);
    const int groups = (inputs + group - 1) / group, blocks = (outputs + 7) / 8;
    int32_t *starts = malloc(sizeof(int32_t) * members * (groups * blocks + 1));
    uint16_t *places = malloc(sizeof(uint16_t) * blocks * inputs);
    int at = 0, list = 0;
    for (int m = 0; m < members; m++, starts[list++] = at)
        for (int g = 0; g < groups; g++)
            for (int b = 0; b < blocks; b++) {
                starts[list++] = at;
                for (int i = g * group; i < inputs && i < (g + 1) * group; i++)
                    if ((i + b) % members == m) places[at++] = (uint16_t)(i - g * group);
            }
    float *values = numbers((int64_t)at * 8), *bias = numbers(members * outputs);
    float *x = numbers((int64_t)members * rows * inputs), *y = numbers((int64_t)members * rows * outputs);
    const BlockLinear layer = {x, values, bias, starts, places, y, (int64_t)rows * inputs, members, rows, inputs, outputs, group, 1};
    plures_block_linear(plures_kernels("portable"), &layer, 1 + below(3));
    free(starts), free(places), free(values), free(bias), free(x), free(y);
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

int main(void) {
    double worst = 0;
    for (int i = 0; i < 300; i++) {
        worst = fmax(worst, convolution(i % 2 ? 1 : LANES));
        linear();
        worst = fmax(worst, gradient());
        norm();
    }
    printf("%d lanes: 300 random layers; largest difference from plain loops %.1e\n", LANES, worst);
    return worst > 1e-3;
}
