/* How rectangles are divided into chunks and chunks among threads. The chunks determine the order of sums, so they
 * depend on the rectangles alone; threads only choose which chunks to process. */
#include "core/arith.h"
#include "rects.h"

/* Chunks of transposed rectangles are squares of this side where possible, since blocks run in the other direction;
 * those with codes are wider, and cut no block of codes. */
#define SIDE 64

/* Start-up cost of a chunk in elements, so that small and large rectangles are balanced. Measured with AdamW in float32
 * on one core with AVX-512: 1000 rectangles of one element take 62 us, one of 200 000 elements 112 us. */
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
    if (!blocks && rect->stride == c.cols &&
        rect->skipped == 0) { /* with blocks the caller decides, since sums must not depend on gaps */
        c.cols *= c.rows;
        c.rows = 1;
    }
    int64_t side = rect->scale[0] != NULL ? TCH_CODE_BLOCK : SIDE;
    c.wide = tchi_min(c.cols, transposed ? side : TCHI_CPU_CHUNK);
    c.high = tchi_min(c.rows, TCHI_CPU_CHUNK / c.wide);
    c.wide = tchi_min(c.cols, TCHI_CPU_CHUNK / c.high);
    c.wide -= rect->scale[0] != NULL && c.wide < c.cols ? c.wide % TCH_CODE_BLOCK : 0;
    c.down = tchi_ceil_div(c.rows, c.high);
    c.across = tchi_ceil_div(c.cols, c.wide);
    return c;
}

int64_t tchi_cpu_chunks_of(const tch_rect *rect, bool blocks)
{
    cut c = cut_rect(rect, blocks);
    return c.down * c.across;
}

/* A chunk with neighbors in one direction is more than half full on average, and a quarter full in the worst case of
 * both; the last one of a rectangle may be smaller. */
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

/* All chunks of a rectangle count the same. */
static int64_t chunk_cost(const cut *c)
{
    int64_t chunks = c->down * c->across;
    return chunks == 0 ? 0 : tchi_ceil_div(c->rows * c->cols, chunks) + CHUNK_COST;
}

static void process_chunk(const walk *w, const tch_rect *rect, const cut *c, int64_t index, int64_t number)
{
    int64_t row = index / c->across * c->high;
    int64_t col = index % c->across * c->wide;
    tchi_cpu_chunk chunk = {
        rect, row, col, tchi_min(c->high, c->rows - row), tchi_min(c->wide, c->cols - col), number,
    };
    w->task(w->argument, &chunk);
}

/* The costs of all chunks are concatenated; this thread runs the chunks that begin in [from, to). */
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
            process_chunk(w, rect, &c, i, number + i);
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

/* --- runs -------------------------------------------------------------------------------------------------------- */

/* A run in the compute type and back: conversions, gradient scale and sign, master copies, stochastic rounding,
 * transposed blocks. Nothing is copied if memory already has the right type. */
static char *at_element(void *data, tch_scalar type, int64_t index)
{
    return (char *)data + index * tchi_cpu_size(type);
}

void tchi_cpu_run_begin(tchi_cpu_run *run, const tch_update *update, const tchi_cpu_chunk *chunk)
{
    run->update = update;
    run->rect = chunk->rect;
    run->loops = tchi_loops_for(update->real);
    run->steps = tchi_cpu_steps_for(update->real);
    run->chunk = chunk;
    run->row = run->col = run->n = 0;
}

bool tchi_cpu_run_next(tchi_cpu_run *run)
{
    const tchi_cpu_chunk *chunk = run->chunk;
    run->col += run->n;
    if (run->col == chunk->cols) {
        run->row++;
        run->col = 0;
    }
    int64_t left = chunk->cols - run->col;
    run->n = left < TCHI_CPU_RUN ? left : TCHI_CPU_RUN;
    run->at = (chunk->row + run->row) * run->rect->stride + chunk->col + run->col;
    run->number = run->rect->first + run->at + (chunk->row + run->row) * run->rect->skipped;
    return run->row < chunk->rows;
}

/* --- parameters ------------------------------------------------------------------------------------------------- */

/* The authoritative copy of the parameter, and its type. */
static char *authoritative_copy(const tchi_cpu_run *run, tch_scalar *type)
{
    bool mastered = run->rect->master != NULL;
    *type = mastered ? TCH_SCALAR_F32 : run->update->param_type;
    return at_element(mastered ? run->rect->master : run->rect->param, *type, run->at);
}

void *tchi_cpu_run_param(tchi_cpu_run *run)
{
    tch_scalar type;
    char *copy = authoritative_copy(run, &type);
    if (type == run->update->real) {
        return copy;
    }
    tchi_convert(run->n, run->update->real, run->param, type, copy);
    return run->param;
}

static void round_at_random(const tchi_cpu_run *run, const float *p, uint16_t *out)
{
    const tch_rect *rect = run->rect;
    tchi_cpu_random_run random = {run->update->seed, (uint32_t)rect->parameter, (uint32_t)rect->clock->step,
                                  run->number};
    run->steps->round_at_random(run->n, &random, p, out);
}

void tchi_cpu_run_store_param(tchi_cpu_run *run, const void *p)
{
    const tch_update *u = run->update;
    tch_scalar type;
    char *copy = authoritative_copy(run, &type);
    if (u->stochastic && type == TCH_SCALAR_BF16 && u->real == TCH_SCALAR_F32) {
        round_at_random(run, p, (uint16_t *)copy);
    } else if (type != u->real) {
        tchi_convert(run->n, type, copy, u->real, p);
    }
    if (run->rect->master != NULL) {
        tchi_convert(run->n, u->param_type, at_element(run->rect->param, u->param_type, run->at), type, copy);
    }
}

/* --- gradients and state ---------------------------------------------------------------------------------------- */

const void *tchi_cpu_run_gradient(tchi_cpu_run *run, const void *p, double decay)
{
    const tch_update *u = run->update;
    const void *g = at_element(run->rect->grad, u->grad_type, run->at);
    double divisor = (u->grad_scale != NULL ? (double)*u->grad_scale : 1.0) * (u->maximize ? -1.0 : 1.0);
    if (u->grad_type != u->real) {
        tchi_convert(run->n, u->real, run->gradient, u->grad_type, g);
        g = run->gradient;
    }
    if (divisor != 1.0) {
        run->steps->divide(run->n, divisor, g, run->gradient);
        g = run->gradient;
    }
    if (p != NULL && decay != 0.0) {
        run->loops->combine(run->n, 1.0, g, decay, p, run->gradient);
        g = run->gradient;
    }
    return g;
}

void *tchi_cpu_run_state(const tchi_cpu_run *run, int index)
{
    return at_element(run->rect->state[index], run->update->real, run->at);
}

/* --- moments ---------------------------------------------------------------------------------------------------- */

/* Runs begin where blocks of codes do. */
_Static_assert(TCHI_CPU_RUN % TCH_CODE_BLOCK == 0 && TCHI_CPU_CHUNK % TCHI_CPU_RUN == 0, "runs cut blocks of codes");

static float *scales_of(const tchi_cpu_run *run, int index)
{
    return run->rect->scale[index] + run->at / TCH_CODE_BLOCK;
}

void *tchi_cpu_run_moment(tchi_cpu_run *run, int index)
{
    switch (run->update->moments) {
    case TCH_MOMENTS_BF16:
        tchi_convert(run->n, TCH_SCALAR_F32, run->moment[index], TCH_SCALAR_BF16,
                     (uint16_t *)run->rect->state[index] + run->at);
        return run->moment[index];
    case TCH_MOMENTS_CODES:
        run->steps->decode(run->n, index, (uint8_t *)run->rect->state[index] + run->at, scales_of(run, index),
                           run->moment[index]);
        return run->moment[index];
    default:
        return tchi_cpu_run_state(run, index);
    }
}

/* Zeros the rest of the last whole word of codes. */
static void clear_rest(const tchi_cpu_run *run, uint8_t *codes)
{
    bool last = run->at + run->n == run->rect->rows * run->rect->cols;
    for (int64_t i = run->n; last && i % 4 != 0; i++) {
        codes[i] = 0;
    }
}

/* Second moments first: the scales of first ones follow from theirs. */
static void store_codes(const tchi_cpu_run *run, tchi_code_use use, const uint32_t *words)
{
    const float *squares = NULL;
    uint8_t *codes;
    if (use == TCHI_CODE_ADAMW) {
        codes = (uint8_t *)run->rect->state[1] + run->at;
        run->steps->encode_squares(run->n, run->moment[1], words, codes, scales_of(run, 1));
        clear_rest(run, codes);
        squares = scales_of(run, 1);
    }
    codes = (uint8_t *)run->rect->state[0] + run->at;
    run->steps->encode_signed(run->n, use, run->moment[0], words, squares, codes, scales_of(run, 0));
    clear_rest(run, codes);
}

void tchi_cpu_run_store_moments(const tchi_cpu_run *run, tchi_code_use use)
{
    if (run->update->moments == TCH_MOMENTS_REAL) {
        return;
    }
    const tch_rect *rect = run->rect;
    uint32_t words[TCHI_CPU_RUN];
    tchi_cpu_random_run random = {run->update->seed, (uint32_t)rect->parameter + 0x80000000u,
                                  (uint32_t)rect->clock->step, run->number};
    run->steps->random_words(run->n, &random, words);
    if (run->update->moments == TCH_MOMENTS_CODES) {
        store_codes(run, use, words);
        return;
    }
    for (int k = 0; k < (use == TCHI_CODE_ADAMW ? 2 : 1); k++) {
        run->steps->cut(run->n, k, run->moment[k], words, (uint16_t *)rect->state[k] + run->at);
    }
}

/* --- blocks ----------------------------------------------------------------------------------------------------- */

/* A chunk's part of a block, with rows and columns exchanged if the block is transposed. */
typedef struct block_part {
    tch_scalar type, real;
    char *data;
    int64_t rows, cols, ld;
} block_part;

static block_part part_of_block(const tch_update *update, const tchi_cpu_chunk *chunk, int index)
{
    const tch_rect *rect = chunk->rect;
    bool transposed = rect->transposed;
    int64_t first = transposed ? chunk->col * rect->block_ld + chunk->row : chunk->row * rect->block_ld + chunk->col;
    return (block_part){
        .type = update->block_type,
        .real = update->real,
        .data = at_element(rect->block[index], update->block_type, first),
        .rows = transposed ? chunk->cols : chunk->rows,
        .cols = transposed ? chunk->rows : chunk->cols,
        .ld = rect->block_ld,
    };
}

/* Contiguous rows in the compute type. */
static void unpack_block(const block_part *part, char *packed)
{
    for (int64_t i = 0; i < part->rows; i++) {
        tchi_convert(part->cols, part->real, at_element(packed, part->real, i * part->cols), part->type,
                     at_element(part->data, part->type, i * part->ld));
    }
}

static void pack_block(const block_part *part, const char *packed)
{
    for (int64_t i = 0; i < part->rows; i++) {
        tchi_convert(part->cols, part->type, at_element(part->data, part->type, i * part->ld), part->real,
                     packed + i * part->cols * tchi_cpu_size(part->real));
    }
}

void tchi_cpu_tile_open(tchi_cpu_tile *tile, const tch_update *update, const tchi_cpu_chunk *chunk, int index,
                        bool read)
{
    char packed[TCHI_CPU_CHUNK * sizeof(double)];
    tile->data = NULL;
    tile->direct = false;
    if (chunk->rect->block[index] == NULL) {
        return;
    }
    block_part part = part_of_block(update, chunk, index);
    tile->direct = !chunk->rect->transposed && part.type == part.real;
    tile->data = tile->direct ? part.data : tile->buffer;
    tile->ld = tile->direct ? part.ld : chunk->cols;
    if (tile->direct || !read) {
        return;
    }
    if (!chunk->rect->transposed) {
        unpack_block(&part, tile->buffer);
        return;
    }
    unpack_block(&part, packed);
    tchi_cpu_steps_for(part.real)->transpose(part.rows, part.cols, packed, part.cols, tile->buffer, tile->ld);
}

void tchi_cpu_tile_store(const tchi_cpu_tile *tile, const tch_update *update, const tchi_cpu_chunk *chunk, int index)
{
    char packed[TCHI_CPU_CHUNK * sizeof(double)];
    if (tile->data == NULL || tile->direct) {
        return;
    }
    block_part part = part_of_block(update, chunk, index);
    if (!chunk->rect->transposed) {
        pack_block(&part, tile->buffer);
        return;
    }
    tchi_cpu_steps_for(part.real)->transpose(part.cols, part.rows, tile->buffer, tile->ld, packed, part.cols);
    pack_block(&part, packed);
}

void *tchi_cpu_tile_run(const tchi_cpu_tile *tile, const tchi_cpu_run *run)
{
    return tile->data + (run->row * tile->ld + run->col) * tchi_cpu_size(run->update->real);
}
