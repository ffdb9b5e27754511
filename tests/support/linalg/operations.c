/* The rows use a batch of two and small unequal sizes, so that exchanged dimensions are detected. Independent of
 * cmocka, since cuda_smoke.c also uses these rows. */
#include "operations.h"

#include <string.h>

/* A call of a row, with the tensors t. */
#define CALL(name, call)                                                                                               \
    static tch_status name(tch_context *context, tch_tensor *const *t)                                                 \
    {                                                                                                                  \
        return call;                                                                                                   \
    }

static const tch_layer linear = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
static const tch_layer layer_norm = TCH_LAYER_INIT(TCH_LAYER_LAYER_NORM);
static const tch_layer rms_norm = TCH_LAYER_INIT(TCH_LAYER_RMS_NORM);

static tch_status call_root_backward(tch_context *context, tch_tensor *const *t)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = 1e-2;
    return tch_inverse_root_backward(context, t[0], 4, &config, t[1], t[2], t[3]);
}

static tch_status inverse_root(tch_context *context, tch_root_method method, tch_tensor *const *t)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = 1e-2;
    config.method = method;
    return tch_inverse_root(context, t[0], 4, &config, t[1], t[2], t[3]);
}

static tch_status call_grad_sum_of_group_norm(tch_context *context, tch_tensor *const *t)
{
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_GROUP_NORM);
    layer.groups = 2;
    return tch_grad_weighted_sum(context, &layer, t[0], t[1], t[2], 0.0, t[3], t[4]);
}

/* clang-format off */
CALL(call_copy, tch_tensor_copy(context, t[0], t[1]))
CALL(call_fill, tch_tensor_fill(context, t[0], 2.5))
CALL(call_matmul, tch_matmul(context, t[0], t[1], t[2]))
CALL(call_gemm, tch_gemm(context, 1.5, t[0], 1, t[1], 1, 0.0, t[2]))
CALL(call_symmetric_product, tch_symmetric_product(context, t[0], t[1], t[2]))
CALL(call_gram, tch_gram(context, 0.5, t[0], 0, 0.0, t[1]))
CALL(call_matmul_chunked, tch_matmul_chunked(context, t[0], t[1], 1 << 20, t[2]))
CALL(call_eigh, tch_eigh(context, t[0], t[1], t[2], t[3]))
CALL(call_matrix_power, tch_matrix_power(context, t[0], -0.25, 1e-3, t[1], t[2]))
CALL(call_power_backward, tch_matrix_power_backward(context, t[0], -0.25, 1e-3, t[1], t[2], t[3]))
CALL(call_root_auto, inverse_root(context, TCH_ROOT_AUTO, t))
CALL(call_root_eigen, inverse_root(context, TCH_ROOT_EIGEN, t))
CALL(call_root_newton, inverse_root(context, TCH_ROOT_NEWTON, t))
CALL(call_root_rational, inverse_root(context, TCH_ROOT_RATIONAL, t))
CALL(call_polar_express, tch_orthogonalize(context, t[0], 5, TCH_ORTHO_POLAR_EXPRESS, t[1]))
CALL(call_muon, tch_orthogonalize(context, t[0], 5, TCH_ORTHO_MUON, t[1]))
CALL(call_kronecker_product, tch_kronecker_product(context, t[0], t[1], t[2]))
CALL(call_kronecker_matmul, tch_kronecker_matmul(context, t[0], t[1], t[2], t[3]))
CALL(call_kronecker_apply, tch_kronecker_apply(context, t[0], t[1], t[2], t[3]))
CALL(call_kronecker_solve, tch_kronecker_solve(context, t[0], t[1], t[2], 1e-2, t[3], t[4]))
CALL(call_nearest_kronecker, tch_nearest_kronecker(context, t[0], t[1], t[2], t[3]))
CALL(call_grad_samples, tch_grad_samples(context, &linear, t[0], t[1], t[2], t[3]))
CALL(call_grad_norms, tch_grad_norms(context, &linear, t[0], t[1], TCH_GRAD_BOTH, 0, t[2]))
CALL(call_grad_norms_of_layer_norm, tch_grad_norms(context, &layer_norm, t[0], t[1], TCH_GRAD_BOTH, 0, t[2]))
CALL(call_grad_sum, tch_grad_weighted_sum(context, &linear, t[0], t[1], t[2], 0.0, t[3], t[4]))
CALL(call_grad_gram, tch_grad_gram(context, &linear, t[0], t[1], TCH_GRAD_BOTH, 0, t[2]))
CALL(call_grad_gram_of_rms_norm, tch_grad_gram(context, &rms_norm, t[0], t[1], TCH_GRAD_BOTH, 0, t[2]))
CALL(call_grad_dots, tch_grad_dots(context, &linear, t[0], t[1], t[2], t[3], 0, t[4]))
CALL(call_grad_factors, tch_grad_factors(context, &linear, t[0], t[1], 0, TCH_SHARING_EXPAND, 1.0, 0.0, t[2], t[3]))
CALL(call_grad_reduced_factors, tch_grad_factors(context, &linear, t[0], t[1], 1, TCH_SHARING_REDUCE, 1.0, 0.0,
     t[2], t[3]))
CALL(call_grad_scales, tch_grad_scales(context, &linear, t[0], t[1], 0, t[2], t[3], 1.0, 0.0, t[4]))
CALL(call_clip_weights, tch_grad_clip_weights(context, t[0], 0.5, t[1]))
CALL(call_natural_weights, tch_grad_natural_weights(context, t[0], t[1], 0.1, t[2], NULL))

#define ROOT_OPERANDS                                           \
    {{"a", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 6, 6}},            \
     {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 6, 6}},             \
     {"residual", ROLE_OPTIONAL_OUTPUT, KIND_FLOAT64, 1, {2}},  \
     {"report", ROLE_OPTIONAL_OUTPUT, KIND_INT32, 1, {2}}}

#define BACKWARD_OPERANDS                                       \
    {{"a", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 6, 6}},            \
     {"grad", ROLE_INPUT, KIND_REAL, 3, {2, 6, 6}},             \
     {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 6, 6}},             \
     {"report", ROLE_OPTIONAL_OUTPUT, KIND_INT32, 1, {2}}}

#define LINEAR_OPERANDS                                         \
    {"input", ROLE_INPUT, KIND_REAL, 3, {2, 3, 4}},             \
    {"output_gradient", ROLE_INPUT, KIND_REAL, 3, {2, 3, 5}}

#define NORMALIZED_OPERANDS                                     \
    {"input", ROLE_INPUT, KIND_REAL, 3, {2, 4, 6}},             \
    {"output_gradient", ROLE_INPUT, KIND_REAL, 3, {2, 4, 6}}

const test_operation test_operations[] = {
    {"tch_tensor_copy", "", 2,
     {{"dst", ROLE_OUTPUT, KIND_REAL, 3, {2, 5, 4}},
      {"src", ROLE_INPUT, KIND_REAL, 3, {2, 5, 4}}}, call_copy},
    {"tch_tensor_fill", "", 1,
     {{"tensor", ROLE_OUTPUT, KIND_REAL, 3, {2, 5, 4}}}, call_fill},
    {"tch_matmul", "", 3,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 5, 4}},
      {"b", ROLE_INPUT, KIND_REAL, 3, {2, 4, 3}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 5, 3}}}, call_matmul},
    {"tch_gemm", "", 3,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 4, 5}},
      {"b", ROLE_INPUT, KIND_REAL, 3, {2, 3, 4}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 5, 3}}}, call_gemm},
    {"tch_symmetric_product", "", 3,
     {{"a", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 6, 6}},
      {"b", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 6, 6}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 6, 6}}}, call_symmetric_product},
    {"tch_gram", "", 2,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 6, 4}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 6, 6}}}, call_gram},
    {"tch_matmul_chunked", "", 3,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 5, 4}},
      {"b", ROLE_INPUT, KIND_REAL, 3, {2, 4, 3}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 5, 3}}}, call_matmul_chunked},
    {"tch_eigh", "", 4,
     {{"a", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 6, 6}},
      {"w", ROLE_OUTPUT, KIND_REAL, 2, {2, 6}},
      {"v", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 3, {2, 6, 6}},
      {"report", ROLE_OPTIONAL_OUTPUT, KIND_INT32, 1, {2}}}, call_eigh},
    {"tch_matrix_power", "", 3,
     {{"a", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 6, 6}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 6, 6}},
      {"report", ROLE_OPTIONAL_OUTPUT, KIND_INT32, 1, {2}}}, call_matrix_power},
    {"tch_matrix_power_backward", "", 4, BACKWARD_OPERANDS, call_power_backward},
    {"tch_inverse_root_backward", "", 4, BACKWARD_OPERANDS, call_root_backward},
    {"tch_inverse_root", "auto", 4, ROOT_OPERANDS, call_root_auto},
    {"tch_inverse_root", "eigen", 4, ROOT_OPERANDS, call_root_eigen},
    {"tch_inverse_root", "newton", 4, ROOT_OPERANDS, call_root_newton},
    {"tch_orthogonalize", "polar express", 2,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 6, 4}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 6, 4}}}, call_polar_express},
    {"tch_orthogonalize", "muon", 2,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 4, 6}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 4, 6}}}, call_muon},
    {"tch_kronecker_product", "", 3,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 2, 3}},
      {"b", ROLE_INPUT, KIND_REAL, 3, {2, 5, 4}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 10, 12}}}, call_kronecker_product},
    {"tch_kronecker_matmul", "", 4,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 2, 3}},
      {"b", ROLE_INPUT, KIND_REAL, 3, {2, 5, 4}},
      {"x", ROLE_INPUT, KIND_REAL, 3, {2, 12, 7}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 10, 7}}}, call_kronecker_matmul},
    {"tch_kronecker_apply", "", 4,
     {{"a", ROLE_INPUT, KIND_REAL, 3, {2, 2, 3}},
      {"b", ROLE_INPUT, KIND_REAL, 3, {2, 5, 4}},
      {"x", ROLE_INPUT, KIND_REAL, 3, {2, 3, 4}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 2, 5}}}, call_kronecker_apply},
    {"tch_kronecker_solve", "", 5,
     {{"a", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 4, 4}},
      {"b", ROLE_SYMMETRIC, KIND_REAL, 3, {2, 3, 3}},
      {"x", ROLE_INPUT, KIND_REAL, 3, {2, 4, 3}},
      {"out", ROLE_OUTPUT, KIND_REAL, 3, {2, 4, 3}},
      {"report", ROLE_OPTIONAL_OUTPUT, KIND_INT32, 1, {2}}}, call_kronecker_solve},
    {"tch_nearest_kronecker", "", 4,
     {{"m", ROLE_INPUT, KIND_REAL, 3, {2, 10, 12}},
      {"a", ROLE_OUTPUT, KIND_REAL, 3, {2, 2, 3}},
      {"b", ROLE_OUTPUT, KIND_REAL, 3, {2, 5, 4}},
      {"error", ROLE_OPTIONAL_OUTPUT, KIND_FLOAT64, 1, {2}}}, call_nearest_kronecker},
    {"tch_grad_samples", "linear", 4,
     {LINEAR_OPERANDS,
      {"weight", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 3, {2, 5, 4}},
      {"bias", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 2, {2, 5}}}, call_grad_samples},
    {"tch_grad_norms", "linear", 3,
     {LINEAR_OPERANDS,
      {"norms", ROLE_OUTPUT, KIND_FLOAT64, 1, {2}}}, call_grad_norms},
    {"tch_grad_norms", "layer norm", 3,
     {NORMALIZED_OPERANDS,
      {"norms", ROLE_OUTPUT, KIND_FLOAT64, 1, {2}}}, call_grad_norms_of_layer_norm},
    {"tch_grad_weighted_sum", "linear", 5,
     {LINEAR_OPERANDS,
      {"weights", ROLE_OPTIONAL_INPUT, KIND_FLOAT64, 1, {2}},
      {"weight", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 2, {5, 4}},
      {"bias", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 1, {5}}}, call_grad_sum},
    {"tch_grad_weighted_sum", "group norm", 5,
     {NORMALIZED_OPERANDS,
      {"weights", ROLE_OPTIONAL_INPUT, KIND_FLOAT64, 1, {2}},
      {"weight", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 1, {4}},
      {"bias", ROLE_OPTIONAL_OUTPUT, KIND_REAL, 1, {4}}}, call_grad_sum_of_group_norm},
    {"tch_grad_gram", "linear", 3,
     {LINEAR_OPERANDS,
      {"gram", ROLE_OUTPUT, KIND_FLOAT64, 2, {2, 2}}}, call_grad_gram},
    {"tch_grad_gram", "RMS norm", 3,
     {NORMALIZED_OPERANDS,
      {"gram", ROLE_OUTPUT, KIND_FLOAT64, 2, {2, 2}}}, call_grad_gram_of_rms_norm},
    {"tch_grad_dots", "linear", 5,
     {LINEAR_OPERANDS,
      {"weight", ROLE_OPTIONAL_INPUT, KIND_REAL, 2, {5, 4}},
      {"bias", ROLE_OPTIONAL_INPUT, KIND_REAL, 1, {5}},
      {"dots", ROLE_OUTPUT, KIND_FLOAT64, 1, {2}}}, call_grad_dots},
    {"tch_grad_factors", "expand", 4,
     {LINEAR_OPERANDS,
      {"input_factor", ROLE_OPTIONAL_OUTPUT, KIND_FLOAT64, 2, {4, 4}},
      {"output_factor", ROLE_OPTIONAL_OUTPUT, KIND_FLOAT64, 2, {5, 5}}}, call_grad_factors},
    {"tch_grad_factors", "reduce", 4,
     {LINEAR_OPERANDS,
      {"input_factor", ROLE_OPTIONAL_OUTPUT, KIND_FLOAT64, 2, {5, 5}},
      {"output_factor", ROLE_OPTIONAL_OUTPUT, KIND_FLOAT64, 2, {5, 5}}}, call_grad_reduced_factors},
    {"tch_grad_scales", "", 5,
     {LINEAR_OPERANDS,
      {"input_basis", ROLE_INPUT, KIND_FLOAT64, 2, {4, 4}},
      {"output_basis", ROLE_INPUT, KIND_FLOAT64, 2, {5, 5}},
      {"scales", ROLE_OUTPUT, KIND_FLOAT64, 2, {5, 4}}}, call_grad_scales},
    {"tch_grad_clip_weights", "", 2,
     {{"norms", ROLE_INPUT, KIND_FLOAT64, 1, {2}},
      {"weights", ROLE_OUTPUT, KIND_FLOAT64, 1, {2}}}, call_clip_weights},
    {"tch_grad_natural_weights", "", 3,
     {{"gram", ROLE_SYMMETRIC, KIND_FLOAT64, 2, {3, 3}},
      {"rhs", ROLE_OPTIONAL_INPUT, KIND_FLOAT64, 1, {3}},
      {"weights", ROLE_OUTPUT, KIND_FLOAT64, 1, {3}}}, call_natural_weights},
    /* Last, since test_operation_count omits it if the device does not support it. */
    {"tch_inverse_root", "rational", 4, ROOT_OPERANDS, call_root_rational},
};
/* clang-format on */

/* clang-format off */
static const struct {
    const char *operation, *variant, *operand;
    test_freedom freedom;
} freedoms[] = {
    {"tch_gram", "", "a", FREE_COLS},
    {"tch_grad_norms", "linear", "input", FREE_COLS},
    {"tch_grad_norms", "linear", "output_gradient", FREE_COLS},
    {"tch_grad_gram", "linear", "input", FREE_COLS},
    {"tch_grad_gram", "linear", "output_gradient", FREE_COLS},
    {"tch_grad_gram", "linear", "gram", FREE_FLOAT32},
    {"tch_grad_gram", "RMS norm", "gram", FREE_FLOAT32},
    {"tch_grad_factors", "expand", "input", FREE_FLOAT},
    {"tch_grad_factors", "expand", "output_gradient", FREE_FLOAT},
    {"tch_grad_factors", "expand", "input_factor", FREE_FLOAT32},
    {"tch_grad_factors", "expand", "output_factor", FREE_FLOAT32},
    {"tch_grad_factors", "reduce", "input", FREE_FLOAT},
    {"tch_grad_factors", "reduce", "output_gradient", FREE_FLOAT},
    {"tch_grad_factors", "reduce", "input_factor", FREE_FLOAT32},
    {"tch_grad_factors", "reduce", "output_factor", FREE_FLOAT32},
    {"tch_grad_scales", "", "input", FREE_FLOAT},
    {"tch_grad_scales", "", "output_gradient", FREE_FLOAT},
    {"tch_grad_clip_weights", "", "weights", FREE_IN_PLACE},
    {"tch_grad_natural_weights", "", "gram", FREE_FLOAT32},
};

/* Parameters and Gram matrices have no leading batch dimension. */
static const char *const unbatched[] = {
    "tch_grad_weighted_sum", "tch_grad_gram",   "tch_grad_dots",
    "tch_grad_factors",      "tch_grad_scales", "tch_grad_natural_weights",
};
/* clang-format on */

bool test_is_free(const test_operation *operation, int32_t index, test_freedom freedom)
{
    for (size_t i = 0; i < sizeof freedoms / sizeof freedoms[0]; i++) {
        if (freedoms[i].freedom == freedom && strcmp(freedoms[i].operation, operation->name) == 0 &&
            strcmp(freedoms[i].variant, operation->variant) == 0 &&
            strcmp(freedoms[i].operand, operation->operands[index].name) == 0) {
            return true;
        }
    }
    return false;
}

bool test_is_batched(const test_operation *operation)
{
    for (size_t i = 0; i < sizeof unbatched / sizeof unbatched[0]; i++) {
        if (strcmp(unbatched[i], operation->name) == 0) {
            return false;
        }
    }
    return true;
}

int32_t test_operation_rows(void)
{
    return sizeof test_operations / sizeof test_operations[0];
}

bool test_is_output(const test_operand *operand)
{
    return operand->role == ROLE_OUTPUT || operand->role == ROLE_OPTIONAL_OUTPUT;
}
