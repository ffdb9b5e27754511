/* The functions of grad.h, one for one. A layer is an object of torchium._C.Layer, and the scale of the output
 * gradients an argument of each call. Outputs are given: their shapes are the parameters', which the caller has. */
#include "module.h"

#include "arguments.h"
#include "calls.h"
#include "layer.h"

/* The parameters every function here has. */
#define ARGUMENTS PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords

/* Operands: read, written, and both of them where None may stand for none. */
#define INPUT(object, name)                                                                                            \
    {                                                                                                                  \
        object, name, PY_REQUIRED                                                                                      \
    }
#define MAYBE_INPUT(object, name)                                                                                      \
    {                                                                                                                  \
        object, name, 0                                                                                                \
    }
#define OUTPUT(object, name)                                                                                           \
    {                                                                                                                  \
        object, name, PY_REQUIRED | PY_WRITTEN                                                                         \
    }
#define MAYBE(object, name)                                                                                            \
    {                                                                                                                  \
        object, name, PY_WRITTEN                                                                                       \
    }

static int take_layer(PyObject *layer, PyObject *scale, tch_layer *result)
{
    if (py_layer_take(layer, "layer", result) < 0) {
        return -1;
    }
    return scale == NULL ? 0 : py_take_double(scale, "scale", &result->scale);
}

static int take_parts(PyObject *value, tch_grad_part *parts)
{
    int64_t number;
    if (py_take_int(value, "parts", TCH_GRAD_WEIGHT, TCH_GRAD_BOTH, &number) < 0) {
        return -1;
    }
    *parts = (tch_grad_part)number;
    return 0;
}

/* --- gradients --------------------------------------------------------------------------------------------------- */

static PyObject *grad_samples(ARGUMENTS)
{
    static const char *const names[] = {"layer", "input", "output_gradient", "weight", "bias", "scale", "stream", NULL};
    PyObject *v[7];
    py_call call;
    tch_layer layer;
    (void)module;
    if (py_arguments("grad_samples", names, 5, args, count, keywords, v) < 0 || take_layer(v[0], v[5], &layer) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "input"), INPUT(v[2], "output_gradient"), MAYBE(v[3], "weight"),
                                   MAYBE(v[4], "bias")};
    if (py_call_begin(&call, operands, 4, v[6], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call,
            tch_grad_samples(call.context, &layer, call.tensors[0], call.tensors[1], call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

static PyObject *grad_norms(ARGUMENTS)
{
    static const char *const names[] = {"layer", "input", "output_gradient", "parts", "accumulate",
                                        "norms", "scale", "stream",          NULL};
    PyObject *v[8];
    py_call call;
    tch_layer layer;
    tch_grad_part parts;
    bool accumulate;
    (void)module;
    if (py_arguments("grad_norms", names, 6, args, count, keywords, v) < 0 || take_layer(v[0], v[6], &layer) < 0 ||
        take_parts(v[3], &parts) < 0 || py_take_bool(v[4], "accumulate", &accumulate) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "input"), INPUT(v[2], "output_gradient"), OUTPUT(v[5], "norms")};
    if (py_call_begin(&call, operands, 3, v[7], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call,
            tch_grad_norms(call.context, &layer, call.tensors[0], call.tensors[1], parts, accumulate, call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *grad_weighted_sum(ARGUMENTS)
{
    static const char *const names[] = {"layer",  "input", "output_gradient", "weights", "beta",
                                        "weight", "bias",  "scale",           "stream",  NULL};
    PyObject *v[9];
    py_call call;
    tch_layer layer;
    double beta;
    (void)module;
    if (py_arguments("grad_weighted_sum", names, 7, args, count, keywords, v) < 0 ||
        take_layer(v[0], v[7], &layer) < 0 || py_take_double(v[4], "beta", &beta) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "input"), INPUT(v[2], "output_gradient"), MAYBE_INPUT(v[3], "weights"),
                                   MAYBE(v[5], "weight"), MAYBE(v[6], "bias")};
    if (py_call_begin(&call, operands, 5, v[8], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_weighted_sum(call.context, &layer, call.tensors[0], call.tensors[1], call.tensors[2], beta,
                                        call.tensors[3], call.tensors[4]));
    return py_call_end(&call);
}

static PyObject *grad_gram(ARGUMENTS)
{
    static const char *const names[] = {"layer", "input", "output_gradient", "parts", "accumulate",
                                        "gram",  "scale", "stream",          NULL};
    PyObject *v[8];
    py_call call;
    tch_layer layer;
    tch_grad_part parts;
    bool accumulate;
    (void)module;
    if (py_arguments("grad_gram", names, 6, args, count, keywords, v) < 0 || take_layer(v[0], v[6], &layer) < 0 ||
        take_parts(v[3], &parts) < 0 || py_take_bool(v[4], "accumulate", &accumulate) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "input"), INPUT(v[2], "output_gradient"), OUTPUT(v[5], "gram")};
    if (py_call_begin(&call, operands, 3, v[7], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call,
            tch_grad_gram(call.context, &layer, call.tensors[0], call.tensors[1], parts, accumulate, call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *grad_dots(ARGUMENTS)
{
    static const char *const names[] = {"layer",      "input", "output_gradient", "weight", "bias",
                                        "accumulate", "dots",  "scale",           "stream", NULL};
    PyObject *v[9];
    py_call call;
    tch_layer layer;
    bool accumulate;
    (void)module;
    if (py_arguments("grad_dots", names, 7, args, count, keywords, v) < 0 || take_layer(v[0], v[7], &layer) < 0 ||
        py_take_bool(v[5], "accumulate", &accumulate) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "input"), INPUT(v[2], "output_gradient"), MAYBE_INPUT(v[3], "weight"),
                                   MAYBE_INPUT(v[4], "bias"), OUTPUT(v[6], "dots")};
    if (py_call_begin(&call, operands, 5, v[8], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_dots(call.context, &layer, call.tensors[0], call.tensors[1], call.tensors[2],
                                call.tensors[3], accumulate, call.tensors[4]));
    return py_call_end(&call);
}

static PyObject *grad_tied_norms(ARGUMENTS)
{
    static const char *const names[] = {
        "layer", "tokens", "embedding_gradient", "linear_input", "linear_gradient", "norms", "scale", "stream", NULL};
    PyObject *v[8];
    py_call call;
    tch_layer layer;
    (void)module;
    if (py_arguments("grad_tied_norms", names, 6, args, count, keywords, v) < 0 || take_layer(v[0], v[6], &layer) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "tokens"), INPUT(v[2], "embedding_gradient"),
                                   INPUT(v[3], "linear_input"), INPUT(v[4], "linear_gradient"), OUTPUT(v[5], "norms")};
    if (py_call_begin(&call, operands, 5, v[7], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_tied_norms(call.context, &layer, call.tensors[0], call.tensors[1], call.tensors[2],
                                      call.tensors[3], call.tensors[4]));
    return py_call_end(&call);
}

/* --- clipping and the natural gradient --------------------------------------------------------------------------- */

static PyObject *grad_clip_weights(ARGUMENTS)
{
    static const char *const names[] = {"norms", "max_norm", "weights", "stream", NULL};
    PyObject *v[4];
    py_call call;
    double max_norm;
    (void)module;
    if (py_arguments("grad_clip_weights", names, 3, args, count, keywords, v) < 0 ||
        py_take_double(v[1], "max_norm", &max_norm) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "norms"), OUTPUT(v[2], "weights")};
    if (py_call_begin(&call, operands, 2, v[3], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_clip_weights(call.context, call.tensors[0], max_norm, call.tensors[1]));
    return py_call_end(&call);
}

static PyObject *grad_natural_weights(ARGUMENTS)
{
    static const char *const names[] = {"gram", "rhs", "damping", "weights", "report", "stream", NULL};
    PyObject *v[6];
    py_call call;
    double damping;
    (void)module;
    if (py_arguments("grad_natural_weights", names, 5, args, count, keywords, v) < 0 ||
        py_take_double(v[2], "damping", &damping) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "gram"), MAYBE_INPUT(v[1], "rhs"), OUTPUT(v[3], "weights"),
                                   MAYBE(v[4], "report")};
    if (py_call_begin(&call, operands, 4, v[5], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_natural_weights(call.context, call.tensors[0], call.tensors[1], damping, call.tensors[2],
                                           call.tensors[3]));
    return py_call_end(&call);
}

/* --- curvature --------------------------------------------------------------------------------------------------- */

static int take_sharing(PyObject *value, tch_sharing *sharing)
{
    static const char *const words[] = {"expand", "reduce", NULL};
    int index;
    if (py_take_word(value, "sharing", words, &index) < 0) {
        return -1;
    }
    *sharing = (tch_sharing)index;
    return 0;
}

static PyObject *grad_factors(ARGUMENTS)
{
    static const char *const names[] = {"layer", "input",        "output_gradient", "bias",  "sharing", "alpha",
                                        "beta",  "input_factor", "output_factor",   "scale", "stream",  NULL};
    PyObject *v[11];
    py_call call;
    tch_layer layer;
    tch_sharing sharing;
    double alpha, beta;
    bool bias;
    (void)module;
    if (py_arguments("grad_factors", names, 9, args, count, keywords, v) < 0 || take_layer(v[0], v[9], &layer) < 0 ||
        py_take_bool(v[3], "bias", &bias) < 0 || take_sharing(v[4], &sharing) < 0 ||
        py_take_double(v[5], "alpha", &alpha) < 0 || py_take_double(v[6], "beta", &beta) < 0) {
        return NULL;
    }
    const py_operand operands[] = {MAYBE_INPUT(v[1], "input"), MAYBE_INPUT(v[2], "output_gradient"),
                                   MAYBE(v[7], "input_factor"), MAYBE(v[8], "output_factor")};
    if (py_call_begin(&call, operands, 4, v[10], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_factors(call.context, &layer, call.tensors[0], call.tensors[1], bias, sharing, alpha, beta,
                                   call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

static PyObject *grad_scales(ARGUMENTS)
{
    static const char *const names[] = {"layer", "input", "output_gradient", "bias",  "input_basis", "output_basis",
                                        "alpha", "beta",  "scales",          "scale", "stream",      NULL};
    PyObject *v[11];
    py_call call;
    tch_layer layer;
    double alpha, beta;
    bool bias;
    (void)module;
    if (py_arguments("grad_scales", names, 9, args, count, keywords, v) < 0 || take_layer(v[0], v[9], &layer) < 0 ||
        py_take_bool(v[3], "bias", &bias) < 0 || py_take_double(v[6], "alpha", &alpha) < 0 ||
        py_take_double(v[7], "beta", &beta) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "input"), INPUT(v[2], "output_gradient"), INPUT(v[4], "input_basis"),
                                   INPUT(v[5], "output_basis"), OUTPUT(v[8], "scales")};
    if (py_call_begin(&call, operands, 5, v[10], NULL) < 0) {
        return NULL;
    }
    PY_CALL(call, tch_grad_scales(call.context, &layer, call.tensors[0], call.tensors[1], bias, call.tensors[2],
                                  call.tensors[3], alpha, beta, call.tensors[4]));
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
        PY_METHOD("grad_factors", grad_factors, "the factors of KFAC, updated"),
        PY_METHOD("grad_scales", grad_scales, "the scales of EKFAC, updated"),
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, functions);
}
