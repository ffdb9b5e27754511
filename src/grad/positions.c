/* Sides of LINEAR and CONV layers. `in_place` decides whether memory is used directly; scratch is contiguous: samples,
 * groups, positions, columns. */
#include "positions.h"

#include "core/status.h"

#include "layer.h"

#include "linalg/batch.h"

static tchi_side features_last(const tch_tensor *tensor)
{
    int32_t last = tensor->ndim - 1;
    tchi_side side = {.type = tchi_scalar_of(tensor->dtype), .samples = tensor->shape[0], .groups = 1};
    side.cols = tensor->shape[last];
    side.data = tchi_tensor_data(tensor);
    side.sample_stride = tchi_tensor_stride(tensor, 0);
    side.col_stride = tchi_tensor_stride(tensor, last);
    side.positions = tchi_merge_dimensions(tensor, 1, last, &side.rank, side.sizes, side.strides);
    return side;
}

static tchi_side channels_second(const tch_tensor *tensor, int64_t groups)
{
    tchi_side side = {.type = tchi_scalar_of(tensor->dtype), .samples = tensor->shape[0], .groups = groups};
    side.cols = tensor->shape[1] / groups;
    side.data = tchi_tensor_data(tensor);
    side.sample_stride = tchi_tensor_stride(tensor, 0);
    side.col_stride = tchi_tensor_stride(tensor, 1);
    side.group_stride = side.cols * side.col_stride;
    side.positions = tchi_merge_dimensions(tensor, 2, tensor->ndim, &side.rank, side.sizes, side.strides);
    return side;
}

/* Missing dimensions come first, with size 1. */
static tch_patches patches_of(const tch_layer *layer, const tch_tensor *input)
{
    tch_patches p = {.data = tchi_tensor_data(input), .type = tchi_scalar_of(input->dtype), .padding = layer->padding};
    p.samples = input->shape[0];
    p.groups = layer->groups;
    p.channels = input->shape[1] / layer->groups;
    p.strides[0] = tchi_tensor_stride(input, 0);
    p.strides[1] = tchi_tensor_stride(input, 1);
    for (int32_t k = 0; k < 3; k++) {
        int32_t i = k - (3 - layer->dims);
        bool there = i >= 0;
        p.size[k] = there ? input->shape[2 + i] : 1;
        p.strides[2 + k] = there ? tchi_tensor_stride(input, 2 + i) : 0;
        p.kernel[k] = there ? layer->kernel[i] : 1;
        p.stride[k] = there ? layer->stride[i] : 1;
        p.dilation[k] = there ? layer->dilation[i] : 1;
        p.before[k] = there ? layer->before[i] : 0;
        p.outputs[k] = there ? tchi_conv_outputs(layer, i, input->shape[2 + i]) : 1;
    }
    return p;
}

tchi_side tchi_input_side(const tch_layer *layer, const tch_tensor *input)
{
    if (layer->kind == TCH_LAYER_LINEAR) {
        return features_last(input);
    }
    tchi_side side = {.type = tchi_scalar_of(input->dtype), .samples = input->shape[0], .groups = layer->groups};
    side.patched = true;
    side.patches = patches_of(layer, input);
    side.positions = side.patches.outputs[0] * side.patches.outputs[1] * side.patches.outputs[2];
    side.cols = tchi_conv_columns(layer, input->shape[1]);
    return side;
}

tchi_side tchi_gradient_side(const tch_layer *layer, const tch_tensor *output_gradient)
{
    return layer->kind == TCH_LAYER_LINEAR ? features_last(output_gradient)
                                           : channels_second(output_gradient, layer->groups);
}

/* --- the caller's memory, or scratch ----------------------------------------------------------------------------- */

/* Row stride of a matrix, which may have a single row. */
static int64_t row_stride(const tchi_side *side)
{
    return side->positions > 1 ? side->strides[0] : side->cols > 0 ? side->cols : 1;
}

bool tchi_side_in_place(const tchi_side *side, tchi_arrangement arrangement)
{
    bool rows_lie_apart =
        (side->col_stride == 1 || side->cols <= 1) && side->rank == 1 && row_stride(side) >= side->cols;
    bool groups_fit = side->groups == 1 || side->sample_stride == side->groups * side->group_stride;
    bool samples_follow = side->sample_stride >= 0 && (groups_fit || side->samples <= 1);
    if (side->patched || !rows_lie_apart || !samples_follow) {
        return false;
    }
    if (arrangement == TCHI_APART || side->samples <= 1) {
        return true;
    }
    return side->positions == 1 ? side->sample_stride >= side->cols
                                : side->sample_stride == side->positions * side->strides[0];
}

tch_matrices tchi_side_place(const tchi_side *side, tchi_arena *arena, int64_t first, int64_t count,
                             tchi_arrangement arrangement)
{
    int64_t batch = count * side->groups;
    if (!tchi_side_in_place(side, arrangement)) {
        return tchi_scratch_matrices(arena, side->type, batch, side->positions, side->cols);
    }
    int64_t stride = side->groups > 1 ? side->group_stride : side->sample_stride;
    char *start = (char *)side->data + first * side->sample_stride * tchi_scalar_size(side->type);
    return (tch_matrices){
        start, side->type, side->positions, side->cols, row_stride(side), batch, batch > 1 ? stride : 0};
}

/* Copies with all dimensions of the side: samples, groups if any, positions, columns. */
static tch_status read_strided(tch_context *context, const tchi_side *side, char *start, const tch_matrices *m)
{
    int64_t shape[TCH_MAX_RANK + 1];
    int64_t theirs[TCH_MAX_RANK + 1];
    int64_t ours[TCH_MAX_RANK + 1];
    int32_t rank = TCH_MAX_RANK; /* filled from the last dimension */
    shape[rank] = side->cols;
    theirs[rank] = side->col_stride;
    ours[rank--] = 1;
    int64_t step = m->ld;
    for (int32_t i = side->rank - 1; i >= 0; i--) {
        shape[rank] = side->sizes[i];
        theirs[rank] = side->strides[i];
        ours[rank--] = step;
        step *= side->sizes[i];
    }
    if (side->groups > 1) {
        shape[rank] = side->groups;
        theirs[rank] = side->group_stride;
        ours[rank--] = m->stride;
    }
    shape[rank] = m->batch / side->groups;
    theirs[rank] = side->sample_stride;
    ours[rank] = side->groups * m->stride;
    tch_array source = {start, side->type, TCH_MAX_RANK + 1 - rank, shape + rank, theirs + rank};
    tch_array target = {m->data, m->type, TCH_MAX_RANK + 1 - rank, shape + rank, ours + rank};
    return context->backend->matrix->copy(context->state, &target, &source);
}

tch_status tchi_side_read(tch_context *context, const tchi_side *side, int64_t first, const tch_matrices *m)
{
    if (m->batch == 0 || side->positions == 0 || side->cols == 0) {
        return TCH_OK;
    }
    if (side->patched) {
        tch_patches p = side->patches;
        p.samples = m->batch / side->groups;
        p.data = (const char *)p.data + first * p.strides[0] * tchi_scalar_size(p.type);
        return context->backend->sample->im2col(context->state, &p, m);
    }
    char *start = (char *)side->data + first * side->sample_stride * tchi_scalar_size(side->type);
    return m->data == start ? TCH_OK : read_strided(context, side, start, m);
}

tch_matrices tchi_tall(const tch_matrices *m)
{
    tch_matrices tall = *m;
    if (m->batch != 1) {
        tall.rows = m->batch * m->rows;
        tall.ld = m->rows == 1 ? m->stride : m->ld;
        tall.batch = 1;
        tall.stride = 0;
    }
    return tall;
}

tch_matrices tchi_flat(const tch_matrices *m, int64_t count)
{
    int64_t cols = count > 0 ? m->batch / count * m->rows * m->cols : 0;
    return (tch_matrices){m->data, m->type, count, cols, cols, 1, 0};
}

tch_status tchi_layer_product(tch_context *context, const tch_layer *layer, double alpha, const tch_matrices *a,
                              int32_t transpose_a, const tch_matrices *b, int32_t transpose_b, double beta,
                              const tch_matrices *c)
{
    return context->backend->matrix->gemm(context->state, alpha, a, transpose_a, b, transpose_b, beta, layer->rounded,
                                          c);
}
