/* Leading dimensions are merged where their strides allow it, and the rest is traversed in runs along the innermost
 * one, so that the usual contiguous batch is a single backend call. */
#include "batch.h"

#include "core/status.h"

tch_scalar tchi_compute_type(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
}

int64_t tchi_merge_dimensions(const tch_tensor *tensor, int32_t from, int32_t to, int32_t *rank, int64_t *sizes,
                              int64_t *strides)
{
    int64_t count = 1;
    for (int32_t i = from; i < to; i++) {
        int64_t size = tensor->shape[i];
        int64_t stride = tchi_tensor_stride(tensor, i);
        int32_t last = *rank - 1;
        count *= size;
        if (size == 1) {
            continue;
        }
        if (last >= 0 && strides[last] == stride * size) {
            sizes[last] *= size;
            strides[last] = stride;
        } else {
            sizes[*rank] = size;
            strides[(*rank)++] = stride;
        }
    }
    if (*rank == 0) {
        sizes[(*rank)++] = 1;
    }
    return count;
}

tchi_batch tchi_batch_of(const tch_tensor *tensor, int32_t inner)
{
    int32_t leading = tensor->ndim - inner;
    tchi_batch b = {.data = tchi_tensor_data(tensor), .type = tchi_scalar_of(tensor->dtype), .rows = 1, .cols = 1};
    b.row_stride = b.col_stride = 1;
    if (inner >= 1) {
        b.cols = tensor->shape[tensor->ndim - 1];
        b.col_stride = tchi_tensor_stride(tensor, tensor->ndim - 1);
        b.row_stride = b.cols;
    }
    if (inner == 2) {
        b.rows = tensor->shape[tensor->ndim - 2];
        b.row_stride = tchi_tensor_stride(tensor, tensor->ndim - 2);
    }
    b.count = tchi_merge_dimensions(tensor, 0, leading, &b.rank, b.sizes, b.strides);
    return b;
}

tchi_batch tchi_batch_pick(tchi_batch batch, const int64_t *picked, int64_t count)
{
    if (picked != NULL) {
        batch.picked = picked;
        batch.count = count;
    }
    return batch;
}

tchi_batch tchi_batch_transposed(tchi_batch b)
{
    tchi_batch t = b;
    t.rows = b.cols;
    t.cols = b.rows;
    t.row_stride = b.col_stride;
    t.col_stride = b.row_stride;
    return t;
}

/* The longest run of items from `first` on along the innermost dimension, and its address. */
static int64_t next_run(const tchi_batch *b, int64_t first, int64_t count, char **start)
{
    int32_t inner = b->rank - 1;
    if (b->picked != NULL) {
        const int64_t *picked = b->picked + first;
        int64_t adjacent = 1;
        while (adjacent < count && picked[adjacent] == picked[0] + adjacent) {
            adjacent++;
        }
        first = picked[0];
        count = adjacent;
    }
    int64_t index = first % b->sizes[inner];
    int64_t offset = index * b->strides[inner];
    int64_t outer = first / b->sizes[inner];
    for (int32_t i = inner - 1; i >= 0; i--) {
        offset += outer % b->sizes[i] * b->strides[i];
        outer /= b->sizes[i];
    }
    *start = (char *)b->data + offset * tchi_scalar_size(b->type);
    int64_t run = b->sizes[inner] - index;
    return run < count ? run : count;
}

void *tchi_batch_item(const tchi_batch *batch, int64_t index)
{
    char *start;
    (void)next_run(batch, index, 1, &start);
    return start;
}

typedef enum direction { READ, WRITE } direction;

static tch_status transfer(tch_context *context, const tchi_batch *b, int64_t first, const tch_matrices *m,
                           direction dir)
{
    if (b->rows == 0 || b->cols == 0) {
        return TCH_OK;
    }
    for (int64_t done = 0; done < m->batch;) {
        char *start;
        int64_t run = next_run(b, first + done, m->batch - done, &start);
        tch_matrices part = tchi_matrices_part(m, done, run);
        const int64_t shape[3] = {run, b->rows, b->cols};
        const int64_t theirs[3] = {b->strides[b->rank - 1], b->row_stride, b->col_stride};
        const int64_t ours[3] = {part.stride, part.ld, 1};
        tch_array outside = {start, b->type, 3, shape, theirs};
        tch_array inside = {part.data, part.type, 3, shape, ours};
        TCHI_TRY(dir == READ ? context->backend->matrix->copy(context->state, &inside, &outside)
                             : context->backend->matrix->copy(context->state, &outside, &inside));
        done += run;
    }
    return TCH_OK;
}

tch_status tchi_batch_read(tch_context *context, const tchi_batch *batch, int64_t first, const tch_matrices *dst)
{
    return transfer(context, batch, first, dst, READ);
}

tch_status tchi_batch_write(tch_context *context, const tchi_batch *batch, int64_t first, const tch_matrices *src)
{
    return transfer(context, batch, first, src, WRITE);
}

static bool is_plain(const tchi_batch *b)
{
    return (b->col_stride == 1 || b->cols <= 1) && (b->row_stride >= b->cols || b->rows <= 1) &&
           b->strides[b->rank - 1] >= 0;
}

static tch_matrices run_matrices(const tchi_batch *b, char *start, int64_t run)
{
    int64_t ld = b->rows > 1 ? b->row_stride : b->cols > 0 ? b->cols : 1;
    return (tch_matrices){start, b->type, b->rows, b->cols, ld, run, run > 1 ? b->strides[b->rank - 1] : 0};
}

tch_status tchi_batch_select(tch_context *context, const tchi_batch *batch, int64_t first, const int32_t *flags,
                             const tch_matrices *src, const tch_matrices *spare)
{
    if (batch->rows == 0 || batch->cols == 0) {
        return TCH_OK;
    }
    if (!is_plain(batch)) {
        TCHI_TRY(tchi_batch_read(context, batch, first, spare));
        TCHI_TRY(context->backend->matrix->select(context->state, flags, src, spare));
        return tchi_batch_write(context, batch, first, spare);
    }
    for (int64_t done = 0; done < src->batch;) {
        char *start;
        int64_t run = next_run(batch, first + done, src->batch - done, &start);
        tch_matrices out = run_matrices(batch, start, run);
        tch_matrices part = tchi_matrices_part(src, done, run);
        TCHI_TRY(context->backend->matrix->select(context->state, flags + done, &part, &out));
        done += run;
    }
    return TCH_OK;
}

bool tchi_batch_direct(const tchi_batch *batch, tch_scalar type, int64_t first, int64_t count, tch_matrices *matrices)
{
    char *start;
    if (batch->type != type || !is_plain(batch) || batch->count == 0 || next_run(batch, first, count, &start) < count) {
        return false;
    }
    *matrices = run_matrices(batch, start, count);
    return true;
}

tch_matrices tchi_scratch_matrices(tchi_arena *arena, tch_scalar type, int64_t count, int64_t rows, int64_t cols)
{
    int64_t bytes;
    if (__builtin_mul_overflow(count, rows * cols, &bytes) ||
        __builtin_mul_overflow(bytes, tchi_scalar_size(type), &bytes)) {
        bytes = INT64_MAX; /* reserving it will fail */
    }
    return tchi_matrices_new(tchi_arena_take(arena, bytes), type, count, rows, cols);
}

tch_matrices tchi_scratch_aligned(tchi_arena *arena, tch_scalar type, int64_t count, int64_t rows, int64_t cols)
{
    enum { ELEMENTS = 8 }; /* 16 bytes of the smallest type */
    tch_matrices m = tchi_scratch_matrices(arena, type, count, rows, (cols + ELEMENTS - 1) / ELEMENTS * ELEMENTS);
    m.cols = cols;
    return m;
}

tch_matrices tchi_batch_place(const tchi_batch *batch, tchi_arena *arena, tch_scalar type, int64_t first, int64_t count,
                              bool *in_place)
{
    tch_matrices m;
    *in_place = tchi_batch_direct(batch, type, first, count, &m);
    return *in_place ? m : tchi_scratch_matrices(arena, type, count, batch->rows, batch->cols);
}
