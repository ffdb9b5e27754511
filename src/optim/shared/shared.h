/* An optimizer whose work and state are divided among the ranks of a group.
 *
 * The unit of ownership is the tile: one block of Shampoo or SOAP with its factors, one matrix of Muon, or a span of a
 * large replicated parameter that is updated elementwise. Its name, its batch and its refresh schedule follow from the
 * whole model and never from the number of ranks; only its owner does. A parameter with blocks is `carried`: the
 * caller's tensor is a shard of it (or all of it, if replicated), and its blocks are tiles, each a small parameter on
 * its owner, with moments, factors and buffers for its gradient and its result. A step:
 *
 *     in:   gradients go from the ranks that hold them to the owners of tiles
 *     the method's step on the local tiles
 *     out:  directions are sent back, and every rank applies them to its shards
 *
 * The method's code computes a tile's direction unchanged: the tile starts at 0 and is stepped with a learning rate of
 * -1 and no decay. For a replicated parameter whose direction would not be smaller, the tile is stepped as the
 * parameter itself and its new values are sent back (`by_value`), so only owners need master copies of half-precision
 * parameters. With `constant_norm` every tile is: its values, of which the owner needs the norm, are sent first.
 *
 * The exchange has the same bytes in every step, whichever gradients are missing, so ranks that disagree do not
 * deadlock. The ranks agree by a reduction, before anything is written, on whether gradients are finite and which
 * exist. */
#ifndef TCHI_OPTIM_SHARED_H
#define TCHI_OPTIM_SHARED_H

#include "comm/comm.h"
#include "optim/optimizer.h"

#include "optim/shape.h"
#include "regions.h"

/* A tile; the same on every rank. */
typedef struct tchi_tile {
    int32_t param; /* the caller's */
    int32_t number;
    int32_t owner;
    int32_t local; /* index in this rank's tiles, or -1 */
    int32_t block_batch, bucket;
    int64_t start[TCHI_MOST_ORDER], size[TCHI_MOST_ORDER];
} tchi_tile;

/* A rectangle to transfer: between this rank's tensor and the wire, or between a tile and the wire. */
typedef struct tchi_part {
    int32_t tile; /* in the list of tiles */
    int32_t peer;
    int64_t size[TCHI_MOST_ORDER];
    int64_t in_tile;                     /* elements: its offset in the tile */
    int64_t at, stride[TCHI_MOST_ORDER]; /* elements: in this rank's tensor, if it is there */
    int64_t wire;                        /* bytes: in the buffer */
} tchi_part;

/* One direction of travel. */
typedef struct tchi_route {
    tchi_list send, receive; /* tchi_part, in the order of the buffers */
    int64_t *counts;         /* 4 for each rank, as in tch_comm_counts */
    int64_t send_bytes, receive_bytes;
} tchi_route;

enum { TCHI_SEND_OFFSETS, TCHI_SEND_BYTES, TCHI_RECEIVE_OFFSETS, TCHI_RECEIVE_BYTES };

static inline int64_t *tchi_route_counts(const tchi_route *route, int32_t ranks, int which)
{
    return route->counts + (int64_t)which * ranks;
}

#define TCHI_ALL_BUCKETS INT64_MAX

/* Bytes [from, from + bytes) of an owner's concatenated results are at byte `at` of a segment. */
typedef struct tchi_share {
    int32_t segment;
    int64_t from, bytes, at;
} tchi_share;

/* Tiles that are exchanged together. Sharded parameters use all_to_all; replicated ones need no exchange of gradients
 * and use all_gather for results. */
typedef struct tchi_bucket {
    int32_t end_batch; /* the block batch in which it ends; INT32_MAX: after all of them, with spans */
    int64_t end_index; /* before this tile of that batch; INT64_MAX: after its last */
    bool sharded;      /* some parameter is sharded */
    bool crosses;      /* and some part changes rank, on any rank; experts may be on their owners */
    tchi_route in, out;
    tchi_list local;  /* parts that owners read from their whole gradients */
    tchi_list unsent; /* parts that another replica sends; filtered here too, so that replicas stay equal */
    int64_t unsent_bytes;
    tchi_list spread_in, spread; /* all_gather: parts copied into this rank's segment, and parts of all segments */
    int64_t segment;             /* bytes of each rank's */
    bool levels;                 /* some ranks' results exceed a segment and are moved to other segments first */
    int64_t own_bytes;           /* this rank's results in its segment, before those of others */
    tchi_route level;            /* of that move; received parts are not listed */
    /* while planning */
    int64_t *gathered;    /* bytes of the results of each rank */
    tchi_list shares;     /* tchi_share, by owner */
    int64_t *first_share; /* of each rank */
    int64_t host_bytes;
} tchi_bucket;

/* The device buffers of a collective, and the event after it. */
typedef struct tchi_wire {
    char *sent, *received;
    void *done;
} tchi_wire;

/* The exchanges of a parameter group: buckets in order, on a second stream if there is one, overlapped with
 * computation. The counters of buckets are the progress of the current step. */
typedef struct tchi_exchange {
    int64_t first_tile, tiles;
    tchi_list buckets; /* tchi_bucket */
    tchi_wire in[2], out[2];
    int64_t called_in, arrived, sent_out, applied;
    char *tile_data, *tile_grads; /* of this rank's tiles */
    int64_t tile_data_bytes;
} tchi_exchange;

static inline tchi_bucket *tchi_bucket_at(const tchi_exchange *x, int64_t i)
{
    return (tchi_bucket *)x->buckets.items + i;
}

/* A step's agreement, reduced by maximum over the group. Each pair is a number and its complement, which stay
 * complements only if all ranks sent the same number. */
typedef struct tchi_agreement {
    int32_t all[2];     /* a hash of the others, of which gradients exist, and of the numbers of steps */
    int32_t odd[2];     /* the first parameter that has a gradient, or none, unlike at the last step; for the message */
    int32_t options[2]; /* a hash of the groups' options */
    int32_t found;      /* whether anything is not finite */
    int32_t unused;
    double spare[2];
} tchi_agreement;

/* A parameter of the group. */
typedef struct tchi_shared_param {
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK]; /* of the whole */
    bool sharded;
    int64_t first_held, held; /* its rectangles on this rank, if it is sharded */
    int64_t first_stretch, stretches;
} tchi_shared_param;

/* Elements that are adjacent in the whole parameter and on this rank, for moments that are rounded by the number of an
 * element, or by blocks. */
typedef struct tchi_stretch {
    int64_t start, at, count; /* the first element in the whole, and on this rank */
    bool first;               /* as in tchi_held */
} tchi_stretch;

/* A rectangle of a parameter on this rank. */
typedef struct tchi_held {
    int64_t start[TCH_MAX_RANK], size[TCH_MAX_RANK], offset[TCH_MAX_RANK]; /* as in tch_shard */
    bool first;                                                            /* no lower rank holds the same */
} tchi_held;

struct tchi_shared {
    tch_comm *comm;
    tchi_list tiles;           /* tchi_tile */
    tchi_list params;          /* tchi_shared_param: one for each parameter */
    tchi_list held;            /* tchi_held: in the order of the parameters */
    tchi_list stretches;       /* tchi_stretch: of shards whose moments are in bfloat16 or int8 */
    tchi_list rects;           /* tch_rect: scratch of the exchanges */
    tchi_agreement *agreement; /* on the device */
    uint64_t hash;             /* of the latest parameter group and its division */
    void *seen;                /* a readback of the last step's agreement, or NULL */
    bool asked;                /* the readback is pending */
};

static inline tchi_tile *tchi_shared_tile(const tch_optimizer *o, int64_t i)
{
    return (tchi_tile *)o->shared->tiles.items + i;
}

static inline const tchi_shared_param *tchi_shared_param_at(const tch_optimizer *o, int32_t i)
{
    return (const tchi_shared_param *)o->shared->params.items + i;
}

/* --- creation: see create.c */

tch_status tchi_shared_open(tch_optimizer *optimizer, tch_comm *comm);
void tchi_shared_close(tch_optimizer *optimizer);

/* After a failure: waits for collectives on the second stream. */
void tchi_shared_wait(tch_optimizer *optimizer);

/* A span is updated in its parameter, at the parameter's current address. Returns the tile. */
tchi_param *tchi_shared_find_span(const tch_optimizer *optimizer, tchi_param *tile);

/* Sets the dims of the whole parameter, whether it is carried, and the types on the wire. */
tch_status tchi_shared_set_dims(const tch_optimizer *optimizer, tchi_param *param, const tch_parameter *parameter,
                                const tch_placement *placement);

/* Plans a parameter group including its blocks, without device memory. */
tch_status tchi_shared_plan_group(tch_optimizer *optimizer, int32_t group, const tch_parameter *parameters,
                                  const tch_placement *placements);

/* Records the local rectangles of the group's parameters, for checkpoints; discards those of all parameters from
 * `params` on. */
tch_status tchi_held_note(tch_optimizer *optimizer, int32_t group, const tch_placement *placements);
void tchi_held_forget(tch_optimizer *optimizer, int64_t params);

/* The stretches of a shard, or NULL if the parameter has none. */
const tchi_stretch *tchi_stretches_of(const tch_optimizer *optimizer, const tchi_param *param, int64_t *count);

/* Plans the tiles of a group's carried parameters, their owners, this rank's tiles and the transfers. `regions` has one
 * entry per parameter of the group. */
tch_status tchi_shared_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions);
tch_status tchi_exchange_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions);
void tchi_exchange_release(tchi_exchange *exchange);

/* The division of a carried parameter into tiles. */
tchi_cut tchi_shared_cut(const tch_optimizer *optimizer, const tchi_param *param);

/* Lays out the buffers; NULL while measuring. */
void tchi_exchange_layout(tch_optimizer *optimizer, int32_t group, tchi_arena *beside);

/* A collective on creation and extension: each rank passes its hash and status, so that if one fails, all fail and none
 * waits. */
tch_status tchi_shared_compare(tch_comm *comm, tch_context *context, uint64_t hash, tch_status status);
uint64_t tchi_shared_hash(const tch_optimizer *optimizer, int32_t group, const tchi_regions *regions);

/* --- stepping: see step.c */

/* After gradients are read: *found_by_any, on the device, is nonzero if a gradient of any rank is not finite, and
 * *agreement says whether all ranks had the same gradients. decide_skip reads both. */
tch_status tchi_shared_agree(tch_optimizer *optimizer, const tchi_step *now, const int32_t *found,
                             const float *found_inf, const int32_t **found_by_any, const int32_t **agreement);

/* Whether a step that is skipped ends here. With device memory ranks that do not agree still exchange, since the hosts
 * of some may not know yet; the device changes nothing. */
tch_status tchi_shared_ends(const tch_optimizer *optimizer, bool skipped, bool *ends);

/* After the step: reports a step that was skipped because ranks disagreed about gradients; aborts the group if the
 * optimizer has failed, so that no rank waits for this one. */
tch_status tchi_shared_finish(tch_optimizer *optimizer, bool skipped);

/* Before a step: reports that the last one was skipped for that reason, if the host has not read it yet. */
tch_status tchi_shared_look_back(tch_optimizer *optimizer);

/* Updates tiles from their parameters: which have gradients, and their step counts. */
void tchi_shared_follow(tch_optimizer *optimizer, const tchi_step *now);

/* The exchange of a step: starts sending gradients; waits for those of a bucket and all before it; sends the results of
 * the first `done` buckets; completes. All ranks call the middle two in the same order (see tchi_for_each_run). Without
 * a group they do nothing. */
tch_status tchi_exchange_begin(tch_optimizer *optimizer, const tchi_step *now, int32_t group);
tch_status tchi_exchange_arrive(tch_optimizer *optimizer, const tchi_step *now, int32_t group, int64_t bucket);
tch_status tchi_exchange_leave(tch_optimizer *optimizer, const tchi_step *now, int32_t group, int64_t done);
tch_status tchi_exchange_finish(tch_optimizer *optimizer, const tchi_step *now, int32_t group);

void tchi_exchange_close(tch_optimizer *optimizer, tchi_exchange *exchange);

/* Copies parameters to the tiles that are stepped by value; a collective if they are of shards. */
tch_status tchi_exchange_values(tch_optimizer *optimizer, int32_t group);

#endif
