/* Trains a small model with a sharded optimizer from one checkpoint to the next, with optional faults on one rank; and
 * the same in one process. */
#ifndef TORCHIUM_TESTS_SHARED_TRIAL_H
#define TORCHIUM_TESTS_SHARED_TRIAL_H

#include "support/comm/placed_model.h"

enum { SHARED_STEPS = 7, SHARED_PARAMETERS = 12 }; /* gradients exist for PLACED_STEPS */

/* Matrices of one shape and of others, one with a side of 1, a convolution, a vector, an embedding, a tensor; a square
 * one, whose factors have full rank from the first gradient on; experts; fused Q, K and V. */
extern const placed_shape shared_model[SHARED_PARAMETERS];

typedef struct shared_training {
    const placed_numbers *numbers;
    tch_optim_config config;
    tch_dtype dtype;
    placed_how place;
    pretend_group *group;  /* NULL: one process */
    int32_t missing;       /* the parameter without a gradient at step 2, or -1 */
    int32_t first, steps;  /* of PLACED_STEPS */
    const char *from, *to; /* checkpoints of the parameters and the optimizer; NULL: start from scratch, save nothing */
    int32_t failures;      /* of a factor, set at the start */
    double **end;          /* output of the parameters, or NULL */
    tch_status statuses[PRETEND_MOST];
    char messages[PRETEND_MOST][256];
    int64_t state_bytes[PRETEND_MOST];
    int32_t bad_rank, bad_step;  /* a NaN in the gradients of this rank at this step; -1 for none */
    int32_t wrong_rank;          /* has a gradient of another shape at step 1; -1 for none */
    int32_t lacking_rank;        /* has no gradient where others have one, at step 1; -1 for none */
    int32_t other_rank;          /* has a different model; -1 for none */
    int32_t blind_rank;          /* fails to open the checkpoint; -1 for none */
    int32_t poor_rank;           /* has no workspace at step 1; -1 for none */
    bool late;                   /* no rank has a gradient of parameter 1 at step 0 */
    bool goes_on;                /* after errors of steps; the first one is kept */
    uint32_t skipped;            /* steps, as bits */
    int32_t taken[PRETEND_MOST]; /* steps without an error */
} shared_training;

/* Replicated, with one gradient missing and no faults. */
shared_training shared_training_of(const placed_numbers *numbers, const tch_optim_config *config, tch_dtype dtype);

/* Small blocks, and refreshes at every other step. */
tch_optim_config shared_config(tch_optim_kind kind);

/* One rank's part, as a task of pretend_run: `training` is a shared_training. A single process if comm is NULL. */
void shared_train(tch_comm *comm, int32_t rank, void *training);

/* Parts of that: a rank's model, and saving and loading a checkpoint. */
void shared_open_model(placed_model *m, const shared_training *t, tch_context *context, int32_t rank, int32_t ranks);
tch_status shared_save(const shared_training *t, const placed_model *m, tch_context *context, tch_comm *comm,
                       tch_optimizer *optimizer);
tch_status shared_load(const shared_training *t, placed_model *m, tch_context *context, tch_optimizer *optimizer,
                       int32_t rank);

/* All ranks of a group of that size, or one process without a group if it is 0; the second form fails the test on any
 * error. */
void shared_try(shared_training *training, int32_t ranks, placed_how place, bool late);
void shared_run(shared_training *training, int32_t ranks, placed_how place, bool late);

/* Fixtures: *state is the placed_numbers of all tests. */
int shared_open(void **state);
int shared_close(void **state);

#endif
