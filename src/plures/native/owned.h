/* What one layer of all members is: the plain C interface of the library. */
#ifndef PLURES_OWNED_H
#define PLURES_OWNED_H
#include <stdint.h>
#include "training.h"

#define PLURES_INTERFACE 11 /* raised with every change of the structures or functions below */

/* A convolution of all members. Activations are [member][image block][channel][row][column][lanes]: `lanes` images lie
   side by side, or one where the pixels of one image fill the vectors; half of 16 lanes, where two tiles do. The kernels that a member owns stand in lists, one
   per (member, group of input channels, output channel), one list after the other:
   `starts`, [member][lists of the member + 1], says where each begins and the last one ends, `places` which input channel of the group (whole kernels) or which tap of which input
   channel (single weights: channel * taps + tap) an entry multiplies, `values` by what. */
typedef struct {
    const float *input, *residual, *values, *bias; /* residual may be NULL; bias is [member][output channel] */
    const int32_t *starts;
    const uint16_t *places;
    float *output;
    int64_t input_member_stride; /* in floats; 0 where all members see the same input */
    int64_t output_channel_stride, output_row_stride, output_pixel_stride; /* of output and residual, in floats; usual if lanes is 1 */
    int32_t members, images, channels, height, width, outputs, output_height, output_width;
    int32_t kernel_height, kernel_width, stride_y, stride_x, padding_y, padding_x;
    int32_t lanes, group, whole, relu; /* relu: 0 is none, 1 a ReLU, 6 one that ends at 6 (ReLU6) */
} Convolution;

/* The weights of a linear layer that the members own, one list per (member, group of inputs, output), as above: `places` are inputs of the
   group, and weights lie where strides say (in floats). With `each` 8, a list is of a block of eight outputs, and `weight` has eight numbers for
   each entry, in the order of the lists. Owners are [output][input]; NULL if each member has a weight of its own, and with blocks. */
typedef struct {
    const float *weight;
    const uint8_t *owners;
    const int32_t *starts;
    const uint16_t *places;
    int64_t starts_stride; /* from one member to the next */
    int64_t member_stride, output_stride, input_stride;
    int32_t inputs, outputs, group, each;
} Lists;

/* A linear layer of all members. For training, `backward` has the same weights in lists per input; gradients are written where the weights
   and biases lie, to `to_weight` and `to_bias`. These may be NULL, and so may be the bias, [member][output]. */
typedef struct {
    Lists forward, backward;
    const float *bias;
    float *to_weight, *to_bias;
    int64_t bias_stride;
    int32_t relu;
} Linear;

/* A chain of linear layers over rows, [member][row][input] to [member][row][output]. For training, what goes in and out of the layers is kept,
   turned; on the way back, `output` is read as the gradient of the outputs, and that of the inputs is written to `to_input`, which may be NULL. */
typedef struct {
    const float *input;
    float *output, *kept, *to_input;
    const Linear *layers;
    const int32_t *ids;          /* of the members, in owners and weights of their own; NULL if they are 0, 1, ... */
    int64_t input_member_stride; /* in floats; 0 if all members see the same input */
    int32_t members, rows, count, backward;
} Rows;

/* Images into the lanes of vectors and back: plain is [image][channel][row][column] with any strides (in floats). */
typedef struct {
    float *plain, *blocked;
    int64_t image_stride, channel_stride, row_stride, column_stride;
    int32_t images, channels, height, width, lanes;
} Blocking;

/* output = relu(input * factor + shift), factors per member and channel; layout and relu as those of a convolution. */
typedef struct {
    const float *input, *factor, *shift;
    float *output;
    int64_t input_member_stride;
    int32_t members, images, channels, pixels; /* pixels: rows * columns * lanes */
    int32_t relu;
} Affine;

/* Digits of a base from 2 to 256, `per_word` in each word, the lowest first; the last word may have fewer. */
typedef struct {
    const uint64_t *words;
    uint8_t *digits;
    int64_t count;
    int32_t base, per_word;
} Digits;

/* The entries of a weight, [row][column], of `size` bytes each, from what each owner has in order: from values[owner] to values[256 + owner].
   `block` rows share their owners, [rows / block, rounded up][column]. */
typedef struct {
    const uint8_t *owners;
    char *weight;
    const char *const *values;
    int64_t rows, columns, size;
    int32_t block;
} Placing;

/* What a checksum is of: a text of at most 63 bytes, and the bytes of a tensor. */
typedef struct {
    const char *label;
    const uint8_t *data;
    int64_t bytes;
    uint8_t digest[32];
} Message;

/* One build of the kernels. Work is cut into items that do not depend on the number of threads. */
typedef struct {
    int32_t lanes;
    const char *instructions;
    int64_t (*convolution_items)(const Convolution *, int threads);
    int64_t (*convolution_scratch)(const Convolution *); /* bytes that each thread needs */
    void (*convolution_item)(const Convolution *, int threads, int64_t item, void *scratch);
    int (*joins_halves)(const Convolution *); /* lanes are half of these, and two tiles of images fill a vector */
    int64_t (*rows_items)(const Rows *);
    int64_t (*rows_scratch)(const Rows *);
    void (*rows_item)(const Rows *, int64_t item, float *scratch);
    const TrainingKernels *training;
} Kernels;

#endif
