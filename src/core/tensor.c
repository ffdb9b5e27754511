/* Tensors: creation from a pool, shape and stride queries, and views for the operations table. */
#include "tensor.h"

#include <string.h>

#include "allocator.h"
#include "check.h"
#include "context.h"
#include "list.h"
#include "status.h"

/* A tensor owned by the library. The public part comes first: its address is the handle. */
typedef struct owned_tensor {
    tch_tensor tensor;
    tchi_pool *pool;
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
} owned_tensor;

static const struct {
    tch_dtype dtype;
    const char *name;
    int32_t size;
} types[TCH_SCALAR_COUNT] = {
    [TCH_SCALAR_F64] = {{TCH_FLOAT, 64, 1}, "float64", 8},  [TCH_SCALAR_F32] = {{TCH_FLOAT, 32, 1}, "float32", 4},
    [TCH_SCALAR_F16] = {{TCH_FLOAT, 16, 1}, "float16", 2},  [TCH_SCALAR_BF16] = {{TCH_BFLOAT, 16, 1}, "bfloat16", 2},
    [TCH_SCALAR_I32] = {{TCH_INT, 32, 1}, "int32", 4},      [TCH_SCALAR_I64] = {{TCH_INT, 64, 1}, "int64", 8},
    [TCH_SCALAR_BF16X2] = {{0, 0, 0}, "split bfloat16", 4},
};

/* Tensor types; the split type exists only in scratch. */
#define TENSOR_TYPES TCH_SCALAR_BF16X2

bool tch_dtype_equal(tch_dtype a, tch_dtype b)
{
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

tch_scalar tchi_scalar_of(tch_dtype dtype)
{
    for (int i = 0; i < TENSOR_TYPES; i++) {
        if (tch_dtype_equal(types[i].dtype, dtype)) {
            return (tch_scalar)i;
        }
    }
    return TCH_SCALAR_COUNT;
}

int64_t tchi_scalar_size(tch_scalar type)
{
    return types[type].size;
}

bool tchi_scalar_is_float(tch_scalar type)
{
    return type <= TCH_SCALAR_BF16;
}

size_t tch_dtype_size(tch_dtype dtype)
{
    tch_scalar type = tchi_scalar_of(dtype);
    return type == TCH_SCALAR_COUNT ? 0 : (size_t)types[type].size;
}

const char *tch_dtype_name(tch_dtype dtype)
{
    tch_scalar type = tchi_scalar_of(dtype);
    return type == TCH_SCALAR_COUNT ? "unknown" : types[type].name;
}

void *tchi_tensor_data(const tch_tensor *tensor)
{
    return tensor->data == NULL ? NULL : (char *)tensor->data + tensor->byte_offset;
}

int64_t tchi_tensor_count(const tch_tensor *tensor, int32_t from, int32_t to)
{
    int64_t count = 1;
    for (int32_t i = from; i < to; i++) {
        count *= tensor->shape[i];
    }
    return count;
}

int64_t tchi_tensor_bytes(const tch_tensor *tensor)
{
    return tch_tensor_numel(tensor) * (int64_t)tch_dtype_size(tensor->dtype);
}

bool tchi_on_host(const tch_tensor *tensor)
{
    return tensor->device.type == TCH_DEVICE_CPU || tensor->device.type == TCH_DEVICE_CUDA_HOST;
}

/* `count` rows of the first dimension from `first` on; their sizes are kept in `shape`. A single row loses that
 * dimension. */
static tch_tensor rows_of(const tch_tensor *tensor, int64_t first, int64_t count, int64_t *shape)
{
    int32_t from = count == 1;
    tch_tensor rows = *tensor;
    int64_t offset = first * tchi_tensor_stride(tensor, 0) * (int64_t)tch_dtype_size(tensor->dtype);
    rows.data = (char *)tchi_tensor_data(tensor) + offset;
    rows.byte_offset = 0;
    rows.ndim = tensor->ndim - from;
    memcpy(shape, tensor->shape + from, (size_t)rows.ndim * sizeof *shape);
    if (from == 0) {
        shape[0] = count;
    }
    rows.shape = shape;
    rows.strides = tensor->strides != NULL ? tensor->strides + from : NULL;
    return rows;
}

/* In one piece if it fits; else by groups of rows, or each row in chunks. */
tch_status tchi_visit_chunks(const tch_tensor *tensor, int64_t room, tchi_chunk_visitor visit, void *user)
{
    int64_t count = tch_tensor_numel(tensor);
    if (count <= room) {
        tch_tensor whole = *tensor;
        return count == 0 ? TCH_OK : visit(user, &whole);
    }
    int64_t shape[TCH_MAX_RANK];
    int64_t row = count / tensor->shape[0];
    int64_t step = row < room ? room / row : 1;
    for (int64_t first = 0; first < tensor->shape[0]; first += step) {
        int64_t left = tensor->shape[0] - first;
        tch_tensor rows = rows_of(tensor, first, left < step ? left : step, shape);
        TCHI_TRY(tchi_visit_chunks(&rows, room, visit, user));
    }
    return TCH_OK;
}

int64_t tchi_tensor_stride(const tch_tensor *tensor, int32_t dimension)
{
    return tensor->strides != NULL ? tensor->strides[dimension]
                                   : tchi_tensor_count(tensor, dimension + 1, tensor->ndim);
}

int64_t tch_tensor_numel(const tch_tensor *tensor)
{
    if (tensor == NULL || tensor->ndim < 0 || tensor->ndim > TCH_MAX_RANK) {
        return -1;
    }
    if (tensor->ndim > 0 && tensor->shape == NULL) {
        return -1;
    }
    bool empty = false, overflow = false;
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0) {
            return -1;
        }
        empty = empty || tensor->shape[i] == 0;
        overflow = overflow || __builtin_mul_overflow(count, tensor->shape[i], &count);
    }
    return empty ? 0 : overflow ? -1 : count;
}

bool tch_tensor_is_contiguous(const tch_tensor *tensor)
{
    int64_t expected = 1;
    if (tch_tensor_numel(tensor) < 0) {
        return false;
    }
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tchi_tensor_stride(tensor, i) != expected) {
            return false;
        }
        expected *= tensor->shape[i];
    }
    return true;
}

tch_array tchi_array_of(const tch_tensor *tensor, int64_t *strides)
{
    for (int32_t i = 0; i < tensor->ndim; i++) {
        strides[i] = tchi_tensor_stride(tensor, i);
    }
    return (tch_array){tchi_tensor_data(tensor), tchi_scalar_of(tensor->dtype), tensor->ndim, tensor->shape, strides};
}

void tchi_tensor_extent(const tch_tensor *tensor, const char **low, const char **high)
{
    *low = *high = NULL;
    if (tch_tensor_numel(tensor) <= 0) {
        return;
    }
    int64_t below = 0, above = 0;
    int64_t size = (int64_t)tch_dtype_size(tensor->dtype);
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int64_t reach = (tensor->shape[i] - 1) * tchi_tensor_stride(tensor, i) * size;
        *(reach < 0 ? &below : &above) += reach;
    }
    *low = (const char *)tchi_tensor_data(tensor) + below;
    *high = (const char *)tchi_tensor_data(tensor) + above + size;
}

tch_matrices tchi_matrices_new(void *data, tch_scalar type, int64_t batch, int64_t rows, int64_t cols)
{
    return (tch_matrices){data, type, rows, cols, cols > 0 ? cols : 1, batch, rows * cols};
}

tch_matrices tchi_matrices_part(const tch_matrices *matrices, int64_t first, int64_t count)
{
    tch_matrices part = *matrices;
    if (part.data != NULL) {
        part.data = (char *)part.data + first * part.stride * types[part.type].size;
    }
    part.batch = count;
    return part;
}

tch_matrices tchi_matrices_block(const tch_matrices *matrices, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    tch_matrices block = *matrices;
    block.data = (char *)block.data + (row * block.ld + col) * types[block.type].size;
    block.rows = rows;
    block.cols = cols;
    return block;
}

/* Batch dimensions merge into one if each stride equals the size of all inner ones times the innermost stride. */
static bool merge_batch(const tch_tensor *tensor, tch_matrices *m)
{
    int64_t stride = 0;
    m->batch = 1;
    for (int32_t i = tensor->ndim - 3; i >= 0; i--) {
        if (tensor->shape[i] == 1) {
            continue;
        }
        int64_t step = tchi_tensor_stride(tensor, i);
        if (m->batch == 1) {
            stride = step;
        } else if (step != stride * m->batch) {
            return false;
        }
        m->batch *= tensor->shape[i];
    }
    m->stride = stride;
    return true;
}

bool tchi_matrices_of(const tch_tensor *tensor, tch_matrices *m)
{
    int32_t row = tensor->ndim - 2;
    int32_t col = tensor->ndim - 1;
    *m = (tch_matrices){.data = tchi_tensor_data(tensor),
                        .type = tchi_scalar_of(tensor->dtype),
                        .rows = tensor->shape[row],
                        .cols = tensor->shape[col]};
    int64_t least = m->cols > 0 ? m->cols : 1;
    m->ld = m->rows == 1 ? least : tchi_tensor_stride(tensor, row);
    bool unit = m->cols == 1 || tchi_tensor_stride(tensor, col) == 1;
    return unit && m->ld >= least && merge_batch(tensor, m) && m->stride >= 0;
}

/* --- creation --------------------------------------------------------------------------------------------------- */

/* Channels-last keeps the order of dimensions [N, C, ...] and stores them as [N, ..., C]. */
static void set_strides(owned_tensor *t, tch_memory_format format)
{
    int32_t order[TCH_MAX_RANK]; /* from the fastest to the slowest */
    int32_t ndim = t->tensor.ndim;
    int32_t placed = 0;
    if (format == TCH_CHANNELS_LAST) {
        order[placed++] = 1;
    }
    for (int32_t i = ndim - 1; i >= 0; i--) {
        if (format != TCH_CHANNELS_LAST || i != 1) {
            order[placed++] = i;
        }
    }
    int64_t stride = 1;
    for (int32_t k = 0; k < ndim; k++) {
        t->strides[order[k]] = stride;
        stride *= t->shape[order[k]] > 0 ? t->shape[order[k]] : 1;
    }
}

static tch_status check_creation(tch_dtype dtype, int32_t ndim, const int64_t *shape, tch_memory_format format,
                                 tch_tensor *const *tensor)
{
    if (tensor == NULL || (shape == NULL && ndim > 0)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_tensor_create: %s is NULL",
                         tensor == NULL ? "tensor" : "shape");
    }
    if (tch_dtype_size(dtype) == 0) {
        return tchi_fail(TCH_ERR_DTYPE,
                         "tch_tensor_create: dtype (code %u, %u bits, %u lanes) is not one of the library's",
                         dtype.code, dtype.bits, dtype.lanes);
    }
    if (ndim < 0 || ndim > TCH_MAX_RANK) {
        return tchi_fail(TCH_ERR_SHAPE, "tch_tensor_create: ndim is %d, expected 0 to %d", ndim, TCH_MAX_RANK);
    }
    if (format != TCH_CONTIGUOUS && format != TCH_CHANNELS_LAST) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_tensor_create: format is %d, expected TCH_CONTIGUOUS or "
                         "TCH_CHANNELS_LAST",
                         (int)format);
    }
    if (format == TCH_CHANNELS_LAST && ndim != 4 && ndim != 5) {
        return tchi_fail(TCH_ERR_SHAPE, "tch_tensor_create: channels-last needs 4 or 5 dimensions, ndim is %d", ndim);
    }
    return TCH_OK;
}

static tch_status create_tensor(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                                tch_memory_format format, int zero, tch_tensor **tensor)
{
    TCHI_ENTER(context, "tch_tensor_create");
    TCHI_TRY(check_creation(dtype, ndim, shape, format, tensor));
    tch_tensor described = {.ndim = ndim, .dtype = dtype, .shape = (int64_t *)shape};
    int64_t count = tch_tensor_numel(&described);
    int64_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow(count, (int64_t)tch_dtype_size(dtype), &bytes)) {
        char text[TCHI_DESCRIBE_SIZE];
        return tchi_fail(TCH_ERR_SHAPE, "tch_tensor_create: shape %s has a negative size or too many elements",
                         tchi_describe_shape(&described, text, sizeof text));
    }
    owned_tensor *t;
    TCHI_TRY(tchi_host_take(sizeof *t, "a tensor", &t));
    *t = (owned_tensor){.tensor = described, .pool = context->pool};
    t->tensor.device = tch_context_device(context);
    t->tensor.shape = t->shape;
    t->tensor.strides = t->strides;
    if (ndim > 0) {
        memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    }
    set_strides(t, format);
    tch_status status = tchi_pool_allocate(context->pool, bytes, &t->tensor.data);
    if (status == TCH_OK && zero && bytes > 0) {
        status = context->backend->device->zero_bytes(context->state, t->tensor.data, bytes);
    }
    if (status != TCH_OK) {
        tchi_pool_free(context->pool, t->tensor.data);
        tchi_host_release(t, sizeof *t);
        return status;
    }
    tchi_pool_retain(context->pool);
    *tensor = &t->tensor;
    return TCH_OK;
}

tch_status tch_tensor_create(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                             tch_memory_format format, tch_tensor **tensor)
{
    return create_tensor(context, dtype, ndim, shape, format, 1, tensor);
}

tch_status tch_tensor_create_uninitialized(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                                           tch_memory_format format, tch_tensor **tensor)
{
    return create_tensor(context, dtype, ndim, shape, format, 0, tensor);
}

void tch_tensor_destroy(tch_tensor *tensor)
{
    if (tensor == NULL) {
        return;
    }
    owned_tensor *t = (owned_tensor *)tensor;
    tchi_pool *pool = t->pool;
    tchi_pool_free(pool, t->tensor.data);
    tchi_host_release(t, sizeof *t);
    tchi_pool_drop(pool);
}

tch_tensor tch_tensor_view(void *data, tch_dtype dtype, int32_t ndim, int64_t *shape)
{
    return (tch_tensor){.data = data, .device = {TCH_DEVICE_CPU, 0}, .ndim = ndim, .dtype = dtype, .shape = shape};
}

/* --- copies ----------------------------------------------------------------------------------------------------- */

/* A copy between host and device that changes type or layout. The host's side passes through device scratch, contiguous
 * and in its type; the device converts and rearranges. */
typedef struct crossing {
    tch_context *context;
    bool to_host;
    tch_dtype dtype; /* of the host's side */
    void *scratch;
    char *host; /* where the next chunk lies */
} crossing;

/* Maximum elements of a chunk: 64 MiB of float64. Reasoned, not tuned: a millisecond on a fast link at 55 GB/s, a
 * hundred times the overhead of a copy and a kernel, and a small workspace for any size. */
#define CROSSING_ELEMENTS ((int64_t)8 << 20)

static tch_status cross_chunk(void *user, tch_tensor *device)
{
    crossing *c = user;
    char *host = c->host;
    int64_t packed_strides[TCH_MAX_RANK], device_strides[TCH_MAX_RANK];
    const tch_tensor scratch = {.data = c->scratch, .ndim = device->ndim, .dtype = c->dtype, .shape = device->shape};
    tch_array packed = tchi_array_of(&scratch, packed_strides);
    tch_array array = tchi_array_of(device, device_strides);
    int64_t bytes = tchi_tensor_count(device, 0, device->ndim) * (int64_t)tch_dtype_size(c->dtype);
    const tch_backend *backend = c->context->backend;
    void *state = c->context->state;
    c->host += bytes;
    if (c->to_host) {
        TCHI_TRY(backend->matrix->copy(state, &packed, &array));
        return backend->device->copy_bytes(state, host, c->scratch, bytes, TCH_COPY_TO_HOST);
    }
    TCHI_TRY(backend->device->copy_bytes(state, c->scratch, host, bytes, TCH_COPY_TO_DEVICE));
    return backend->matrix->copy(state, &array, &packed);
}

/* All scratch is reserved before the first write. */
static tch_status copy_through_scratch(tch_context *context, const tch_tensor *host, const tch_tensor *device,
                                       bool to_host)
{
    int64_t size = (int64_t)tch_dtype_size(host->dtype);
    int64_t count = tch_tensor_numel(host);
    int64_t most = count < CROSSING_ELEMENTS ? count : CROSSING_ELEMENTS;
    crossing c = {.context = context, .to_host = to_host, .dtype = host->dtype, .host = tchi_tensor_data(host)};
    int64_t room = tchi_arena_fit(context, most, size, 256); /* what rounding up to the alignment may add */
    tchi_arena arena = {0};
    tchi_arena_take(&arena, room * size);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    c.scratch = tchi_arena_take(&arena, room * size);
    return tchi_visit_chunks(device, room, cross_chunk, &c);
}

/* Between host and device. Identical layouts are copied directly, without scratch. */
static tch_status copy_across(tch_context *context, tch_tensor *dst, const tch_tensor *src)
{
    bool to_host = tchi_on_host(dst);
    const tch_tensor *host = to_host ? dst : src;
    const tch_tensor *device = to_host ? src : dst;
    if (!tch_tensor_is_contiguous(host)) {
        return tchi_fail(TCH_ERR_LAYOUT,
                         "tch_tensor_copy: %s is in host memory and not contiguous, which a copy between host and "
                         "device needs; copy it on the host first, in a context of the cpu",
                         to_host ? "dst" : "src");
    }
    if (!tch_dtype_equal(dst->dtype, src->dtype) || !tch_tensor_is_contiguous(device)) {
        return copy_through_scratch(context, host, device, to_host);
    }
    return context->backend->device->copy_bytes(context->state, tchi_tensor_data(dst), tchi_tensor_data(src),
                                                tchi_tensor_bytes(src),
                                                to_host ? TCH_COPY_TO_HOST : TCH_COPY_TO_DEVICE);
}

/* Either side is the context's device or the host. */
static tch_status check_place(const tch_context *context, const tch_tensor *tensor, const char *name)
{
    TCHI_TRY(tch_tensor_check(tensor, name));
    return tchi_on_host(tensor) ? TCH_OK : tchi_check_device(context, tensor, name);
}

tch_status tch_tensor_copy(tch_context *context, tch_tensor *dst, const tch_tensor *src)
{
    TCHI_ENTER(context, "tch_tensor_copy");
    TCHI_TRY(check_place(context, src, "src"));
    TCHI_TRY(check_place(context, dst, "dst"));
    TCHI_TRY(tchi_check_writable(dst, "dst"));
    TCHI_TRY(tchi_check_same_shape(dst, "dst", src));
    TCHI_TRY(tchi_check_disjoint(dst, "dst", src, "src"));
    if (!tch_dtype_equal(dst->dtype, src->dtype)) {
        TCHI_TRY(tchi_check_float(dst, "dst"));
        TCHI_TRY(tchi_check_float(src, "src"));
    }
    if (tch_tensor_numel(src) == 0) {
        return TCH_OK;
    }
    if (tchi_on_host(dst) != tchi_on_host(src)) {
        return copy_across(context, dst, src);
    }
    if (tchi_on_host(dst) && !context->backend->host_memory) {
        return tchi_fail(TCH_ERR_DEVICE, "tch_tensor_copy: dst and src are both on the host; use a context of the cpu");
    }
    int64_t dst_strides[TCH_MAX_RANK], src_strides[TCH_MAX_RANK];
    tch_array to = tchi_array_of(dst, dst_strides);
    tch_array from = tchi_array_of(src, src_strides);
    return context->backend->matrix->copy(context->state, &to, &from);
}

tch_status tch_tensor_fill(tch_context *context, tch_tensor *tensor, double value)
{
    TCHI_ENTER(context, "tch_tensor_fill");
    TCHI_TRY(tchi_check_output(context, tensor, "tensor"));
    int64_t strides[TCH_MAX_RANK];
    tch_array array = tchi_array_of(tensor, strides);
    return context->backend->matrix->fill(context->state, &array, value);
}
