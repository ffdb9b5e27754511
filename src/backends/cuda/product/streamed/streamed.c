/* Products with operands or result in host memory, possibly larger than the device. Tiles arrive on one stream, are
 * multiplied on the state's, and leave on a third; events order the three, and every operand has two slots on the
 * device, so that copies both ways overlap the arithmetic. The host drives it tile by tile: it copies pageable memory
 * to and from page-locked chunks, one product ahead of the device.
 *
 * The one thing to know before changing it: cudaStreamWaitEvent waits for the event as last recorded when it is called,
 * so a wait must be queued after the record it is meant for. */
#include "backends/cuda/cuda.h"

#include "backends/cuda/runtime/scalars.h"
#include "core/arith.h"
#include "streamed.h"

/* --- blocks: a tile, divided into chunks of page-locked memory --------------------------------------------------- */

/* A part of a matrix in storage order. */
typedef struct block {
    int64_t row, col, rows, cols;
} block;

/* The part of op(X) at (row, col) in the order of storage. */
static block stored_block(int64_t row, int64_t rows, int64_t col, int64_t cols, int32_t transpose)
{
    return transpose ? (block){col, row, cols, rows} : (block){row, col, rows, cols};
}

/* Columns and rows of a chunk: whole rows of the block where one fits in a chunk. */
static block chunk_shape(const block *b, int64_t size)
{
    int64_t cols = tchi_min(b->cols, TCHI_STAGING_CHUNK_BYTES / size);
    int64_t rows = tchi_min(b->rows, TCHI_STAGING_CHUNK_BYTES / (cols * size));
    return (block){0, 0, rows, cols};
}

static int64_t chunk_count(const block *b, int64_t size)
{
    if (b->rows == 0 || b->cols == 0) {
        return 0;
    }
    block shape = chunk_shape(b, size);
    return (b->rows + shape.rows - 1) / shape.rows * ((b->cols + shape.cols - 1) / shape.cols);
}

/* Offset and size of chunk `index` in block b. */
static block chunk_at(const block *b, int64_t size, int64_t index)
{
    block shape = chunk_shape(b, size);
    int64_t across = (b->cols + shape.cols - 1) / shape.cols;
    block p = {index / across * shape.rows, index % across * shape.cols, 0, 0};
    p.rows = tchi_min(shape.rows, b->rows - p.row);
    p.cols = tchi_min(shape.cols, b->cols - p.col);
    return p;
}

/* --- the flow of tiles ------------------------------------------------------------------------------------------- */

typedef struct slot {
    char *data;
    int64_t tile; /* which tile it holds, -1 for none */
    const tchi_slot_events *events;
} slot;

/* One of A, B and C. */
typedef struct side {
    tch_matrices whole;
    int32_t on_host, direct; /* direct: page-locked, copied by the device itself */
    tchi_stream_tiles tiles;
    slot slots[TCHI_STREAM_SLOTS];
    int32_t current; /* the most recently used slot */
} side;

/* A result tile being copied to pageable memory chunk by chunk. */
typedef struct departure {
    int active;
    block tile;
    const slot *from;
    int64_t chunks, fetched, delivered;
    int64_t chunk[TCHI_STAGING_CHUNKS]; /* of the ring, by chunk number modulo its length */
} departure;

typedef struct flow {
    tchi_cuda_state *state;
    tchi_cuda_staging *staging;
    const tch_streamed_product *product;
    tchi_stream_plan plan;
    side a, b, c;
    tch_matrices sum; /* float32, if the plan has one */
    departure leaving;
} flow;

static tch_status wait_for(cudaStream_t stream, cudaEvent_t event)
{
    return tchi_cuda_check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

static tch_status record_event(cudaEvent_t event, cudaStream_t stream)
{
    return tchi_cuda_check(cudaEventRecord(event, stream), "cudaEventRecord");
}

/* --- addresses --------------------------------------------------------------------------------------------------- */

static char *host_address(const side *s, const block *b)
{
    return (char *)s->whole.data + (b->row * s->whole.ld + b->col) * tchi_cuda_scalar_size(s->whole.type);
}

/* Copy descriptor of a chunk (or a whole block) from host memory to the slot of the block. */
static tchi_rows rows_in(const side *s, const block *b, const slot *at, const block *chunk)
{
    int64_t size = tchi_cuda_scalar_size(s->whole.type);
    block place = {b->row + chunk->row, b->col + chunk->col, chunk->rows, chunk->cols};
    return (tchi_rows){.to = at->data + (chunk->row * s->tiles.ld + chunk->col) * size,
                       .to_pitch = s->tiles.ld * size,
                       .from = host_address(s, &place),
                       .from_pitch = (s->whole.rows > 1 ? s->whole.ld : s->whole.cols) * size,
                       .width = chunk->cols * size,
                       .rows = chunk->rows};
}

static tchi_rows rows_out(const side *s, const block *b, const slot *at, const block *chunk)
{
    tchi_rows in = rows_in(s, b, at, chunk);
    return (tchi_rows){(char *)in.from, in.from_pitch, in.to, in.to_pitch, in.width, in.rows};
}

/* --- to the device ----------------------------------------------------------------------------------------------- */

static tch_status copy_in(flow *f, const side *s, const block *b, const slot *to)
{
    int64_t size = tchi_cuda_scalar_size(s->whole.type);
    if (s->direct) {
        block all = {0, 0, b->rows, b->cols};
        tchi_rows rows = rows_in(s, b, to, &all);
        return tchi_cuda_staging_copy(&rows, f->staging->in);
    }
    for (int64_t i = 0; i < chunk_count(b, size); i++) {
        block chunk = chunk_at(b, size, i);
        tchi_rows rows = rows_in(s, b, to, &chunk);
        TCHI_TRY(tchi_cuda_staging_send(f->staging, &rows));
    }
    return TCH_OK;
}

/* The block in its slot, or in place on the device. */
static tch_matrices matrices_in_slot(const side *s, const block *b, const slot *in)
{
    tch_matrices m = {s->on_host ? in->data : host_address(s, b),
                      s->whole.type,
                      b->rows,
                      b->cols,
                      s->on_host ? s->tiles.ld : s->whole.ld,
                      1,
                      0};
    return m;
}

static slot *next_slot(side *s)
{
    s->current = (s->current + 1) % s->tiles.slots;
    return &s->slots[s->current];
}

static tch_status fill_slot(flow *f, const side *s, const block *b, const slot *to, cudaEvent_t after)
{
    TCHI_TRY(wait_for(f->staging->in, after));
    TCHI_TRY(copy_in(f, s, b, to));
    TCHI_TRY(record_event(to->events->filled, f->staging->in));
    return wait_for(f->state->stream, to->events->filled);
}

static int find_slot(side *s, int64_t tile)
{
    for (int i = 0; i < s->tiles.slots; i++) {
        if (s->slots[i].tile == tile) {
            s->current = i;
            return 1;
        }
    }
    return 0;
}

/* Brings tile number `tile` of A or B, block b, to the device, replacing the least recently used one. */
static tch_status load_tile(flow *f, side *s, const block *b, int64_t tile, tch_matrices *m)
{
    if (s->on_host && !find_slot(s, tile)) {
        slot *at = next_slot(s);
        at->tile = tile;
        TCHI_TRY(fill_slot(f, s, b, at, at->events->used));
    }
    *m = matrices_in_slot(s, b, &s->slots[s->current]);
    return TCH_OK;
}

/* A slot for block b of C, with its contents if C is read. */
static tch_status load_result(flow *f, const block *b, tch_matrices *m)
{
    if (f->c.on_host) {
        const slot *at = next_slot(&f->c);
        TCHI_TRY(wait_for(f->state->stream, at->events->drained));
        if (f->product->beta != 0.0) {
            TCHI_TRY(fill_slot(f, &f->c, b, at, at->events->drained));
        }
    }
    *m = matrices_in_slot(&f->c, b, &f->c.slots[f->c.current]);
    return TCH_OK;
}

/* --- to the host ------------------------------------------------------------------------------------------------- */

static tch_status fetch_next(flow *f)
{
    departure *d = &f->leaving;
    int64_t size = tchi_cuda_scalar_size(f->c.whole.type);
    block chunk = chunk_at(&d->tile, size, d->fetched);
    tchi_rows rows = rows_out(&f->c, &d->tile, d->from, &chunk);
    TCHI_TRY(tchi_cuda_staging_fetch(f->staging, &rows, &d->chunk[d->fetched % TCHI_STAGING_CHUNKS]));
    d->fetched++;
    return d->fetched < d->chunks ? TCH_OK : record_event(d->from->events->drained, f->staging->out);
}

/* Waits until the departing tile, if any, is in host memory. */
static tch_status finish_departure(flow *f)
{
    departure *d = &f->leaving;
    int64_t size = tchi_cuda_scalar_size(f->c.whole.type);
    while (d->active && d->delivered < d->chunks) {
        block chunk = chunk_at(&d->tile, size, d->delivered);
        tchi_rows rows = rows_out(&f->c, &d->tile, d->from, &chunk);
        TCHI_TRY(tchi_cuda_staging_deliver(f->staging, &rows, d->chunk[d->delivered % TCHI_STAGING_CHUNKS]));
        d->delivered++;
        if (d->fetched < d->chunks) {
            TCHI_TRY(fetch_next(f));
        }
    }
    d->active = 0;
    return TCH_OK;
}

static tch_status begin_departure(flow *f, const block *b)
{
    const slot *from = &f->c.slots[f->c.current];
    TCHI_TRY(wait_for(f->staging->out, from->events->used));
    if (f->c.direct) {
        block all = {0, 0, b->rows, b->cols};
        tchi_rows rows = rows_out(&f->c, b, from, &all);
        TCHI_TRY(tchi_cuda_staging_copy(&rows, f->staging->out));
        return record_event(from->events->drained, f->staging->out);
    }
    departure *d = &f->leaving;
    *d = (departure){.active = 1, .tile = *b, .from = from};
    d->chunks = chunk_count(b, tchi_cuda_scalar_size(f->c.whole.type));
    while (d->fetched < tchi_min(d->chunks, TCHI_STAGING_CHUNKS)) {
        TCHI_TRY(fetch_next(f));
    }
    return TCH_OK;
}

/* Called after queueing the product of this tile: completes the previous one meanwhile. */
static tch_status send_result(flow *f, const block *b)
{
    if (!f->c.on_host) {
        return TCH_OK;
    }
    TCHI_TRY(record_event(f->c.slots[f->c.current].events->used, f->state->stream));
    TCHI_TRY(finish_departure(f));
    return begin_departure(f, b);
}

/* --- products ---------------------------------------------------------------------------------------------------- */

static tch_status convert_tile(flow *f, const tch_matrices *to, const tch_matrices *from)
{
    const int64_t shape[2] = {to->rows, to->cols};
    const int64_t to_strides[2] = {to->ld, 1};
    const int64_t from_strides[2] = {from->ld, 1};
    tch_array target = {to->data, to->type, 2, shape, to_strides};
    tch_array source = {from->data, from->type, 2, shape, from_strides};
    return tchi_cuda_copy(f->state, &target, &source);
}

/* Records the use of the current slot. */
static tch_status mark_used(flow *f, const side *s)
{
    return s->on_host ? record_event(s->slots[s->current].events->used, f->state->stream) : TCH_OK;
}

/* C += slice `slice` of A B for the tile (i, j) of the result. */
static tch_status multiply_slice(flow *f, int64_t i, int64_t j, int64_t slice, const tch_matrices *c, double beta)
{
    const tchi_stream_plan *p = &f->plan;
    int64_t slices = (p->k + p->tile[2] - 1) / p->tile[2];
    int64_t from = slice * p->tile[2];
    int64_t depth = tchi_min(p->tile[2], p->k - from);
    block in_a = stored_block(i * p->tile[0], c->rows, from, depth, f->product->transpose_a);
    block in_b = stored_block(from, depth, j * p->tile[1], c->cols, f->product->transpose_b);
    tch_matrices a;
    tch_matrices b;
    TCHI_TRY(load_tile(f, &f->a, &in_a, i * slices + slice, &a));
    TCHI_TRY(load_tile(f, &f->b, &in_b, j * slices + slice, &b));
    TCHI_TRY(tchi_cuda_gemm(f->state, f->product->alpha, &a, f->product->transpose_a, &b, f->product->transpose_b, beta,
                            0, c));
    TCHI_TRY(mark_used(f, &f->a));
    return mark_used(f, &f->b);
}

/* Tile (i, j) of the result. A half type is accumulated in float32 over the slices, and rounded once. */
static tch_status multiply_tile(flow *f, int64_t i, int64_t j)
{
    const tchi_stream_plan *p = &f->plan;
    int64_t row = i * p->tile[0];
    int64_t col = j * p->tile[1];
    block b = {row, col, tchi_min(p->tile[0], p->m - row), tchi_min(p->tile[1], p->n - col)};
    tch_matrices c;
    TCHI_TRY(load_result(f, &b, &c));
    tch_matrices sum = f->sum;
    sum.rows = b.rows;
    sum.cols = b.cols;
    if (sum.data != NULL && f->product->beta != 0.0) {
        TCHI_TRY(convert_tile(f, &sum, &c));
    }
    const tch_matrices *target = sum.data != NULL ? &sum : &c;
    int64_t slice = 0;
    do { /* once even for k = 0: C becomes beta C */
        TCHI_TRY(multiply_slice(f, i, j, slice, target, slice == 0 ? f->product->beta : 1.0));
        slice++;
    } while (slice * p->tile[2] < p->k);
    TCHI_TRY(sum.data != NULL ? convert_tile(f, &c, &sum) : TCH_OK);
    return send_result(f, &b);
}

static tch_status multiply_tiles(flow *f)
{
    const tchi_stream_plan *p = &f->plan;
    int64_t rows = (p->m + p->tile[0] - 1) / p->tile[0];
    int64_t cols = (p->n + p->tile[1] - 1) / p->tile[1];
    for (int64_t t = 0; t < rows * cols; t++) {
        TCHI_TRY(p->columns_outermost ? multiply_tile(f, t % rows, t / rows) : multiply_tile(f, t / cols, t % cols));
    }
    return finish_departure(f);
}

/* --- the operation ----------------------------------------------------------------------------------------------- */

/* Page-locked or managed from its first element to its last. */
static int is_direct(const tch_matrices *m)
{
    struct cudaPointerAttributes first;
    struct cudaPointerAttributes last;
    int64_t elements = (m->rows - 1) * m->ld + m->cols;
    if (m->rows == 0 || m->cols == 0) {
        return 1;
    }
    char *end = (char *)m->data + elements * tchi_cuda_scalar_size(m->type) - 1;
    if (cudaPointerGetAttributes(&first, m->data) != cudaSuccess ||
        cudaPointerGetAttributes(&last, end) != cudaSuccess) {
        (void)cudaGetLastError(); /* copies then treat it as pageable, which every address is */
        return 0;
    }
    return first.type != cudaMemoryTypeUnregistered && last.type != cudaMemoryTypeUnregistered;
}

static side make_side(const tch_matrices *whole, int32_t on_host, const tchi_stream_tiles *tiles)
{
    return (side){.whole = *whole, .on_host = on_host, .direct = on_host && is_direct(whole), .tiles = *tiles};
}

static void assign_slots(side *s, const tchi_slot_events *events, char **scratch)
{
    for (int i = 0; i < s->tiles.slots; i++) {
        s->slots[i] = (slot){*scratch, -1, &events[i]};
        *scratch += s->tiles.bytes;
    }
}

static tch_status set_up(flow *f, char *scratch)
{
    const tch_streamed_product *p = f->product;
    const tchi_stream_plan *plan = &f->plan;
    f->a = make_side(&p->a, p->a_on_host, &plan->a);
    f->b = make_side(&p->b, p->b_on_host, &plan->b);
    f->c = make_side(&p->c, p->c_on_host, &plan->c);
    int ring_out = p->c_on_host && !f->c.direct;
    int ring_in = (p->a_on_host && !f->a.direct) || (p->b_on_host && !f->b.direct) || (ring_out && p->beta != 0.0);
    TCHI_TRY(tchi_cuda_staging_ready(f->state, ring_in, ring_out));
    f->staging = f->state->staging;
    assign_slots(&f->a, f->staging->slots[0], &scratch);
    assign_slots(&f->b, f->staging->slots[1], &scratch);
    assign_slots(&f->c, f->staging->slots[2], &scratch);
    f->sum = (tch_matrices){plan->sum_bytes > 0 ? scratch : NULL, TCH_SCALAR_F32, 0, 0, plan->tile[1], 1, 0};
    return TCH_OK;
}

/* Waits for all copies; after a failure also for the state's stream, so that no work of the product remains. */
static tch_status finish_flow(flow *f, tch_status so_far)
{
    cudaError_t in = cudaStreamSynchronize(f->staging->in);
    cudaError_t out = cudaStreamSynchronize(f->staging->out);
    if (so_far != TCH_OK || in != cudaSuccess || out != cudaSuccess) {
        (void)cudaStreamSynchronize(f->state->stream); /* the first failure is the one to report */
    }
    TCHI_TRY(so_far);
    TCHI_CUDA_TRY(in, "copying a streamed product's operands");
    return tchi_cuda_check(out, "copying a streamed product's result");
}

/* 2 m n k operations; plan.traffic bytes cross the link, at best every host operand once. */
tch_status tchi_cuda_streamed_product(void *state, const tch_streamed_product *product, void *scratch,
                                      int64_t scratch_bytes)
{
    flow f = {.state = state, .product = product};
    if (product->c.rows == 0 || product->c.cols == 0) {
        return TCH_OK;
    }
    if (tchi_cuda_is_capturing(f.state->stream)) {
        return tchi_cuda_host->fail(TCH_ERR_UNSUPPORTED, "a product with operands in host memory waits for them, and "
                                                         "cannot be captured in a CUDA graph");
    }
    if (!tchi_stream_plan_make(product, scratch_bytes, &f.plan)) {
        return tchi_cuda_host->fail(TCH_ERR_OUT_OF_MEMORY,
                                    "the product needs at least %lld bytes on the device, the budget leaves %lld",
                                    (long long)f.plan.bytes, (long long)scratch_bytes);
    }
    TCHI_TRY(set_up(&f, scratch));
    /* The two other streams start after the state's stream, which may still use the scratch or compute an operand. */
    tch_status status = record_event(f.staging->start, f.state->stream);
    status = status == TCH_OK ? wait_for(f.staging->in, f.staging->start) : status;
    status = status == TCH_OK ? wait_for(f.staging->out, f.staging->start) : status;
    return finish_flow(&f, status == TCH_OK ? multiply_tiles(&f) : status);
}
