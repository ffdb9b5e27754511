/* Weights for the sum of per-sample gradients: for clipping, and for the natural gradient. */
#include <torchium/grad.h>

#include <math.h>

#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "layer.h"

/* --- clipping ---------------------------------------------------------------------------------------------------- */

static tch_status check_clipping(tch_context *context, const tch_tensor *norms, double max_norm,
                                 const tch_tensor *weights)
{
    TCHI_TRY(tchi_check_input(context, norms, "norms"));
    if (norms->ndim != 1) {
        return tchi_wrong_shape(norms, "norms", "[B]");
    }
    TCHI_TRY(tchi_check_numbers(context, norms, "norms", norms->shape[0]));
    TCHI_TRY(tchi_check_output(context, weights, "weights"));
    TCHI_TRY(tchi_check_numbers(context, weights, "weights", norms->shape[0]));
    if (tchi_tensor_data(weights) != tchi_tensor_data(norms)) { /* else all of them, for work in place */
        TCHI_TRY(tchi_check_disjoint(weights, "weights", norms, "norms"));
    }
    if (isnan(max_norm) || max_norm <= 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "max_norm is %g, expected a number above 0", max_norm);
    }
    return TCH_OK;
}

tch_status tch_grad_clip_weights(tch_context *context, const tch_tensor *norms, double max_norm, tch_tensor *weights)
{
    TCHI_ENTER_FOR(context, "tch_grad_clip_weights", sample);
    TCHI_TRY(check_clipping(context, norms, max_norm, weights));
    if (norms->shape[0] == 0) {
        return TCH_OK;
    }
    return context->backend->sample->clip_weights(context->state, TCH_CLIP_NORM, norms->shape[0],
                                                  tchi_tensor_data(norms), 1.0, max_norm, tchi_tensor_data(weights));
}

/* --- the natural gradient ---------------------------------------------------------------------------------------- */

/* Within the span of a batch, the natural gradient is one solve with the Gram matrix of per-sample gradients, in
 * float64 for any type, since small eigenvalues matter most. */
typedef struct natural_buffers {
    tch_matrices gram; /* overwritten by the solve */
    tch_matrices rhs;  /* B by 1: the right-hand side, then the weights */
    double *shift;
    tchi_inspection of_gram;
    void *scratch;
} natural_buffers;

static void natural_layout(natural_buffers *n, tchi_arena *arena, tch_context *context, int64_t samples)
{
    n->gram = tchi_scratch_matrices(arena, TCH_SCALAR_F64, 1, samples, samples);
    n->rhs = tchi_scratch_matrices(arena, TCH_SCALAR_F64, 1, samples, 1);
    n->shift = tchi_arena_take(arena, (int64_t)sizeof(double));
    tchi_inspection_layout(&n->of_gram, arena, 1);
    n->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SPD_SOLVE,
                                                                                TCH_SCALAR_F64, samples, 1, 1, 0));
}

static tch_status read_rhs(tch_context *context, const tch_tensor *rhs, const tch_matrices *dst)
{
    const int64_t shape[1] = {dst->rows};
    const int64_t strides[1] = {1};
    tch_array array = {dst->data, dst->type, 1, shape, strides};
    if (rhs == NULL) {
        return context->backend->matrix->fill(context->state, &array, 1.0);
    }
    tch_array given = {tchi_tensor_data(rhs), TCH_SCALAR_F64, 1, shape, strides};
    return context->backend->matrix->copy(context->state, &array, &given);
}

static tch_status check_gram(tch_context *context, const tch_tensor *gram)
{
    TCHI_TRY(tchi_check_input(context, gram, "gram"));
    if (gram->ndim != 2 || gram->shape[0] != gram->shape[1]) {
        return tchi_wrong_shape(gram, "gram", "[B, B]");
    }
    TCHI_TRY(tchi_check_wide(gram, "gram"));
    return tchi_check_matrix_size(gram, "gram");
}

static tch_status check_natural(tch_context *context, const tch_tensor *gram, const tch_tensor *rhs, double damping,
                                const tch_tensor *weights, const tch_tensor *report)
{
    TCHI_TRY(check_gram(context, gram));
    if (rhs != NULL) {
        TCHI_TRY(tchi_check_numbers(context, rhs, "rhs", gram->shape[0]));
    }
    TCHI_TRY(tchi_check_output(context, weights, "weights"));
    TCHI_TRY(tchi_check_numbers(context, weights, "weights", gram->shape[0]));
    TCHI_TRY(tchi_check_report(context, report, "report", gram, TCH_INT32));
    const tchi_named inputs[] = {{gram, "gram"}, {rhs, "rhs"}};
    const tchi_named outputs[] = {{weights, "weights"}, {report, "report"}};
    TCHI_TRY(tchi_check_all_disjoint(outputs, 2, inputs, 2));
    if (!isfinite(damping) || damping <= 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "damping is %g, expected a finite number above 0", damping);
    }
    return TCH_OK;
}

tch_status tch_grad_natural_weights(tch_context *context, const tch_tensor *gram, const tch_tensor *rhs, double damping,
                                    tch_tensor *weights, tch_tensor *report)
{
    TCHI_ENTER_FOR(context, "tch_grad_natural_weights", sample);
    TCHI_TRY(check_natural(context, gram, rhs, damping, weights, report));
    natural_buffers n;
    tchi_arena arena = {0};
    tch_status bad = TCH_OK;
    int64_t samples = gram->shape[0];
    double shift = (double)samples * damping;
    tchi_batch source = tchi_batch_of(gram, 2);
    natural_layout(&n, &arena, context, samples);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    natural_layout(&n, &arena, context, samples);
    TCHI_TRY(tchi_batch_read(context, &source, 0, &n.gram));
    TCHI_TRY(read_rhs(context, rhs, &n.rhs));
    TCHI_TRY(tchi_inspect(context, &n.gram, source.type, &n.of_gram));
    TCHI_TRY(context->backend->device->copy_bytes(context->state, n.shift, &shift, sizeof shift, TCH_COPY_NUMBERS));
    TCHI_TRY(context->backend->matrix->spd_solve(context->state, &n.gram, n.shift, &n.rhs, n.of_gram.flags, n.scratch));
    tch_matrices out = tchi_matrices_new(tchi_tensor_data(weights), TCH_SCALAR_F64, 1, samples, 1);
    TCHI_TRY(context->backend->matrix->select(context->state, n.of_gram.flags, &n.rhs, &out));
    TCHI_TRY(tchi_report(context, report, 0, 1, n.of_gram.flags, "gram", &bad));
    return bad;
}
