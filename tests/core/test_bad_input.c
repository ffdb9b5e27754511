/* Bad tensors. Every operation of the table is called with each of its tensors broken in each way; each refusal has its
 * status, names the argument, and leaves every tensor as it was. Numbers out of range are in test_bad_arguments.c, bad
 * numbers inside good tensors in test_bad_numbers.c. */
#include <string.h>

#include "support/linalg/operations.h"
#include "support/messages.h"
#include "support/testing.h"

/* A copy of a tensor with strides of its own, to be broken. */
typedef struct broken {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK + 1];
    int64_t strides[TCH_MAX_RANK + 1];
} broken;

static void copy_to_break(const test_tensor *t, broken *b)
{
    b->tensor = t->tensor;
    memcpy(b->shape, t->shape, sizeof t->shape);
    memcpy(b->strides, t->strides, sizeof t->strides);
    b->shape[TCH_MAX_RANK] = 1;
    b->strides[TCH_MAX_RANK] = 1;
    b->tensor.shape = b->shape;
    b->tensor.strides = b->strides;
}

/* Runs the call with operand `index` replaced, expects this status with its name, and that nothing was written. */
static void refuse(test_call *call, tch_context *context, int32_t index, tch_tensor *replacement, tch_status expected)
{
    tch_tensor *kept = call->arguments[index];
    call->arguments[index] = replacement;
    test_check_refused(test_call_run(call, context), expected, call->operation->operands[index].name);
    call->arguments[index] = kept;
    test_call_check_unchanged(call);
}

typedef void (*breaker)(test_call *call, tch_context *context, int32_t index);

static void break_null(test_call *call, tch_context *context, int32_t index)
{
    test_role role = call->operation->operands[index].role;
    if (role != ROLE_OPTIONAL_OUTPUT && role != ROLE_OPTIONAL_INPUT) {
        refuse(call, context, index, NULL, TCH_ERR_INVALID_ARGUMENT);
    }
}

static void break_data(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    copy_to_break(call->tensors[index], &b);
    b.tensor.data = NULL;
    refuse(call, context, index, &b.tensor, TCH_ERR_INVALID_ARGUMENT);
}

static void break_shape_pointer(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    copy_to_break(call->tensors[index], &b);
    b.tensor.shape = NULL;
    refuse(call, context, index, &b.tensor, TCH_ERR_INVALID_ARGUMENT);
}

static void break_rank(test_call *call, tch_context *context, int32_t index)
{
    const int32_t ranks[] = {-1, TCH_MAX_RANK + 1, INT32_MAX, INT32_MIN};
    broken b;
    copy_to_break(call->tensors[index], &b);
    for (int i = 0; i < 4; i++) {
        b.tensor.ndim = ranks[i];
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
    }
}

static bool is_fill(const test_call *call)
{
    return strcmp(call->operation->name, "tch_tensor_fill") == 0;
}

static bool is_copy(const test_call *call)
{
    return strcmp(call->operation->name, "tch_tensor_copy") == 0;
}

/* The one call that reads and writes memory of the host from a context on another device. */
static bool is_chunked(const test_call *call)
{
    return strcmp(call->operation->name, "tch_matmul_chunked") == 0;
}

/* Runs the call with operand `index` replaced by one that does not fit the others: the message names one of them. */
static void refuse_shape(test_call *call, tch_context *context, int32_t index, tch_tensor *replacement)
{
    const test_operation *operation = call->operation;
    call->arguments[index] = replacement;
    tch_status got = test_call_run(call, context);
    call->arguments[index] = &call->tensors[index]->tensor;
    CHECK(got == TCH_ERR_SHAPE, "gave %s", tch_status_name(got));
    bool named = false;
    for (int32_t i = 0; i < operation->count; i++) {
        named = named || test_names_argument(tch_last_error(), operation->operands[i].name);
    }
    CHECK(named, "the message names no argument: %s", tch_last_error());
    test_call_check_unchanged(call);
}

/* Too few dimensions: a vector where matrices belong, a number where a vector belongs. */
static void break_rank_too_low(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    copy_to_break(call->tensors[index], &b);
    b.tensor.ndim = b.tensor.ndim > 1 ? 1 : 0;
    if (is_copy(call)) {
        refuse_shape(call, context, index, &b.tensor);
    } else if (!is_fill(call)) {
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
    }
}

static void break_sizes(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    for (int32_t d = 0; d < call->tensors[index]->tensor.ndim; d++) {
        copy_to_break(call->tensors[index], &b);
        b.shape[d] = -b.shape[d];
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
        copy_to_break(call->tensors[index], &b);
        b.shape[d] = INT64_MAX;
        b.shape[b.tensor.ndim > 1 ? (d + 1) % b.tensor.ndim : 0] = INT64_MAX;
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
    }
}

/* One row, column or matrix more than the others say, where they say it. A fill takes any shape. */
static void break_fit(test_call *call, tch_context *context, int32_t index)
{
    for (int32_t d = 0; d < call->tensors[index]->tensor.ndim && !is_fill(call); d++) {
        broken b;
        copy_to_break(call->tensors[index], &b);
        b.tensor.strides = NULL;
        b.shape[d] += 1;
        if (d != 2 || !test_is_free(call->operation, index, FREE_COLS)) {
            refuse_shape(call, context, index, &b.tensor);
        }
    }
}

static void break_unknown_dtype(test_call *call, tch_context *context, int32_t index)
{
    const tch_dtype unknown[] = {{TCH_FLOAT, 8, 1}, {TCH_FLOAT, 32, 4}, {TCH_UINT, 32, 1}, {77, 32, 1}, {0, 0, 0}};
    broken b;
    copy_to_break(call->tensors[index], &b);
    for (int i = 0; i < 5; i++) {
        b.tensor.dtype = unknown[i];
        refuse(call, context, index, &b.tensor, TCH_ERR_DTYPE);
    }
}

/* A type the library knows, in the wrong place. Copies convert and fills take any type. */
static void break_dtype(test_call *call, tch_context *context, int32_t index)
{
    const tch_dtype others[] = {TCH_FLOAT16, TCH_BFLOAT16, TCH_INT32, TCH_INT64, TCH_FLOAT32, TCH_FLOAT64};
    broken b;
    copy_to_break(call->tensors[index], &b);
    for (int i = 0; i < 6 && !is_fill(call) && !is_copy(call); i++) {
        b.tensor.dtype = others[i];
        bool will_do =
            (tch_dtype_equal(others[i], TCH_FLOAT32) && test_is_free(call->operation, index, FREE_FLOAT32)) ||
            ((others[i].code == TCH_FLOAT || others[i].code == TCH_BFLOAT) &&
             test_is_free(call->operation, index, FREE_FLOAT));
        if (!will_do && !tch_dtype_equal(others[i], call->tensors[index]->tensor.dtype)) {
            refuse(call, context, index, &b.tensor, TCH_ERR_DTYPE);
        }
    }
}

static void break_device(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    copy_to_break(call->tensors[index], &b);
    b.tensor.device.type = test_on_cpu() ? TCH_DEVICE_CUDA : TCH_DEVICE_CPU;
    if (test_on_cpu() || (!is_copy(call) && !is_chunked(call))) {
        refuse(call, context, index, &b.tensor, TCH_ERR_DEVICE);
    }
    b.tensor.device.type = 4711;
    refuse(call, context, index, &b.tensor, TCH_ERR_DEVICE);
    copy_to_break(call->tensors[index], &b);
    b.tensor.device.index += 1;
    if (!is_copy(call)) {
        refuse(call, context, index, &b.tensor, TCH_ERR_DEVICE);
    }
}

static void break_alignment(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    copy_to_break(call->tensors[index], &b);
    b.tensor.byte_offset += 1;
    refuse(call, context, index, &b.tensor, TCH_ERR_LAYOUT);
}

/* Strides that lead out of the address space; the products on the way must not wrap. */
static void break_strides_too_far(test_call *call, tch_context *context, int32_t index)
{
    const int64_t far[] = {INT64_MAX, INT64_MIN, INT64_MAX / 2, INT64_MIN / 2, INT64_MAX / 4};
    for (int i = 0; i < 5; i++) {
        broken b;
        copy_to_break(call->tensors[index], &b);
        b.strides[0] = far[i];
        refuse(call, context, index, &b.tensor, TCH_ERR_LAYOUT);
    }
}

/* Outputs whose elements share memory. */
static void break_output_strides(test_call *call, tch_context *context, int32_t index)
{
    broken b;
    if (!test_is_output(&call->operation->operands[index])) {
        return;
    }
    for (int32_t d = 0; d < call->tensors[index]->tensor.ndim; d++) {
        copy_to_break(call->tensors[index], &b);
        b.strides[d] = 0;
        refuse(call, context, index, &b.tensor, TCH_ERR_LAYOUT);
    }
    copy_to_break(call->tensors[index], &b);
    if (b.tensor.ndim > 1) {
        b.strides[b.tensor.ndim - 2] = 1;
        refuse(call, context, index, &b.tensor, TCH_ERR_LAYOUT);
    }
}

/* An output on top of another operand, exactly or by its last element. */
static void break_overlap(test_call *call, tch_context *context, int32_t index)
{
    for (int32_t other = 0; other < call->operation->count; other++) {
        const test_operand *operand = &call->operation->operands[index];
        if (other == index || !test_is_output(operand) || test_is_free(call->operation, index, FREE_IN_PLACE)) {
            continue;
        }
        const test_tensor *victim = call->tensors[other];
        broken b;
        copy_to_break(call->tensors[index], &b);
        b.tensor.data = victim->tensor.data;
        b.tensor.byte_offset = victim->tensor.byte_offset;
        tch_tensor *kept = call->arguments[index];
        call->arguments[index] = &b.tensor;
        tch_status got = test_call_run(call, context);
        CHECK(got == TCH_ERR_LAYOUT, "on %s gave %s", call->operation->operands[other].name, tch_status_name(got));
        const char *message = tch_last_error();
        CHECK(test_names_argument(message, call->operation->operands[index].name) &&
                  test_names_argument(message, call->operation->operands[other].name),
              "the message does not name both: %s", message);
        call->arguments[index] = kept;
        test_call_check_unchanged(call);
    }
}

static void for_every_operand(tch_context *context, const char *what, breaker breaks)
{
    for (int32_t i = 0; i < test_operation_count(); i++) {
        const test_operation *operation = &test_operations[i];
        test_call call;
        test_call_make(&call, context, operation, TCH_FLOAT32);
        for (int32_t index = 0; index < operation->count; index++) {
            test_case("%s %s: %s with %s", operation->name, operation->variant, operation->operands[index].name, what);
            breaks(&call, context, index);
        }
        test_case("%s %s: still works", operation->name, operation->variant);
        CHECK_OK(test_call_run(&call, context));
        test_call_check_done(&call);
        test_call_free(&call);
    }
}

static void null_tensors(void **state)
{
    for_every_operand(*state, "NULL", break_null);
}

static void null_data(void **state)
{
    for_every_operand(*state, "data NULL", break_data);
}

static void null_shapes(void **state)
{
    for_every_operand(*state, "shape NULL", break_shape_pointer);
}

static void impossible_ranks(void **state)
{
    for_every_operand(*state, "an impossible rank", break_rank);
}

static void ranks_too_low(void **state)
{
    for_every_operand(*state, "a rank too low", break_rank_too_low);
}

static void impossible_sizes(void **state)
{
    for_every_operand(*state, "a negative or overflowing size", break_sizes);
}

static void shapes_that_do_not_fit(void **state)
{
    for_every_operand(*state, "a size that does not fit", break_fit);
}

static void unknown_dtypes(void **state)
{
    for_every_operand(*state, "an unknown dtype", break_unknown_dtype);
}

static void wrong_dtypes(void **state)
{
    for_every_operand(*state, "a wrong dtype", break_dtype);
}

static void wrong_devices(void **state)
{
    for_every_operand(*state, "a wrong device", break_device);
}

static void misaligned_tensors(void **state)
{
    for_every_operand(*state, "a misaligned first element", break_alignment);
}

static void strides_too_far(void **state)
{
    for_every_operand(*state, "strides out of the address space", break_strides_too_far);
}

static void outputs_that_share_memory_with_themselves(void **state)
{
    for_every_operand(*state, "strides that repeat elements", break_output_strides);
}

static void outputs_that_overlap(void **state)
{
    for_every_operand(*state, "memory of another operand", break_overlap);
}

static void null_contexts(void **state)
{
    tch_context *context = *state;
    for (int32_t i = 0; i < test_operation_count(); i++) {
        test_call call;
        test_case("%s", test_operations[i].name);
        test_call_make(&call, context, &test_operations[i], TCH_FLOAT32);
        test_check_refused(test_call_run(&call, NULL), TCH_ERR_INVALID_ARGUMENT, "context");
        test_call_check_unchanged(&call);
        test_call_free(&call);
    }
}

static void optional_outputs_may_be_left_out(void **state)
{
    tch_context *context = *state;
    for (int32_t i = 0; i < test_operation_count(); i++) {
        for (int32_t index = 0; index < test_operations[i].count; index++) {
            test_call call;
            if (test_operations[i].operands[index].role != ROLE_OPTIONAL_OUTPUT) {
                continue;
            }
            test_case("%s without %s", test_operations[i].name, test_operations[i].operands[index].name);
            test_call_make(&call, context, &test_operations[i], TCH_FLOAT32);
            call.arguments[index] = NULL;
            CHECK_OK(test_call_run(&call, context));
            test_tensor_check_unchanged(call.tensors[index], "what was left out");
            test_tensor_check_written(call.tensors[1], "an output");
            test_call_free(&call);
        }
    }
}

/* A batch of none, and matrices without rows: valid, and nothing is done. */
static void run_empty(tch_context *context, const test_operation *operation, bool keep_batch)
{
    test_operation empty = *operation;
    test_call call;
    for (int32_t index = 0; index < empty.count; index++) {
        test_operand *operand = &empty.operands[index];
        for (int32_t d = keep_batch ? 1 : 0; d < (keep_batch ? operand->ndim : 1); d++) {
            operand->shape[d] = 0;
        }
    }
    test_call_make(&call, context, &empty, TCH_FLOAT32);
    CHECK_OK(test_call_run(&call, context));
    for (int32_t index = 0; index < empty.count; index++) {
        if (call.tensors[index]->count == 0) {
            test_tensor_check_unchanged(call.tensors[index], empty.operands[index].name);
        }
    }
    test_call_free(&call);
}

static void empty_tensors_are_valid(void **state)
{
    tch_context *context = *state;
    for (int32_t i = 0; i < test_operation_count(); i++) {
        if (!test_is_batched(&test_operations[i])) {
            continue;
        }
        test_case("%s %s with a batch of none", test_operations[i].name, test_operations[i].variant);
        run_empty(context, &test_operations[i], false);
        test_case("%s %s with 0 by 0 matrices", test_operations[i].name, test_operations[i].variant);
        run_empty(context, &test_operations[i], true);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(null_tensors),
        cmocka_unit_test(null_data),
        cmocka_unit_test(null_shapes),
        cmocka_unit_test(null_contexts),
        cmocka_unit_test(impossible_ranks),
        cmocka_unit_test(ranks_too_low),
        cmocka_unit_test(impossible_sizes),
        cmocka_unit_test(shapes_that_do_not_fit),
        cmocka_unit_test(unknown_dtypes),
        cmocka_unit_test(wrong_dtypes),
        cmocka_unit_test(wrong_devices),
        cmocka_unit_test(misaligned_tensors),
        cmocka_unit_test(strides_too_far),
        cmocka_unit_test(outputs_that_share_memory_with_themselves),
        cmocka_unit_test(outputs_that_overlap),
        cmocka_unit_test(optional_outputs_may_be_left_out),
        cmocka_unit_test(empty_tensors_are_valid),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
