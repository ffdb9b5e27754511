/* Searches the tile sizes of a streamed product: every pair for m and n with the deepest slice of k that fits, in both
 * traversal orders, at most a few thousand cases. */
#include "streamed.h"

#include "backends/cuda/runtime/scalars.h"
#include "core/arith.h"

/* Rows of a tile on the device begin at multiples of this, for cuBLAS; slots at multiples of SLOT_ALIGNMENT. */
#define ROW_ALIGNMENT 16
#define SLOT_ALIGNMENT 256

/* Larger tile sizes are multiples of this, cuBLAS's tile size. */
#define TILE_ROUND 128

/* Cost of a tile in bytes of traffic at 55 GB/s: the last wave of its product, about 0.3 ms. Reasoned. */
#define TILE_COST (INT64_C(16) << 20)

static int64_t count(int64_t size, int64_t tile)
{
    return size > tile ? (size + tile - 1) / tile : 1;
}

/* `size` divided into 1, 2, 3, 4, 6, 8, 12, ... parts, for step = 0, 1, 2, ...; 0 after the last. */
static int64_t tile_size(int64_t size, int step)
{
    int64_t parts = step == 0 ? 1 : (INT64_C(2) + (step - 1) % 2) << ((step - 1) / 2);
    if (step > 0 && parts / 2 >= size) {
        return 0;
    }
    int64_t tile = size < 1 ? 1 : (size + parts - 1) / parts;
    int64_t rounded = tile > TILE_ROUND ? tchi_round_up(tile, TILE_ROUND) : tile;
    return rounded < size || size < 1 ? rounded : size;
}

static tchi_stream_tiles tiles_of(int64_t rows, int64_t cols, int64_t tiles, int32_t transpose, int32_t on_host,
                                  tch_scalar type)
{
    tchi_stream_tiles t = {.rows = transpose ? cols : rows, .cols = transpose ? rows : cols};
    int64_t size = tchi_cuda_scalar_size(type);
    t.ld = tchi_round_up(t.cols * size, ROW_ALIGNMENT) / size;
    t.slots = !on_host ? 0 : tiles == 1 ? 1 : TCHI_STREAM_SLOTS;
    t.bytes = on_host ? tchi_round_up(t.rows * t.ld * size, SLOT_ALIGNMENT) : 0;
    return t;
}

static void lay_out(const tch_streamed_product *p, tchi_stream_plan *plan)
{
    const int64_t *tile = plan->tile;
    tch_scalar type = p->c.type;
    int64_t rows = count(plan->m, tile[0]);
    int64_t cols = count(plan->n, tile[1]);
    int64_t depth = count(plan->k, tile[2]);
    int half = type == TCH_SCALAR_F16 || type == TCH_SCALAR_BF16;
    plan->a = tiles_of(tile[0], tile[2], rows * depth, p->transpose_a, p->a_on_host, type);
    plan->b = tiles_of(tile[2], tile[1], depth * cols, p->transpose_b, p->b_on_host, type);
    plan->c = tiles_of(tile[0], tile[1], rows * cols, 0, p->c_on_host, type);
    plan->sum_bytes = half && depth > 1 ? tchi_round_up(tile[0] * tile[1] * (int64_t)sizeof(float), SLOT_ALIGNMENT) : 0;
    plan->bytes =
        plan->a.slots * plan->a.bytes + plan->b.slots * plan->b.bytes + plan->c.slots * plan->c.bytes + plan->sum_bytes;
}

/* How often an operand with `tiles` tiles along the traversal and `depth` slices of k is transferred in `passes`
 * passes. */
static int64_t times_brought(int64_t tiles, int64_t depth, int64_t passes, int outer)
{
    return depth == 1 && (outer || tiles == 1) ? 1 : passes;
}

static void count_traffic(const tch_streamed_product *p, tchi_stream_plan *plan)
{
    int64_t size = tchi_cuda_scalar_size(p->c.type);
    int64_t rows = count(plan->m, plan->tile[0]);
    int64_t cols = count(plan->n, plan->tile[1]);
    int64_t depth = count(plan->k, plan->tile[2]);
    int64_t a = plan->m * plan->k * size * times_brought(rows, depth, cols, !plan->columns_outermost);
    int64_t b = plan->k * plan->n * size * times_brought(cols, depth, rows, plan->columns_outermost);
    int64_t c = plan->m * plan->n * size * (p->beta != 0.0 ? 2 : 1);
    plan->traffic = (p->a_on_host ? a : 0) + (p->b_on_host ? b : 0) + (p->c_on_host ? c : 0);
}

static double score(const tchi_stream_plan *plan)
{
    double tiles = (double)count(plan->m, plan->tile[0]) * (double)count(plan->n, plan->tile[1]) *
                   (double)count(plan->k, plan->tile[2]);
    double ends = (double)plan->a.bytes + (double)plan->b.bytes + (double)plan->c.bytes;
    return (double)plan->traffic + ends + tiles * (double)TILE_COST;
}

/* Finds the deepest slice of k that fits; returns 0 if none does, with the shallowest in the plan. */
static int deepest(const tch_streamed_product *p, int64_t budget, tchi_stream_plan *plan)
{
    for (int step = 0; (plan->tile[2] = tile_size(plan->k, step)) > 0; step++) {
        lay_out(p, plan);
        if (plan->bytes <= budget) {
            return 1;
        }
    }
    plan->tile[2] = 1;
    lay_out(p, plan);
    return 0;
}

static void keep_better(const tch_streamed_product *p, tchi_stream_plan *candidate, tchi_stream_plan *best, int *found)
{
    for (int order = 0; order < 2; order++) {
        candidate->columns_outermost = order;
        count_traffic(p, candidate);
        if (!*found || score(candidate) < score(best)) {
            *best = *candidate;
            *found = 1;
        }
    }
}

int tchi_stream_plan_make(const tch_streamed_product *product, int64_t budget, tchi_stream_plan *plan)
{
    int found = 0;
    tchi_stream_plan t = {.m = product->c.rows, .n = product->c.cols};
    t.k = product->transpose_a ? product->a.rows : product->a.cols;
    for (int i = 0; (t.tile[0] = tile_size(t.m, i)) > 0; i++) {
        for (int j = 0; (t.tile[1] = tile_size(t.n, j)) > 0; j++) {
            if (deepest(product, budget, &t)) {
                keep_better(product, &t, plan, &found);
            }
        }
    }
    if (!found) {
        t.tile[0] = t.tile[1] = t.tile[2] = 1;
        lay_out(product, &t);
        *plan = t;
    }
    return found;
}
