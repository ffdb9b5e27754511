/* Products. Operands with a BLAS layout are used in place; others are first copied to scratch in the compute type. If
 * that scratch would exceed a budget, the product is computed in tiles. If the backend streams products, operands of
 * the chunked one may be in host memory. */
#include <torchium/linalg.h>

#include <string.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

/* One of A, B and out. Strides are in elements of `type`; batch strides follow the product's batch dimensions. */
typedef struct operand {
    const tch_tensor *tensor;
    void *data;
    tch_scalar type;
    int64_t rows, cols, row_stride, col_stride;
    int64_t batch_strides[TCH_MAX_RANK];
} operand;

typedef struct product {
    double alpha, beta;
    operand a, b, c;
    int32_t rank; /* batch dimensions */
    int64_t sizes[TCH_MAX_RANK];
    tch_scalar compute;
} product;

/* --- shapes ----------------------------------------------------------------------------------------------------- */

/* The size of batch dimension i counted from the right; 1 if the tensor has none. */
static int64_t batch_size(const tch_tensor *t, int32_t from_right)
{
    int32_t i = t->ndim - 3 - from_right;
    return i >= 0 ? t->shape[i] : 1;
}

static tch_status broadcast_shape(const tch_tensor *a, const tch_tensor *b, int32_t *ndim, int64_t *shape)
{
    int32_t rank = a->ndim > b->ndim ? a->ndim : b->ndim;
    *ndim = rank;
    for (int32_t k = 0; k < rank - 2; k++) {
        int64_t x = batch_size(a, k);
        int64_t y = batch_size(b, k);
        if (x != y && x != 1 && y != 1) {
            char a_text[TCHI_DESCRIBE_SIZE];
            char b_text[TCHI_DESCRIBE_SIZE];
            return tchi_fail(TCH_ERR_SHAPE, "the leading dimensions of a %s and b %s do not broadcast",
                             tchi_describe_shape(a, a_text, sizeof a_text),
                             tchi_describe_shape(b, b_text, sizeof b_text));
        }
        shape[rank - 3 - k] = x == 1 ? y : x;
    }
    return TCH_OK;
}

static int64_t dimension_of(const tch_tensor *t, int32_t from_right, int32_t transpose)
{
    return t->shape[t->ndim - 1 - (transpose ? 1 - from_right : from_right)];
}

static bool lies_on_host(const tch_tensor *t)
{
    return t != NULL && (t->device.type == TCH_DEVICE_CPU || t->device.type == TCH_DEVICE_CUDA_HOST);
}

/* Checks that a tensor is on the context's device, or in host memory if the product is streamed. */
static tch_status check_place(tch_context *context, const tch_tensor *t, const char *name, bool streamed)
{
    return streamed && lies_on_host(t) ? tch_tensor_check(t, name) : tchi_check_input(context, t, name);
}

static tch_status check_product(tch_context *context, const tch_tensor *a, int32_t ta, const tch_tensor *b, int32_t tb,
                                const tch_tensor *out, bool streamed)
{
    TCHI_TRY(check_place(context, a, "a", streamed));
    TCHI_TRY(check_place(context, b, "b", streamed));
    TCHI_TRY(check_place(context, out, "out", streamed));
    TCHI_TRY(tchi_check_writable(out, "out"));
    TCHI_TRY(tchi_check_matrix(a, "a"));
    TCHI_TRY(tchi_check_matrix(b, "b"));
    TCHI_TRY(tchi_check_float(a, "a"));
    TCHI_TRY(tchi_check_same_dtype(b, "b", a, "a"));
    TCHI_TRY(tchi_check_same_dtype(out, "out", a, "a"));
    if (dimension_of(a, 0, ta) != dimension_of(b, 1, tb)) {
        char a_text[TCHI_DESCRIBE_SIZE];
        char b_text[TCHI_DESCRIBE_SIZE];
        return tchi_fail(TCH_ERR_SHAPE, "a %s%s and b %s%s do not fit: the inner sizes are %lld and %lld",
                         tchi_describe_shape(a, a_text, sizeof a_text), ta ? " transposed" : "",
                         tchi_describe_shape(b, b_text, sizeof b_text), tb ? " transposed" : "",
                         (long long)dimension_of(a, 0, ta), (long long)dimension_of(b, 1, tb));
    }
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK];
    TCHI_TRY(broadcast_shape(a, b, &ndim, shape));
    shape[ndim - 2] = dimension_of(a, 1, ta);
    shape[ndim - 1] = dimension_of(b, 0, tb);
    TCHI_TRY(tchi_check_shape(out, "out", ndim, shape));
    TCHI_TRY(tchi_check_matrix_size(a, "a"));
    TCHI_TRY(tchi_check_matrix_size(b, "b"));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    return tchi_check_disjoint(out, "out", b, "b");
}

/* --- operands --------------------------------------------------------------------------------------------------- */

static operand make_operand(const tch_tensor *t, int32_t transpose, const product *p)
{
    int32_t row = t->ndim - (transpose ? 1 : 2);
    int32_t col = t->ndim - (transpose ? 2 : 1);
    operand o = {.tensor = t, .data = tchi_tensor_data(t), .type = tchi_scalar_of(t->dtype)};
    o.rows = t->shape[row];
    o.cols = t->shape[col];
    o.row_stride = tchi_tensor_stride(t, row);
    o.col_stride = tchi_tensor_stride(t, col);
    for (int32_t k = 0; k < p->rank; k++) {
        int32_t i = t->ndim - 3 - k;
        o.batch_strides[p->rank - 1 - k] = i >= 0 && t->shape[i] != 1 ? tchi_tensor_stride(t, i) : 0;
    }
    return o;
}

/* BLAS needs one stride of 1 and another of at least a whole line. */
static bool lies_by_rows(const operand *o)
{
    return (o->col_stride == 1 || o->cols == 1) && (o->row_stride >= o->cols || o->rows == 1);
}

static bool lies_by_columns(const operand *o)
{
    return (o->row_stride == 1 || o->rows == 1) && (o->col_stride >= o->rows || o->cols == 1);
}

static bool usable_in_place(const operand *o, tch_scalar compute, bool by_columns_too)
{
    bool strides = true;
    for (int32_t i = 0; i < TCH_MAX_RANK; i++) {
        strides = strides && o->batch_strides[i] >= 0;
    }
    return strides && o->type == compute && (lies_by_rows(o) || (by_columns_too && lies_by_columns(o))) &&
           o->row_stride <= TCHI_MOST_SIZE && o->col_stride <= TCHI_MOST_SIZE;
}

/* The operand as matrices at element offset `offset`, and whether BLAS has to transpose it. */
static tch_matrices as_matrices(const operand *o, int64_t offset, int64_t batch, int64_t stride, int32_t *transpose)
{
    char *data = (char *)o->data + offset * tchi_scalar_size(o->type);
    *transpose = !lies_by_rows(o);
    int64_t rows = *transpose ? o->cols : o->rows;
    int64_t cols = *transpose ? o->rows : o->cols;
    int64_t ld = *transpose ? o->col_stride : o->row_stride;
    if (rows == 1 || ld < 1) {
        ld = cols > 0 ? cols : 1;
    }
    return (tch_matrices){data, o->type, rows, cols, ld, batch, stride};
}

/* --- the batch -------------------------------------------------------------------------------------------------- */

/* Merges batch dimensions that are contiguous in all three operands. */
static void merge_dimensions(product *p)
{
    int32_t kept = 0;
    operand *each[3] = {&p->a, &p->b, &p->c};
    for (int32_t i = 0; i < p->rank; i++) {
        bool merges = kept > 0;
        for (int k = 0; k < 3 && merges; k++) {
            merges = each[k]->batch_strides[kept - 1] == each[k]->batch_strides[i] * p->sizes[i];
        }
        int32_t to = merges ? kept - 1 : kept++;
        p->sizes[to] = merges ? p->sizes[to] * p->sizes[i] : p->sizes[i];
        for (int k = 0; k < 3; k++) {
            each[k]->batch_strides[to] = each[k]->batch_strides[i];
        }
    }
    for (int k = 0; k < 3; k++) {
        for (int32_t i = kept; i < TCH_MAX_RANK; i++) {
            each[k]->batch_strides[i] = 0;
        }
    }
    p->rank = kept;
}

static int64_t outer_count(const product *p, int32_t dimensions)
{
    int64_t count = 1;
    for (int32_t i = 0; i < dimensions; i++) {
        count *= p->sizes[i];
    }
    return count;
}

static int64_t batch_offset(const product *p, const operand *o, int32_t dimensions, int64_t index)
{
    int64_t offset = 0;
    for (int32_t i = dimensions - 1; i >= 0; i--) {
        offset += index % p->sizes[i] * o->batch_strides[i];
        index /= p->sizes[i];
    }
    return offset;
}

/* All three in place: one backend call for each index of the outer batch dimensions. */
static tch_status multiply_in_place(tch_context *context, const product *p)
{
    int32_t outer = p->rank > 0 ? p->rank - 1 : 0;
    int64_t inner = p->rank > 0 ? p->sizes[p->rank - 1] : 1;
    int64_t strides[3] = {0, 0, 0};
    if (p->rank > 0) {
        strides[0] = p->a.batch_strides[outer];
        strides[1] = p->b.batch_strides[outer];
        strides[2] = p->c.batch_strides[outer];
    }
    for (int64_t i = 0; i < outer_count(p, outer); i++) {
        int32_t ta;
        int32_t tb;
        int32_t tc;
        tch_matrices a = as_matrices(&p->a, batch_offset(p, &p->a, outer, i), inner, strides[0], &ta);
        tch_matrices b = as_matrices(&p->b, batch_offset(p, &p->b, outer, i), inner, strides[1], &tb);
        tch_matrices c = as_matrices(&p->c, batch_offset(p, &p->c, outer, i), inner, strides[2], &tc);
        TCHI_TRY(context->backend->matrix->gemm(context->state, p->alpha, &a, ta, &b, tb, p->beta, 0, &c));
    }
    return TCH_OK;
}

/* --- staging whole operands ------------------------------------------------------------------------------------- */

static int64_t staged_bytes(const operand *o, tch_scalar compute)
{
    return tch_tensor_numel(o->tensor) * tchi_scalar_size(compute);
}

/* Points the operand at a contiguous copy of its tensor in scratch, in the order of the tensor's dimensions. */
static void restage_operand(operand *o, void *scratch, product *p, int32_t transpose)
{
    tch_tensor plain = *o->tensor;
    plain.strides = NULL;
    operand staged = make_operand(&plain, transpose, p);
    staged.tensor = o->tensor;
    staged.data = scratch;
    staged.type = p->compute;
    *o = staged;
}

static tch_status copy_whole(tch_context *context, const tch_tensor *tensor, void *scratch, tch_scalar type, int back)
{
    tchi_batch batch = tchi_batch_of(tensor, 2);
    tch_matrices all = tchi_matrices_new(scratch, type, batch.count, batch.rows, batch.cols);
    return back ? tchi_batch_write(context, &batch, 0, &all) : tchi_batch_read(context, &batch, 0, &all);
}

static tch_status multiply_staged(tch_context *context, product *p, int32_t ta, int32_t tb, const bool *stage)
{
    operand *each[3] = {&p->a, &p->b, &p->c};
    int32_t transposes[3] = {ta, tb, 0};
    void *scratch[3] = {NULL, NULL, NULL};
    tchi_arena arena = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int k = 0; k < 3; k++) {
            scratch[k] = stage[k] ? tchi_arena_take(&arena, staged_bytes(each[k], p->compute)) : NULL;
        }
        if (pass == 0) {
            TCHI_TRY(tchi_arena_reserve(context, &arena));
        }
    }
    for (int k = 0; k < 3; k++) {
        if (stage[k] && (k < 2 || p->beta != 0.0)) {
            TCHI_TRY(copy_whole(context, each[k]->tensor, scratch[k], p->compute, 0));
        }
        if (stage[k]) {
            restage_operand(each[k], scratch[k], p, transposes[k]);
        }
    }
    const tch_tensor *out = p->c.tensor;
    merge_dimensions(p);
    TCHI_TRY(multiply_in_place(context, p));
    return stage[2] ? copy_whole(context, out, scratch[2], p->compute, 1) : TCH_OK;
}

/* --- tiles ------------------------------------------------------------------------------------------------------ */

typedef struct tile {
    int64_t m, n, k; /* sizes of a tile */
    bool stage[3];
    int64_t bytes;
} tile;

#define ROUND_TO 256

static int64_t tile_bytes(const tile *t, tch_scalar compute)
{
    const int64_t elements[3] = {t->m * t->k, t->k * t->n, t->m * t->n};
    int64_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        int64_t chunk = t->stage[i] ? elements[i] * tchi_scalar_size(compute) : 0;
        bytes += (chunk + ROUND_TO - 1) / ROUND_TO * ROUND_TO;
    }
    return bytes;
}

/* Halves the largest side until the tile fits: squarer tiles read each operand fewer times. */
static tch_status choose_tile(const product *p, const bool *stage, int64_t budget, tile *t)
{
    *t = (tile){p->c.rows, p->c.cols, p->a.cols, {stage[0], stage[1], stage[2]}, 0};
    while ((t->bytes = tile_bytes(t, p->compute)) > budget) {
        int64_t *largest = t->m >= t->n ? &t->m : &t->n;
        largest = t->k > *largest ? &t->k : largest;
        if (*largest == 1) {
            return tchi_fail(
                TCH_ERR_OUT_OF_MEMORY,
                "the product needs at least %lld bytes of scratch, and the budget leaves %lld (the pool rounds up)",
                (long long)t->bytes, (long long)budget);
        }
        *largest = (*largest + 1) / 2;
    }
    return TCH_OK;
}

static operand part_of(const operand *o, int64_t offset, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    operand part = *o;
    offset += row * o->row_stride + col * o->col_stride;
    part.data = (char *)o->data + offset * tchi_scalar_size(o->type);
    part.rows = rows;
    part.cols = cols;
    memset(part.batch_strides, 0, sizeof part.batch_strides);
    return part;
}

static tch_status move_tile(tch_context *context, const operand *outside, const operand *inside, int back)
{
    const int64_t shape[2] = {outside->rows, outside->cols};
    const int64_t theirs[2] = {outside->row_stride, outside->col_stride};
    const int64_t ours[2] = {inside->row_stride, inside->col_stride};
    tch_array there = {outside->data, outside->type, 2, shape, theirs};
    tch_array here = {inside->data, inside->type, 2, shape, ours};
    return back ? context->backend->matrix->copy(context->state, &there, &here)
                : context->backend->matrix->copy(context->state, &here, &there);
}

/* The operand itself, or a copy of it in scratch if it has to be staged. */
static tch_status stage_tile(tch_context *context, const operand *outside, bool stage, bool read, void *scratch,
                             tch_scalar compute, operand *inside)
{
    *inside = *outside;
    if (!stage) {
        return TCH_OK;
    }
    inside->data = scratch;
    inside->type = compute;
    inside->row_stride = outside->cols;
    inside->col_stride = 1;
    return read ? move_tile(context, outside, inside, 0) : TCH_OK;
}

static tch_status multiply_tile(tch_context *context, const product *p, const operand *a, const operand *b,
                                const operand *c, double beta)
{
    int32_t ta;
    int32_t tb;
    int32_t tc;
    tch_matrices x = as_matrices(a, 0, 1, 0, &ta);
    tch_matrices y = as_matrices(b, 0, 1, 0, &tb);
    tch_matrices z = as_matrices(c, 0, 1, 0, &tc);
    return context->backend->matrix->gemm(context->state, p->alpha, &x, ta, &y, tb, beta, 0, &z);
}

/* One tile of out, summed over chunks of the inner dimension. */
static tch_status tile_of_out(tch_context *context, const product *p, const tile *t, void *const *scratch,
                              int64_t index, int64_t i, int64_t j)
{
    int64_t rows = tchi_min(p->c.rows - i, t->m);
    int64_t cols = tchi_min(p->c.cols - j, t->n);
    operand outside = part_of(&p->c, batch_offset(p, &p->c, p->rank, index), i, rows, j, cols);
    operand c;
    TCHI_TRY(stage_tile(context, &outside, t->stage[2], p->beta != 0.0, scratch[2], p->compute, &c));
    int64_t k = 0;
    do { /* also once for an inner size of 0: out = beta out */
        int64_t depth = tchi_min(p->a.cols - k, t->k);
        operand a_part = part_of(&p->a, batch_offset(p, &p->a, p->rank, index), i, rows, k, depth);
        operand b_part = part_of(&p->b, batch_offset(p, &p->b, p->rank, index), k, depth, j, cols);
        operand a;
        operand b;
        TCHI_TRY(stage_tile(context, &a_part, t->stage[0], true, scratch[0], p->compute, &a));
        TCHI_TRY(stage_tile(context, &b_part, t->stage[1], true, scratch[1], p->compute, &b));
        TCHI_TRY(multiply_tile(context, p, &a, &b, &c, k == 0 ? p->beta : 1.0));
        k += t->k;
    } while (k < p->a.cols);
    return t->stage[2] ? move_tile(context, &outside, &c, 1) : TCH_OK;
}

static tch_status multiply_tiles(tch_context *context, const product *p, const bool *stage, int64_t budget)
{
    tile t;
    TCHI_TRY(choose_tile(p, stage, budget, &t));
    const int64_t elements[3] = {t.m * t.k, t.k * t.n, t.m * t.n};
    void *scratch[3];
    tchi_arena arena = {.used = t.bytes};
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    for (int k = 0; k < 3; k++) {
        scratch[k] = t.stage[k] ? tchi_arena_take(&arena, elements[k] * tchi_scalar_size(p->compute)) : NULL;
    }
    for (int64_t index = 0; index < outer_count(p, p->rank); index++) {
        for (int64_t i = 0; i < p->c.rows; i += t.m) {
            for (int64_t j = 0; j < p->c.cols; j += t.n) {
                TCHI_TRY(tile_of_out(context, p, &t, scratch, index, i, j));
            }
        }
    }
    return TCH_OK;
}

/* The type in which the backend multiplies: half types if it has arithmetic for them, which accumulates in float32;
 * otherwise float32. */
static tch_scalar product_type(const tch_context *context, tch_scalar type)
{
    tch_product_rates rates = {0};
    if (context->backend->matrix->product_rates != NULL) {
        context->backend->matrix->product_rates(context->state, &rates);
    }
    return rates.bf16 > 0.0 ? type : tchi_compute_type(type);
}

static product make_product(double alpha, const tch_tensor *a, int32_t ta, const tch_tensor *b, int32_t tb, double beta,
                            const tch_tensor *out)
{
    product p = {.alpha = alpha, .beta = beta, .rank = out->ndim - 2};
    memcpy(p.sizes, out->shape, (size_t)p.rank * sizeof *p.sizes);
    p.a = make_operand(a, ta, &p);
    p.b = make_operand(b, tb, &p);
    p.c = make_operand(out, 0, &p);
    return p;
}

/* The smaller of a call's budget and the context's limit, 0 meaning none, minus the pool's rounding of at most an
 * eighth. A positive budget stays positive. */
static int64_t usable_budget(const tch_context *context, int64_t budget)
{
    int64_t limit = tch_context_get_workspace_limit(context);
    if (budget == 0 || (limit > 0 && limit < budget)) {
        budget = limit;
    }
    return budget > 0 && budget < 9 ? 1 : budget / 9 * 8;
}

/* Sets which operands have to be staged for p->compute; returns the bytes for that. */
static int64_t staging_needed(const product *p, bool *stage)
{
    const operand *each[3] = {&p->a, &p->b, &p->c};
    int64_t bytes = 0;
    for (int k = 0; k < 3; k++) {
        stage[k] = !usable_in_place(each[k], p->compute, k < 2);
        bytes += stage[k] ? staged_bytes(each[k], p->compute) + ROUND_TO : 0;
    }
    return bytes;
}

/* `budget` in bytes; 0 for the context's limit only. Tiles accumulate slices of the inner dimension in the result,
 * which half types would round each time, so tiles are float32. */
static tch_status multiply_tensors(tch_context *context, double alpha, const tch_tensor *a, int32_t ta,
                                   const tch_tensor *b, int32_t tb, double beta, tch_tensor *out, int64_t budget)
{
    TCHI_TRY(check_product(context, a, ta, b, tb, out, false));
    if (tch_tensor_numel(out) == 0) {
        return TCH_OK;
    }
    bool stage[3];
    product p = make_product(alpha, a, ta, b, tb, beta, out);
    p.compute = product_type(context, p.a.type);
    int64_t bytes = staging_needed(&p, stage);
    if (bytes == 0) {
        merge_dimensions(&p);
        return multiply_in_place(context, &p);
    }
    budget = usable_budget(context, budget);
    if (budget > 0 && bytes > budget) {
        p.compute = tchi_compute_type(p.a.type);
        (void)staging_needed(&p, stage);
        return multiply_tiles(context, &p, stage, budget);
    }
    return multiply_staged(context, &p, ta, tb, stage);
}

/* --- operands in host memory ------------------------------------------------------------------------------------- */

static tch_status check_lines(const operand *o, const char *name)
{
    if ((lies_by_rows(o) || lies_by_columns(o)) && o->row_stride <= TCHI_MOST_SIZE && o->col_stride <= TCHI_MOST_SIZE) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_LAYOUT,
                     "%s has strides %lld and %lld in its last two dimensions: a product with operands in host memory "
                     "reads whole rows or whole columns; copy it to a contiguous tensor with tch_tensor_copy",
                     name, (long long)o->row_stride, (long long)o->col_stride);
}

/* One pair of matrices. A column-major result is the transposed product C' = B' A' in row-major. */
static tch_streamed_product streamed_pair(const product *p, int64_t index)
{
    tch_streamed_product s = {.alpha = p->alpha, .beta = p->beta};
    int32_t ta;
    int32_t tb;
    int32_t tc;
    s.a = as_matrices(&p->a, batch_offset(p, &p->a, p->rank, index), 1, 0, &ta);
    s.b = as_matrices(&p->b, batch_offset(p, &p->b, p->rank, index), 1, 0, &tb);
    s.c = as_matrices(&p->c, batch_offset(p, &p->c, p->rank, index), 1, 0, &tc);
    s.transpose_a = ta;
    s.transpose_b = tb;
    s.a_on_host = lies_on_host(p->a.tensor);
    s.b_on_host = lies_on_host(p->b.tensor);
    s.c_on_host = lies_on_host(p->c.tensor);
    if (tc) {
        tch_streamed_product t = s;
        s.a = t.b;
        s.b = t.a;
        s.transpose_a = !tb;
        s.transpose_b = !ta;
        s.a_on_host = t.b_on_host;
        s.b_on_host = t.a_on_host;
    }
    return s;
}

/* The bytes with which every host operand of a pair fits on the device as a whole, with rows aligned to 16 bytes. */
static int64_t most_useful(const tch_streamed_product *s)
{
    const tch_matrices *each[3] = {&s->a, &s->b, &s->c};
    const int32_t on_host[3] = {s->a_on_host, s->b_on_host, s->c_on_host};
    int64_t bytes = 0;
    for (int k = 0; k < 3; k++) {
        int64_t row = (each[k]->cols * tchi_scalar_size(each[k]->type) + 15) / 16 * 16;
        bytes += on_host[k] ? each[k]->rows * row + 2 * ROUND_TO : 0;
    }
    return bytes;
}

/* The scratch for streaming a pair: the budget or, without one, 80 % of the device's free memory. */
static tch_status streaming_bytes(tch_context *context, const tch_streamed_product *s, int64_t budget, int64_t *bytes)
{
    budget = usable_budget(context, budget);
    if (budget == 0) {
        int64_t total;
        int64_t available;
        TCHI_TRY(context->backend->device->memory_info(context->state, &total, &available));
        budget = available / 5 * 4;
    }
    int64_t most = most_useful(s);
    *bytes = most < budget ? most : budget;
    return TCH_OK;
}

static tch_status multiply_streamed(tch_context *context, const tch_tensor *a, const tch_tensor *b, tch_tensor *out,
                                    int64_t budget)
{
    TCHI_TRY(check_product(context, a, 0, b, 0, out, true));
    if (tch_tensor_numel(out) == 0) {
        return TCH_OK;
    }
    product p = make_product(1.0, a, 0, b, 0, 0.0, out);
    TCHI_TRY(check_lines(&p.a, "a"));
    TCHI_TRY(check_lines(&p.b, "b"));
    TCHI_TRY(check_lines(&p.c, "out"));
    tch_streamed_product pair = streamed_pair(&p, 0);
    tchi_arena arena = {0};
    TCHI_TRY(streaming_bytes(context, &pair, budget, &arena.used));
    int64_t bytes = arena.used;
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    for (int64_t index = 0; index < outer_count(&p, p.rank); index++) {
        pair = streamed_pair(&p, index);
        TCHI_TRY(context->backend->matrix->streamed_product(context->state, &pair, arena.base, bytes));
    }
    return TCH_OK;
}

/* --- the public calls ------------------------------------------------------------------------------------------- */

tch_status tch_matmul(tch_context *context, const tch_tensor *a, const tch_tensor *b, tch_tensor *out)
{
    TCHI_ENTER(context, "tch_matmul");
    return multiply_tensors(context, 1.0, a, 0, b, 0, 0.0, out, 0);
}

tch_status tch_gemm(tch_context *context, double alpha, const tch_tensor *a, int32_t transpose_a, const tch_tensor *b,
                    int32_t transpose_b, double beta, tch_tensor *out)
{
    TCHI_ENTER(context, "tch_gemm");
    return multiply_tensors(context, alpha, a, transpose_a != 0, b, transpose_b != 0, beta, out, 0);
}

tch_status tch_matmul_chunked(tch_context *context, const tch_tensor *a, const tch_tensor *b, int64_t memory_budget,
                              tch_tensor *out)
{
    TCHI_ENTER(context, "tch_matmul_chunked");
    if (memory_budget < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "memory_budget is %lld, expected 0 (no limit) or more bytes",
                         (long long)memory_budget);
    }
    if (context->backend->matrix->streamed_product != NULL &&
        (lies_on_host(a) || lies_on_host(b) || lies_on_host(out))) {
        return multiply_streamed(context, a, b, out, memory_budget);
    }
    return multiply_tensors(context, 1.0, a, 0, b, 0, 0.0, out, memory_budget);
}
