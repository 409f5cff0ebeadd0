/* What training needs of one layer: the plain C interface of the library, as owned.h is for prediction. */
#ifndef PLURES_TRAINING_H
#define PLURES_TRAINING_H
#include <stdint.h>

/* Activations or their gradients, [block of images][channel][row][column][lanes]: `lanes` images lie side by side. */
typedef struct {
    float *values;
    int32_t channels, height, width;
} Maps;

/* A convolution that has some of its kernels. The inputs of those of an output are places[starts[output]] to
   places[starts[output + 1] - 1]. A kernel lies at weight + output * output_stride + input * input_stride, its taps one after
   the other; `flipped`, it is read from its end, as the gradient of the inputs needs it. The gradient of the kernels is
   written to `weight`; it is made of the inputs and of the gradient of the outputs, which stands in `output`. */
typedef struct {
    Maps input, output;
    float *weight;
    const float *bias; /* may be NULL */
    const int32_t *starts, *places;
    int64_t output_stride, input_stride; /* in floats */
    int32_t blocks, kernel_height, kernel_width, stride, padding_y, padding_x, flipped;
} MaskedConvolution;

/* A batch norm, and the addition of a shortcut and the ReLU that may follow it. Forward, it writes output, mean and
   variance. Backward, it reads them and the gradient of the output, and writes all that is named `to_`; `to_residual`, what the
   ReLU lets through, is needed where there is a ReLU. */
typedef struct {
    const float *input, *residual, *weight, *bias, *gradient; /* residual may be NULL */
    float *output, *mean, *variance, *to_residual, *to_input, *to_weight, *to_bias;
    int64_t blocks, channels, pixels; /* pixels: rows * columns * lanes */
    double epsilon;
    int32_t relu, backward;
} Norm;

/* Bytes of scratch are what each thread needs. The gradient of kernels is cut into as many items as are asked for. */
typedef struct {
    int64_t (*sums_items)(const MaskedConvolution *);
    int64_t (*sums_scratch)(const MaskedConvolution *);
    void (*sums_item)(const MaskedConvolution *, int64_t item, float *scratch);
    int64_t (*gradient_scratch)(const MaskedConvolution *);
    void (*gradient_item)(const MaskedConvolution *, int64_t items, int64_t item, float *scratch);
    void (*norm_item)(const Norm *, int64_t channel);
} TrainingKernels;

#endif
