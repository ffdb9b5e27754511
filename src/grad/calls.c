/* tch_grad_samples, tch_grad_norms, tch_grad_weighted_sum and tch_grad_dots: checks of arguments, and dispatch by the
 * kind of layer. */
#include "call.h"

#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "layer.h"
#include "walk.h"

/* Parameters are outputs if `written`; `numbers`, if not NULL, are then inputs. */
static tch_status check_call(tch_context *context, tchi_grad_call *c, bool per_sample, bool written,
                             const tch_tensor *numbers, const char *name)
{
    TCHI_TRY(tchi_check_layer_call(context, c->layer, c->input, c->gradient));
    int64_t samples = c->input->shape[0];
    TCHI_TRY(tchi_check_parameters(context, c->layer, c->input, c->gradient, per_sample ? samples : -1, written,
                                   c->weight, c->bias));
    if (!written || numbers != NULL) {
        TCHI_TRY(tchi_check_numbers(context, numbers, name, samples));
    }
    const tchi_named sides[] = {{c->input, "input"}, {c->gradient, "output_gradient"}};
    const tchi_named parameters[] = {{c->weight, "weight"}, {c->bias, "bias"}};
    const tchi_named other = {numbers, name};
    if (written) {
        TCHI_TRY(tchi_check_all_disjoint(parameters, 2, sides, 2));
        TCHI_TRY(tchi_check_all_disjoint(parameters, 2, &other, 1));
    } else {
        TCHI_TRY(tchi_check_all_disjoint(&other, 1, sides, 2));
        TCHI_TRY(tchi_check_all_disjoint(&other, 1, parameters, 2));
    }
    int parts = (c->weight != NULL ? TCH_GRAD_WEIGHT : 0) | (c->bias != NULL ? TCH_GRAD_BIAS : 0);
    c->parts = (tch_grad_part)parts;
    return TCH_OK;
}

static tch_status call_kind(tch_context *context, const tchi_grad_call *c, tchi_grad_function *product,
                            tchi_grad_function *embedding, tchi_grad_function *normalizing)
{
    return c->layer->kind == TCH_LAYER_EMBEDDING   ? embedding(context, c)
           : tchi_layer_is_product(c->layer->kind) ? product(context, c)
                                                   : normalizing(context, c);
}

/* Norms or inner products. */
static tch_status add_numbers(tch_context *context, tchi_grad_call *c, tch_tensor *numbers, tchi_grad_function *product)
{
    int64_t samples = c->input->shape[0];
    bool of_bias_alone = c->layer->kind == TCH_LAYER_EMBEDDING && !(c->parts & TCH_GRAD_WEIGHT);
    c->numbers = tchi_tensor_data(numbers);
    if (samples == 0 || c->parts == 0 || of_bias_alone) {
        return tchi_clear_numbers(context, c->accumulate, c->numbers, samples);
    }
    return call_kind(context, c, product, tchi_embedding_dots, tchi_normalizing_dots);
}

tch_status tch_grad_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                            const tch_tensor *output_gradient, tch_tensor *weight, tch_tensor *bias)
{
    TCHI_ENTER_FOR(context, "tch_grad_samples", sample);
    tchi_grad_call c = {.layer = layer, .input = input, .gradient = output_gradient, .weight = weight, .bias = bias};
    TCHI_TRY(check_call(context, &c, true, true, NULL, ""));
    return c.parts == 0
               ? TCH_OK
               : call_kind(context, &c, tchi_product_samples, tchi_embedding_samples, tchi_normalizing_samples);
}

tch_status tch_grad_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                          const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate, tch_tensor *norms)
{
    TCHI_ENTER_FOR(context, "tch_grad_norms", sample);
    tchi_grad_call c = {.layer = layer, .input = input, .gradient = output_gradient, .accumulate = accumulate};
    TCHI_TRY(check_call(context, &c, false, false, norms, "norms"));
    TCHI_TRY(tchi_check_parts(parts));
    c.parts = parts;
    return add_numbers(context, &c, norms, tchi_product_norms);
}

tch_status tch_grad_weighted_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, const tch_tensor *weights, double beta,
                                 tch_tensor *weight, tch_tensor *bias)
{
    TCHI_ENTER_FOR(context, "tch_grad_weighted_sum", sample);
    tchi_grad_call c = {.layer = layer, .input = input, .gradient = output_gradient, .weight = weight, .bias = bias};
    TCHI_TRY(check_call(context, &c, false, true, weights, "weights"));
    if (!isfinite(beta)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "beta is %g, expected a finite number", beta);
    }
    c.weights = weights == NULL ? NULL : tchi_tensor_data(weights);
    c.beta = beta;
    return c.parts == 0 ? TCH_OK : call_kind(context, &c, tchi_product_sum, tchi_embedding_sum, tchi_normalizing_sum);
}

tch_status tch_grad_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                         const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias,
                         int32_t accumulate, tch_tensor *dots)
{
    TCHI_ENTER_FOR(context, "tch_grad_dots", sample);
    tchi_grad_call c = {.layer = layer, .input = input, .gradient = output_gradient, .weight = weight, .bias = bias};
    c.accumulate = accumulate;
    TCHI_TRY(check_call(context, &c, false, false, dots, "dots"));
    return add_numbers(context, &c, dots, tchi_product_dots);
}
