/* How rectangles are cut and shared among threads. The cuts decide the order of sums, so they follow from the
 * rectangles alone; threads only choose which chunks are whose. */
#include "core/arith.h"
#include "rects.h"

/* Chunks of transposed rectangles are squares of this side where possible, since blocks run along the other
 * direction. */
#define SIDE 64

/* What starting a chunk costs, in elements, so that tiny rectangles and large ones are shared evenly. Measured with
 * AdamW in float32 on one core with AVX-512: 1000 rectangles of one element take 62 us, one rectangle of 200 000
 * elements 112 us. */
#define CHUNK_COST 110

/* A rectangle as rows by cols, cut into down by across chunks of high by wide elements, the last ones smaller. */
typedef struct cut {
    int64_t rows, cols;
    int64_t high, wide;
    int64_t down, across;
} cut;

static cut cut_rect(const tch_rect *rect, bool blocks)
{
    cut c = {.rows = rect->rows, .cols = rect->cols};
    bool transposed = blocks && rect->transposed;
    if (c.rows == 0 || c.cols == 0) {
        return c;
    }
    if (!blocks && rect->stride == c.cols) { /* with blocks the caller decides, for sums must not depend on gaps */
        c.cols *= c.rows;
        c.rows = 1;
    }
    c.wide = tchi_min(c.cols, transposed ? SIDE : TCHI_CPU_CHUNK);
    c.high = tchi_min(c.rows, TCHI_CPU_CHUNK / c.wide);
    c.wide = tchi_min(c.cols, TCHI_CPU_CHUNK / c.high);
    c.down = tchi_ceil_div(c.rows, c.high);
    c.across = tchi_ceil_div(c.cols, c.wide);
    return c;
}

int64_t tchi_cpu_chunks_of(const tch_rect *rect, bool blocks)
{
    cut c = cut_rect(rect, blocks);
    return c.down * c.across;
}

/* A chunk that has neighbors in one direction alone is more than half full on average, and a quarter in the worst case
 * of both; the last one of a rectangle may be as small as it likes. */
int64_t tchi_cpu_chunks_at_most(int64_t elements, int64_t rects)
{
    return tchi_ceil_div(elements, TCHI_CPU_CHUNK / 4) + rects;
}

/* --- sharing ---------------------------------------------------------------------------------------------------- */

typedef struct walk {
    const tch_update *update;
    bool blocks;
    tchi_cpu_chunk_task task;
    void *argument;
} walk;

/* All chunks of a rectangle are taken to cost the same. */
static int64_t chunk_cost(const cut *c)
{
    int64_t chunks = c->down * c->across;
    return chunks == 0 ? 0 : tchi_ceil_div(c->rows * c->cols, chunks) + CHUNK_COST;
}

static void do_chunk(const walk *w, const tch_rect *rect, const cut *c, int64_t index, int64_t number)
{
    int64_t row = index / c->across * c->high;
    int64_t col = index % c->across * c->wide;
    tchi_cpu_chunk chunk = {
        rect, row, col, tchi_min(c->high, c->rows - row), tchi_min(c->wide, c->cols - col), number,
    };
    w->task(w->argument, &chunk);
}

/* The costs of all chunks, laid end to end, are a line, of which this thread has [from, to): the chunks that begin
 * there are its own. */
static void walk_range(void *argument, int64_t from, int64_t to)
{
    const walk *w = argument;
    int64_t at = 0, number = 0;
    for (int64_t k = 0; k < w->update->count && at < to; k++) {
        const tch_rect *rect = &w->update->rects[k];
        cut c = cut_rect(rect, w->blocks);
        int64_t chunks = c.down * c.across;
        int64_t cost = chunk_cost(&c);
        int64_t first = chunks > 0 && at < from ? tchi_min(tchi_ceil_div(from - at, cost), chunks) : 0;
        int64_t last = chunks > 0 ? tchi_min(tchi_ceil_div(to - at, cost), chunks) : 0;
        for (int64_t i = first; i < last; i++) {
            do_chunk(w, rect, &c, i, number + i);
        }
        at += chunks * cost;
        number += chunks;
    }
}

void tchi_cpu_for_chunks(const tchi_cpu_state *state, const tch_update *update, bool blocks, double work,
                         tchi_cpu_chunk_task task, void *argument)
{
    walk w = {update, blocks, task, argument};
    int64_t total = 0;
    for (int64_t k = 0; k < update->count; k++) {
        cut c = cut_rect(&update->rects[k], blocks);
        total += c.down * c.across * chunk_cost(&c);
    }
    if (total > 0) {
        tchi_cpu_split(state, total, work * (double)total, walk_range, &w);
    }
}
