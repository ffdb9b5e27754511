/* Every public tensor operation as a row of a table: arguments with roles and shapes, and a call. Tests that treat all
 * operations alike (bad input, failing memory, threads) iterate over this table. */
#ifndef TORCHIUM_TESTS_OPERATIONS_H
#define TORCHIUM_TESTS_OPERATIONS_H

#include "support/tensors.h"

#define TEST_MAX_OPERANDS 5

typedef enum test_role {
    ROLE_INPUT,          /* random numbers */
    ROLE_OPTIONAL_INPUT, /* the same, may be NULL */
    ROLE_SYMMETRIC,      /* an input: well-conditioned symmetric positive definite matrices */
    ROLE_OUTPUT,
    ROLE_OPTIONAL_OUTPUT /* may be NULL */
} test_role;

typedef enum test_kind { KIND_REAL, KIND_FLOAT64, KIND_INT32 } test_kind; /* KIND_REAL: the dtype of the call */

typedef struct test_operand {
    const char *name; /* as in the header and in messages */
    test_role role;
    test_kind kind;
    int32_t ndim;
    int64_t shape[4];
} test_operand;

typedef struct test_operation {
    const char *name;    /* the public function */
    const char *variant; /* its option, or "" */
    int32_t count;
    test_operand operands[TEST_MAX_OPERANDS];
    tch_status (*call)(tch_context *context, tch_tensor *const *t);
} test_operation;

extern const test_operation test_operations[];

/* All rows, and those supported by the device under test; the others are last in the table. */
int32_t test_operation_rows(void);
int32_t test_operation_count(void);

/* The operands of a call in the contiguous layout: inputs filled, outputs poisoned. */
typedef struct test_call {
    const test_operation *operation;
    test_tensor *tensors[TEST_MAX_OPERANDS];
    tch_tensor *arguments[TEST_MAX_OPERANDS]; /* passed to the call; tests replace them by invalid ones */
} test_call;

void test_call_make(test_call *call, tch_context *context, const test_operation *operation, tch_dtype dtype);
void test_call_free(test_call *call);
tch_status test_call_run(const test_call *call, tch_context *context);
/* Fails the test unless every operand is unchanged. */
void test_call_check_unchanged(const test_call *call);
/* Fails the test unless inputs are unchanged and outputs fully written. */
void test_call_check_done(const test_call *call);

bool test_is_output(const test_operand *operand);

/* What else an operand may be. */
typedef enum test_freedom {
    FREE_COLS,    /* dimension 2 may have any size */
    FREE_FLOAT32, /* or float32 */
    FREE_FLOAT,   /* or any float type */
    FREE_IN_PLACE /* an output that may alias an input */
} test_freedom;

bool test_is_free(const test_operation *operation, int32_t index, test_freedom freedom);

/* Whether the first dimension is the batch in all operands. */
bool test_is_batched(const test_operation *operation);

#endif
