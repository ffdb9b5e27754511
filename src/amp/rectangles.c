/* See rectangles.h. Signs and the order of strides are dropped first: what is left is where the elements lie. */
#include "rectangles.h"

#include <stdbool.h>

#include "core/tensor.h"

/* The memory of a gradient: sizes with rising positive strides from its lowest address, neighbors merged where one
 * continues the other, each element once. */
typedef struct footprint {
    char *low;
    int32_t order;
    int64_t size[TCH_MAX_RANK], stride[TCH_MAX_RANK];
} footprint;

static void insert_by_stride(footprint *f, int64_t size, int64_t stride)
{
    int32_t k = f->order++;
    for (; k > 0 && f->stride[k - 1] > stride; k--) {
        f->size[k] = f->size[k - 1];
        f->stride[k] = f->stride[k - 1];
    }
    f->size[k] = size;
    f->stride[k] = stride;
}

static void merge_neighbors(footprint *f)
{
    int32_t last = 0;
    for (int32_t k = 1; k < f->order; k++) {
        if (f->stride[k] == f->stride[last] * f->size[last]) {
            f->size[last] *= f->size[k];
        } else {
            f->size[++last] = f->size[k];
            f->stride[last] = f->stride[k];
        }
    }
    f->order = f->order > 0 ? last + 1 : 0;
}

static footprint footprint_of(const tch_tensor *tensor)
{
    const char *low;
    const char *high;
    footprint f = {0};
    tchi_tensor_extent(tensor, &low, &high);
    f.low = (char *)low;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int64_t stride = tchi_tensor_stride(tensor, i);
        if (tensor->shape[i] > 1 && stride != 0) {
            insert_by_stride(&f, tensor->shape[i], stride < 0 ? -stride : stride);
        }
    }
    merge_neighbors(&f);
    return f;
}

/* The first two dimensions are one rectangle, or, where elements do not follow each other, the first alone is a column;
 * `used` is how many went into it. */
static tch_rect rectangle_of(const footprint *f, int32_t *used)
{
    tch_rect rect = {.rows = 1, .cols = 1, .factor = 1.0};
    bool row = f->order > 0 && f->stride[0] == 1;
    *used = row ? 1 : 0;
    rect.cols = row ? f->size[0] : 1;
    if (f->order > *used) {
        rect.rows = f->size[*used];
        rect.stride = f->stride[*used];
        *used += 1;
    } else {
        rect.stride = rect.cols;
    }
    return rect;
}

int64_t tchi_rectangle_count(const tch_tensor *tensor)
{
    if (tensor == NULL || tch_tensor_numel(tensor) == 0) {
        return 0;
    }
    int32_t used;
    int64_t count = 1;
    footprint f = footprint_of(tensor);
    (void)rectangle_of(&f, &used);
    for (int32_t k = used; k < f.order; k++) {
        count *= f.size[k];
    }
    return count;
}

/* The next place of the dimensions from `from` on, counted like the digits of a number. */
static void advance(const footprint *f, int32_t from, int64_t *index, int64_t *offset)
{
    for (int32_t k = from; k < f->order; k++) {
        *offset += f->stride[k];
        if (++index[k] < f->size[k]) {
            return;
        }
        *offset -= f->size[k] * f->stride[k];
        index[k] = 0;
    }
}

int64_t tchi_list_rectangles(const tch_tensor *tensor, tch_rect *rects)
{
    int64_t count = tchi_rectangle_count(tensor);
    if (count == 0) {
        return 0;
    }
    int32_t used;
    int64_t index[TCH_MAX_RANK] = {0};
    int64_t offset = 0;
    int64_t element = (int64_t)tch_dtype_size(tensor->dtype);
    footprint f = footprint_of(tensor);
    tch_rect rect = rectangle_of(&f, &used);
    for (int64_t i = 0; i < count; i++) {
        rect.grad = f.low + offset * element;
        rects[i] = rect;
        advance(&f, used, index, &offset);
    }
    return count;
}
