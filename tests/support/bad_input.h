/* Bad input as rows of tables. A row is a number of a struct with values out of its range, or one thing changed in a
 * tensor, with the status that must come of it; test_check_refused of messages.h asks for that status and for the name
 * of the argument in the message. */
#ifndef TORCHIUM_TESTS_BAD_INPUT_H
#define TORCHIUM_TESTS_BAD_INPUT_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/tensor.h>

#include "support/messages.h"

#define TEST_MOST_BAD 6

typedef enum test_field_type { FIELD_REAL, FIELD_INT32, FIELD_INT64 } test_field_type;

/* A number of a struct, or the first of an array there. */
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

/* A field with values that it may not have. */
typedef struct test_range {
    test_field field;
    int mark; /* a meaning of the test's own: where the row applies */
    int count;
    double bad[TEST_MOST_BAD];
} test_range;

void test_field_set(void *config, const test_field *field, double value);
double test_field_get(const void *config, const test_field *field);

/* Fails the test unless this thread's message has the value, in some notation: its first digits are enough. */
void test_check_value_told(double value);

typedef enum test_part {
    PART_DATA,   /* NULL */
    PART_SHAPE,  /* NULL */
    PART_RANK,   /* dimensions beyond the tensor's own have one element */
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

/* A copy of a tensor with sizes and strides of its own. */
typedef struct test_broken {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK + 1], strides[TCH_MAX_RANK + 1];
} test_broken;

/* Both return the copy. */
tch_tensor *test_broken_copy(test_broken *b, const tch_tensor *tensor);
tch_tensor *test_broken_make(test_broken *b, const tch_tensor *tensor, const test_flaw *flaw);

#endif
