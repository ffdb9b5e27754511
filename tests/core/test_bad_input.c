/* Invalid tensors: every operation of the table is called with each of its tensors invalid in each way; each call
 * returns its status, names the argument, and changes no tensor. test_bad_arguments.c has out-of-range numbers,
 * test_bad_numbers.c non-finite values. */
#include "support/bad_input.h"
#include "support/linalg/operations.h"
#include "support/testing.h"

/* Runs the call with operand `index` replaced; expects this status with its name, and that nothing was written. */
static void refuse(test_call *call, tch_context *context, int32_t index, tch_tensor *replacement, tch_status expected)
{
    tch_tensor *kept = call->arguments[index];
    call->arguments[index] = replacement;
    test_check_refused(test_call_run(call, context), expected, call->operation->operands[index].name);
    call->arguments[index] = kept;
    test_call_check_unchanged(call);
}

static void break_null(test_call *call, tch_context *context, int32_t index)
{
    test_role role = call->operation->operands[index].role;
    if (role != ROLE_OPTIONAL_OUTPUT && role != ROLE_OPTIONAL_INPUT) {
        refuse(call, context, index, NULL, TCH_ERR_INVALID_ARGUMENT);
    }
}

static const test_flaw flaws[] = {
    {"data NULL", TCH_ERR_INVALID_ARGUMENT, PART_DATA, 0, {0}},
    {"shape NULL", TCH_ERR_INVALID_ARGUMENT, PART_SHAPE, 0, {0}},
    {"rank -1", TCH_ERR_SHAPE, PART_RANK, -1, {0}},
    {"a rank too high", TCH_ERR_SHAPE, PART_RANK, TCH_MAX_RANK + 1, {0}},
    {"the largest rank", TCH_ERR_SHAPE, PART_RANK, INT32_MAX, {0}},
    {"the least rank", TCH_ERR_SHAPE, PART_RANK, INT32_MIN, {0}},
    {"8 bits", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 8, 1}},
    {"vectors of 4", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 32, 4}},
    {"unsigned integers", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_UINT, 32, 1}},
    {"type 77", TCH_ERR_DTYPE, PART_DTYPE, 0, {77, 32, 1}},
    {"no type", TCH_ERR_DTYPE, PART_DTYPE, 0, {0, 0, 0}},
    {"device 4711", TCH_ERR_DEVICE, PART_DEVICE, 4711, {0}},
    {"a misaligned first element", TCH_ERR_LAYOUT, PART_OFFSET, 1, {0}},
    /* Strides that leave the address space; intermediate products must not wrap. */
    {"the largest stride", TCH_ERR_LAYOUT, PART_STRIDE, INT64_MAX, {0}},
    {"the least stride", TCH_ERR_LAYOUT, PART_STRIDE, INT64_MIN, {0}},
    {"half the largest stride", TCH_ERR_LAYOUT, PART_STRIDE, INT64_MAX / 2, {0}},
    {"half the least stride", TCH_ERR_LAYOUT, PART_STRIDE, INT64_MIN / 2, {0}},
    {"a quarter of the largest stride", TCH_ERR_LAYOUT, PART_STRIDE, INT64_MAX / 4, {0}},
};

static void break_by_row(test_call *call, tch_context *context, int32_t index)
{
    test_broken b;
    for (size_t i = 0; i < TEST_COUNT(flaws); i++) {
        test_case("%s %s: %s with %s", call->operation->name, call->operation->variant,
                  call->operation->operands[index].name, flaws[i].what);
        refuse(call, context, index, test_broken_make(&b, &call->tensors[index]->tensor, &flaws[i]), flaws[i].expected);
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

/* The only call that accesses host memory from a context on another device. */
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

/* Too few dimensions: a vector for a matrix, a scalar for a vector. */
static void break_rank_too_low(test_call *call, tch_context *context, int32_t index)
{
    test_broken b;
    test_broken_copy(&b, &call->tensors[index]->tensor);
    b.tensor.ndim = b.tensor.ndim > 1 ? 1 : 0;
    if (is_copy(call)) {
        refuse_shape(call, context, index, &b.tensor);
    } else if (!is_fill(call)) {
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
    }
}

static void break_sizes(test_call *call, tch_context *context, int32_t index)
{
    test_broken b;
    for (int32_t d = 0; d < call->tensors[index]->tensor.ndim; d++) {
        test_broken_copy(&b, &call->tensors[index]->tensor);
        b.shape[d] = -b.shape[d];
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
        test_broken_copy(&b, &call->tensors[index]->tensor);
        b.shape[d] = INT64_MAX;
        b.shape[b.tensor.ndim > 1 ? (d + 1) % b.tensor.ndim : 0] = INT64_MAX;
        refuse(call, context, index, &b.tensor, TCH_ERR_SHAPE);
    }
}

/* One row, column or matrix too many, where the shape is determined by others. A fill takes any shape. */
static void break_fit(test_call *call, tch_context *context, int32_t index)
{
    for (int32_t d = 0; d < call->tensors[index]->tensor.ndim && !is_fill(call); d++) {
        test_broken b;
        test_broken_copy(&b, &call->tensors[index]->tensor);
        b.tensor.strides = NULL;
        b.shape[d] += 1;
        if (d != 2 || !test_is_free(call->operation, index, FREE_COLS)) {
            refuse_shape(call, context, index, &b.tensor);
        }
    }
}

/* A supported type in the wrong operand. Copies convert and fills take any type. */
static void break_dtype(test_call *call, tch_context *context, int32_t index)
{
    const tch_dtype others[] = {TCH_FLOAT16, TCH_BFLOAT16, TCH_INT32, TCH_INT64, TCH_FLOAT32, TCH_FLOAT64};
    test_broken b;
    test_broken_copy(&b, &call->tensors[index]->tensor);
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
    test_broken b;
    test_broken_copy(&b, &call->tensors[index]->tensor);
    b.tensor.device.type = test_on_cpu() ? TCH_DEVICE_CUDA : TCH_DEVICE_CPU;
    if (test_on_cpu() || (!is_copy(call) && !is_chunked(call))) {
        refuse(call, context, index, &b.tensor, TCH_ERR_DEVICE);
    }
    test_broken_copy(&b, &call->tensors[index]->tensor);
    b.tensor.device.index += 1;
    if (!is_copy(call)) {
        refuse(call, context, index, &b.tensor, TCH_ERR_DEVICE);
    }
}

/* Outputs with overlapping elements. */
static void break_output_strides(test_call *call, tch_context *context, int32_t index)
{
    test_broken b;
    if (!test_is_output(&call->operation->operands[index])) {
        return;
    }
    for (int32_t d = 0; d < call->tensors[index]->tensor.ndim; d++) {
        test_broken_copy(&b, &call->tensors[index]->tensor);
        b.strides[d] = 0;
        refuse(call, context, index, &b.tensor, TCH_ERR_LAYOUT);
    }
    test_broken_copy(&b, &call->tensors[index]->tensor);
    if (b.tensor.ndim > 1) {
        b.strides[b.tensor.ndim - 2] = 1;
        refuse(call, context, index, &b.tensor, TCH_ERR_LAYOUT);
    }
}

/* An output that overlaps another operand, entirely or in its last element. */
static void break_overlap(test_call *call, tch_context *context, int32_t index)
{
    for (int32_t other = 0; other < call->operation->count; other++) {
        const test_operand *operand = &call->operation->operands[index];
        if (other == index || !test_is_output(operand) || test_is_free(call->operation, index, FREE_IN_PLACE)) {
            continue;
        }
        const test_tensor *victim = call->tensors[other];
        test_broken b;
        test_broken_copy(&b, &call->tensors[index]->tensor);
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

static const struct {
    const char *what;
    void (*breaks)(test_call *call, tch_context *context, int32_t index);
} breakers[] = {
    {"NULL", break_null},
    {"one thing changed", break_by_row},
    {"a rank too low", break_rank_too_low},
    {"a negative or overflowing size", break_sizes},
    {"a size that does not fit", break_fit},
    {"a wrong dtype", break_dtype},
    {"a wrong device", break_device},
    {"strides that repeat elements", break_output_strides},
    {"memory of another operand", break_overlap},
};

static void break_operation(tch_context *context, const test_operation *operation, int which)
{
    test_call call;
    test_call_make(&call, context, operation, TCH_FLOAT32);
    for (int32_t index = 0; index < operation->count; index++) {
        test_case("%s %s: %s with %s", operation->name, operation->variant, operation->operands[index].name,
                  breakers[which].what);
        breakers[which].breaks(&call, context, index);
    }
    test_case("%s %s: still works", operation->name, operation->variant);
    CHECK_OK(test_call_run(&call, context));
    test_call_check_done(&call);
    test_call_free(&call);
}

TEST(broken_tensors)
{
    for (size_t which = 0; which < TEST_COUNT(breakers); which++) {
        for (int32_t i = 0; i < test_operation_count(); i++) {
            break_operation(*state, &test_operations[i], (int)which);
        }
    }
}

TEST(null_contexts)
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

TEST(optional_outputs_may_be_left_out)
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

/* Empty batches and matrices without rows are valid no-ops. */
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

TEST(empty_tensors_are_valid)
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

TEST_MAIN(test_open_context, test_close_context)
