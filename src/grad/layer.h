/* What the functions of grad.h ask of a layer's description and of the tensors that come with it, for every kind. All
 * of it is checked before anything is written; messages name the argument, its shape, and the shape it should have. */
#ifndef TCHI_GRAD_LAYER_H
#define TCHI_GRAD_LAYER_H

#include <stdbool.h>

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

/* The description by itself: kind and options. */
tch_status tchi_check_layer(const tch_layer *layer);

/* One of the two tensors by itself, the layer having been checked. */
tch_status tchi_check_layer_input(const tch_context *context, const tch_layer *layer, const tch_tensor *input);
tch_status tchi_check_layer_gradient(const tch_context *context, const tch_layer *layer,
                                     const tch_tensor *output_gradient);

/* All of the above, and that the output gradient is one of this layer for this input. */
tch_status tchi_check_layer_call(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient);

/* Only LINEAR and CONV, for functions that know no other. */
tch_status tchi_check_layer_is_product(const tch_layer *layer, const char *function);

const char *tchi_layer_name(tch_layer_kind kind);

/* LINEAR and CONV: product_layers.c; the other kinds have files of their own. */
bool tchi_layer_is_product(tch_layer_kind kind);

/* Outputs of a convolution along one of its dimensions. */
int64_t tchi_conv_outputs(const tch_layer *layer, int32_t dimension, int64_t size);

/* Columns of a convolution's weight as a matrix, C / groups times the kernel's size. */
int64_t tchi_conv_columns(const tch_layer *layer, int64_t channels);

/* The tensors of the parameters, either of which may be NULL, and the bias must be where the kind has none: shapes of
 * the layer, types that of the output gradient, or float32 where that is a half type. `written`: no element is stored
 * twice. */
tch_status tchi_check_parameters(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, int64_t samples, bool written,
                                 const tch_tensor *weight, const tch_tensor *bias);

/* One or both of the parts. */
tch_status tchi_check_parts(tch_grad_part parts);

/* One float64 for each sample, one after the other. */
tch_status tchi_check_numbers(const tch_context *context, const tch_tensor *numbers, const char *name, int64_t samples);

/* int32 or int64. */
tch_status tchi_check_tokens(const tch_tensor *tokens, const char *name);

/* float32 or float64. */
tch_status tchi_check_wide(const tch_tensor *tensor, const char *name);

/* Says that a tensor has another shape than expected. */
tch_status tchi_wrong_shape(const tch_tensor *tensor, const char *name, const char *expected);

#endif
