/* The Gram matrix of gradients from slices of them, rows and columns of the weight's matrix that are formed for all
 * samples at once: inner products of slices add up to those of gradients. */
#include "gram.h"

#include "core/status.h"

#include "core/arith.h"
#include "linalg/batch.h"

/* Rows [row, row + rows) and columns [col, col + cols) of the weight's matrix in groups [group, group + groups). */
typedef struct slice {
    int64_t group, groups, row, rows, col, cols;
} slice;

typedef struct slice_buffers {
    tch_matrices formed; /* of all samples */
    tchi_row_products products;
    tch_matrices a, g;
} slice_buffers;

/* The largest slice that all samples can have at once: the whole gradient, or rows of one group, or part of a row. */
static slice choose_slice(const tch_context *context, const tchi_gram_call *c)
{
    int64_t most = tchi_scratch_budget(context) / 2 / (c->g.samples * tchi_scalar_size(c->type));
    int64_t rows = most / c->a.cols;
    slice s = {.groups = 1, .rows = tchi_min(rows < 1 ? 1 : rows, c->g.cols), .cols = c->a.cols};
    if (rows / c->g.groups >= c->g.cols) {
        s.groups = c->g.groups;
    } else if (rows < 1) {
        s.cols = most < 1 ? 1 : most;
    }
    return s;
}

static void slice_layout(slice_buffers *b, tchi_arena *arena, const tch_context *context, const tchi_gram_call *c,
                         const slice *s, int64_t first, int64_t count)
{
    b->formed = tchi_scratch_matrices(arena, c->type, c->g.samples * s->groups, s->rows, s->cols);
    b->products = tchi_row_products_layout(arena, context, c);
    b->a = tchi_side_place(&c->a, arena, first, count, TCHI_APART);
    b->g = tchi_side_place(&c->g, arena, first, count, TCHI_APART);
}

/* The columns and groups of a side that a slice is made of. */
static tch_matrices part_of_side(const tch_matrices *x, const tchi_side *side, const slice *s, int64_t col,
                                 int64_t cols)
{
    tch_matrices part = *x;
    part.data = (char *)x->data + (s->group * x->stride + col) * tchi_scalar_size(x->type);
    part.cols = cols;
    if (s->groups < side->groups) {
        part.batch = x->batch / side->groups;
        part.stride = x->stride * side->groups;
    }
    return part;
}

static tch_status form_slice(tch_context *context, const tchi_gram_call *c, const slice *s, const slice_buffers *b,
                             int64_t first, int64_t count)
{
    TCHI_TRY(tchi_side_read(context, &c->a, first, &b->a));
    TCHI_TRY(tchi_side_read(context, &c->g, first, &b->g));
    tch_matrices a = part_of_side(&b->a, &c->a, s, s->col, s->cols);
    tch_matrices g = part_of_side(&b->g, &c->g, s, s->row, s->rows);
    tch_matrices out = tchi_matrices_new(b->formed.data, c->type, c->g.samples * s->groups, s->rows, s->cols);
    out = tchi_matrices_part(&out, first * s->groups, count * s->groups);
    return context->backend->matrix->gemm(context->state, 1.0, &g, 1, &a, 0, 0.0, 0, &out);
}

static tch_status add_slice(tch_context *context, const tchi_gram_call *c, const slice *s, const slice *largest,
                            void *base, int64_t chunk)
{
    slice_buffers b;
    int64_t first = 0;
    do { /* there is a sample at least, and the buffers that all chunks have in common are wanted afterwards */
        int64_t count = tchi_min(chunk, c->g.samples - first);
        tchi_arena arena = {.base = base};
        slice_layout(&b, &arena, context, c, largest, first, count);
        TCHI_TRY(form_slice(context, c, s, &b, first, count));
        first += chunk;
    } while (first < c->g.samples);
    int64_t cols = s->groups * s->rows * s->cols;
    tch_matrices rows = tchi_matrices_new(b.formed.data, c->type, 1, c->g.samples, cols);
    return tchi_gram_add_rows(context, c, &rows, &b.products);
}

/* Samples whose sides are looked at at once, while the slice of all samples is there. */
static int64_t choose_chunk(tch_context *context, const tchi_gram_call *c, const slice *s)
{
    slice_buffers probe;
    tchi_arena none = {0};
    tchi_arena one = {0};
    slice_layout(&probe, &none, context, c, s, 0, 0);
    slice_layout(&probe, &one, context, c, s, 0, 1);
    return tchi_chunk_samples(context, c->g.samples, c->g.positions, one.used - none.used, none.used);
}

int64_t tchi_gram_slices_bytes(tch_context *context, const tchi_gram_call *c)
{
    slice_buffers probe;
    tchi_arena arena = {0};
    slice s = choose_slice(context, c);
    slice_layout(&probe, &arena, context, c, &s, 0, choose_chunk(context, c, &s));
    return arena.used;
}

tch_status tchi_gram_by_slices(tch_context *context, const tchi_gram_call *c)
{
    slice s = choose_slice(context, c);
    const slice largest = s;
    int64_t chunk = choose_chunk(context, c, &s);
    tchi_arena arena = {.used = tchi_gram_slices_bytes(context, c)};
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    for (s.group = 0; s.group < c->g.groups; s.group += s.groups) {
        for (s.row = 0; s.row < c->g.cols; s.row += largest.rows) {
            s.rows = tchi_min(largest.rows, c->g.cols - s.row);
            for (s.col = 0; s.col < c->a.cols; s.col += largest.cols) {
                s.cols = tchi_min(largest.cols, c->a.cols - s.col);
                TCHI_TRY(add_slice(context, c, &s, &largest, arena.base, chunk));
            }
        }
    }
    return TCH_OK;
}
