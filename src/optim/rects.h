/* Arguments of the operation table: rectangles of parameters, alone or with the blocks of a chunk in scratch memory. */
#ifndef TCHI_OPTIM_RECTS_H
#define TCHI_OPTIM_RECTS_H

#include "optimizer.h"

/* Layout of the blocks of a block batch in a work buffer: matrices of size[0] by size[1] with rows aligned to 16 bytes;
 * tensors of higher order are contiguous. */
typedef struct tchi_work {
    tch_scalar type;
    int64_t rows, cols, ld;
    int64_t stride; /* elements from one block to the next */
} tchi_work;

tchi_work tchi_work_of(const tchi_block_batch *block_batch, tch_scalar type);
int64_t tchi_work_bytes(const tchi_work *work, int64_t blocks);
tch_matrices tchi_work_matrices(const tchi_work *work, void *buffer, int64_t blocks);

/* Blocks of one block batch that one batched call can process: their gradients have one type in this step, and their
 * clocks are equal. */
typedef struct tchi_run {
    tchi_block_batch *block_batch;
    int64_t first, count; /* within the block batch */
    const tchi_step *now;
} tchi_run;

/* Calls visit for every run of a group; runs are at most a chunk of their block batch. With `exchanges`, on all ranks
 * or none, a run's gradients arrive before it, and its results are sent after it, by bucket. */
typedef tch_status (*tchi_run_visit)(tch_optimizer *optimizer, const tchi_run *run);
tch_status tchi_for_each_run(tch_optimizer *optimizer, const tchi_step *now, int32_t group, bool exchanges,
                             tchi_run_visit visit);
const tchi_param *tchi_run_param(const tch_optimizer *optimizer, const tchi_run *run);

/* The key of a recording of a run's work; `variant` distinguishes variants between steps. The recorded work reads
 * neither gradients nor grad_scale, whose addresses may change. */
tchi_recording_key tchi_run_key(const tch_optimizer *optimizer, const tchi_run *run, int64_t variant);

/* Rows and columns of a matrix in memory order. */
static inline int64_t tchi_block_rows(const tchi_block_batch *block_batch, const tchi_block *block)
{
    return block_batch->size[block->transposed ? 1 : 0];
}
static inline int64_t tchi_block_cols(const tchi_block_batch *block_batch, const tchi_block *block)
{
    return block_batch->size[block->transposed ? 0 : 1];
}

/* The number of rectangles of a block. */
int64_t tchi_block_rects(const tch_optimizer *optimizer, const tchi_block_batch *block_batch, int64_t block);

/* A rectangle that begins at element `first` of this rank's part of a parameter. `gradient` may be NULL. */
tch_rect tchi_rect_at(const tchi_param *param, const tchi_gradient *gradient, int64_t first, int64_t rows, int64_t cols,
                      int64_t stride);

/* The common part of a group's updates. `now` may be NULL if no gradient is read. */
tch_update tchi_update_of(const tch_optimizer *optimizer, const tchi_step *now, int32_t group, const tch_hyper *hyper);

/* The same for a run, with its rectangles; block[0] and block[1] point into two work buffers, either of which may be
 * NULL. */
tch_update tchi_update_run(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, void *block0,
                           void *block1);

/* Calls visit for every pair of types among the parameters of the group that have a gradient, with whole parameters as
 * rectangles: all, or only those without blocks. */
typedef tch_status (*tchi_update_visit)(tch_optimizer *optimizer, int32_t group, const tch_update *update);
tch_status tchi_for_each_type(tch_optimizer *optimizer, const tchi_step *now, int32_t group, bool with_blocks,
                              const tch_hyper *hyper, tchi_update_visit visit);

#endif
