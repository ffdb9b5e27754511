/* The inside of KFAC. From the outside in:
 *
 *     kfac       layers, the memory they share
 *       layer      its factors are `groups` units, 1 but for grouped convolutions
 *       block batch      all units of equal sizes p and d: what one batched product works on
 *       factor batch     all factors of equal size n, inputs' and outputs' alike: what one refresh works on
 *
 * Units of a block batch lie one after the other, and so do their factors within a factor batch: every batched call
 * sees a constant stride. Of the state everything but scales belongs to factor batches. */
#ifndef TCHI_KFAC_H
#define TCHI_KFAC_H

#include <stdbool.h>

#include <torchium/comm.h>
#include <torchium/kfac.h>

#include "core/context.h"
#include "core/saved.h"
#include "core/tensor.h"

#define TCHI_KFAC_NAME 192                      /* bytes of a layer's name, at most, with its end */
#define TCHI_KFAC_STATES 7                      /* named tensors of one layer, at most */
#define TCHI_KFAC_STATE_NAME 224                /* a layer's name and what follows the slash */
#define TCHI_KFAC_MOST_COUNT ((int64_t)1 << 53) /* above it, a count and the next are one double */

enum { TCHI_INPUT = 0, TCHI_OUTPUT = 1, TCHI_SIDES = 2 };

/* What the host counts for a layer, in the order of tch_kfac_get_counts. */
enum { TCHI_UPDATES = 0, TCHI_PENDING = 1, TCHI_REFRESHES = 2, TCHI_SCALE_UPDATES = 3 };

typedef struct tchi_kfac_layer {
    char name[TCHI_KFAC_NAME];
    tch_layer layer;
    int64_t inputs;  /* columns of the weight as a matrix, without that of the bias */
    int64_t outputs; /* of all groups */
    int64_t groups;
    int32_t bias;
    int32_t block_batch;
    int64_t unit;  /* the first of its units in the block batch */
    int32_t owner; /* in the group: the rank that refreshes it */
} tchi_kfac_layer;

typedef struct tchi_kfac_block_batch {
    int64_t size[TCHI_SIDES]; /* d, with the bias, and p of one group */
    int32_t factor_batch[TCHI_SIDES];
    int64_t position[TCHI_SIDES]; /* of the first unit's factor there */
    int64_t count;                /* of units */
    int32_t first, layers;        /* in the list `order` */
    char *scales;                 /* EKFAC: count matrices p by d */
    char *kept;                   /* of the call under way: preconditioned gradients that wait for their scale */
} tchi_kfac_block_batch;

typedef struct tchi_kfac_factor_batch {
    int64_t n, count;
    char *factors, *results; /* results are inverses or bases: of layers that this process holds them of */
    int64_t held;            /* results; all of them without a group */
    char *values;            /* held by n; NULL for inverses */
    int32_t *owner;          /* on the host: the layer of each factor */
    int64_t *slot;           /* on the host: where its result is; factors that follow each other and are held have
                                results that do */
    int32_t *flags;          /* on the device: what became of the latest refresh of each */
    double *residuals;       /* its certificate; stays 0 for bases */
    double *traces, *shifts; /* inverses: what factored damping is made from, and what it adds */
} tchi_kfac_factor_batch;

typedef struct tchi_kfac_state {
    char name[TCHI_KFAC_STATE_NAME];
    int32_t layer;
    tch_tensor tensor;
    int64_t shape[3];
} tchi_kfac_state;

/* Numbers on the device. */
typedef struct tchi_kfac_control {
    double counts[2]; /* observations, and those that were rejected */
    double dot;       /* of new and old gradients, over all layers */
    double scale;     /* what kl_clip made of it */
    int32_t rejected; /* the latest observation, and the same for the scales */
    int32_t scales_rejected;
    int32_t skip;
} tchi_kfac_control;

/* A chunk of device memory. */
typedef struct tchi_kfac_chunk {
    void *pointer;
    int64_t bytes;
} tchi_kfac_chunk;

struct tch_kfac {
    tch_context *context;
    tch_comm *comm; /* the group that shares it, or NULL */
    tch_kfac_config config;
    tch_state_allocator allocator; /* allocate is NULL for the pool */
    tch_scalar type;               /* of the factors and all that is made of them */
    int32_t count;
    tchi_kfac_layer *layers;
    int64_t *counts; /* TCH_KFAC_COUNTS for each layer: a tensor of checkpoints */
    int32_t *order;  /* layers by block batch */
    tchi_kfac_block_batch *block_batches;
    int32_t block_batch_count;
    tchi_kfac_factor_batch *factor_batches;
    int32_t factor_batch_count;
    int32_t *owners; /* of all factor batches */
    int64_t *slots;
    int64_t owner_count;
    tchi_kfac_state *states;
    int32_t state_count;
    tchi_kfac_chunk state, beside; /* what the caller may have given, and what is not kept in a checkpoint */
    tchi_kfac_control *control;    /* on the device */
    tch_status failed;             /* not TCH_OK after an error of the device */
};

/* --- config.c */
tch_status tchi_kfac_check_config(const char *function, const tch_kfac_config *config);
/* Refuses changes of what is not marked (step). */
tch_status tchi_kfac_check_change(const tch_kfac_config *now, const tch_kfac_config *next);
extern const tchi_options tchi_kfac_options;

/* --- layout.c */
/* A layer's own name, or "layerN" in `text`. */
const char *tchi_kfac_layer_name(const tch_kfac_layer *layer, int32_t index, char text[32]);
/* Checks one layer's description. */
tch_status tchi_kfac_check_layer(const char *function, const tch_kfac_layer *layer, const char *name);
/* Groups the layers into block batches and factor batches; host memory only. */
tch_status tchi_kfac_plan(tch_kfac *kfac, const tch_kfac_layer *layers);
void tchi_kfac_release_plan(tch_kfac *kfac);
/* Places everything in two arenas, which may only be measuring. */
void tchi_kfac_place(tch_kfac *kfac, tchi_arena *state, tchi_arena *beside);
/* Fills the list of named tensors. */
void tchi_kfac_name_states(tch_kfac *kfac);

/* --- shared.c */
/* The owner of every layer, by what its refresh costs: the same on every rank. */
tch_status tchi_kfac_choose_owners(tch_kfac *kfac);
/* Whether this process refreshes a layer, and whether it has what a refresh makes; always, without a group. */
bool tchi_kfac_is_mine(const tch_kfac *kfac, int32_t layer);
bool tchi_kfac_is_held(const tch_kfac *kfac, int32_t layer);

/* What owners give to the others: preconditioned gradients that are kept in scratch, or bases and their eigenvalues. */
typedef enum tchi_kfac_traffic { TCHI_GRADIENTS, TCHI_BASES } tchi_kfac_traffic;
/* The most that a rank sends. */
int64_t tchi_kfac_traffic_bytes(const tch_kfac *kfac, tchi_kfac_traffic what);
/* With scratch of that size, and as much from every rank. */
tch_status tchi_kfac_exchange(const tch_kfac *kfac, tchi_kfac_traffic what, char *send, char *receive);

/* --- access.c */
/* Not NULL, and not failed. */
tch_status tchi_kfac_usable(const tch_kfac *kfac, const char *function);
/* The counts of one layer, as its state has them; `what` they are goes into the message. */
tch_status tchi_kfac_check_counts(const char *what, const char *layer, const int64_t counts[TCH_KFAC_COUNTS]);
/* Marks KFAC failed where the status is an error of the device, and returns it. Memory is taken before anything is
 * written, so lack of it is not one. */
tch_status tchi_kfac_note(tch_kfac *kfac, tch_status status);

static inline int64_t *tchi_kfac_counts(const tch_kfac *kfac, int32_t layer)
{
    return kfac->counts + (int64_t)layer * TCH_KFAC_COUNTS;
}

static inline tchi_kfac_factor_batch *tchi_kfac_factor_batch_of(const tch_kfac *kfac,
                                                                const tchi_kfac_block_batch *block_batch, int side)
{
    return &kfac->factor_batches[block_batch->factor_batch[side]];
}

/* Matrices of a factor batch, `count` from `first` on: factors, or what the refresh made of those, which must be
 * held. */
tch_matrices tchi_kfac_factors(const tch_kfac *kfac, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                               int64_t count);
tch_matrices tchi_kfac_results(const tch_kfac *kfac, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                               int64_t count);
/* 1 by n each. */
tch_matrices tchi_kfac_values(const tch_kfac *kfac, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                              int64_t count);

#endif
