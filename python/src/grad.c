/* The functions of grad.h, one for one. A layer is a torchium._C.Layer, and the scale of the output gradients an
 * argument of each call. The caller passes the outputs, which have the parameters' shapes. */
#include "module.h"

#include "arguments.h"
#include "calls.h"

static int take_layer(PyObject *layer, PyObject *scale, tch_layer *result)
{
    if (py_layer_take(layer, "layer", result) < 0) {
        return -1;
    }
    return scale == NULL ? 0 : py_take_double(scale, "scale", &result->scale);
}

/* --- gradients --------------------------------------------------------------------------------------------------- */

static PyObject *grad_samples(PY_ARGUMENTS)
{
    PY_TAKE("grad_samples", 5, "layer", "input", "output_gradient", "weight", "bias", "scale", "stream");
    tch_layer layer;
    if (take_layer(v[0], v[5], &layer) < 0) {
        return NULL;
    }
    PY_BEGIN(v[6], NULL, PY_IN(1), PY_IN(2), PY_MAYBE_OUT(3), PY_MAYBE_OUT(4));
    PY_CALL(call, tch_grad_samples(call.context, &layer, t[0], t[1], t[2], t[3]));
    return py_call_end(&call);
}

typedef tch_status reduction(tch_context *, const tch_layer *, const tch_tensor *, const tch_tensor *, tch_grad_part,
                             int32_t, tch_tensor *);

/* Reductions over samples: squared norms, or inner products. */
static PyObject *reduce_samples(PyObject *const *v, const char *const *names, reduction *reduce)
{
    tch_layer layer;
    int64_t parts;
    bool accumulate;
    if (take_layer(v[0], v[6], &layer) < 0 || py_take_int(v[3], "parts", TCH_GRAD_WEIGHT, TCH_GRAD_BOTH, &parts) < 0 ||
        py_take_bool(v[4], "accumulate", &accumulate) < 0) {
        return NULL;
    }
    PY_BEGIN(v[7], NULL, PY_IN(1), PY_IN(2), PY_OUT(5));
    PY_CALL(call, reduce(call.context, &layer, t[0], t[1], (tch_grad_part)parts, accumulate, t[2]));
    return py_call_end(&call);
}

static PyObject *grad_norms(PY_ARGUMENTS)
{
    PY_TAKE("grad_norms", 6, "layer", "input", "output_gradient", "parts", "accumulate", "norms", "scale", "stream");
    return reduce_samples(v, names, tch_grad_norms);
}

static PyObject *grad_weighted_sum(PY_ARGUMENTS)
{
    PY_TAKE("grad_weighted_sum", 7, "layer", "input", "output_gradient", "weights", "beta", "weight", "bias", "scale",
            "stream");
    tch_layer layer;
    double beta;
    if (take_layer(v[0], v[7], &layer) < 0 || py_take_double(v[4], "beta", &beta) < 0) {
        return NULL;
    }
    PY_BEGIN(v[8], NULL, PY_IN(1), PY_IN(2), PY_MAYBE_IN(3), PY_MAYBE_OUT(5), PY_MAYBE_OUT(6));
    PY_CALL(call, tch_grad_weighted_sum(call.context, &layer, t[0], t[1], t[2], beta, t[3], t[4]));
    return py_call_end(&call);
}

static PyObject *grad_gram(PY_ARGUMENTS)
{
    PY_TAKE("grad_gram", 6, "layer", "input", "output_gradient", "parts", "accumulate", "gram", "scale", "stream");
    return reduce_samples(v, names, tch_grad_gram);
}

static PyObject *grad_dots(PY_ARGUMENTS)
{
    PY_TAKE("grad_dots", 7, "layer", "input", "output_gradient", "weight", "bias", "accumulate", "dots", "scale",
            "stream");
    tch_layer layer;
    bool accumulate;
    if (take_layer(v[0], v[7], &layer) < 0 || py_take_bool(v[5], "accumulate", &accumulate) < 0) {
        return NULL;
    }
    PY_BEGIN(v[8], NULL, PY_IN(1), PY_IN(2), PY_MAYBE_IN(3), PY_MAYBE_IN(4), PY_OUT(6));
    PY_CALL(call, tch_grad_dots(call.context, &layer, t[0], t[1], t[2], t[3], accumulate, t[4]));
    return py_call_end(&call);
}

static PyObject *grad_tied_norms(PY_ARGUMENTS)
{
    PY_TAKE("grad_tied_norms", 6, "layer", "tokens", "embedding_gradient", "linear_input", "linear_gradient", "norms",
            "scale", "stream");
    tch_layer layer;
    if (take_layer(v[0], v[6], &layer) < 0) {
        return NULL;
    }
    PY_BEGIN(v[7], NULL, PY_IN(1), PY_IN(2), PY_IN(3), PY_IN(4), PY_OUT(5));
    PY_CALL(call, tch_grad_tied_norms(call.context, &layer, t[0], t[1], t[2], t[3], t[4]));
    return py_call_end(&call);
}

/* --- clipping and the natural gradient --------------------------------------------------------------------------- */

static PyObject *grad_clip_weights(PY_ARGUMENTS)
{
    PY_TAKE("grad_clip_weights", 3, "norms", "max_norm", "weights", "stream");
    double max_norm;
    if (py_take_double(v[1], "max_norm", &max_norm) < 0) {
        return NULL;
    }
    PY_BEGIN(v[3], NULL, PY_IN(0), PY_OUT(2));
    PY_CALL(call, tch_grad_clip_weights(call.context, t[0], max_norm, t[1]));
    return py_call_end(&call);
}

static PyObject *grad_natural_weights(PY_ARGUMENTS)
{
    PY_TAKE("grad_natural_weights", 5, "gram", "rhs", "damping", "weights", "report", "stream");
    double damping;
    if (py_take_double(v[2], "damping", &damping) < 0) {
        return NULL;
    }
    PY_BEGIN(v[5], NULL, PY_IN(0), PY_MAYBE_IN(1), PY_OUT(3), PY_MAYBE_OUT(4));
    PY_CALL(call, tch_grad_natural_weights(call.context, t[0], t[1], damping, t[2], t[3]));
    return py_call_end(&call);
}

int py_grad_register(PyObject *module)
{
    static PyMethodDef functions[] = {
        PY_METHOD("grad_samples", grad_samples, "weight and bias = the gradient of each sample"),
        PY_METHOD("grad_norms", grad_norms, "norms = the squared norm of each sample's gradient, not formed"),
        PY_METHOD("grad_weighted_sum", grad_weighted_sum, "weight and bias = beta times them + the weighted sum"),
        PY_METHOD("grad_gram", grad_gram, "gram = the inner products of the samples' gradients"),
        PY_METHOD("grad_dots", grad_dots, "dots = the inner product of each sample's gradient with a direction"),
        PY_METHOD("grad_tied_norms", grad_tied_norms, "norms += what a weight of an embedding and a linear layer adds"),
        PY_METHOD("grad_clip_weights", grad_clip_weights, "weights = min(1, max_norm / (sqrt(norms) + 1e-6))"),
        PY_METHOD("grad_natural_weights", grad_natural_weights, "weights = (gram + B damping I)^-1 rhs"),
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, functions);
}
