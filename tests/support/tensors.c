/* The whole block is copied to the host and back as int32, which no copy may alter, so that all bytes are checked
 * without accessing device memory. Poison is all bits set: NaN in every floating type, -1 in the integers. */
#include "tensors.h"

#include "elements.h"
#include "testing.h"

#define GUARD_BYTES 256
#define POISON 0xff
#define ROW_GAP 3
#define BATCH_GAP 5

const char *test_layout_name(test_layout layout)
{
    static const char *const names[] = {"contiguous", "transposed", "row gaps", "batch gaps",
                                        "stepped",    "offset",     "reversed", "expanded"};
    return names[layout];
}

static int64_t at_least_one(int64_t size)
{
    return size > 1 ? size : 1;
}

/* Strides from the innermost dimension outward; transposing exchanges the innermost two. */
static void lay_out(test_tensor *t, int32_t ndim, test_layout layout)
{
    int64_t pitch = layout == LAYOUT_STEPPED ? 2 : 1;
    for (int32_t level = 0; level < ndim; level++) {
        int32_t d = ndim - 1 - level;
        if (layout == LAYOUT_TRANSPOSED && ndim > 1 && level < 2) {
            d = ndim - 2 + level;
        }
        t->strides[d] = pitch;
        pitch *= at_least_one(t->shape[d]);
        if ((layout == LAYOUT_ROW_GAPS || layout == LAYOUT_STEPPED) && level == 0) {
            pitch += ROW_GAP;
        }
        if (layout == LAYOUT_BATCH_GAPS && level > 0) {
            pitch += BATCH_GAP;
        }
    }
    if (layout == LAYOUT_EXPANDED && ndim > 0) {
        t->strides[0] = 0;
    }
    for (int32_t d = 0; d < ndim && layout == LAYOUT_REVERSED; d++) {
        t->strides[d] = -t->strides[d];
    }
}

static int64_t count_elements(const test_tensor *t, int32_t ndim)
{
    int64_t count = 1;
    for (int32_t d = 0; d < ndim; d++) {
        count *= t->shape[d];
    }
    return count;
}

/* The offset, in elements, of the last element from the first; may be negative. */
static int64_t distance(const test_tensor *t, int32_t ndim)
{
    int64_t last = 0;
    for (int32_t d = 0; d < ndim; d++) {
        last += (at_least_one(t->shape[d]) - 1) * t->strides[d];
    }
    return last;
}

static tch_tensor host_block(const test_tensor *t, unsigned char *bytes, int64_t *length)
{
    *length = t->bytes / 4;
    return tch_tensor_view(bytes, TCH_INT32, 1, length);
}

static void to_device(test_tensor *t)
{
    int64_t length;
    tch_tensor host = host_block(t, t->image, &length);
    CHECK_OK(tch_tensor_copy(t->context, t->block, &host));
}

static unsigned char *from_device(const test_tensor *t)
{
    int64_t length;
    unsigned char *bytes = test_alloc((size_t)t->bytes);
    tch_tensor host = host_block(t, bytes, &length);
    CHECK_OK(tch_tensor_copy(t->context, &host, t->block));
    CHECK_OK(tch_context_synchronize(t->context));
    return bytes;
}

static void release(void *tensor)
{
    test_tensor *t = tensor;
    tch_tensor_destroy(t->block);
    free(t->image);
    free(t);
}

void test_tensor_free(test_tensor *t)
{
    if (t != NULL) {
        release(test_keep(t));
    }
}

test_tensor *test_tensor_make(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                              test_layout layout)
{
    test_tensor *t = test_keep(test_alloc(sizeof *t));
    memset(t, 0, sizeof *t);
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    lay_out(t, ndim, layout);
    int64_t size = (int64_t)tch_dtype_size(dtype);
    int64_t reach = distance(t, ndim) * size;
    int64_t shift = layout == LAYOUT_OFFSET ? size : reach < 0 ? -reach : 0;
    t->context = context;
    t->count = count_elements(t, ndim);
    t->bytes = (2 * GUARD_BYTES + shift + (reach > 0 ? reach : 0) + size + 3) / 4 * 4;
    int64_t words = t->bytes / 4;
    CHECK_OK(tch_tensor_create_uninitialized(context, TCH_INT32, 1, &words, TCH_CONTIGUOUS, &t->block));
    t->image = test_keep(test_alloc((size_t)t->bytes));
    memset(t->image, POISON, (size_t)t->bytes);
    to_device(t);
    t->tensor = (tch_tensor){t->block->data,
                             tch_context_device(context),
                             ndim,
                             dtype,
                             t->shape,
                             layout == LAYOUT_CONTIGUOUS ? NULL : t->strides,
                             t->block->byte_offset + (uint64_t)(GUARD_BYTES + shift)};
    test_own(t, release);
    return t;
}

/* Iterates over elements in row-major order. Finding each by divisions took a third of the time of some tests. */
typedef struct walk {
    const test_tensor *tensor;
    int64_t index[TCH_MAX_RANK];
    int64_t size;
    int64_t offset; /* of the element in the block, in bytes */
} walk;

static walk walk_start(const test_tensor *t)
{
    walk w = {.tensor = t, .size = (int64_t)tch_dtype_size(t->tensor.dtype)};
    w.offset = (int64_t)(t->tensor.byte_offset - t->block->byte_offset);
    return w;
}

static void walk_on(walk *w)
{
    const test_tensor *t = w->tensor;
    for (int32_t d = t->tensor.ndim - 1; d >= 0; d--) {
        w->offset += t->strides[d] * w->size;
        if (++w->index[d] < t->shape[d]) {
            return;
        }
        w->offset -= t->shape[d] * t->strides[d] * w->size;
        w->index[d] = 0;
    }
}

void test_tensor_write(test_tensor *t, const double *values)
{
    walk w = walk_start(t);
    for (int64_t i = 0; i < t->count; i++, walk_on(&w)) {
        test_encode(t->tensor.dtype, values[i], t->image + w.offset);
    }
    to_device(t);
}

void test_tensor_draw(test_tensor *t, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    double *values = test_alloc((size_t)t->count * sizeof *values);
    test_random_fill_normal(&random, values, t->count);
    test_tensor_write(t, values);
    test_drop(values);
}

void test_tensor_poison(test_tensor *t)
{
    memset(t->image, POISON, (size_t)t->bytes);
    to_device(t);
}

double *test_tensor_read(const test_tensor *t)
{
    unsigned char *bytes = from_device(t);
    double *values = test_alloc((size_t)t->count * sizeof *values);
    walk w = walk_start(t);
    for (int64_t i = 0; i < t->count; i++, walk_on(&w)) {
        values[i] = test_decode(t->tensor.dtype, bytes + w.offset);
    }
    test_drop(bytes);
    return values;
}

bool test_tensor_is_unchanged(const test_tensor *t)
{
    unsigned char *bytes = from_device(t);
    bool same = memcmp(bytes, t->image, (size_t)t->bytes) == 0;
    test_drop(bytes);
    return same;
}

void test_tensor_check_unchanged(const test_tensor *t, const char *name)
{
    CHECK(test_tensor_is_unchanged(t), "%s was written", name);
}

static bool is_poison(const unsigned char *element, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (element[i] != POISON) {
            return false;
        }
    }
    return true;
}

void test_tensor_check_written(const test_tensor *t, const char *name)
{
    unsigned char *bytes = from_device(t);
    size_t size = tch_dtype_size(t->tensor.dtype);
    walk w = walk_start(t);
    for (int64_t i = 0; i < t->count; i++, walk_on(&w)) {
        unsigned char *element = bytes + w.offset;
        CHECK(!is_poison(element, size), "element %lld of %s was not written", (long long)i, name);
        memcpy(element, t->image + w.offset, size);
    }
    CHECK(memcmp(bytes, t->image, (size_t)t->bytes) == 0, "memory beside %s was written", name);
    test_drop(bytes);
}

double *test_tensor_read_unchanged(const test_tensor *t, const char *name)
{
    test_tensor_check_unchanged(t, name);
    return test_tensor_read(t);
}

double *test_tensor_read_written(const test_tensor *t, const char *name)
{
    test_tensor_check_written(t, name);
    return test_tensor_read(t);
}

void test_check_report_ok(const test_tensor *report)
{
    double *codes = test_tensor_read_written(report, "report");
    for (int64_t i = 0; i < report->count; i++) {
        CHECK(codes[i] == TCH_REPORT_OK, "matrix %lld is reported as %g", (long long)i, codes[i]);
    }
}
