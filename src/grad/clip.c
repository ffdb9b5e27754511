/* Weights that bring every sample's gradient to a norm of at most max_norm. */
#include <torchium/grad.h>

#include <math.h>

#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"

#include "layer.h"

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
