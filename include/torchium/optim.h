/* Optimizers: SGD, AdamW, Lion, Shampoo, KL-Shampoo, SOAP, Muon and NorMuon, written once for every device.
 *
 *     tch_optim_config config = tch_optim_defaults(TCH_OPTIM_SHAMPOO);
 *     config.lr = 0.01;
 *     tch_optimizer *optimizer;
 *     tch_optimizer_create(context, &config, NULL, count, parameters, &optimizer);
 *     for (;;) {
 *         ... compute gradients ...
 *         tch_optimizer_step(optimizer, count, gradients);
 *     }
 *
 * Parameters are updated in place. They stay the caller's, on the context's device, float32, float64, float16 or
 * bfloat16, in any dense layout (row-major, channels last, transposed). Shampoo, SOAP, Muon and NorMuon take the
 * parameters with at least two dimensions larger than 1; the others get AdamW, in the same optimizer.
 *
 * A step never synchronizes and allocates nothing once it has run a few times, and can be captured in a CUDA graph.
 * Results are the same, to the bit, from run to run on the same device. */
#ifndef TORCHIUM_OPTIM_H
#define TORCHIUM_OPTIM_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/checkpoint.h>
#include <torchium/comm.h>
#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/linalg.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

typedef struct tch_optimizer tch_optimizer;

/* === Configuration ================================================================================================ */

typedef enum tch_optim_kind {
    TCH_OPTIM_SGD = 0,
    TCH_OPTIM_ADAMW = 1,
    TCH_OPTIM_SHAMPOO = 2,
    TCH_OPTIM_SOAP = 3,
    TCH_OPTIM_MUON = 4,
    TCH_OPTIM_LION = 5,
    TCH_OPTIM_NORMUON = 6,
    TCH_OPTIM_KL_SHAMPOO = 7
} tch_optim_kind;

typedef enum tch_grafting {
    TCH_GRAFTING_NONE = 0,
    TCH_GRAFTING_SGD = 1,
    TCH_GRAFTING_ADAGRAD = 2,
    TCH_GRAFTING_RMSPROP = 3,
    TCH_GRAFTING_ADAM = 4
} tch_grafting;

typedef enum tch_weight_decay_type {
    TCH_WEIGHT_DECAY_DECOUPLED = 0, /* p -= lr weight_decay p, in addition to the step */
    TCH_WEIGHT_DECAY_L2 = 1         /* adds weight_decay p to the gradient */
} tch_weight_decay_type;

/* What a step does when a gradient has an infinity or a NaN. The device decides, once for the whole step: a non-finite
 * gradient never reaches a factor, a moment or a parameter. (On a GPU the host does not wait for the outcome, so roots
 * and bases scheduled for this step are still refreshed, from the unchanged factors. It does wait at the first refresh
 * of roots and bases.) */
typedef enum tch_nonfinite {
    TCH_NONFINITE_SKIP = 0,  /* counts the step as skipped and changes nothing else */
    TCH_NONFINITE_RAISE = 1, /* skips, synchronizes and returns TCH_ERR_NUMERIC */
    TCH_NONFINITE_IGNORE = 2 /* no check */
} tch_nonfinite;

/* The step length of Muon for a matrix [m, n]. NorMuon scales its direction to the Frobenius norm that an exactly
 * orthogonal direction would have: this times sqrt(min(m, n)). */
typedef enum tch_adjust_lr_fn {
    TCH_ADJUST_LR_ORIGINAL = 0,        /* lr sqrt(max(1, m / n)) */
    TCH_ADJUST_LR_MATCH_RMS_ADAMW = 1, /* 0.2 lr sqrt(max(m, n)) */
    TCH_ADJUST_LR_PLAIN = 2            /* lr */
} tch_adjust_lr_fn;

/* Precision of products with float32 gradients. Roots and bases always reach their own tolerance. */
typedef enum tch_precision {
    TCH_PRECISION_HIGH = 0,   /* TF32 on a GPU that has it: operands are rounded to 11 bits, far below gradient noise */
    TCH_PRECISION_HIGHEST = 1 /* float32 */
} tch_precision;

/* Storage of the moments of elementwise updates: SGD, Lion and AdamW, also where AdamW is part of another optimizer.
 * Rounding is stochastic, by bits that depend only on `seed`, the step and the element. */
typedef enum tch_state_dtype {
    TCH_STATE_FLOAT32 = 0,
    TCH_STATE_BFLOAT16 = 1,
    TCH_STATE_INT8 = 2 /* 8 bits, scaled in blocks of 128 elements: 2.06 bytes for AdamW's two moments instead of 8 */
} tch_state_dtype;

/* The configuration of a parameter group. Start from tch_optim_defaults and change what you need; each kind reads the
 * fields that name it. Fields are called as in Python, and grouped as there. Those marked (step) may change between
 * steps. */
typedef struct tch_optim_config {
    size_t struct_size;
    tch_optim_kind kind;

    double lr;                               /* (step) */
    double weight_decay;                     /* (step) */
    tch_weight_decay_type weight_decay_type; /* AdamW, Shampoo, SOAP. SGD is always L2; Muon, NorMuon, Lion decoupled */
    int32_t maximize;
    /* (step) Decay rates. AdamW, SOAP: of the moments. Shampoo: of the filtered gradient (0: no filter) and the factors
     * (1: their sum). Lion: of the average in the direction and the stored one. NorMuon: beta2, of the row moments */
    double beta1, beta2;
    double eps;       /* (step) AdamW, SOAP: added to the root of the second moment. Muon: the least norm of a matrix.
                        NorMuon: both. Shampoo: absolute damping of the factors */
    double momentum;  /* (step) SGD, Shampoo: buffer = momentum buffer + d. Muon, NorMuon: a moving average */
    double dampening; /* (step) SGD */
    int32_t nesterov; /* SGD, Shampoo, Muon, NorMuon */
    int32_t use_bias_correction; /* Shampoo, SOAP; AdamW always does */
    int32_t amsgrad;             /* AdamW */

    /* AdamW for the parameters that Shampoo, SOAP, Muon and NorMuon do not precondition */
    struct {
        double lr;      /* (step) AdamW uses adamw.lr lr / adamw.base_lr, so that it follows a schedule of lr. 0: lr
                           itself, or 0.3 lr for Muon and NorMuon unless adjust_lr_fn is MATCH_RMS_ADAMW; the group's
                           configuration then holds that value */
        double base_lr; /* (step) the lr that adamw.lr belongs to. 0: the lr of the configuration that sets adamw.lr;
                           where that is 0 too there is no ratio: adamw.lr is used as it is while lr is not 0 */
        double beta1, beta2; /* (step) */
        double eps;          /* (step) */
        double weight_decay; /* (step) -1: the weight_decay above */
    } adamw;

    /* Shampoo, and SOAP, which runs Adam in the eigenbasis of Shampoo's factors */
    struct {
        int64_t max_preconditioner_dim; /* Shampoo, and SOAP with soap.block: larger dimensions are split into blocks of
                                           at most this size. SOAP otherwise: a larger dimension has no factor. Neither
                                           has a side of a block over 100 times as long as the product of the others */
        int32_t merge_dims;             /* tensors of rank above 2: merge neighboring dimensions, innermost first, while
                                           their product is at most max_preconditioner_dim; 0: a factor for each */
        int32_t precondition_1d;        /* vectors too */
        int32_t precondition_frequency; /* (step) steps between refreshes, at least 1; the maximum with refresh_drift */
        double refresh_drift;           /* (step) adaptive refresh: the interval of a factor, 1 at first, doubles when a
                                           refresh finds its root or basis off by less than half of this, and halves
                                           when off by more than this; see docs/optimizers.md. 0: a fixed interval */
        double refresh_budget; /* (step) adaptive refresh: the largest fraction of the factors refreshed in one step */
        int32_t stagger;       /* (step) spread refreshes over the steps of an interval, balanced by cost */
        /* Shampoo only */
        int32_t start_preconditioning_step; /* before this step, counted from 1, the grafted method alone (SGD without
                                               grafting); -1: precondition from the first step */
        int32_t exponent_override;          /* the root is the power -1/override. 0: twice the number of factors */
        tch_grafting grafting;
        double grafting_beta2, grafting_eps; /* (step) */
    } shampoo;

    struct {
        int32_t block;           /* split dimensions above shampoo.max_preconditioner_dim into blocks */
        double shampoo_beta;     /* (step) decay rate of the factors; -1: beta2 */
        int32_t normalize_grads; /* scale the direction of each matrix to a root mean square of 1 */
    } soap;

    /* Muon, NorMuon */
    struct {
        tch_ortho_method method;   /* TCH_ORTHO_MINIMAX */
        double ns_coefficients[3]; /* for TCH_ORTHO_MUON; all 0: its published ones */
        int32_t ns_steps;          /* 0: the method's usual number, 5, 5 or 3 */
        tch_adjust_lr_fn adjust_lr_fn;
    } muon;

    struct {
        tch_state_dtype state_dtype; /* float32 for parameters below 4096 elements, float64 for float64 ones. Not with
                                        amsgrad, nor where ranks share the optimizer */
        int32_t packed_factors;      /* keep factors, and Shampoo's roots, as lower triangles: half the memory, the same
                                        results. A step unpacks as many at a time as `budget` allows */
        tch_state_dtype root_dtype;  /* of roots of float32 factors: FLOAT32, or BFLOAT16, packed: a quarter of the
                                        memory; rounding to nearest adds at most 2^-9 to their relative error */
        int32_t master_weights;      /* keep a float32 copy of float16 and bfloat16 parameters */
        int32_t stochastic_rounding; /* unbiased stochastic rounding of bfloat16 parameters without a float32 copy */
        uint64_t seed;               /* of stochastic rounding. The first group's counts */
        int64_t budget; /* bytes of scratch that a step may use; work is split into chunks to stay within it. 0: an
                           eighth of the state, at least 2 GiB and 1/32 of the GPU's memory. The first group's counts */
    } memory;

    struct {
        tch_precision precision;
        double damping;          /* (step) Shampoo's damping is max(eps, damping times the largest eigenvalue); see
                             tch_root_config. At least 2 u sqrt(T) is used, u the unit roundoff and T the gradients in
                             the factor, rounded to a power of two: rounding error is of that size. 0: eps alone; a
                             refresh then waits for the device */
        double tolerance;        /* residual of Shampoo's roots. 0: the default of tch_inverse_root */
        tch_root_method method;  /* of Shampoo's roots: TCH_ROOT_AUTO */
        tch_nonfinite nonfinite; /* the first group's counts */
        int32_t world_invariant; /* update every block by itself. GPU libraries choose algorithms by batch size, which
                                    depends on how many ranks share an optimizer; with this, results have the same bits
                                    for any number of ranks, and steps are slower. A CPU's always have */
    } numerics;
} tch_optim_config;

/* One parameter, or one gradient's place in the list. */
typedef struct tch_parameter {
    tch_tensor *tensor; /* updated in place; the description is copied, the memory is not */
    const char *name;   /* for state, messages and checkpoints; copied. NULL: "parameterN" */
    int32_t use_adamw;  /* 1: AdamW for this one, whatever its shape, as for embeddings */
    /* Several matrices in one tensor, each of which methods with blocks treat as a parameter of its own. The tensor is
     * then contiguous. */
    int32_t batch_dims;  /* leading dimensions that only number them: 1 for experts, [E, m, n] */
    int32_t cut_count;   /* 0, or: the dimension that follows is cut after so many rows each, */
    const int64_t *cuts; /* as Q, K and V in one weight, or heads; their sum is its size. Copied */
} tch_parameter;

/* A rectangle of a tensor that ranks of a group share, and where it is in what its rank has. */
typedef struct tch_shard {
    int32_t rank;
    int64_t start[TCH_MAX_RANK], size[TCH_MAX_RANK]; /* in the whole tensor */
    int64_t offset[TCH_MAX_RANK];                    /* where it begins in the rank's own */
} tch_shard;

/* How a parameter lies among the ranks of a group. All ranks describe it alike. Shards may be empty, uneven, and on
 * several ranks at once; each element is on one rank at least. */
typedef struct tch_placement {
    size_t struct_size;
    int32_t ndim;         /* of the whole tensor */
    const int64_t *shape; /* the same */
    int32_t count;        /* of shards; 0: every rank has the whole tensor, and the same gradient */
    const tch_shard *shards;
} tch_placement;
#define TCH_PLACEMENT_INIT                                                                                             \
    {                                                                                                                  \
        sizeof(tch_placement), 0, NULL, 0, NULL                                                                        \
    }

/* Where the state's memory comes from, when not from the context's pool. The library asks for a few large chunks and
 * gives them back when the optimizer is destroyed. Memory is on the context's device, aligned to 256 bytes. */
typedef struct tch_state_allocator {
    size_t struct_size; /* sizeof(tch_state_allocator) */
    tch_status (*allocate)(void *user, int64_t bytes, void **pointer);
    void (*release)(void *user, void *pointer, int64_t bytes);
    void *user;
} tch_state_allocator;

/* What an optimizer is made with besides its configuration; NULL or 0 for each is the default. It is copied; comm and
 * placements are what the ranks of a group need.
 *
 * With `comm`, the ranks of that group divide the work and the state; it outlives the optimizer. Each rank makes the
 * same call with its own part of the same parameters. `placements` has one entry for each parameter; NULL: every rank
 * has every parameter whole, as in data parallel training. A group of one rank that has every parameter as one shard is
 * not used at all.
 *
 * The number of ranks does not change the mathematics: equal gradients give equal updates, on any rank. Every
 * rank then calls tch_optimizer_step with its gradients, for the shards it has; a rank without elements of a parameter
 * passes its empty gradient, not NULL. Ranks that come with different models, options or gradients (one missing where
 * others have it) all get TCH_ERR_COMM, and nothing is changed. After a failure of the group the optimizer is marked
 * failed. */
typedef struct tch_optim_setup {
    size_t struct_size;
    tch_comm *comm;
    const tch_placement *placements;
    const tch_state_allocator *allocator;
} tch_optim_setup;
#define TCH_OPTIM_SETUP_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_optim_setup), NULL, NULL, NULL                                                                      \
    }

TCH_BEGIN_DECLS

/* The defaults of a kind; those of SGD for a number that is none. */
TCH_API tch_optim_config tch_optim_defaults(tch_optim_kind kind);

/* "sgd", "adamw", "shampoo", "soap", "muon", "lion", "normuon"; NULL for a number that is none. And back: -1 for a name
 * that is none. */
TCH_API const char *tch_optim_kind_name(tch_optim_kind kind);
TCH_API int32_t tch_optim_kind_parse(const char *name);

/* === Making one =================================================================================================== */

/* An optimizer with one group of `count` parameters, 0 allowed. The context must outlive it. `setup` may be NULL. */
TCH_API tch_status tch_optimizer_create(tch_context *context, const tch_optim_config *config,
                                        const tch_optim_setup *setup, int32_t count, const tch_parameter *parameters,
                                        tch_optimizer **optimizer);

/* Another group, of the same kind, also during training. Its parameters are numbered after those there
 * are. `placements` as in tch_optim_setup; `group`, its number, may be NULL. */
TCH_API tch_status tch_optimizer_add_group(tch_optimizer *optimizer, const tch_optim_config *config, int32_t count,
                                           const tch_parameter *parameters, const tch_placement *placements,
                                           int32_t *group);

/* Waits for the device. NULL is allowed. */
TCH_API void tch_optimizer_destroy(tch_optimizer *optimizer);

/* === Stepping ===================================================================================================== */

/* One step. `gradients` has one entry for every parameter of all groups, in order; NULL for a parameter that has none
 * this time, which then stays as it is with all its state. A gradient has its parameter's shape, any layout, and its
 * dtype; for a float32 parameter float16 and bfloat16 too. Gradients are not changed.
 *
 * After an error of the caller's nothing has changed. After an error of the device the optimizer is marked failed, and
 * every later step says so. */
TCH_API tch_status tch_optimizer_step(tch_optimizer *optimizer, int32_t count, const tch_tensor *const *gradients);

/* The same with loss scaling, see amp.h: gradients are divided by the number in `grad_scale`, and nothing changes where
 * the one in `found_inf` is not 0. Both float32 with one element on the device; either may be NULL. */
TCH_API tch_status tch_optimizer_step_scaled(tch_optimizer *optimizer, int32_t count,
                                             const tch_tensor *const *gradients, const tch_tensor *grad_scale,
                                             const tch_tensor *found_inf);

/* === Groups and their numbers ===================================================================================== */

TCH_API int32_t tch_optimizer_group_count(const tch_optimizer *optimizer);
TCH_API int32_t tch_optimizer_parameter_count(const tch_optimizer *optimizer);

/* A group's configuration as it is now. */
TCH_API tch_status tch_optimizer_get_config(const tch_optimizer *optimizer, int32_t group, tch_optim_config *config);

/* Changes a group's numbers, those marked (step); a change of anything else is an error that names it. */
TCH_API tch_status tch_optimizer_set_config(tch_optimizer *optimizer, int32_t group, const tch_optim_config *config);

/* Sets lr; AdamW's learning rate follows, see adamw.lr. */
TCH_API tch_status tch_optimizer_set_lr(tch_optimizer *optimizer, int32_t group, double lr);

/* A learning rate that lives on the device, float32 or float64 with one element, read at every step from now on; NULL
 * returns to the number in the configuration. AdamW's learning rate follows it too. */
TCH_API tch_status tch_optimizer_set_lr_tensor(tch_optimizer *optimizer, int32_t group, const tch_tensor *lr);

/* Moves a parameter to other memory: same shape, dtype and layout. Its state stays. */
TCH_API tch_status tch_optimizer_set_parameter(tch_optimizer *optimizer, int32_t parameter, tch_tensor *tensor);

/* === State, memory, statistics ==================================================================================== */

typedef struct tch_optim_state {
    size_t struct_size;
    const char *name;   /* "layer1.weight/exp_avg", "layer1.weight/factor.0.1": parameter / what . block . dimension */
    int32_t parameter;  /* whose it is */
    tch_tensor *tensor; /* a view, valid as long as the optimizer */
} tch_optim_state;
#define TCH_OPTIM_STATE_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_optim_state), NULL, 0, NULL                                                                         \
    }

/* Everything that must survive a restart, as named tensors: what a checkpoint holds, together with the number of
 * steps. */
TCH_API int32_t tch_optimizer_state_count(const tch_optimizer *optimizer);
TCH_API tch_status tch_optimizer_get_state(tch_optimizer *optimizer, int32_t index, tch_optim_state *state);

/* What the host counts for one parameter beside those tensors, for a caller who copies them himself: the steps of the
 * optimizer, the steps taken with this parameter, and for each of its factors a number that says how often a refresh
 * failed and the intervals of adaptive refresh. With the
 * tensors and the counts of every parameter in its place a new optimizer, made from the same parameters, goes on bit
 * for bit. */
TCH_API int64_t tch_optimizer_counts_length(const tch_optimizer *optimizer, int32_t parameter); /* 0 if there is none */
TCH_API tch_status tch_optimizer_get_counts(tch_optimizer *optimizer, int32_t parameter, int64_t length,
                                            int64_t *counts);

/* After the parameter's tensors: its clock is read. Waits for the device. */
TCH_API tch_status tch_optimizer_set_counts(tch_optimizer *optimizer, int32_t parameter, int64_t length,
                                            const int64_t *counts);

/* A block with a second-order method as the ranks of a group divide them: on every rank the same list. Dimensions are
 * those of the parameter after merging, outermost first. */
typedef struct tch_optim_tile {
    size_t struct_size;
    int32_t parameter, number; /* as in the names of its state */
    int32_t owner;             /* the rank */
    int32_t order;
    int64_t dims[4], start[4], size[4];
} tch_optim_tile;
#define TCH_OPTIM_TILE_INIT                                                                                            \
    {                                                                                                                  \
        sizeof(tch_optim_tile), 0, 0, 0, 0, {0}, {0},                                                                  \
        {                                                                                                              \
            0                                                                                                          \
        }                                                                                                              \
    }
TCH_API int64_t tch_optimizer_tile_count(const tch_optimizer *optimizer); /* 0 where it is not shared */
TCH_API tch_status tch_optimizer_get_tile(const tch_optimizer *optimizer, int64_t index, tch_optim_tile *tile);

typedef struct tch_optim_memory {
    size_t struct_size;
    int64_t state;   /* bytes that stay: moments, factors, roots, master copies */
    int64_t scratch; /* bytes a step keeps for itself while the optimizer lives */
    int64_t refresh; /* bytes of the context's workspace that a refresh takes */
    int64_t blocks;  /* matrices with a second-order method, after blocking */
    int64_t factors; /* of them */
    /* On a GPU, bytes of the driver for steps that are recorded, outside of any pool. The driver does not tell: an
     * estimate by the number of kernels, which a forecast estimates as well, from above. It grows to it in the first
     * steps. */
    int64_t recorded;
} tch_optim_memory;
#define TCH_OPTIM_MEMORY_INIT                                                                                          \
    {                                                                                                                  \
        sizeof(tch_optim_memory), 0, 0, 0, 0, 0, 0                                                                     \
    }

/* What an optimizer would take, before anything is allocated; the tensors' data may be NULL. */
TCH_API tch_status tch_optim_forecast(tch_context *context, const tch_optim_config *config, int32_t count,
                                      const tch_parameter *parameters, tch_optim_memory *memory);

/* What this one takes. */
TCH_API tch_status tch_optimizer_get_memory(tch_optimizer *optimizer, tch_optim_memory *memory);

typedef struct tch_optim_stats {
    size_t struct_size;
    int64_t steps;         /* asked for */
    int64_t skipped;       /* of them, by a gradient that was not finite or by loss scaling */
    int64_t refreshes;     /* of roots or bases, each factor counted */
    int64_t failed;        /* factors whose latest refresh failed; they go on with their last good root */
    double worst_residual; /* the largest certificate among the latest roots; see tch_inverse_root */
    /* Of the factors that were refreshed since the optimizer was made or loaded, on this rank, in steps: */
    int64_t refreshed_factors;
    double interval_mean, interval_max;   /* from one refresh to the next, as scheduled now */
    double staleness_mean, staleness_max; /* since the latest refresh */
} tch_optim_stats;
#define TCH_OPTIM_STATS_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_optim_stats), 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0                                                \
    }

/* Waits for the device, and changes nothing: a factor whose refresh failed gets ten times the relative damping at its
 * next one, and goes over to the eigen method if that fails too, whether anybody looks or not. */
TCH_API tch_status tch_optimizer_get_stats(tch_optimizer *optimizer, tch_optim_stats *stats);

/* === Checkpoints ================================================================================================== */

/* Adds the whole state to a checkpoint being written, under names that begin with `prefix` and a slash, and the
 * hyperparameters to its metadata. The tensors are read when the writer saves: not after the next step.
 *
 * Of an optimizer that ranks share, each adds its part to its own writer, for tch_checkpoint_writer_save_sharded: its
 * tiles, its shards of what is laid out like a parameter, and some of what all ranks have. */
TCH_API tch_status tch_optimizer_save(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix);

/* Takes the state from an open checkpoint: the same kind, parameters of the same names and shapes. Training goes on bit
 * for bit as it would have on the same device. Hyperparameters marked (step) are taken too. Everything but the tensors'
 * bytes is compared before the first write, and numbers of steps that cannot be are refused; after an error of the
 * device, or a tensor that is not what its checksum says, the optimizer is marked failed.
 *
 * The checkpoint may come from one process or from any number of ranks, replicated or sharded in any way, and so may
 * the optimizer that loads it. Ranks that share one call this together, and none goes on where another could not load
 * its part: a rank that could not open the checkpoint calls it with NULL, so that the others do not wait. */
TCH_API tch_status tch_optimizer_load(tch_optimizer *optimizer, tch_checkpoint *checkpoint, const char *prefix);

TCH_END_DECLS

#endif
