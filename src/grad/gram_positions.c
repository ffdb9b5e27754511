/* The Gram matrix of gradients from inner products of positions: <a_s, a_t> <g_s, g_t> summed over the positions of two
 * samples, for two blocks of samples at a time. */
#include "gram.h"

#include "core/status.h"

#include "core/arith.h"
#include "linalg/batch.h"
#include "linalg/algebra.h"

typedef struct pair_buffers {
    tch_matrices a[2], g[2]; /* of two blocks of samples */
    tch_matrices of_a, of_g; /* inner products of their positions */
    void *scratch;
} pair_buffers;

static void pair_layout(pair_buffers *b, tchi_arena *arena, tch_context *context, const tchi_gram_call *c,
                        const int64_t first[2], const int64_t count[2])
{
    int64_t rows = count[0] * c->g.positions;
    int64_t cols = count[1] * c->g.positions;
    for (int k = 0; k < 2; k++) {
        b->a[k] = tchi_side_place(&c->a, arena, first[k], count[k], TCHI_TALL);
        b->g[k] = tchi_side_place(&c->g, arena, first[k], count[k], TCHI_TALL);
    }
    b->of_a = tchi_scratch_matrices(arena, c->type, 1, rows, cols);
    b->of_g = tchi_scratch_matrices(arena, c->type, 1, rows, cols);
    b->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_BLOCK_DOTS,
                                                                                c->type, rows, cols, 1, 0));
}

/* Samples in a block: halved until two blocks and their inner products fit. */
static int64_t choose_block(tch_context *context, const tchi_gram_call *c)
{
    int64_t budget = tchi_scratch_budget(context);
    int64_t block = tchi_min(c->g.samples, TCHI_MOST_SIZE / c->g.positions);
    for (;;) {
        pair_buffers probe;
        tchi_arena arena = {0};
        const int64_t first[2] = {0, 0};
        const int64_t count[2] = {block, block};
        pair_layout(&probe, &arena, context, c, first, count);
        if (block <= 1 || arena.used <= budget) {
            return block < 1 ? 1 : block;
        }
        block = (block + 1) / 2;
    }
}

static tch_status positions_product(tch_context *context, const tchi_gram_call *c, const tch_matrices sides[2],
                                    const tch_matrices *out)
{
    tch_matrices left = tchi_tall(&sides[0]);
    tch_matrices right = tchi_tall(&sides[1]);
    return tchi_layer_product(context, c->layer, 1.0, &left, 0, &right, 1, 0.0, out);
}

static tch_status add_pair(tch_context *context, const tchi_gram_call *c, const int64_t first[2],
                           const int64_t count[2])
{
    pair_buffers b;
    tchi_arena arena = {0};
    pair_layout(&b, &arena, context, c, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    pair_layout(&b, &arena, context, c, first, count);
    for (int k = 0; k < 2; k++) {
        TCHI_TRY(tchi_side_read(context, &c->a, first[k], &b.a[k]));
        TCHI_TRY(tchi_side_read(context, &c->g, first[k], &b.g[k]));
    }
    TCHI_TRY(positions_product(context, c, b.a, &b.of_a));
    TCHI_TRY(positions_product(context, c, b.g, &b.of_g));
    tch_matrices out = tchi_block(&c->gram, first[0], count[0], first[1], count[1]);
    TCHI_TRY(context->backend->sample->block_dots(context->state, &b.of_a, &b.of_g, c->g.positions, c->g.positions,
                                                  c->square, 1.0, &out, b.scratch));
    if (first[0] == first[1]) {
        return TCH_OK;
    }
    tch_matrices upper = tchi_block(&c->gram, first[1], count[1], first[0], count[0]);
    return tchi_transpose(context, &out, &upper);
}

int64_t tchi_gram_positions_bytes(tch_context *context, const tchi_gram_call *c)
{
    pair_buffers probe;
    tchi_arena arena = {0};
    int64_t block = choose_block(context, c);
    const int64_t first[2] = {0, 0};
    const int64_t count[2] = {block, block};
    pair_layout(&probe, &arena, context, c, first, count);
    return arena.used;
}

tch_status tchi_gram_by_positions(tch_context *context, const tchi_gram_call *c)
{
    int64_t samples = c->g.samples;
    int64_t block = choose_block(context, c);
    for (int64_t i = 0; i < samples; i += block) {
        for (int64_t j = 0; j <= i; j += block) {
            const int64_t first[2] = {i, j};
            const int64_t count[2] = {tchi_min(block, samples - i), tchi_min(block, samples - j)};
            TCHI_TRY(add_pair(context, c, first, count));
        }
    }
    return TCH_OK;
}
