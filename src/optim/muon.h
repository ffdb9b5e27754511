/* What Muon shares with optimizers that go on from its direction: the momentum of matrices, gathered with their short
 * side first and made orthogonal. How the direction becomes a step is theirs. */
#ifndef TCHI_OPTIM_MUON_H
#define TCHI_OPTIM_MUON_H

#include "method.h"
#include "rects.h"

typedef struct tchi_muon_run tchi_muon_run;

/* Moves the parameters of a run by its direction, which lies in scratch. Recorded: it may look at no gradient. */
typedef tch_status (*tchi_muon_apply)(const tchi_muon_run *run, const tch_matrices *direction);

struct tchi_muon_run {
    tch_optimizer *optimizer;
    const tch_optim_config *config;
    tchi_run run;
    tchi_work work;
    tchi_muon_apply apply;
};

/* For the tables of the method: see method.h. */
void tchi_muon_set_numbers(const tch_optim_config *config, tchi_group_numbers *numbers);
void tchi_muon_set_dims(const tch_optim_config *config, tchi_dims *dims);
double tchi_muon_rest_share(const tch_optim_config *config);
bool tchi_muon_has_blocks(const tch_optim_config *config, const tchi_dims *dims);
void tchi_muon_moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS]);
tchi_clock_rule tchi_muon_clock_rule(const tch_optim_config *config);
int64_t tchi_muon_work(const tch_context *context, const tch_optim_config *config, const tchi_block_batch *block_batch);

/* A step of the group up to its directions, with what `apply` does then. */
tch_status tchi_muon_step(tch_optimizer *optimizer, const tchi_step *now, int32_t group, tchi_muon_apply apply);

/* The rectangles of a run with the direction in block[0]: one for each block. */
tch_update tchi_muon_update(const tchi_muon_run *run, const tch_matrices *direction);

/* A matrix of a run as m by n by its parameter's shape, in whatever order it lies in memory. */
typedef struct tchi_muon_sides {
    double m, n;
} tchi_muon_sides;

tchi_muon_sides tchi_muon_sides_of(const tch_optimizer *optimizer, const tchi_run *run, int64_t block);

/* What the learning rate is multiplied by for a matrix, by muon_lr. */
double tchi_muon_step_factor(const tch_optim_config *config, double rows, double cols);

#endif
