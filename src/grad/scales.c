/* Scales of EKFAC: mean squares of the per-sample gradient's coordinates in the factors' eigenbases. Inputs and output
 * gradients are rotated, so that the rotated gradient is their product, which is squared without being stored. The bias
 * is a last input of 1: its part of the rotation, the last column of the basis, is equal for every position. */
#include <torchium/grad.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/batch.h"

#include "candidate.h"
#include "factors.h"
#include "layer.h"
#include "walk.h"

/* One side and its rotation. */
typedef struct rotation {
    tchi_side side;
    tchi_batch basis; /* eigenvectors as rows, one matrix for each group */
    int32_t bias;
    tch_matrices q; /* the basis in the compute type: the caller's memory or scratch */
    bool q_in_place;
    tch_matrices positions; /* of a chunk, as placed */
    tch_matrices rows;      /* the same in the compute type; for one group a single matrix of all positions */
    tch_matrices rotated;   /* samples times groups of them */
} rotation;

typedef struct scales_call {
    const tch_layer *layer;
    const tchi_curvature_update *update;
    const tch_tensor *scales;
    rotation a, g;
    tch_scalar type;
    tchi_candidate candidate;
    tchi_verdict verdict;
    double *divisor;
    void *scratch;
} scales_call;

static void rotation_layout(rotation *r, tchi_arena *arena, tch_scalar type, int64_t first, int64_t count)
{
    tchi_arrangement how = r->side.groups == 1 ? TCHI_TALL : TCHI_APART;
    int64_t batch = count * r->side.groups;
    r->positions = tchi_side_place(&r->side, arena, first, count, how);
    r->rows = r->side.type == type ? r->positions
                                   : tchi_scratch_matrices(arena, type, batch, r->side.positions, r->side.cols);
    r->rotated = tchi_scratch_matrices(arena, type, batch, r->side.positions, r->q.cols);
}

/* One position: the square of a product is the product of squares, so the sum over samples is a matrix product. */
static bool is_single(const scales_call *c)
{
    return c->a.side.positions == 1 && c->a.side.groups == 1;
}

static int64_t squares_scratch(const tch_context *context, const scales_call *c, int64_t count)
{
    const tch_backend *t = context->backend;
    int64_t d = c->a.rotated.cols;
    int64_t p = c->g.rotated.cols;
    if (is_single(c)) {
        return t->device->scratch_bytes(context->state, TCH_SCRATCH_BLOCK_DOTS, c->type, count, d > p ? d : p, 1, 0);
    }
    return t->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SQUARES, c->type, c->a.side.positions, d,
                                    c->a.rotated.batch, p);
}

static void scales_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    scales_call *c = call;
    tchi_candidate_layout(&c->candidate, arena, c->scales, c->type, false);
    tchi_verdict_layout(&c->verdict, arena, c->a.side.groups);
    c->divisor = tchi_arena_take(arena, sizeof *c->divisor);
    c->a.q = tchi_batch_place(&c->a.basis, arena, c->type, 0, c->a.basis.count, &c->a.q_in_place);
    c->g.q = tchi_batch_place(&c->g.basis, arena, c->type, 0, c->g.basis.count, &c->g.q_in_place);
    rotation_layout(&c->a, arena, c->type, first, count);
    rotation_layout(&c->g, arena, c->type, first, count);
    c->scratch = tchi_arena_take(arena, squares_scratch(context, c, count));
}

/* --- rotating ---------------------------------------------------------------------------------------------------- */

static tch_status convert_rows(tch_context *context, const tch_matrices *from, const tch_matrices *to)
{
    const int64_t shape[3] = {from->batch, from->rows, from->cols};
    const int64_t theirs[3] = {from->stride, from->ld, 1};
    const int64_t ours[3] = {to->stride, to->ld, 1};
    tch_array source = {from->data, from->type, 3, shape, theirs};
    tch_array target = {to->data, to->type, 3, shape, ours};
    return from->data == to->data ? TCH_OK : context->backend->matrix->copy(context->state, &target, &source);
}

/* The matrices of group h of all samples, with a stride of `groups`. */
static tch_matrices of_group(const tch_matrices *m, int64_t groups, int64_t h)
{
    tch_matrices part = tchi_matrices_part(m, h, 1);
    part.batch = m->batch / groups;
    part.stride = groups * m->stride;
    return part;
}

/* Sets every row of `rotated` to the last column of the basis. */
static tch_status start_at_bias(tch_context *context, const tch_matrices *q, const tch_matrices *rotated)
{
    const int64_t shape[3] = {rotated->batch, rotated->rows, rotated->cols};
    const int64_t theirs[3] = {0, 0, q->ld};
    const int64_t ours[3] = {rotated->stride, rotated->ld, 1};
    char *last = (char *)q->data + (q->cols - 1) * tchi_scalar_size(q->type);
    tch_array source = {last, q->type, 3, shape, theirs};
    tch_array target = {rotated->data, rotated->type, 3, shape, ours};
    return context->backend->matrix->copy(context->state, &target, &source);
}

/* rotated = rows Q', with a column of ones appended to the rows for the bias. */
static tch_status rotate_group(tch_context *context, const tch_layer *layer, const rotation *r,
                               const tch_matrices *rows, const tch_matrices *q, const tch_matrices *rotated)
{
    tch_matrices inner = *q;
    inner.cols = r->side.cols;
    inner.stride = rows->batch > 1 ? 0 : inner.stride;
    if (r->bias) {
        TCHI_TRY(start_at_bias(context, q, rotated));
    }
    return tchi_layer_product(context, layer, 1.0, rows, 0, &inner, 1, r->bias ? 1.0 : 0.0, rotated);
}

static tch_status rotate_side(tch_context *context, const tch_layer *layer, const rotation *r, int64_t first)
{
    TCHI_TRY(tchi_side_read(context, &r->side, first, &r->positions));
    TCHI_TRY(convert_rows(context, &r->positions, &r->rows));
    if (r->side.groups == 1) {
        tch_matrices rows = tchi_tall(&r->rows);
        tch_matrices rotated = tchi_tall(&r->rotated);
        return rotate_group(context, layer, r, &rows, &r->q, &rotated);
    }
    for (int64_t h = 0; h < r->side.groups; h++) {
        tch_matrices rows = of_group(&r->rows, r->side.groups, h);
        tch_matrices rotated = of_group(&r->rotated, r->side.groups, h);
        tch_matrices q = tchi_matrices_part(&r->q, h, 1);
        q.batch = rows.batch;
        TCHI_TRY(rotate_group(context, layer, r, &rows, &q, &rotated));
    }
    return TCH_OK;
}

/* --- the call ---------------------------------------------------------------------------------------------------- */

static tch_status square_elements(tch_context *context, const tch_matrices *x, void *scratch)
{
    return context->backend->sample->block_dots(context->state, x, x, 1, 1, 1.0, 0.0, x, scratch);
}

static tch_status begin_scales(tch_context *context, void *call)
{
    scales_call *c = call;
    TCHI_TRY(tchi_widen_scale(context, c->update->grad_scale, c->divisor));
    TCHI_TRY(c->a.q_in_place ? TCH_OK : tchi_batch_read(context, &c->a.basis, 0, &c->a.q));
    return c->g.q_in_place ? TCH_OK : tchi_batch_read(context, &c->g.basis, 0, &c->g.q);
}

static tch_status scales_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    scales_call *c = call;
    const tch_backend *t = context->backend;
    double beta = first == 0 ? 0.0 : 1.0;
    double scale = c->update->alpha * c->layer->scale * c->layer->scale / (double)c->a.side.samples;
    TCHI_TRY(rotate_side(context, c->layer, &c->a, first));
    TCHI_TRY(rotate_side(context, c->layer, &c->g, first));
    if (!is_single(c)) {
        return t->sample->sample_squares(context->state, &c->a.rotated, &c->g.rotated, scale, beta, c->layer->rounded,
                                         &c->candidate.sum, c->scratch);
    }
    tch_matrices a = tchi_tall(&c->a.rotated);
    tch_matrices g = tchi_tall(&c->g.rotated);
    TCHI_TRY(square_elements(context, &a, c->scratch));
    TCHI_TRY(square_elements(context, &g, c->scratch));
    return t->matrix->gemm(context->state, scale, &g, 1, &a, 0, beta, 0, &c->candidate.sum);
}

static tch_status update_scales(tch_context *context, scales_call *c)
{
    tchi_candidate *candidate = &c->candidate;
    const tchi_walk walk = {.samples = c->a.side.samples,
                            .positions = c->a.side.positions,
                            .small = true,
                            .layout = scales_layout,
                            .begin = begin_scales,
                            .part = scales_part};
    if (c->update->rehearse) {
        return tchi_reserve_first(context, tchi_walk_bytes(context, &walk, c));
    }
    TCHI_TRY(tchi_walk_samples(context, &walk, c));
    if (c->update->grad_scale != NULL) {
        TCHI_TRY(tchi_candidate_divide(context, candidate, c->divisor));
    }
    return tchi_candidates_keep(context, &c->verdict, &candidate, 1, c->update->beta, c->update->rejected);
}

static tch_status check_basis(const tch_context *context, const tch_tensor *basis, const char *name, int64_t groups,
                              int64_t n, const tch_tensor *scales)
{
    const int64_t shape[3] = {groups, n, n};
    TCHI_TRY(tchi_check_input(context, basis, name));
    TCHI_TRY(tchi_check_same_dtype(basis, name, scales, "scales"));
    return groups > 1 ? tchi_check_shape(basis, name, 3, shape) : tchi_check_shape(basis, name, 2, shape + 1);
}

static tch_status check_scales(const tch_context *context, const scales_call *c, const tch_tensor *input,
                               const tch_tensor *output_gradient, const tch_tensor *input_basis,
                               const tch_tensor *output_basis, const tch_tensor *scales)
{
    int64_t groups = c->a.side.groups;
    int64_t d = c->a.side.cols + c->a.bias;
    int64_t p = c->g.side.cols;
    TCHI_TRY(tchi_check_factor(context, scales, "scales", groups, p, d));
    TCHI_TRY(check_basis(context, input_basis, "input_basis", groups, d, scales));
    TCHI_TRY(check_basis(context, output_basis, "output_basis", groups, p, scales));
    const tchi_named inputs[] = {{input, "input"},
                                 {output_gradient, "output_gradient"},
                                 {input_basis, "input_basis"},
                                 {output_basis, "output_basis"}};
    const tchi_named outputs[] = {{scales, "scales"}};
    return tchi_check_all_disjoint(outputs, 1, inputs, 4);
}

tch_status tchi_grad_scales(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                            const tch_tensor *output_gradient, int32_t bias, const tch_tensor *input_basis,
                            const tch_tensor *output_basis, const tchi_curvature_update *update, tch_tensor *scales)
{
    TCHI_TRY(tchi_check_input(context, input, "input"));
    TCHI_TRY(tchi_check_input(context, output_gradient, "output_gradient"));
    TCHI_TRY(
        tchi_check_curvature(context, "tch_grad_scales", layer, input, output_gradient, update->alpha, update->beta));
    scales_call call = {.layer = layer, .update = update, .scales = scales};
    call.a.side = tchi_input_side(layer, input);
    call.g.side = tchi_gradient_side(layer, output_gradient);
    call.a.bias = bias != 0;
    TCHI_TRY(check_scales(context, &call, input, output_gradient, input_basis, output_basis, scales));
    call.a.basis = tchi_batch_of(input_basis, 2);
    call.g.basis = tchi_batch_of(output_basis, 2);
    tch_scalar type = tchi_curvature_type(tchi_scalar_of(scales->dtype), call.a.side.type);
    call.type = tchi_curvature_type(type, call.g.side.type);
    bool nothing = call.a.side.samples == 0 || call.a.side.positions == 0;
    return nothing ? TCH_OK : update_scales(context, &call);
}

tch_status tch_grad_scales(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                           const tch_tensor *output_gradient, int32_t bias, const tch_tensor *input_basis,
                           const tch_tensor *output_basis, double alpha, double beta, tch_tensor *scales)
{
    TCHI_ENTER_FOR(context, "tch_grad_scales", sample);
    const tchi_curvature_update update = {.alpha = alpha, .beta = beta};
    return tchi_grad_scales(context, layer, input, output_gradient, bias, input_basis, output_basis, &update, scales);
}
