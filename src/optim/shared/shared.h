/* An optimizer whose work and state the ranks of a group divide.
 *
 * The unit of ownership is the tile: one block of Shampoo or SOAP with its factors, one matrix of Muon, or a span of
 * a large parameter that every rank has and that is updated element by element. Its name, its companions in a batch
 * and the phase of its refreshes follow from the whole model and never from the number of ranks; only its owner
 * does. A parameter with blocks is `carried`: the caller's tensor is a shard of it (or all of it, where every rank
 * has the same), and its blocks are tiles, each a small parameter on the rank that owns it, with moments, factors
 * and a place for its gradient and its result. A step is
 *
 *     in:   gradients go from the ranks that hold them to the owners of tiles
 *     the method's own step on the tiles that are here
 *     out:  directions come back, and every rank applies them to what it holds
 *
 * A tile's direction is had from the method without a change of its code: the tile begins at 0 and is stepped with a
 * learning rate of -1 and no decay. Where every rank has the whole parameter and a direction would not be narrower,
 * the tile is stepped as the parameter itself and its new values come back (`by_value`): so half-precision parameters
 * need their master copies on owners alone.
 *
 * The exchange of a step has the same bytes at every step, whichever gradients are missing: no rank waits for one that
 * thinks otherwise. What ranks must agree on (that gradients are finite, and which are there) is reduced over the
 * group before anything is written. */
#ifndef TCHI_OPTIM_SHARED_H
#define TCHI_OPTIM_SHARED_H

#include "comm/comm.h"
#include "optim/optimizer.h"

#include "optim/shape.h"
#include "regions.h"

/* A tile, on every rank alike. */
typedef struct tchi_tile {
    int32_t param; /* the caller's */
    int32_t number;
    int32_t owner;
    int32_t local; /* index in this rank's tiles, or -1 */
    int32_t block_batch, bucket;
    int64_t start[TCHI_MOST_ORDER], size[TCHI_MOST_ORDER];
} tchi_tile;

/* A rectangle on its way: between this rank's tensor and the wire, or between a tile and the wire. */
typedef struct tchi_part {
    int32_t tile; /* in the list of tiles */
    int32_t peer;
    int64_t size[TCHI_MOST_ORDER];
    int64_t in_tile;                     /* elements: where it begins in the tile */
    int64_t at, stride[TCHI_MOST_ORDER]; /* elements: in this rank's tensor, where it is there */
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

/* Of the results of an owner, one after the other: those in [from, from + bytes) lie in a segment at byte `at`. */
typedef struct tchi_share {
    int32_t segment;
    int64_t from, bytes, at;
} tchi_share;

/* Tiles that travel together. Sharded parameters go by all_to_all; what every rank has whole needs no way in and comes
 * back by all_gather. */
typedef struct tchi_bucket {
    int32_t end_batch; /* it ends in this block batch, or INT32_MAX: after all of them, with spans */
    int64_t end_index; /* before the tile of this number in it; INT64_MAX: with its last */
    bool sharded;      /* some parameter is */
    bool crosses; /* and something of it goes from one rank to another, on whichever; experts may lie with owners */
    tchi_route in, out;
    tchi_list local;  /* parts that owners read from their own whole gradients */
    tchi_list unsent; /* parts that another replica sends: filtered here too, so that replicas stay equal */
    int64_t unsent_bytes;
    tchi_list spread_in, spread; /* all_gather: parts that go into this rank's segment, and those of all segments */
    int64_t segment;             /* bytes of each rank's */
    bool levels;                 /* some have more results than a segment holds, which go into those of others first */
    int64_t own_bytes;           /* this rank's in its own segment, behind which it has those of others */
    tchi_route level;            /* these: nothing is listed for what is received */
    /* while it is planned */
    int64_t *gathered;    /* bytes of the results of each rank */
    tchi_list shares;     /* tchi_share, by owner */
    int64_t *first_share; /* of each rank */
    int64_t host_bytes;
} tchi_bucket;

/* The buffers of a collective, on the device, and an event behind it. */
typedef struct tchi_wire {
    char *sent, *received;
    void *done;
} tchi_wire;

/* What a group of parameters exchanges: buckets one after the other, on a second stream where there is one, each while
 * others are worked on. Counts of buckets say how far the step under way has come. */
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

/* What ranks reduce over the group: a number and its complement, the largest of which are complements where all came
 * with the same one; and whether something is not finite. */
typedef struct tchi_agreement {
    int32_t pair[2], found, unused;
    double spare[2];
} tchi_agreement;

/* A parameter as the group has it. */
typedef struct tchi_shared_param {
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK]; /* of the whole */
    bool sharded;
    int64_t first_held, held; /* what of it is here, where it is sharded */
} tchi_shared_param;

/* A rectangle of a parameter that is here. */
typedef struct tchi_held {
    int64_t start[TCH_MAX_RANK], size[TCH_MAX_RANK], offset[TCH_MAX_RANK]; /* as in tch_shard */
    bool first;                                                            /* no rank before this one has the same */
} tchi_held;

struct tchi_shared {
    tch_comm *comm;
    tchi_list tiles;           /* tchi_tile */
    tchi_list params;          /* tchi_shared_param: one for each parameter */
    tchi_list held;            /* tchi_held: in the order of the parameters */
    tchi_list rects;           /* tch_rect: scratch of the exchanges */
    tchi_agreement *agreement; /* on the device */
    uint64_t hash;             /* of the latest group of parameters, and of how it is divided */
    void *seen;                /* a readback of the agreement of the last step, or NULL */
    bool asked;                /* for it */
};

static inline tchi_tile *tchi_shared_tile(const tch_optimizer *o, int64_t i)
{
    return (tchi_tile *)o->shared->tiles.items + i;
}

static inline const tchi_shared_param *tchi_shared_param_at(const tch_optimizer *o, int32_t i)
{
    return (const tchi_shared_param *)o->shared->params.items + i;
}

/* --- making: see create.c */

tch_status tchi_shared_open(tch_optimizer *optimizer, tch_comm *comm);
void tchi_shared_close(tch_optimizer *optimizer);

/* After a failure collectives may be under way on the second stream: waits for them. */
void tchi_shared_wait(tch_optimizer *optimizer);

/* A span is worked on in its parameter, wherever that lies now. Returns the tile. */
tchi_param *tchi_shared_find_span(const tch_optimizer *optimizer, tchi_param *tile);

/* The dims of the whole parameter, whether it is carried, and what will travel of it. */
tch_status tchi_shared_set_dims(const tch_optimizer *optimizer, tchi_param *param, const tch_parameter *parameter,
                                const tch_placement *placement);

/* All that a group of parameters needs short of memory on the device, its blocks included. */
tch_status tchi_shared_plan_group(tch_optimizer *optimizer, int32_t group, const tch_parameter *parameters,
                                  const tch_placement *placements);

/* Notes what of the group's parameters is here, for checkpoints; forgets it for all parameters from `params` on. */
tch_status tchi_held_note(tch_optimizer *optimizer, int32_t group, const tch_placement *placements);
void tchi_held_forget(tch_optimizer *optimizer, int64_t params);

/* The tiles of a group's carried parameters, their owners, this rank's own in the optimizer's list, and what travels.
 * `regions` has one entry for each parameter of the group. */
tch_status tchi_shared_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions);
tch_status tchi_exchange_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions);
void tchi_exchange_release(tchi_exchange *exchange);

/* How a carried parameter is cut into tiles. */
tchi_cut tchi_shared_cut(const tch_optimizer *optimizer, const tchi_param *param);

/* Buffers; NULL while measuring. */
void tchi_exchange_layout(tch_optimizer *optimizer, int32_t group, tchi_arena *beside);

/* Every rank comes here once when it makes or extends an optimizer, also one that cannot, with its error: then none
 * goes on, and none waits. */
tch_status tchi_shared_compare(tch_comm *comm, tch_context *context, uint64_t hash, tch_status status);
uint64_t tchi_shared_hash(const tch_optimizer *optimizer, int32_t group, const tchi_regions *regions);

/* --- stepping: see step.c */

/* After gradients were read: *found_by_any, on the device, is not 0 where a gradient of some rank is not finite, and
 * *agreement says whether all came with the same gradients: what decide_skip reads. */
tch_status tchi_shared_agree(tch_optimizer *optimizer, const tchi_step *now, const int32_t *found,
                             const float *found_inf, const int32_t **found_by_any, const int32_t **agreement);

/* A rank whose call is wrong has its own error, and the others do not wait for it. */
tch_status tchi_shared_refuse(tch_optimizer *optimizer, tch_status status);

/* After the step: says so where it was skipped because ranks came with different gradients; gives the group up where
 * the optimizer has failed, so that no other rank waits for this one. */
tch_status tchi_shared_finish(tch_optimizer *optimizer, bool skipped);

/* Before a step: says so where the last one was skipped for that reason while the host did not look. */
tch_status tchi_shared_look_back(tch_optimizer *optimizer);

/* Tiles follow their parameters: which have gradients, and their counts of steps. */
void tchi_shared_follow(tch_optimizer *optimizer, const tchi_step *now);

/* The exchange of a step: gradients begin to travel; those of a bucket, and of all before it, have arrived; the tiles
 * of the first `done` buckets have their results, which may go; everything is back. All ranks call the two in the
 * middle in the same order (see tchi_for_each_run). They do nothing where the optimizer is alone. */
tch_status tchi_exchange_begin(tch_optimizer *optimizer, const tchi_step *now, int32_t group);
tch_status tchi_exchange_arrive(tch_optimizer *optimizer, const tchi_step *now, int32_t group, int64_t bucket);
tch_status tchi_exchange_leave(tch_optimizer *optimizer, const tchi_step *now, int32_t group, int64_t done);
tch_status tchi_exchange_finish(tch_optimizer *optimizer, const tchi_step *now, int32_t group);

void tchi_exchange_close(tch_optimizer *optimizer, tchi_exchange *exchange);

/* Parameters into the tiles that are stepped by value. */
tch_status tchi_exchange_values(tch_optimizer *optimizer, int32_t group);

#endif
