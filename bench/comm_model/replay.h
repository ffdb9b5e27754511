/* What a rank of a shared optimizer sends and works in a step, read from its plan: the plan is made as an optimizer
 * makes it, without the model's memory and without a collective. tests/comm/test_comm_model.c compares the counts with
 * those of real steps. */
#ifndef TORCHIUM_BENCH_REPLAY_H
#define TORCHIUM_BENCH_REPLAY_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/comm.h>
#include <torchium/optim.h>

#define REPLAY_MOST_BUCKETS 64
#define REPLAY_MOST_PERIOD 16

/* Bytes between a rank and others of its node, and those of other nodes: the larger of sent and received. */
typedef struct replay_bytes {
    int64_t near, far;
} replay_bytes;

typedef struct replay_bucket {
    bool sharded, levels;
    replay_bytes in, out; /* of the two all_to_all */
    replay_bytes level;   /* of the one before the all_gather */
    int64_t segment;      /* of each rank in the all_gather; 0 for none */
    double work;          /* floating-point operations on this rank's tiles, refreshes apart */
} replay_bucket;

typedef struct replay_rank {
    int64_t collectives, bytes;        /* of a step, as tch_comm_get_traffic counts them */
    int64_t state_bytes, beside_bytes; /* beside it: tiles, their gradients, and the buffers of collectives */
    int64_t tiles, own_tiles;
    int32_t buckets;
    replay_bucket bucket[REPLAY_MOST_BUCKETS];
    double work;                        /* of all buckets */
    double refresh[REPLAY_MOST_PERIOD]; /* floating-point operations of refreshes in each step of a period */
    double plan_seconds;                /* of the processor */
} replay_rank;

typedef struct replay_group {
    int32_t size, node; /* ranks, and those of one node */
    int64_t bucket_bytes, span_bytes;
} replay_group;

/* The step of one rank. Tensors of `parameters` are this rank's shards, whose memory is not looked at. The period must
 * be REPLAY_MOST_PERIOD or less. */
tch_status replay_step(tch_context *context, const tch_optim_config *config, const replay_group *group, int32_t rank,
                       int32_t count, const tch_parameter *parameters, const tch_placement *placements,
                       replay_rank *result);

#endif
