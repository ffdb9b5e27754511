/* Kronecker factors of a layer's Fisher matrix: a symmetric product for each side, over all samples and positions. The
 * bias' column of ones is not appended to the inputs: its last row and column of the factor, the sum of the inputs, are
 * written directly. */
#include "factors.h"

#include <math.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "candidate.h"
#include "layer.h"
#include "walk.h"

/* --- checks shared with scales.c --------------------------------------------------------------------------------- */

static tch_status check_number(const char *name, double value)
{
    return isfinite(value) ? TCH_OK
                           : tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s is %g, expected a finite number", name, value);
}

static tch_status check_together(const tch_layer *layer, const tch_tensor *input, const tch_tensor *output_gradient)
{
    tchi_side a = tchi_input_side(layer, input);
    tchi_side g = tchi_gradient_side(layer, output_gradient);
    if (a.samples == g.samples && a.positions == g.positions) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_SHAPE,
                     "output_gradient has %lld samples of %lld positions, expected %lld of %lld as the layer makes of "
                     "input",
                     (long long)g.samples, (long long)g.positions, (long long)a.samples, (long long)a.positions);
}

tch_status tchi_check_curvature(const tch_context *context, const char *function, const tch_layer *layer,
                                const tch_tensor *input, const tch_tensor *output_gradient, double alpha, double beta)
{
    TCHI_TRY(tchi_check_layer(layer));
    TCHI_TRY(tchi_check_layer_is_product(layer, function));
    if (input != NULL) {
        TCHI_TRY(tchi_check_layer_input(context, layer, input));
    }
    if (output_gradient != NULL) {
        TCHI_TRY(tchi_check_layer_gradient(context, layer, output_gradient));
    }
    if (input != NULL && output_gradient != NULL) {
        TCHI_TRY(check_together(layer, input, output_gradient));
    }
    TCHI_TRY(check_number("alpha", alpha));
    return check_number("beta", beta);
}

tch_status tchi_check_factor(const tch_context *context, const tch_tensor *factor, const char *name, int64_t groups,
                             int64_t rows, int64_t cols)
{
    const int64_t shape[3] = {groups, rows, cols};
    TCHI_TRY(tchi_check_output(context, factor, name));
    TCHI_TRY(tchi_check_wide(factor, name));
    return groups > 1 ? tchi_check_shape(factor, name, 3, shape) : tchi_check_shape(factor, name, 2, shape + 1);
}

tch_scalar tchi_curvature_type(tch_scalar result, tch_scalar positions)
{
    return result == TCH_SCALAR_F64 || positions == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
}

tch_status tchi_widen_scale(tch_context *context, const float *grad_scale, double *wide)
{
    const int64_t one = 1;
    tch_array from = {(void *)grad_scale, TCH_SCALAR_F32, 1, &one, &one};
    tch_array to = {wide, TCH_SCALAR_F64, 1, &one, &one};
    return grad_scale == NULL ? TCH_OK : context->backend->matrix->copy(context->state, &to, &from);
}

/* --- one factor -------------------------------------------------------------------------------------------------- */

/* The data of one factor. */
typedef struct factor_source {
    tchi_side side;
    tch_tensor *factor;
    int32_t bias;
    tch_sharing sharing;
    double weight; /* of the outer product of one row */
    double pooled; /* REDUCE: the factor of a sample's sum over positions */
    double corner; /* the bias' diagonal element */
} factor_source;

typedef struct factor_buffers {
    tch_matrices positions; /* the caller's memory or scratch, of a chunk */
    tch_matrices rows;      /* operand of the product, a matrix per group */
    void *scratch;
} factor_buffers;

static bool is_half(tch_scalar type)
{
    return type == TCH_SCALAR_F16 || type == TCH_SCALAR_BF16;
}

static tch_scalar compute_type(const factor_source *s)
{
    return tchi_curvature_type(tchi_scalar_of(s->factor->dtype), s->side.type);
}

/* Rows can be multiplied in place: they have the sum's type, or the device multiplies half precision. */
static bool rows_as_placed(const tch_context *context, const factor_source *s)
{
    tch_scalar type = compute_type(s);
    bool good_type = s->side.type == type || (is_half(s->side.type) && type == TCH_SCALAR_F32 &&
                                              context->backend->matrix->product_rates != NULL);
    return s->sharing == TCH_SHARING_EXPAND && s->side.groups == 1 && good_type;
}

static int64_t sums_scratch(const tch_context *context, const tch_matrices *x)
{
    return context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, x->type, x->rows, x->cols,
                                                   x->batch, 0);
}

/* Rows of a chunk of samples: all positions of a group in order, or one per sample, which for several groups are
 * strided. */
static tch_matrices rows_layout(const factor_source *s, tchi_arena *arena, int64_t count)
{
    const tchi_side *side = &s->side;
    tch_scalar type = compute_type(s);
    if (s->sharing == TCH_SHARING_REDUCE) {
        tch_matrices rows = tchi_scratch_matrices(arena, type, 1, count * side->groups, side->cols);
        return (tch_matrices){rows.data, type, count, side->cols, side->groups * side->cols, side->groups, side->cols};
    }
    return tchi_scratch_matrices(arena, type, side->groups, count * side->positions, side->cols);
}

static void chunk_layout(const tch_context *context, const factor_source *s, factor_buffers *b, tchi_arena *arena,
                         int64_t first, int64_t count)
{
    tchi_arrangement how = s->sharing == TCH_SHARING_EXPAND && s->side.groups == 1 ? TCHI_TALL : TCHI_APART;
    b->positions = tchi_side_place(&s->side, arena, first, count, how);
    b->rows = rows_as_placed(context, s) ? tchi_tall(&b->positions) : rows_layout(s, arena, count);
    b->scratch =
        tchi_arena_take(arena, tchi_max(sums_scratch(context, &b->positions), sums_scratch(context, &b->rows)));
}

/* Permutes positions [sample][group][T] to [group][sample][T], and converts them to the sum's type. */
static tch_status regroup_positions(tch_context *context, const factor_source *s, const factor_buffers *b)
{
    const tch_matrices *from = &b->positions;
    const tch_matrices *to = &b->rows;
    int64_t groups = s->side.groups;
    const int64_t shape[4] = {groups, from->batch / groups, from->rows, from->cols};
    const int64_t theirs[4] = {groups > 1 ? from->stride : 0, groups * from->stride, from->ld, 1};
    const int64_t ours[4] = {to->stride, from->rows * to->ld, to->ld, 1};
    tch_array source = {from->data, from->type, 4, shape, theirs};
    tch_array target = {to->data, to->type, 4, shape, ours};
    return context->backend->matrix->copy(context->state, &target, &source);
}

static tch_status pool_positions(tch_context *context, const factor_source *s, const factor_buffers *b)
{
    tch_matrices out = tchi_matrices_new(b->rows.data, b->rows.type, 1, b->positions.batch, s->side.cols);
    return context->backend->sample->sample_sums(context->state, &b->positions, s->pooled, 0.0, &out, b->scratch);
}

static tch_status make_rows(tch_context *context, const factor_source *s, const factor_buffers *b, int64_t first)
{
    TCHI_TRY(tchi_side_read(context, &s->side, first, &b->positions));
    if (rows_as_placed(context, s)) {
        return TCH_OK;
    }
    return s->sharing == TCH_SHARING_REDUCE ? pool_positions(context, s, b) : regroup_positions(context, s, b);
}

/* Writes the bias' last row: the sum of the rows. */
static tch_status add_border(tch_context *context, const factor_source *s, const factor_buffers *b, double beta,
                             const tch_matrices *sum)
{
    char *start = (char *)sum->data + s->side.cols * sum->ld * tchi_scalar_size(sum->type);
    tch_matrices border = {start, sum->type, sum->batch, s->side.cols, sum->stride, 1, 0};
    return context->backend->sample->sample_sums(context->state, &b->rows, s->weight, beta, &border, b->scratch);
}

static tch_status add_chunk(tch_context *context, const tch_layer *layer, const factor_source *s,
                            const factor_buffers *b, double beta, const tch_matrices *sum)
{
    tch_matrices inner = *sum;
    inner.rows = inner.cols = s->side.cols; /* without the bias' last row and column */
    bool rounded = layer->rounded != 0 || is_half(b->rows.type);
    TCHI_TRY((rounded ? tchi_gram_rounded : tchi_gram)(context, s->weight, &b->rows, 1, beta, &inner));
    return s->bias ? add_border(context, s, b, beta, sum) : TCH_OK;
}

/* Copies the last row to the last column and sets the corner. */
static tch_status finish_border(tch_context *context, const factor_source *s, const tch_matrices *sum)
{
    const tch_backend *t = context->backend;
    int64_t d = s->side.cols;
    int64_t size = tchi_scalar_size(sum->type);
    const int64_t shape[2] = {sum->batch, d};
    const int64_t along_row[2] = {sum->stride, 1};
    const int64_t along_column[2] = {sum->stride, sum->ld};
    tch_array row = {(char *)sum->data + d * sum->ld * size, sum->type, 2, shape, along_row};
    tch_array column = {(char *)sum->data + d * size, sum->type, 2, shape, along_column};
    tch_array corner = {(char *)sum->data + (d * sum->ld + d) * size, sum->type, 1, shape, along_row};
    TCHI_TRY(t->matrix->copy(context->state, &column, &row));
    return t->matrix->fill(context->state, &corner, s->corner);
}

/* --- the call ---------------------------------------------------------------------------------------------------- */

/* Up to two factors; their chunks run in turn and share scratch. */
typedef struct factor_call {
    const tch_layer *layer;
    factor_source sources[2];
    tchi_candidate candidates[2];
    int32_t count;
    int32_t current;
    int32_t output; /* index of the output factor, or -1 */
    factor_buffers buffers;
    tchi_verdict verdict;
    double *divisor; /* the loss scale */
} factor_call;

static factor_source source_of(const tchi_side *side, tch_tensor *factor, int32_t bias, tch_sharing sharing)
{
    return (factor_source){.side = *side, .factor = factor, .bias = bias != 0, .sharing = sharing};
}

static void add_input(factor_call *c, const tch_layer *layer, const tch_tensor *input, int32_t bias,
                      tch_sharing sharing, double alpha, tch_tensor *factor)
{
    tchi_side side = tchi_input_side(layer, input);
    factor_source s = source_of(&side, factor, bias, sharing);
    double rows = (double)side.samples * (sharing == TCH_SHARING_EXPAND ? (double)side.positions : 1.0);
    s.weight = alpha / rows;
    s.pooled = 1.0 / (double)side.positions;
    s.corner = alpha;
    c->sources[c->count++] = s;
}

static void add_output(factor_call *c, const tch_layer *layer, const tch_tensor *output_gradient, tch_sharing sharing,
                       double alpha, tch_tensor *factor)
{
    tchi_side side = tchi_gradient_side(layer, output_gradient);
    factor_source s = source_of(&side, factor, 0, sharing);
    s.weight = alpha * layer->scale * layer->scale / (double)side.samples;
    s.pooled = 1.0;
    c->output = c->count;
    c->sources[c->count++] = s;
}

static void factors_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    factor_call *c = call;
    for (int32_t i = 0; i < c->count; i++) {
        tchi_candidate_layout(&c->candidates[i], arena, c->sources[i].factor, compute_type(&c->sources[i]), true);
    }
    tchi_verdict_layout(&c->verdict, arena, c->sources[0].side.groups);
    c->divisor = tchi_arena_take(arena, sizeof *c->divisor);
    chunk_layout(context, &c->sources[c->current], &c->buffers, arena, first, count);
}

static tch_status factors_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    factor_call *c = call;
    const factor_source *s = &c->sources[c->current];
    TCHI_TRY(make_rows(context, s, &c->buffers, first));
    return add_chunk(context, c->layer, s, &c->buffers, first == 0 ? 0.0 : 1.0, &c->candidates[c->current].sum);
}

static tchi_walk factor_walk(factor_call *c, int32_t index)
{
    const tchi_side *side = &c->sources[index].side;
    c->current = index;
    return (tchi_walk){.samples = side->samples,
                       .positions = side->positions,
                       .small = true,
                       .layout = factors_layout,
                       .part = factors_part};
}

static tch_status update_factors(tch_context *context, factor_call *c, const tchi_curvature_update *update)
{
    tchi_candidate *candidates[2] = {&c->candidates[0], &c->candidates[1]};
    int64_t most = 0;
    for (int32_t i = 0; i < c->count; i++) {
        const tchi_walk walk = factor_walk(c, i);
        most = tchi_max(most, tchi_walk_bytes(context, &walk, c));
    }
    TCHI_TRY(tchi_reserve_first(context, most));
    if (update->rehearse) {
        return TCH_OK;
    }
    for (int32_t i = 0; i < c->count; i++) {
        const tchi_walk walk = factor_walk(c, i);
        TCHI_TRY(tchi_walk_samples(context, &walk, c));
        TCHI_TRY(c->sources[i].bias ? finish_border(context, &c->sources[i], &c->candidates[i].sum) : TCH_OK);
    }
    if (c->output >= 0 && update->grad_scale != NULL) {
        TCHI_TRY(tchi_widen_scale(context, update->grad_scale, c->divisor));
        TCHI_TRY(tchi_candidate_divide(context, candidates[c->output], c->divisor));
    }
    return tchi_candidates_keep(context, &c->verdict, candidates, c->count, update->beta, update->rejected);
}

static tch_status check_factors(const tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing,
                                const tch_tensor *input_factor, const tch_tensor *output_factor)
{
    if ((int)sharing < 0 || sharing >= TCH_SHARING_COUNT) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "sharing is %d, expected one of tch_sharing", (int)sharing);
    }
    if (input_factor != NULL) {
        TCHI_TRY(tchi_check_input(context, input, "input"));
        tchi_side side = tchi_input_side(layer, input);
        int64_t d = side.cols + (bias != 0);
        TCHI_TRY(tchi_check_factor(context, input_factor, "input_factor", side.groups, d, d));
    }
    if (output_factor != NULL) {
        TCHI_TRY(tchi_check_input(context, output_gradient, "output_gradient"));
        tchi_side side = tchi_gradient_side(layer, output_gradient);
        TCHI_TRY(tchi_check_factor(context, output_factor, "output_factor", side.groups, side.cols, side.cols));
    }
    const tchi_named inputs[] = {{input, "input"}, {output_gradient, "output_gradient"}};
    const tchi_named outputs[] = {{input_factor, "input_factor"}, {output_factor, "output_factor"}};
    return tchi_check_all_disjoint(outputs, 2, inputs, 2);
}

tch_status tchi_grad_factors(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                             const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing,
                             const tchi_curvature_update *update, tch_tensor *input_factor, tch_tensor *output_factor)
{
    TCHI_TRY(
        tchi_check_curvature(context, "tch_grad_factors", layer, input, output_gradient, update->alpha, update->beta));
    TCHI_TRY(check_factors(context, layer, input, output_gradient, bias, sharing, input_factor, output_factor));
    factor_call call = {.layer = layer, .output = -1};
    if (input_factor != NULL) {
        add_input(&call, layer, input, bias, sharing, update->alpha, input_factor);
    }
    if (output_factor != NULL) {
        add_output(&call, layer, output_gradient, sharing, update->alpha, output_factor);
    }
    bool nothing = call.count == 0 || call.sources[0].side.samples == 0 || call.sources[0].side.positions == 0;
    return nothing ? TCH_OK : update_factors(context, &call, update);
}

tch_status tch_grad_factors(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                            const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing, double alpha,
                            double beta, tch_tensor *input_factor, tch_tensor *output_factor)
{
    TCHI_ENTER_FOR(context, "tch_grad_factors", sample);
    const tchi_curvature_update update = {.alpha = alpha, .beta = beta};
    return tchi_grad_factors(context, layer, input, output_gradient, bias, sharing, &update, input_factor,
                             output_factor);
}
