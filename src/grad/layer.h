/* Checks of a layer's description and tensors, for every kind, before anything is written. Messages name the argument,
 * its shape and the expected shape. */
#ifndef TCHI_GRAD_LAYER_H
#define TCHI_GRAD_LAYER_H

#include <stdbool.h>

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

/* The description: kind and options. */
tch_status tchi_check_layer(const tch_layer *layer);

/* One of the two tensors, for a checked layer. */
tch_status tchi_check_layer_input(const tch_context *context, const tch_layer *layer, const tch_tensor *input);
tch_status tchi_check_layer_gradient(const tch_context *context, const tch_layer *layer,
                                     const tch_tensor *output_gradient);

/* All of the above, and that the output gradient fits the input. */
tch_status tchi_check_layer_call(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient);

/* For functions that support LINEAR and CONV only. */
tch_status tchi_check_layer_is_product(const tch_layer *layer, const char *function);

const char *tchi_layer_name(tch_layer_kind kind);

/* LINEAR and CONV: product_layers.c; the other kinds have files of their own. */
bool tchi_layer_is_product(tch_layer_kind kind);

/* Outputs of a convolution along one of its dimensions. */
int64_t tchi_conv_outputs(const tch_layer *layer, int32_t dimension, int64_t size);

/* Columns of a convolution's weight as a matrix, C / groups times the kernel's size. */
int64_t tchi_conv_columns(const tch_layer *layer, int64_t channels);

/* Tensors of the parameters; either may be NULL, and the bias must be for kinds without one. Shapes are the layer's,
 * types that of the output gradient, or float32 for half precision. `written`: no element is stored twice. */
tch_status tchi_check_parameters(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, int64_t samples, bool written,
                                 const tch_tensor *weight, const tch_tensor *bias);

/* One or both of the parts. */
tch_status tchi_check_parts(tch_grad_part parts);

/* One float64 per sample, contiguous. */
tch_status tchi_check_numbers(const tch_context *context, const tch_tensor *numbers, const char *name, int64_t samples);

/* int32 or int64. */
tch_status tchi_check_tokens(const tch_tensor *tokens, const char *name);

/* float32 or float64. */
tch_status tchi_check_wide(const tch_tensor *tensor, const char *name);

/* Reports an unexpected shape. */
tch_status tchi_wrong_shape(const tch_tensor *tensor, const char *name, const char *expected);

#endif
