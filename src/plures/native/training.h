/* What training needs beyond prediction: gradients of kernels, and norm layers. The plain C interface of the library, as owned.h. */
#ifndef PLURES_TRAINING_H
#define PLURES_TRAINING_H
#include <stdint.h>

/* The gradient of the kernels that the members own. Activations are [member][block of images][channel][row][column][lanes], as in
   owned.h. The outputs of the kernels of one input channel of a member are places[starts[input]] to places[starts[input + 1] - 1], with
   starts as [member][input + 1]; the gradient of each kernel, its taps one after the other, is written to to[rows[k] * taps]. */
typedef struct {
    const float *input, *gradient; /* gradient: of the outputs */
    float *to;
    const int32_t *starts, *places, *rows;
    int64_t input_member_stride, gradient_member_stride; /* in floats; 0 if all members see the same */
    int32_t members, blocks, channels, height, width, outputs, output_height, output_width;
    int32_t kernel_height, kernel_width, stride_y, stride_x, padding_y, padding_x;
} KernelGradient;

/* A batch norm of every member, and the addition of a shortcut and the ReLU that may follow it. Forward, it writes output, mean and
   variance, both [member][channel]. Backward, it reads mean, variance and the gradient of the output, and writes all that is named `to_`.
   If a shortcut was added before a ReLU, it reads the output, too, and writes to `to_residual` what the ReLU lets through. */
typedef struct {
    const float *input, *residual, *weight, *bias, *gradient; /* residual may be NULL */
    float *output, *mean, *variance, *to_residual, *to_input, *to_weight, *to_bias;
    int64_t members, blocks, channels, pixels; /* pixels: rows * columns * lanes */
    int64_t to_input_member_stride;            /* in floats; 0 if what one member has written is read before the next one writes */
    double epsilon;
    int32_t relu, backward;
} Norm;

enum { STEP_CONVOLUTION, STEP_GRADIENT, STEP_NORM }; /* what plures_steps runs */

/* Work is cut into items that do not depend on the number of threads. Bytes of scratch are what each thread needs. */
typedef struct {
    int64_t (*gradient_items)(const KernelGradient *);
    int64_t (*gradient_scratch)(const KernelGradient *);
    void (*gradient_item)(const KernelGradient *, int64_t item, float *scratch);
    void (*norm_item)(const Norm *, int64_t item);
} TrainingKernels;

#endif
