#include "shape.h"

#include <string.h>

/* Insertion sort by decreasing stride; there are at most TCH_MAX_RANK dimensions. */
static void insert_by_stride(tchi_dims *dims, int64_t *strides, int64_t size, int64_t stride)
{
    int32_t k = dims->order++;
    for (; k > 0 && strides[k - 1] < stride; k--) {
        strides[k] = strides[k - 1];
        dims->size[k] = dims->size[k - 1];
    }
    strides[k] = stride;
    dims->size[k] = size;
}

bool tchi_dims_of(const tch_tensor *tensor, tchi_dims *dims)
{
    int64_t strides[TCH_MAX_RANK] = {0};
    *dims = (tchi_dims){0};
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) {
            *dims = (tchi_dims){1, {0}};
            return true;
        }
        if (tensor->shape[i] > 1) {
            insert_by_stride(dims, strides, tensor->shape[i], tchi_tensor_stride(tensor, i));
        }
    }
    int64_t expected = 1;
    for (int32_t k = dims->order - 1; k >= 0; k--) {
        if (strides[k] != expected) {
            return false;
        }
        expected *= dims->size[k];
    }
    return true;
}

int64_t tchi_dims_count(const tchi_dims *dims)
{
    int64_t count = 1;
    for (int32_t k = 0; k < dims->order; k++) {
        count *= dims->size[k];
    }
    return count;
}

/* Merges dimension k with the next. */
static void merge_at(tchi_dims *dims, int32_t k)
{
    dims->size[k] *= dims->size[k + 1];
    for (int32_t i = k + 1; i + 1 < dims->order; i++) {
        dims->size[i] = dims->size[i + 1];
    }
    dims->order--;
}

void tchi_dims_merge(tchi_dims *dims, int64_t most, int32_t least)
{
    for (int32_t k = dims->order - 2; k >= 0 && dims->order > least; k--) {
        if (dims->size[k] <= most / dims->size[k + 1]) {
            merge_at(dims, k);
        }
    }
}

void tchi_dims_limit(tchi_dims *dims, int32_t order)
{
    while (dims->order > order) {
        int32_t best = 0;
        for (int32_t k = 1; k + 1 < dims->order; k++) {
            if (dims->size[k] * dims->size[k + 1] < dims->size[best] * dims->size[best + 1]) {
                best = k;
            }
        }
        merge_at(dims, best);
    }
}

void tchi_dims_as_matrix(tchi_dims *dims)
{
    while (dims->order > 2) {
        merge_at(dims, 1);
    }
}

bool tchi_is_row_major(int32_t ndim, const int64_t *shape, const int64_t *strides)
{
    int64_t stride = 1;
    for (int32_t k = ndim - 1; k >= 0; k--) {
        if (shape[k] == 0) {
            return true;
        }
        if (shape[k] > 1 && strides[k] != stride) {
            return false;
        }
        stride *= shape[k];
    }
    return true;
}

bool tchi_is_thin_side(int32_t order, const int64_t *size, int32_t k)
{
    int64_t left = (size[k] - 1) / TCHI_THIN;
    for (int32_t i = 0; i < order; i++) {
        left = i == k ? left : left / size[i];
    }
    return order > 1 && left > 0;
}

/* --- blocks ------------------------------------------------------------------------------------------------------ */

static int64_t parts_of(int64_t size, int64_t most)
{
    return size <= most ? 1 : (size + most - 1) / most;
}

static int64_t rows_of(const tchi_cut *cut, int32_t matrix)
{
    return cut->cuts == NULL ? cut->dims[0] : cut->cuts[matrix];
}

/* Rows of one repetition of the list of matrices, and its number of parts; both are at least 1. */
static void measure_round(const tchi_cut *cut, int64_t *rows, int64_t *parts)
{
    *rows = *parts = 0;
    for (int32_t i = 0; i < cut->cut_count; i++) {
        *rows += rows_of(cut, i);
        *parts += parts_of(rows_of(cut, i), cut->most);
    }
    *rows = *rows > 0 ? *rows : 1;
    *parts = *parts > 0 ? *parts : 1;
}

tchi_cut tchi_cut_of(const tchi_param *param, int64_t most)
{
    const tchi_dims *dims = &param->dims;
    tchi_cut cut = {.order = dims->order, .most = most, .cuts = param->cuts, .cut_count = 1, .blocks = 1};
    for (int32_t k = 0; k < dims->order; k++) {
        cut.dims[k] = dims->size[k];
        cut.counts[k] = parts_of(dims->size[k], most);
        cut.blocks *= k > 0 ? cut.counts[k] : 1;
    }
    if (cut.order > 0) {
        int64_t rows;
        int64_t parts;
        cut.cut_count = param->cuts == NULL ? 1 : param->cut_count;
        measure_round(&cut, &rows, &parts);
        cut.blocks *= cut.dims[0] / rows * parts;
    }
    return cut;
}

/* The range of part `number` along the first dimension. */
static void cut_rows(const tchi_cut *cut, int64_t number, int64_t *start, int64_t *size)
{
    int64_t rows;
    int64_t parts;
    int32_t matrix = 0;
    measure_round(cut, &rows, &parts);
    *start = number / parts * rows;
    number %= parts;
    while (number >= parts_of(rows_of(cut, matrix), cut->most)) {
        number -= parts_of(rows_of(cut, matrix), cut->most);
        *start += rows_of(cut, matrix++);
    }
    int64_t before = number == 0 ? 0 : number * cut->most;
    int64_t left = rows_of(cut, matrix) - before;
    *start += before;
    *size = left < cut->most ? left : cut->most;
}

void tchi_cut_block(const tchi_cut *cut, int64_t number, int64_t *start, int64_t *size)
{
    for (int32_t k = cut->order - 1; k > 0; k--) {
        int64_t part = number % cut->counts[k];
        number /= cut->counts[k];
        start[k] = cut->counts[k] == 1 ? 0 : part * cut->most;
        int64_t left = cut->dims[k] - start[k];
        size[k] = cut->counts[k] == 1 || left < cut->most ? left : cut->most;
    }
    if (cut->order > 0) {
        cut_rows(cut, number, &start[0], &size[0]);
    }
}
