/* Checks of layers. A new kind is a row in `kinds`, its shapes in check_shapes, and the shapes of its parameters at the
 * end. */
#include "layer.h"

#include <math.h>
#include <stdio.h>

#include "core/check.h"
#include "core/status.h"

#include "linalg/algebra.h"

static const struct {
    const char *name;
    bool product, bias;
} kinds[TCH_LAYER_COUNT] = {
    [TCH_LAYER_LINEAR] = {"LINEAR", true, true},         [TCH_LAYER_CONV] = {"CONV", true, true},
    [TCH_LAYER_EMBEDDING] = {"EMBEDDING", false, false}, [TCH_LAYER_LAYER_NORM] = {"LAYER_NORM", false, true},
    [TCH_LAYER_RMS_NORM] = {"RMS_NORM", false, false},   [TCH_LAYER_GROUP_NORM] = {"GROUP_NORM", false, true},
};

const char *tchi_layer_name(tch_layer_kind kind)
{
    return kinds[kind].name;
}

bool tchi_layer_is_product(tch_layer_kind kind)
{
    return kinds[kind].product;
}

tch_status tchi_check_layer_is_product(const tch_layer *layer, const char *function)
{
    if (kinds[layer->kind].product) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_UNSUPPORTED, "%s: layer is of kind %s, expected LINEAR or CONV", function,
                     kinds[layer->kind].name);
}

/* --- the description --------------------------------------------------------------------------------------------- */

static tch_status check_option(const char *name, int32_t dimension, int64_t value, int64_t least)
{
    if (value >= least && value <= TCHI_MOST_SIZE) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: %s[%d] is %lld, expected %lld to %d", name, dimension,
                     (long long)value, (long long)least, TCHI_MOST_SIZE);
}

static tch_status check_conv_options(const tch_layer *layer)
{
    if (layer->dims < 1 || layer->dims > 3) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: dims is %d, expected 1 to 3", layer->dims);
    }
    if ((int)layer->padding < 0 || layer->padding >= TCH_PADDING_COUNT) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: padding is %d, expected one of tch_padding",
                         (int)layer->padding);
    }
    for (int32_t i = 0; i < layer->dims; i++) {
        TCHI_TRY(check_option("kernel", i, layer->kernel[i], 1));
        TCHI_TRY(check_option("stride", i, layer->stride[i], 1));
        TCHI_TRY(check_option("dilation", i, layer->dilation[i], 1));
        TCHI_TRY(check_option("before", i, layer->before[i], 0));
        TCHI_TRY(check_option("after", i, layer->after[i], 0));
    }
    return TCH_OK;
}

static tch_status check_groups(const tch_layer *layer)
{
    if (layer->groups >= 1) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: groups is %lld, expected 1 or more", (long long)layer->groups);
}

static tch_status check_embedding_options(const tch_layer *layer)
{
    if (layer->rows < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: rows is %lld, expected 0 or more", (long long)layer->rows);
    }
    if (layer->padding_index < -1 || layer->padding_index >= layer->rows) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: padding_index is %lld, expected -1 (none) to %lld",
                         (long long)layer->padding_index, (long long)layer->rows - 1);
    }
    return TCH_OK;
}

static tch_status check_normalizing_options(const tch_layer *layer)
{
    if (layer->kind != TCH_LAYER_GROUP_NORM && (layer->normalized < 1 || layer->normalized > TCH_MAX_RANK - 1)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: normalized is %d, expected 1 to %d", layer->normalized,
                         TCH_MAX_RANK - 1);
    }
    if (!isfinite(layer->eps) || layer->eps < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: eps is %g, expected a finite number, 0 or more", layer->eps);
    }
    return layer->kind == TCH_LAYER_GROUP_NORM ? check_groups(layer) : TCH_OK;
}

tch_status tchi_check_layer(const tch_layer *layer)
{
    if (layer == NULL || layer->struct_size != sizeof *layer) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer must point to a struct set to TCH_LAYER_INIT");
    }
    if ((int)layer->kind < 0 || layer->kind >= TCH_LAYER_COUNT) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: kind is %d, expected one of tch_layer_kind",
                         (int)layer->kind);
    }
    if (!isfinite(layer->scale)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer: scale is %g, expected a finite number", layer->scale);
    }
    switch (layer->kind) {
    case TCH_LAYER_LINEAR:
        return TCH_OK;
    case TCH_LAYER_CONV:
        TCHI_TRY(check_groups(layer));
        return check_conv_options(layer);
    case TCH_LAYER_EMBEDDING:
        return check_embedding_options(layer);
    default:
        return check_normalizing_options(layer);
    }
}

/* --- one tensor by itself ---------------------------------------------------------------------------------------- */

tch_status tchi_wrong_shape(const tch_tensor *tensor, const char *name, const char *expected)
{
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected %s", name,
                     tchi_describe_shape(tensor, text, sizeof text), expected);
}

/* The rank, reported as the shape of the kind. */
static tch_status check_rank(const tch_layer *layer, const tch_tensor *tensor, const char *name)
{
    static const char *const conv[] = {"[B, channels, size]", "[B, channels, size, size]",
                                       "[B, channels, size, size, size]"};
    switch (layer->kind) {
    case TCH_LAYER_LINEAR:
        return tensor->ndim >= 2 ? TCH_OK : tchi_wrong_shape(tensor, name, "[B, ..., features]");
    case TCH_LAYER_CONV:
        return tensor->ndim == layer->dims + 2 ? TCH_OK : tchi_wrong_shape(tensor, name, conv[layer->dims - 1]);
    case TCH_LAYER_GROUP_NORM:
        return tensor->ndim >= 2 ? TCH_OK : tchi_wrong_shape(tensor, name, "[B, channels, ...]");
    case TCH_LAYER_EMBEDDING:
        return tensor->ndim >= 1 ? TCH_OK : tchi_wrong_shape(tensor, name, "[B, ...]");
    default:
        break;
    }
    if (tensor->ndim > layer->normalized) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected samples and %d normalized dimensions", name,
                     tchi_describe_shape(tensor, text, sizeof text), layer->normalized);
}

/* Checks that channels divide into groups. */
static tch_status check_channels(const tch_layer *layer, const tch_tensor *tensor, const char *name)
{
    bool grouped = layer->kind == TCH_LAYER_CONV || layer->kind == TCH_LAYER_GROUP_NORM;
    if (!grouped || tensor->shape[1] % layer->groups == 0) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s: its %lld channels do not divide into %lld groups", name,
                     tchi_describe_shape(tensor, text, sizeof text), (long long)tensor->shape[1],
                     (long long)layer->groups);
}

/* Whether the padding mode's source lies inside an input of this size. */
static bool padding_fits(const tch_layer *layer, int32_t i, int64_t size)
{
    int64_t most = layer->before[i] > layer->after[i] ? layer->before[i] : layer->after[i];
    switch (layer->padding) {
    case TCH_PADDING_REFLECT:
        return most < size || most == 0;
    case TCH_PADDING_REPLICATE:
        return size > 0 || most == 0;
    case TCH_PADDING_CIRCULAR:
        return most <= size;
    default:
        return true;
    }
}

int64_t tchi_conv_outputs(const tch_layer *layer, int32_t dimension, int64_t size)
{
    int64_t reach = layer->dilation[dimension] * (layer->kernel[dimension] - 1) + 1;
    int64_t padded = size + layer->before[dimension] + layer->after[dimension];
    return padded < reach ? 0 : (padded - reach) / layer->stride[dimension] + 1;
}

int64_t tchi_conv_columns(const tch_layer *layer, int64_t channels)
{
    int64_t columns = channels / layer->groups;
    for (int32_t i = 0; i < layer->dims; i++) {
        if (__builtin_mul_overflow(columns, layer->kernel[i], &columns)) {
            return INT64_MAX;
        }
    }
    return columns;
}

static tch_status check_conv_input(const tch_layer *layer, const tch_tensor *input)
{
    char text[TCHI_DESCRIBE_SIZE];
    for (int32_t i = 0; i < layer->dims; i++) {
        int64_t size = input->shape[2 + i];
        if (size > TCHI_MOST_SIZE || !padding_fits(layer, i, size)) {
            return tchi_fail(
                TCH_ERR_SHAPE,
                "input has shape %s: padding %lld + %lld of kind %d does not fit size %lld of dimension %d",
                tchi_describe_shape(input, text, sizeof text), (long long)layer->before[i], (long long)layer->after[i],
                (int)layer->padding, (long long)size, 2 + i);
        }
        if (tchi_conv_outputs(layer, i, size) == 0) {
            return tchi_fail(TCH_ERR_SHAPE,
                             "input has shape %s: with padding %lld + %lld dimension %d is shorter than kernel %lld of "
                             "dilation %lld",
                             tchi_describe_shape(input, text, sizeof text), (long long)layer->before[i],
                             (long long)layer->after[i], 2 + i, (long long)layer->kernel[i],
                             (long long)layer->dilation[i]);
        }
    }
    if (tchi_conv_columns(layer, input->shape[1]) > TCHI_MOST_SIZE) {
        return tchi_fail(TCH_ERR_SHAPE, "input has shape %s: channels times the kernel's size are more than %d",
                         tchi_describe_shape(input, text, sizeof text), TCHI_MOST_SIZE);
    }
    return TCH_OK;
}

/* Positions, and features or channels, are rows and columns of matrices below. */
static tch_status check_sizes(const tch_layer *layer, const tch_tensor *tensor, const char *name)
{
    bool channels_first = layer->kind == TCH_LAYER_CONV || layer->kind == TCH_LAYER_GROUP_NORM;
    int32_t last = tensor->ndim - 1;
    int64_t columns = channels_first ? tensor->shape[1] : tensor->shape[last];
    int64_t positions =
        channels_first ? tchi_tensor_count(tensor, 2, tensor->ndim) : tchi_tensor_count(tensor, 1, last);
    if (columns <= TCHI_MOST_SIZE && positions <= TCHI_MOST_SIZE) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s: one sample can have at most %d positions and columns", name,
                     tchi_describe_shape(tensor, text, sizeof text), TCHI_MOST_SIZE);
}

tch_status tchi_check_tokens(const tch_tensor *tokens, const char *name)
{
    tch_scalar type = tchi_scalar_of(tokens->dtype);
    return type == TCH_SCALAR_I32 || type == TCH_SCALAR_I64
               ? TCH_OK
               : tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected int32 or int64", name, tch_dtype_name(tokens->dtype));
}

tch_status tchi_check_wide(const tch_tensor *tensor, const char *name)
{
    tch_scalar type = tchi_scalar_of(tensor->dtype);
    return type == TCH_SCALAR_F32 || type == TCH_SCALAR_F64
               ? TCH_OK
               : tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected float32 or float64", name, tch_dtype_name(tensor->dtype));
}

tch_status tchi_check_layer_input(const tch_context *context, const tch_layer *layer, const tch_tensor *input)
{
    TCHI_TRY(tchi_check_input(context, input, "input"));
    TCHI_TRY(check_rank(layer, input, "input"));
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return tchi_check_tokens(input, "input");
    }
    TCHI_TRY(tchi_check_float(input, "input"));
    TCHI_TRY(check_channels(layer, input, "input"));
    TCHI_TRY(check_sizes(layer, input, "input"));
    return layer->kind == TCH_LAYER_CONV ? check_conv_input(layer, input) : TCH_OK;
}

tch_status tchi_check_layer_gradient(const tch_context *context, const tch_layer *layer,
                                     const tch_tensor *output_gradient)
{
    TCHI_TRY(tchi_check_input(context, output_gradient, "output_gradient"));
    if (layer->kind == TCH_LAYER_EMBEDDING && output_gradient->ndim < 2) {
        return tchi_wrong_shape(output_gradient, "output_gradient", "[B, ..., features]");
    }
    TCHI_TRY(check_rank(layer, output_gradient, "output_gradient"));
    TCHI_TRY(tchi_check_float(output_gradient, "output_gradient"));
    TCHI_TRY(check_channels(layer, output_gradient, "output_gradient"));
    return check_sizes(layer, output_gradient, "output_gradient");
}

/* --- the two together -------------------------------------------------------------------------------------------- */

typedef struct layer_shape {
    int32_t rank;
    int64_t sizes[TCH_MAX_RANK];
} layer_shape;

/* The shape of the output gradient where the input determines it; -1 for any size. */
static layer_shape output_shape(const tch_layer *layer, const tch_tensor *input)
{
    layer_shape shape = {.rank = input->ndim};
    for (int32_t i = 0; i < input->ndim; i++) {
        shape.sizes[i] = input->shape[i];
    }
    if (layer->kind == TCH_LAYER_LINEAR) {
        shape.sizes[shape.rank - 1] = -1;
    } else if (layer->kind == TCH_LAYER_EMBEDDING) {
        shape.rank++; /* no tensor has a size that overflows */
        shape.sizes[(shape.rank - 1) % TCH_MAX_RANK] = -1;
    } else if (layer->kind == TCH_LAYER_CONV) {
        shape.sizes[1] = -1;
        for (int32_t i = 0; i < layer->dims; i++) {
            shape.sizes[2 + i] = tchi_conv_outputs(layer, i, input->shape[2 + i]);
        }
    }
    return shape;
}

static void describe_expected(const layer_shape *shape, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < shape->rank && i < TCH_MAX_RANK && used < size; i++) {
        const char *comma = i > 0 ? ", " : "";
        used += (size_t)(shape->sizes[i] < 0
                             ? snprintf(text + used, size - used, "%sany", comma)
                             : snprintf(text + used, size - used, "%s%lld", comma, (long long)shape->sizes[i]));
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
}

static tch_status check_output_gradient_shape(const tch_layer *layer, const tch_tensor *input,
                                              const tch_tensor *output_gradient)
{
    layer_shape shape = output_shape(layer, input);
    bool same = shape.rank == output_gradient->ndim;
    for (int32_t i = 0; same && i < shape.rank; i++) {
        same = shape.sizes[i] < 0 || shape.sizes[i] == output_gradient->shape[i];
    }
    if (same) {
        return TCH_OK;
    }
    char have[TCHI_DESCRIBE_SIZE];
    char want[TCHI_DESCRIBE_SIZE];
    char from[TCHI_DESCRIBE_SIZE];
    describe_expected(&shape, want, sizeof want);
    return tchi_fail(TCH_ERR_SHAPE, "output_gradient has shape %s, expected %s: the output of a %s layer for input %s",
                     tchi_describe_shape(output_gradient, have, sizeof have), want, kinds[layer->kind].name,
                     tchi_describe_shape(input, from, sizeof from));
}

tch_status tchi_check_layer_call(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient)
{
    TCHI_TRY(tchi_check_layer(layer));
    TCHI_TRY(tchi_check_layer_input(context, layer, input));
    TCHI_TRY(tchi_check_layer_gradient(context, layer, output_gradient));
    if (layer->kind != TCH_LAYER_EMBEDDING) {
        TCHI_TRY(tchi_check_same_dtype(output_gradient, "output_gradient", input, "input"));
    }
    return check_output_gradient_shape(layer, input, output_gradient);
}

/* --- parameters -------------------------------------------------------------------------------------------------- */

static void add_size(layer_shape *shape, int64_t size)
{
    shape->sizes[shape->rank++] = size;
}

/* `samples` >= 0: that many, one per sample. */
static layer_shape begin_shape(int64_t samples)
{
    layer_shape shape = {0};
    if (samples >= 0) {
        add_size(&shape, samples);
    }
    return shape;
}

static layer_shape weight_shape(const tch_layer *layer, const tch_tensor *input, const tch_tensor *output_gradient,
                                int64_t samples)
{
    layer_shape shape = begin_shape(samples);
    switch (layer->kind) {
    case TCH_LAYER_LINEAR:
        add_size(&shape, output_gradient->shape[output_gradient->ndim - 1]);
        add_size(&shape, input->shape[input->ndim - 1]);
        break;
    case TCH_LAYER_CONV:
        add_size(&shape, output_gradient->shape[1]);
        add_size(&shape, input->shape[1] / layer->groups);
        for (int32_t i = 0; i < layer->dims; i++) {
            add_size(&shape, layer->kernel[i]);
        }
        break;
    case TCH_LAYER_EMBEDDING:
        add_size(&shape, layer->rows);
        add_size(&shape, output_gradient->shape[output_gradient->ndim - 1]);
        break;
    case TCH_LAYER_GROUP_NORM:
        add_size(&shape, input->shape[1]);
        break;
    default:
        for (int32_t i = input->ndim - layer->normalized; i < input->ndim; i++) {
            add_size(&shape, input->shape[i]);
        }
    }
    return shape;
}

static layer_shape bias_shape(const tch_layer *layer, const tch_tensor *input, const tch_tensor *output_gradient,
                              int64_t samples)
{
    if (!tchi_layer_is_product(layer->kind)) {
        return weight_shape(layer, input, output_gradient, samples);
    }
    layer_shape shape = begin_shape(samples);
    bool conv = layer->kind == TCH_LAYER_CONV;
    add_size(&shape, output_gradient->shape[conv ? 1 : output_gradient->ndim - 1]);
    return shape;
}

static tch_status check_parameter(const tch_context *context, const tch_tensor *tensor, const char *name,
                                  const layer_shape *shape, bool written, const tch_tensor *output_gradient)
{
    tch_scalar type = tchi_scalar_of(output_gradient->dtype);
    bool half = type == TCH_SCALAR_F16 || type == TCH_SCALAR_BF16;
    TCHI_TRY(written ? tchi_check_output(context, tensor, name) : tchi_check_input(context, tensor, name));
    if (!tch_dtype_equal(tensor->dtype, output_gradient->dtype) &&
        !(half && tchi_scalar_of(tensor->dtype) == TCH_SCALAR_F32)) {
        return tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected %s%s as output_gradient is", name,
                         tch_dtype_name(tensor->dtype), half ? "float32 or " : "",
                         tch_dtype_name(output_gradient->dtype));
    }
    return tchi_check_shape(tensor, name, shape->rank, shape->sizes);
}

tch_status tchi_check_parameters(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, int64_t samples, bool written,
                                 const tch_tensor *weight, const tch_tensor *bias)
{
    if (weight != NULL) {
        layer_shape shape = weight_shape(layer, input, output_gradient, samples);
        TCHI_TRY(check_parameter(context, weight, "weight", &shape, written, output_gradient));
    }
    if (bias == NULL) {
        return TCH_OK;
    }
    if (!kinds[layer->kind].bias) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "bias is given, but a layer of kind %s has none: expected NULL",
                         kinds[layer->kind].name);
    }
    layer_shape shape = bias_shape(layer, input, output_gradient, samples);
    return check_parameter(context, bias, "bias", &shape, written, output_gradient);
}

tch_status tchi_check_parts(tch_grad_part parts)
{
    if ((int)parts >= TCH_GRAD_WEIGHT && (int)parts <= TCH_GRAD_BOTH) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "parts is %d, expected one of tch_grad_part", (int)parts);
}

tch_status tchi_check_numbers(const tch_context *context, const tch_tensor *numbers, const char *name, int64_t samples)
{
    TCHI_TRY(tchi_check_input(context, numbers, name));
    TCHI_TRY(tchi_check_dtype(numbers, name, TCH_FLOAT64));
    TCHI_TRY(tchi_check_shape(numbers, name, 1, &samples));
    if (samples > 1 && tchi_tensor_stride(numbers, 0) != 1) {
        return tchi_fail(TCH_ERR_LAYOUT, "%s has a stride of %lld, expected its %lld numbers to be contiguous", name,
                         (long long)tchi_tensor_stride(numbers, 0), (long long)samples);
    }
    return TCH_OK;
}
