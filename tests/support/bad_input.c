/* Values are doubles in every row, which represent every tabulated value exactly. */
#include "bad_input.h"

#include "testing.h"

void test_field_set(void *config, const test_field *field, double value)
{
    char *at = (char *)config + field->offset;
    if (field->type == FIELD_REAL) {
        memcpy(at, &value, sizeof value);
    } else if (field->type == FIELD_INT32) {
        memcpy(at, &(int32_t){(int32_t)value}, sizeof(int32_t));
    } else {
        memcpy(at, &(int64_t){(int64_t)value}, sizeof(int64_t));
    }
}

double test_field_get(const void *config, const test_field *field)
{
    double real;
    int32_t narrow;
    int64_t wide;
    const char *at = (const char *)config + field->offset;
    memcpy(&narrow, at, sizeof narrow);
    if (field->type == FIELD_INT32) {
        return narrow;
    }
    memcpy(&real, at, sizeof real);
    memcpy(&wide, at, sizeof wide);
    return field->type == FIELD_REAL ? real : (double)wide;
}

void test_check_value_told(double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.4g", value);
    bool long_number = isfinite(value) && fabs(value) > 1e6;
    CHECK(isnan(value) || long_number || strstr(tch_last_error(), text) != NULL,
          "the message does not tell the value %s: %s", text, tch_last_error());
}

tch_tensor *test_broken_copy(test_broken *b, const tch_tensor *tensor)
{
    int64_t stride = 1;
    b->tensor = *tensor;
    for (int32_t d = TCH_MAX_RANK; d >= 0; d--) {
        bool own = d < tensor->ndim;
        b->shape[d] = own ? tensor->shape[d] : 1;
        b->strides[d] = own && tensor->strides != NULL ? tensor->strides[d] : stride;
        stride *= b->shape[d];
    }
    b->tensor.shape = b->shape;
    b->tensor.strides = b->strides;
    return &b->tensor;
}

tch_tensor *test_broken_make(test_broken *b, const tch_tensor *tensor, const test_flaw *flaw)
{
    tch_tensor *t = test_broken_copy(b, tensor);
    /* clang-format off */
    switch (flaw->part) {
    case PART_DATA: t->data = NULL; break;
    case PART_SHAPE: t->shape = NULL; break;
    case PART_RANK: t->ndim = (int32_t)flaw->value; break;
    case PART_SIZE: b->shape[t->ndim > 0 ? t->ndim - 1 : 0] = flaw->value; break;
    case PART_STRIDE: b->strides[0] = flaw->value; break;
    case PART_DTYPE: t->dtype = flaw->dtype; break;
    case PART_DEVICE: t->device.type = (int32_t)flaw->value; break;
    case PART_INDEX: t->device.index += (int32_t)flaw->value; break;
    case PART_OFFSET: t->byte_offset += (uint64_t)flaw->value; break;
    }
    /* clang-format on */
    return t;
}
