/* Tensors on the device under test, in every layout that callers may use. Elements are in a block between guard bytes;
 * guards, gaps and output elements are poisoned with NaN, to detect reads outside an input, unwritten output elements
 * and writes outside an output. */
#ifndef TORCHIUM_TESTS_TENSORS_H
#define TORCHIUM_TESTS_TENSORS_H

#include <stdbool.h>

#include <torchium/torchium.h>

#include "support/random.h"

typedef enum test_layout {
    LAYOUT_CONTIGUOUS, /* strides NULL */
    LAYOUT_TRANSPOSED, /* the last two dimensions swapped in memory */
    LAYOUT_ROW_GAPS,   /* unused elements between rows */
    LAYOUT_BATCH_GAPS, /* unused elements between matrices, so that batch dimensions cannot be merged */
    LAYOUT_STEPPED,    /* every second element of a row */
    LAYOUT_OFFSET,     /* the first element aligned to its own size only */
    LAYOUT_REVERSED,   /* every stride negative: the first element is last in memory */
    LAYOUT_COUNT,
    LAYOUT_EXPANDED = LAYOUT_COUNT /* stride 0 in the first dimension; inputs only */
} test_layout;

typedef struct test_tensor {
    tch_tensor tensor; /* passed to the library */
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
    int64_t count; /* elements */
    tch_context *context;
    tch_tensor *block;    /* the device memory, as one row of int32 */
    unsigned char *image; /* its expected contents */
    int64_t bytes;
} test_tensor;

const char *test_layout_name(test_layout layout);

/* A tensor whose elements, gaps and guards are all poison. */
test_tensor *test_tensor_make(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                              test_layout layout);
void test_tensor_free(test_tensor *t); /* before the test ends */

/* Stores row-major values, rounded to the dtype. */
void test_tensor_write(test_tensor *t, const double *values);

/* Stores standard normal numbers of a separate stream. */
void test_tensor_draw(test_tensor *t, uint64_t stream);

/* Poisons the elements again. */
void test_tensor_poison(test_tensor *t);

/* The device's elements in row-major order, in the test's memory. */
double *test_tensor_read(const test_tensor *t);

/* Fails the test unless every byte of the block is as written or poisoned. */
void test_tensor_check_unchanged(const test_tensor *t, const char *name);

/* Fails the test if a guard or gap was written, or an element was not. */
void test_tensor_check_written(const test_tensor *t, const char *name);

/* The elements, after such a check. */
double *test_tensor_read_unchanged(const test_tensor *t, const char *name);
double *test_tensor_read_written(const test_tensor *t, const char *name);

/* Fails the test unless every entry of a report is TCH_REPORT_OK. */
void test_check_report_ok(const test_tensor *report);

/* True if every byte of the block is unchanged: for partly written batches. */
bool test_tensor_is_unchanged(const test_tensor *t);

#endif
