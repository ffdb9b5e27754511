/* Tables of invalid input. A row is a struct field with out-of-range values, or one change to a tensor, with the
 * expected status; test_check_refused of messages.h checks that status and the argument's name in the message. */
#ifndef TORCHIUM_TESTS_BAD_INPUT_H
#define TORCHIUM_TESTS_BAD_INPUT_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/tensor.h>

#include "support/messages.h"

#define TEST_MOST_BAD 6

typedef enum test_field_type { FIELD_REAL, FIELD_INT32, FIELD_INT64 } test_field_type;

/* A scalar field, or the first element of an array field. */
typedef struct test_field {
    const char *name;
    size_t offset;
    test_field_type type;
} test_field;

/* clang-format off */
#define TEST_FIELD(type, member)                                                                                       \
    {#member, offsetof(type, member),                                                                                  \
     _Generic(((type *)0)->member, double: FIELD_REAL, int64_t: FIELD_INT64, int64_t *: FIELD_INT64,                   \
              size_t: FIELD_INT64, default: FIELD_INT32)}
/* clang-format on */

/* A field and its invalid values. */
typedef struct test_range {
    test_field field;
    int mark; /* defined by the test: where the row applies */
    int count;
    double bad[TEST_MOST_BAD];
} test_range;

void test_field_set(void *config, const test_field *field, double value);
double test_field_get(const void *config, const test_field *field);

/* Fails the test unless this thread's message contains the value; the first digits suffice. */
void test_check_value_told(double value);

typedef enum test_part {
    PART_DATA,   /* NULL */
    PART_SHAPE,  /* NULL */
    PART_RANK,   /* other dimensions have one element */
    PART_SIZE,   /* of the last dimension */
    PART_STRIDE, /* of the first dimension */
    PART_DTYPE,
    PART_DEVICE, /* its type */
    PART_INDEX,  /* added to the device's */
    PART_OFFSET  /* bytes, added */
} test_part;

/* One thing changed in a tensor. */
typedef struct test_flaw {
    const char *what;
    tch_status expected;
    test_part part;
    int64_t value;
    tch_dtype dtype;
} test_flaw;

/* A copy of a tensor with its own sizes and strides. */
typedef struct test_broken {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK + 1], strides[TCH_MAX_RANK + 1];
} test_broken;

tch_tensor *test_broken_copy(test_broken *b, const tch_tensor *tensor);
tch_tensor *test_broken_make(test_broken *b, const tch_tensor *tensor, const test_flaw *flaw);

#endif
