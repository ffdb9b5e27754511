/* A run's numbers in the type of the arithmetic, and the way back: conversions, the gradient's scale and sign, master
 * copies, stochastic rounding, transposed blocks. Where memory has the right type already nothing is copied. */
#include "rects.h"

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
    return run->row < chunk->rows;
}

/* --- parameters ------------------------------------------------------------------------------------------------- */

/* The memory that holds the parameter in full, and its type. */
static char *truth_of(const tchi_cpu_run *run, tch_scalar *type)
{
    bool mastered = run->rect->master != NULL;
    *type = mastered ? TCH_SCALAR_F32 : run->update->param_type;
    return at_element(mastered ? run->rect->master : run->rect->param, *type, run->at);
}

void *tchi_cpu_run_param(tchi_cpu_run *run)
{
    tch_scalar type;
    char *truth = truth_of(run, &type);
    if (type == run->update->real) {
        return truth;
    }
    tchi_convert(run->n, run->update->real, run->param, type, truth);
    return run->param;
}

static void round_at_random(const tchi_cpu_run *run, const float *p, uint16_t *out)
{
    const tch_rect *rect = run->rect;
    tchi_cpu_random_run random = {run->update->seed, (uint32_t)rect->parameter, (uint32_t)rect->clock->step,
                                  rect->first + run->at};
    run->steps->round_at_random(run->n, &random, p, out);
}

void tchi_cpu_run_store_param(tchi_cpu_run *run, const void *p)
{
    const tch_update *u = run->update;
    tch_scalar type;
    char *truth = truth_of(run, &type);
    if (u->stochastic && type == TCH_SCALAR_BF16 && u->real == TCH_SCALAR_F32) {
        round_at_random(run, p, (uint16_t *)truth);
    } else if (type != u->real) {
        tchi_convert(run->n, type, truth, u->real, p);
    }
    if (run->rect->master != NULL) {
        tchi_convert(run->n, u->param_type, at_element(run->rect->param, u->param_type, run->at), type, truth);
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

/* Codes come in whole words. */
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
                                  (uint32_t)rect->clock->step, rect->first + run->at};
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

/* A chunk's part of a block, which has as many rows as the chunk has columns where the block is transposed. */
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

/* Rows one after the other, in the type of the arithmetic. */
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
