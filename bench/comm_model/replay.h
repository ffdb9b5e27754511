/* What a rank of a shared optimizer sends and works in a step, read from its plan: the plan is made as an optimizer
 * makes it, without the model's memory and without a collective. tests/comm/test_comm_model.c compares the counts with
 * those of real steps. */
#ifndef TORCHIUM_BENCH_REPLAY_H
#define TORCHIUM_BENCH_REPLAY_H

#include <stdint.h>

#include <torchium/comm.h>
#include <torchium/optim.h>

#define REPLAY_MOST_PERIOD 16

typedef struct replay_rank {
    int64_t collectives, bytes;       /* of a step, as tch_comm_get_traffic counts them */
    int64_t state_bytes, extra_bytes; /* extra: tiles, their gradients, and the buffers of collectives */
    int64_t tiles, own_tiles;
    int32_t buckets;
    double work;                        /* floating-point operations on this rank's tiles, refreshes apart */
    double refresh[REPLAY_MOST_PERIOD]; /* floating-point operations of refreshes in each step of a period */
    double plan_seconds;                /* of the processor */
} replay_rank;

typedef struct replay_group {
    int32_t size; /* ranks */
    int64_t bucket_bytes, span_bytes;
} replay_group;

/* The step of one rank. Tensors of `parameters` are this rank's shards, whose memory is never read. The period must
 * be REPLAY_MOST_PERIOD or less. */
tch_status replay_step(tch_context *context, const tch_optim_config *config, const replay_group *group, int32_t rank,
                       int32_t count, const tch_parameter *parameters, const tch_placement *placements,
                       replay_rank *result);

#endif
