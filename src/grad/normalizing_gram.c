/* The Gram matrix of the gradients of a normalizing layer's weights: blocks of samples against blocks of samples, which
 * are one block unless the workspace is small. Blocks below the diagonal are computed and mirrored. */
#include "call.h"

#include "core/arith.h"
#include "core/status.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "gram.h"
#include "normalizing.h"
#include "walk.h"

typedef struct gram_buffers {
    tch_matrices sum;       /* B by B, of the type of the gradients */
    tch_matrices converted; /* the same in the type of the caller's matrix */
    tchi_normalizing_chunk left, right;
} gram_buffers;

typedef struct gram_call {
    tchi_normalizing c;
    tch_matrices out; /* the caller's */
    int64_t chunk;
} gram_call;

/* Samples of a block along one side. */
typedef struct range {
    int64_t first, count;
} range;

/* What keeps its place comes first; a block on the diagonal needs no right side. */
static void blocks_layout(const gram_call *g, gram_buffers *b, tchi_arena *arena, tch_context *context, range left,
                          range right)
{
    int64_t n = g->c.samples;
    b->sum = tchi_scratch_matrices(arena, g->c.type, 1, n, n);
    b->converted = g->out.type == g->c.type ? b->sum : tchi_scratch_matrices(arena, g->out.type, 1, n, n);
    tchi_normalizing_layout(&g->c, &b->left, NULL, NULL, arena, context, left.first, left.count);
    tchi_normalizing_layout(&g->c, &b->right, NULL, NULL, arena, context, right.first, right.count);
}

/* target = left right' + beta target; on the diagonal, where left is right, a Gram matrix of its own. */
static tch_status rows_product(tch_context *context, const tch_matrices *left, const tch_matrices *right, double beta,
                               const tch_matrices *target)
{
    return left == right ? tchi_gram(context, 1.0, left, 0, beta, target)
                         : context->backend->matrix->gemm(context->state, 1.0, left, 0, right, 1, beta, 0, target);
}

static tch_status add_block(tch_context *context, const gram_call *g, const gram_buffers *b, range rows, range cols)
{
    bool diagonal = rows.first == cols.first;
    const tchi_normalizing_chunk *right = diagonal ? &b->left : &b->right;
    tch_matrices block = tchi_block(&b->sum, rows.first, rows.count, cols.first, cols.count);
    tch_matrices image = tchi_block(&b->sum, cols.first, cols.count, rows.first, rows.count);
    double beta = 0.0;
    if (tchi_normalizing_has(&g->c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(rows_product(context, &b->left.weight, &right->weight, beta, &block));
        beta = 1.0;
    }
    if (tchi_normalizing_has(&g->c, TCH_GRAD_BIAS)) {
        TCHI_TRY(rows_product(context, &b->left.bias, &right->bias, beta, &block));
    }
    return diagonal ? TCH_OK : tchi_transpose(context, &block, &image);
}

static tch_status sum_blocks(tch_context *context, const gram_call *g, const tchi_arena *arena, gram_buffers *b)
{
    int64_t n = g->c.samples;
    for (int64_t row = 0; row < n; row += g->chunk) {
        range rows = {row, tchi_min(g->chunk, n - row)};
        for (int64_t col = 0; col <= row; col += g->chunk) {
            range cols = {col, col == row ? rows.count : g->chunk};
            tchi_arena here = *arena;
            blocks_layout(g, b, &here, context, rows, col == row ? (range){0, 0} : cols);
            if (col == 0) {
                TCHI_TRY(tchi_normalizing_form(context, &g->c, &b->left, rows.first, rows.count));
            }
            if (col < row) {
                TCHI_TRY(tchi_normalizing_form(context, &g->c, &b->right, cols.first, cols.count));
            }
            TCHI_TRY(add_block(context, g, b, rows, cols));
        }
    }
    return TCH_OK;
}

/* Two blocks share the scratch, unless one has all samples. */
static int64_t choose_chunk(tch_context *context, const gram_call *g)
{
    gram_buffers b;
    tchi_arena fixed = {0};
    blocks_layout(g, &b, &fixed, context, (range){0, 0}, (range){0, 0});
    int64_t chunk = tchi_normalizing_chunk_size(&g->c, context, fixed.used);
    return chunk >= g->c.samples ? chunk : chunk > 1 ? chunk / 2 : 1;
}

/* gram = sum or gram + sum, in gram's type. */
static tch_status add_to(tch_context *context, const gram_buffers *b, int32_t accumulate, const tch_matrices *gram)
{
    const tch_backend *t = context->backend;
    if (b->sum.type != gram->type) {
        TCHI_TRY(t->matrix->shift_scale(context->state, &b->sum, NULL, NULL, 0.0, &b->converted));
    }
    return t->matrix->combine(context->state, 0.0, 1.0, accumulate ? gram : NULL, 1.0, &b->converted, gram);
}

tch_status tchi_normalizing_gram(tch_context *context, const tchi_grad_call *call, const tch_tensor *gram)
{
    gram_call g = {.c = tchi_normalizing_of(call)};
    gram_buffers b;
    tchi_arena arena = {0};
    tchi_arena last = {0};
    if (g.c.features == 0 || g.c.parts == 0 || !tchi_matrices_of(gram, &g.out)) {
        return tchi_clear_gram(context, call->accumulate, gram);
    }
    g.chunk = choose_chunk(context, &g);
    range right = {0, g.chunk < g.c.samples ? g.chunk : 0};
    blocks_layout(&g, &b, &arena, context, (range){0, tchi_min(g.chunk, g.c.samples)}, right);
    blocks_layout(&g, &b, &last, context, (range){0, g.c.samples % g.chunk}, right);
    arena.used = tchi_max(arena.used, last.used);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    TCHI_TRY(sum_blocks(context, &g, &arena, &b));
    return add_to(context, &b, call->accumulate, &g.out);
}
