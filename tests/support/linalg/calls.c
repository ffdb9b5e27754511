/* Operands for the rows of operations.c, and checks of them. */
#include "operations.h"
#include "reference.h"
#include "support/testing.h"

int32_t test_operation_count(void)
{
    return test_offers_method(TCH_ROOT_RATIONAL) ? test_operation_rows() : test_operation_rows() - 1;
}

static tch_dtype dtype_of(test_kind kind, tch_dtype dtype)
{
    return kind == KIND_FLOAT64 ? TCH_FLOAT64 : kind == KIND_INT32 ? TCH_INT32 : dtype;
}

/* All symmetric operands of a call draw from one stream, so that matrices of equal shape are equal and commute. */
static void fill_symmetric(test_tensor *t)
{
    int64_t n = t->shape[t->tensor.ndim - 1];
    double *values = test_alloc((size_t)t->count * sizeof *values);
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    test_random random = test_random_stream(77);
    ref_spectrum(n, 10.0, spectrum);
    for (int64_t i = 0; i < t->count; i += n * n) {
        ref_symmetric(&random, n, spectrum, values + i);
    }
    test_tensor_write(t, values);
    test_drop(spectrum);
    test_drop(values);
}

void test_call_make(test_call *call, tch_context *context, const test_operation *operation, tch_dtype dtype)
{
    memset(call, 0, sizeof *call);
    call->operation = operation;
    for (int32_t i = 0; i < operation->count; i++) {
        const test_operand *operand = &operation->operands[i];
        test_tensor *t =
            test_tensor_make(context, dtype_of(operand->kind, dtype), operand->ndim, operand->shape, LAYOUT_CONTIGUOUS);
        if (operand->role == ROLE_SYMMETRIC) {
            fill_symmetric(t);
        } else if (operand->role == ROLE_INPUT || operand->role == ROLE_OPTIONAL_INPUT) {
            test_tensor_draw(t, (uint64_t)(100 + i));
        }
        call->tensors[i] = t;
        call->arguments[i] = &t->tensor;
    }
}

void test_call_free(test_call *call)
{
    for (int32_t i = 0; i < call->operation->count; i++) {
        test_tensor_free(call->tensors[i]);
    }
}

tch_status test_call_run(const test_call *call, tch_context *context)
{
    return call->operation->call(context, call->arguments);
}

void test_call_check_unchanged(const test_call *call)
{
    for (int32_t i = 0; i < call->operation->count; i++) {
        test_tensor_check_unchanged(call->tensors[i], call->operation->operands[i].name);
    }
}

void test_call_check_done(const test_call *call)
{
    for (int32_t i = 0; i < call->operation->count; i++) {
        const test_operand *operand = &call->operation->operands[i];
        if (test_is_output(operand)) {
            test_tensor_check_written(call->tensors[i], operand->name);
        } else {
            test_tensor_check_unchanged(call->tensors[i], operand->name);
        }
    }
}
