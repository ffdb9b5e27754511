/* The internals of an optimizer, from the outside in:
 *
 *     optimizer    groups, parameters, shared memory
 *       group      one configuration, its hyperparameters on the device
 *         parameter   a dense array in the caller's memory, its moments, its clock
 *           block       a rectangle of one parameter, preconditioned by its factors
 *         block batch     all blocks of a group with equal sizes, for batched calls
 *         factor batch    all factors of a group with equal size and root, refreshed together
 *
 * Blocks of a block batch, and their factors in a factor batch, are stored at a constant stride. Code runs once per
 * block batch or factor batch, never once per parameter. */
#ifndef TCHI_OPTIMIZER_H
#define TCHI_OPTIMIZER_H

#include <stdbool.h>

#include <torchium/optim.h>

#include "core/context.h"
#include "core/list.h"
#include "core/recording.h"
#include "core/tensor.h"

#define TCHI_MOST_ORDER 4 /* factors of one block */
#define TCHI_MOMENTS 3    /* elementwise state tensors of one parameter */
#define TCHI_NAME_SIZE 192

/* The same elements seen without size-1 dimensions, outermost in memory first. */
typedef struct tchi_dims {
    int32_t order;
    int64_t size[TCH_MAX_RANK];
} tchi_dims;

typedef struct tchi_param {
    char *name;
    size_t name_bytes;
    int32_t group;
    int32_t index; /* in the caller's list; for a tile, that of its parameter */
    int32_t tile;  /* index of a tile in its parameter; -1 for a parameter of the caller */
    uint32_t cut;  /* of a tile: bit k is set if it does not span dimension k of its parameter */
    bool blocked;  /* has blocks; otherwise one elementwise rectangle */
    bool carried;  /* its blocks are tiles owned by ranks: see shared/shared.h */
    bool filters;  /* if carried: the moving average stays with the shards, and tiles get the filtered gradient */
    bool by_value; /* if carried, also of its tiles: owners return the parameter, not a direction */
    tch_scalar wire_in, wire_out; /* if carried: types sent to the owners of tiles, and back */
    tch_scalar type;
    tch_scalar real; /* of its state */
    char *data;
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    int64_t count; /* elements */
    int64_t whole; /* elements of the whole parameter, of which this may be a part */
    tchi_dims dims;
    int64_t *cuts;     /* for several matrices: their sizes along dims.size[0], or NULL */
    int32_t cut_count; /* the list repeats along dims.size[0] */
    int32_t batch_dims;
    tch_clock *clock;
    void *master;
    void *moment[TCHI_MOMENTS]; /* meaning by method; NULL where not kept */
    tch_moments moments;        /* their storage type; with blocks, of the first */
    float *scale[2];            /* of int8 moments */
    int64_t steps_seen;         /* steps with a gradient, including the current one */
    bool was_absent;            /* it had no gradient at the last step */
    uint64_t clock_id;          /* equal for parameters whose clocks are equal */
    uint64_t clock_before;      /* the same before the last step */
    int64_t base;               /* offset of its first element in the whole parameter */
    char *staged;               /* of a tile: buffer in which its gradient is assembled */
} tchi_param;

/* A gradient in its parameter's layout; `data` is NULL for a missing one, not for an empty shard. */
typedef struct tchi_gradient {
    char *data;
    tch_scalar type;
} tchi_gradient;

/* The inputs of one step. */
typedef struct tchi_step {
    tchi_gradient *gradients; /* of the parameters */
    tchi_gradient *of_tiles;  /* of this rank's tiles */
    const float *grad_scale;
    bool refuses; /* this rank's call is invalid: it meets the others without gradients, and nothing is changed */
} tchi_step;

typedef struct tchi_block {
    int32_t param;  /* in the list of parameters, or of tiles with a group */
    int32_t number; /* in its parameter */
    int32_t transposed;
    int64_t start[TCHI_MOST_ORDER]; /* in the parameter's dims */
    int64_t global_index;           /* in all ranks' blocks of the block batch */
    int64_t alone_index;            /* in the block batch that one process would have */
} tchi_block;

typedef struct tchi_block_batch {
    int32_t group;
    int32_t order;
    int64_t size[TCHI_MOST_ORDER];
    int32_t factor_batch[TCHI_MOST_ORDER]; /* index of the factor batch of each dimension's factors, or -1 for none */
    int64_t position[TCHI_MOST_ORDER];     /* of the first block's factor in that batch */
    int64_t before[TCHI_MOST_ORDER];       /* preceding factors of other block batches there, in one process */
    tch_scalar type, real;                 /* of parameters, and of the arithmetic */
    tch_scalar param_type;                 /* of parameters in one process */
    int32_t alone;                         /* the group's first block batch that one process would join with this one */
    int64_t alone_all;                     /* in the first: blocks of all of these, on all ranks */
    int64_t count, first;                  /* its blocks in the optimizer's list */
    int64_t all;                           /* on all ranks */
    bool direction;                        /* its results are directions, applied elsewhere */
    bool prepared;                         /* its gradients are already unscaled and include decay */
    int64_t elements;                      /* of one block */
    int64_t rects;                         /* of one block, at most */
    char *moment;                          /* per-block state, block after block, or NULL */
    int64_t chunk;                         /* blocks processed in one pass */
} tchi_block_batch;

typedef struct tchi_factor_batch {
    int32_t group;
    int64_t n;
    int32_t root; /* 0: factors have bases instead */
    tch_scalar real;
    int64_t count;
    int64_t all;           /* on all ranks */
    char *factors, *roots; /* count matrices each; roots or bases */
    bool packed;           /* factors and roots, not bases, are lower triangles: see tensor_modes.h */
    bool bf16_roots;       /* roots are packed, and in bfloat16 */
    int32_t *flags;        /* on the device: status of the latest refresh of each */
    double *drift;         /* after the flags: drift of bases, or norms of directions, for adaptive refresh */
    double *residuals;
    int32_t *orders; /* on the device: permutation of each basis by the latest tracking */
    /* on the host, one per factor */
    int32_t *phase;    /* the step of the interval in which it is refreshed */
    uint8_t *refresh;  /* in this step */
    uint8_t *failures; /* consecutive failed refreshes: more damping, then the eigen method */
    uint16_t *level;   /* by norm: the size of its block's direction after the latest refresh, 0 unknown: outcomes.c */
    uint8_t *stale;    /* by norm: to be refreshed at the next step */
    uint8_t *gap;      /* by drift: 2^gap steps to the next refresh, and 2^next_gap after it */
    uint8_t *next_gap;
    uint8_t *unread;      /* what has not been read yet: see outcomes.c */
    int32_t *block_batch; /* its block batch, and its block in that batch */
    int64_t *block;
    int64_t *alone_index; /* among the factors of one process: refreshes do not depend on placements */
    int64_t *picked;      /* room for the indices of those that are refreshed together */
    int64_t *refreshed;   /* the step of its latest refresh, from 1; 0 if none since creation or loading */
    int32_t phases;       /* the interval `phase` was planned for, 0: not planned */
    void *readback;       /* of flags and drift on a GPU; NULL until the first refresh */
} tchi_factor_batch;

/* The hyperparameters of a group on the device. */
typedef struct tchi_group_numbers {
    tch_hyper main;    /* of the optimizer's own method */
    tch_hyper scalar;  /* of AdamW in an optimizer of matrices; spare[0] is its learning rate over that of `main` */
    tch_hyper factors; /* SOAP: beta2 is shampoo_beta */
    tch_hyper tile;    /* `main` with a learning rate of -1 and no decay: a parameter at 0 becomes the direction */
    tch_clock clock;   /* SOAP: weights of the factors' moving average */
} tchi_group_numbers;

typedef struct tchi_group {
    tch_optim_config config;
    tchi_group_numbers *numbers; /* on the device */
    bool numbers_changed;        /* since the last copy to the device */
    const tch_tensor *lr;        /* NULL, or points to lr_tensor */
    tch_tensor lr_tensor;
    int64_t lr_shape[TCH_MAX_RANK];
    int32_t first_param, params;
    int32_t first_block_batch, block_batches;
    int32_t first_factor_batch, factor_batches;
    int64_t first_state, states;
    struct tchi_exchange *exchange; /* with a group of ranks, or NULL */
} tchi_group;

/* What a state tensor belongs to, which decides the ranks that store it. */
typedef enum tchi_state_kind {
    TCHI_STATE_OF_BLOCK,   /* a block or tile: its owner */
    TCHI_STATE_OF_PARAM,   /* a parameter: every rank */
    TCHI_STATE_LIKE_PARAM, /* a parameter, in its layout: every rank holds its shard */
    TCHI_STATE_LIKE_TILE,  /* in the layout of a tile: a rectangle of parameter-like state */
    TCHI_STATE_OF_ELEMENTS /* a list with an entry for every `per` elements of a shard or of a span */
} tchi_state_kind;

/* One named tensor of the state, allocated separately: callers hold views of it. */
typedef struct tchi_state {
    size_t bytes; /* of this struct, including the name */
    int32_t param;
    tchi_state_kind kind;
    int32_t tile;      /* index in this rank's tiles, or -1 */
    int32_t per;       /* of OF_ELEMENTS */
    int64_t symmetric; /* size of a symmetric matrix, which a file may store differently; else 0 */
    int32_t moment;    /* 1, 2: first or second moment, subject to state_dtype; negative: its scales */
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    char name[];
} tchi_state;

/* An allocation of the state. */
typedef struct tchi_chunk {
    void *pointer;
    int64_t bytes;
    bool is_state; /* from the caller's allocator, if there is one */
} tchi_chunk;

/* Per-step state on the device other than hyperparameters. */
typedef struct tchi_control {
    int32_t found, skip;
    double counts[2]; /* steps, skipped steps */
} tchi_control;

typedef struct tchi_optim_method tchi_optim_method; /* see method.h */
typedef struct tchi_shared tchi_shared;             /* see shared/shared.h */

struct tch_optimizer {
    tch_context *context;
    const tchi_optim_method *method;
    tch_state_allocator allocator; /* allocate is NULL for the pool */
    tchi_shared *shared;           /* NULL: one process */
    tchi_list groups, params, blocks, block_batches, factor_batches, states, chunks;
    tchi_list tiles;       /* tchi_param: the tiles that this rank owns */
    tchi_control *control; /* on the device */
    /* scratch of a step */
    void *scratch_block; /* on the device; the pointers below point into it */
    int64_t scratch_bytes;
    char *scratch;      /* work buffers of a chunk */
    int64_t work_bytes; /* of the work buffers and the following ones */
    char *unpacked;     /* work buffers for matrices that are kept packed: see tensor_modes.h */
    int64_t unpacked_bytes;
    int64_t most_rects;      /* of a chunk */
    int64_t least_workspace; /* minimum for a refresh */
    bool lends_workspace;    /* as scratch of the step; not during capture, as a graph would keep its address */
    /* in scratch, one for each block of a chunk */
    double *target_norms, *norms;
    uint32_t *notes[2]; /* of the backend, for the gradient and the filtered gradient */
    void *graft_scratch;
    char *copies; /* on the device: gradients whose layout differs from their parameter's */
    int64_t copies_bytes;
    tchi_list rect_list, clock_list, gradient_list;
    tchi_list counts;  /* int64_t, in checkpoint order: see save.c */
    tch_rect *rects;   /* on the host */
    int64_t steps;     /* calls of tch_optimizer_step */
    bool counted;      /* the last call, which can be taken back */
    int64_t refreshes; /* factors refreshed */
    int64_t state_bytes;
    int64_t device_bytes;       /* memory of the GPU; 0 on a CPU */
    tch_status failed;          /* not TCH_OK after an error of the device */
    tchi_recordings recordings; /* of the work after gradients are gathered */
};

static inline tchi_group *tchi_group_at(const tch_optimizer *o, int32_t i)
{
    return (tchi_group *)o->groups.items + i;
}
static inline tchi_param *tchi_param_at(const tch_optimizer *o, int32_t i)
{
    return (tchi_param *)o->params.items + i;
}
static inline tchi_block *tchi_block_at(const tch_optimizer *o, int64_t i)
{
    return (tchi_block *)o->blocks.items + i;
}
static inline tchi_block_batch *tchi_block_batch_at(const tch_optimizer *o, int32_t i)
{
    return (tchi_block_batch *)o->block_batches.items + i;
}
static inline tchi_factor_batch *tchi_factor_batch_at(const tch_optimizer *o, int32_t i)
{
    return (tchi_factor_batch *)o->factor_batches.items + i;
}
/* The factors of a block batch along dimension k; NULL if there are none. */
static inline tchi_factor_batch *tchi_factor_batch_of(const tch_optimizer *o, const tchi_block_batch *batch, int32_t k)
{
    return batch->factor_batch[k] < 0 ? NULL : tchi_factor_batch_at(o, batch->factor_batch[k]);
}
static inline tch_moments tchi_kept_as(const tchi_param *p, int32_t moment)
{
    return p->blocked && moment > 0 ? TCH_MOMENTS_REAL : p->moments;
}
static inline tch_dtype tchi_dtype_of(tch_scalar type)
{
    return type == TCH_SCALAR_F64    ? TCH_FLOAT64
           : type == TCH_SCALAR_F16  ? TCH_FLOAT16
           : type == TCH_SCALAR_BF16 ? TCH_BFLOAT16
           : type == TCH_SCALAR_I32  ? TCH_INT32
                                     : TCH_FLOAT32;
}
static inline tchi_state *tchi_state_at(const tch_optimizer *o, int64_t i)
{
    return ((tchi_state **)o->states.items)[i];
}
static inline tchi_param *tchi_tile_at(const tch_optimizer *o, int32_t i)
{
    return (tchi_param *)o->tiles.items + i;
}
static inline const tchi_gradient *tchi_gradient_of(const tch_optimizer *o, const tchi_step *now, const tchi_param *p)
{
    return p->tile < 0 ? &now->gradients[p->index] : &now->of_tiles[p - tchi_tile_at(o, 0)];
}
static inline tchi_param *tchi_block_param(const tch_optimizer *o, const tchi_block *block)
{
    return o->shared != NULL ? tchi_tile_at(o, block->param) : tchi_param_at(o, block->param);
}
/* The number of a block in the caller's parameter. */
static inline int32_t tchi_block_number(const tch_optimizer *o, const tchi_block *block)
{
    const tchi_param *p = tchi_block_param(o, block);
    return p->tile < 0 ? block->number : p->tile;
}

#endif
