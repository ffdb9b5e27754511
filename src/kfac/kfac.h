/* Internals of KFAC, from the outside in:
 *
 *     kfac          layers, and the memory they share
 *       layer         its factors are `groups` units, 1 except for grouped convolutions
 *       block batch   all units of equal sizes p and d: one batched product
 *       factor batch  all factors of equal size n, of inputs and outputs: one refresh
 *
 * Units of a block batch are contiguous, and so are their factors within a factor batch: every batched call has a
 * constant stride. All state except scales belongs to factor batches. */
#ifndef TCHI_KFAC_H
#define TCHI_KFAC_H

#include <stdbool.h>

#include <torchium/comm.h>
#include <torchium/kfac.h>

#include "core/context.h"
#include "core/saved.h"
#include "core/tensor.h"

#define TCHI_KFAC_NAME 192                      /* maximum bytes of a layer's name, with its NUL */
#define TCHI_KFAC_STATES 7                      /* maximum number of named tensors of a layer */
#define TCHI_KFAC_STATE_NAME 224                /* a layer's name and what follows the slash */
#define TCHI_KFAC_MOST_COUNT ((int64_t)1 << 53) /* beyond this, consecutive counts are equal as doubles */

enum { TCHI_INPUT = 0, TCHI_OUTPUT = 1, TCHI_SIDES = 2 };

/* Host-side counters of a layer, in the order of tch_kfac_get_counts. */
enum { TCHI_UPDATES = 0, TCHI_PENDING = 1, TCHI_REFRESHES = 2, TCHI_SCALE_UPDATES = 3 };

typedef struct tchi_kfac_layer {
    char name[TCHI_KFAC_NAME];
    tch_layer layer;
    int64_t inputs;  /* columns of the weight as a matrix, without that of the bias */
    int64_t outputs; /* of all groups */
    int64_t groups;
    int32_t bias;
    int32_t block_batch;
    int64_t unit;  /* its first unit in the block batch */
    int32_t owner; /* rank in the group that refreshes it */
} tchi_kfac_layer;

typedef struct tchi_kfac_block_batch {
    int64_t size[TCHI_SIDES]; /* d, with the bias, and p of one group */
    int32_t factor_batch[TCHI_SIDES];
    int64_t position[TCHI_SIDES]; /* of the first unit's factor there */
    int64_t count;                /* of units */
    int32_t first, layers;        /* in the list `order` */
    char *scales;                 /* EKFAC: count matrices p by d */
    char *kept;                   /* of the current call: preconditioned gradients before scaling */
} tchi_kfac_block_batch;

typedef struct tchi_kfac_factor_batch {
    int64_t n, count;
    char *factors, *results; /* results are inverses or bases, of local layers only */
    int64_t held;            /* number of results; count without a group */
    char *values;            /* held by n; NULL for inverses */
    int32_t *owner;          /* on the host: the layer of each factor */
    int64_t *slot;           /* on the host: the index of its result; consecutive local factors have consecutive
                                results */
    int32_t *flags;          /* on the device: status of each factor's latest refresh */
    double *residuals;       /* its residual; 0 for bases */
    double *traces, *shifts; /* inverses: the inputs of factored damping, and the damping */
} tchi_kfac_factor_batch;

typedef struct tchi_kfac_state {
    char name[TCHI_KFAC_STATE_NAME];
    int32_t layer;
    tch_tensor tensor;
    int64_t shape[3];
} tchi_kfac_state;

/* Numbers on the device. */
typedef struct tchi_kfac_control {
    double counts[2]; /* observations, and rejected ones */
    double dot;       /* of new and old gradients, over all layers */
    double scale;     /* the factor that kl_clip gives */
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
    int64_t *counts; /* TCH_KFAC_COUNTS per layer: a tensor of checkpoints */
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
    tchi_kfac_chunk state, beside; /* provided by the caller, and not saved in checkpoints */
    tchi_kfac_control *control;    /* on the device */
    tch_status failed;             /* not TCH_OK after an error of the device */
};

/* --- config.c */
tch_status tchi_kfac_check_config(const char *function, const tch_kfac_config *config);
/* Rejects changes of options that are not marked (step). */
tch_status tchi_kfac_check_change(const tch_kfac_config *now, const tch_kfac_config *next);
extern const tchi_options tchi_kfac_options;

/* --- layout.c */
/* A layer's name, or "layerN" in `text`. */
const char *tchi_kfac_layer_name(const tch_kfac_layer *layer, int32_t index, char text[32]);
/* Checks one layer's description. */
tch_status tchi_kfac_check_layer(const char *function, const tch_kfac_layer *layer, const char *name);
/* Groups the layers into block batches and factor batches; host memory only. */
tch_status tchi_kfac_plan(tch_kfac *kfac, const tch_kfac_layer *layers);
void tchi_kfac_release_plan(tch_kfac *kfac);
/* Lays out both arenas, also for measuring. */
void tchi_kfac_place(tch_kfac *kfac, tchi_arena *state, tchi_arena *beside);
/* Fills the list of named tensors. */
void tchi_kfac_name_states(tch_kfac *kfac);

/* --- shared.c */
/* Sets the owner of every layer, by the cost of its refresh: equal on every rank. */
tch_status tchi_kfac_choose_owners(tch_kfac *kfac);
/* Whether this process refreshes a layer, and whether it has the results; always, without a group. */
bool tchi_kfac_is_mine(const tch_kfac *kfac, int32_t layer);
bool tchi_kfac_is_held(const tch_kfac *kfac, int32_t layer);

/* The data that owners send: preconditioned gradients in scratch, or bases and their eigenvalues. */
typedef enum tchi_kfac_traffic { TCHI_GRADIENTS, TCHI_BASES } tchi_kfac_traffic;
/* The largest contribution of a rank. */
int64_t tchi_kfac_traffic_bytes(const tch_kfac *kfac, tchi_kfac_traffic what);
/* Exchanges with a buffer of that size, and as much from every rank. */
tch_status tchi_kfac_exchange(const tch_kfac *kfac, tchi_kfac_traffic what, char *send, char *receive);

/* --- access.c */
/* Not NULL, and not failed. */
tch_status tchi_kfac_usable(const tch_kfac *kfac, const char *function);
/* The counts of one layer; `what` names them in messages. */
tch_status tchi_kfac_check_counts(const char *what, const char *layer, const int64_t counts[TCH_KFAC_COUNTS]);
/* Marks KFAC failed if the status is an error of the device, and returns it. Out of memory is not: memory is reserved
 * before anything is written. */
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

/* Matrices of a factor batch, `count` from `first` on: factors, or local results. */
tch_matrices tchi_kfac_factors(const tch_kfac *kfac, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                               int64_t count);
tch_matrices tchi_kfac_results(const tch_kfac *kfac, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                               int64_t count);
/* 1 by n each. */
tch_matrices tchi_kfac_values(const tch_kfac *kfac, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                              int64_t count);

#endif
