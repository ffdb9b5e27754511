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

typedef enum tch_decay {
    TCH_DECAY_DECOUPLED = 0, /* p shrinks by lr weight_decay, beside the step */
    TCH_DECAY_L2 = 1         /* weight_decay p is added to the gradient */
} tch_decay;

/* What a step does when a gradient holds an infinity or a NaN. Decided on the device, for the whole step: a bad
 * gradient never reaches a factor, a moment or a parameter. (On a GPU, where the host does not wait to learn of it,
 * roots and bases that were due are refreshed all the same, from the factors as they are. At the steps with which roots
 * and bases begin the host does wait.) */
typedef enum tch_nonfinite {
    TCH_NONFINITE_SKIP = 0,  /* nothing changes but the count of skipped steps */
    TCH_NONFINITE_RAISE = 1, /* the same, and the step waits for the device and returns TCH_ERR_NUMERIC */
    TCH_NONFINITE_IGNORE = 2 /* not looked for */
} tch_nonfinite;

/* How the step length of a Muon matrix [m, n] follows from lr. NorMuon scales its direction so that the step is as long
 * as Muon's of an exactly orthogonal one would be: this times sqrt(min(m, n)), in the Frobenius norm. */
typedef enum tch_muon_lr {
    TCH_MUON_LR_ORIGINAL = 0,        /* lr sqrt(max(1, m / n)) */
    TCH_MUON_LR_MATCH_RMS_ADAMW = 1, /* 0.2 lr sqrt(max(m, n)) */
    TCH_MUON_LR_PLAIN = 2            /* lr */
} tch_muon_lr;

/* How accurate the products with float32 gradients are. Roots and bases are always computed as their own tolerance
 * says. */
typedef enum tch_precision {
    TCH_PRECISION_HIGH = 0,   /* on a GPU with TF32 operands are rounded to 11 bits: far below a gradient's own noise */
    TCH_PRECISION_HIGHEST = 1 /* float32 */
} tch_precision;

/* How moments of single elements are kept: AdamW's two, also of what other kinds leave to AdamW, Lion's and SGD's. They
 * are rounded stochastically, by bits that depend on `seed`, the step and the element alone. */
typedef enum tch_state_dtype {
    TCH_STATE_FLOAT32 = 0,
    TCH_STATE_BFLOAT16 = 1,
    TCH_STATE_INT8 = 2 /* eight bits by blocks of 128 elements: 2.06 bytes for AdamW's two moments instead of 8 */
} tch_state_dtype;

/* All options of all kinds; each kind reads the ones named after it. Take one from tch_optim_defaults and change what
 * you need. Those marked (step) may be changed between steps. */
typedef struct tch_optim_config {
    size_t struct_size;
    tch_optim_kind kind;

    /* --- all */
    double lr;           /* (step) */
    double weight_decay; /* (step) */
    tch_decay decay;     /* SGD is always l2, Muon, NorMuon and Lion always decoupled */
    int32_t maximize;

    /* --- SGD, and what follows the preconditioner in Shampoo */
    double momentum;  /* (step) SGD, Shampoo: buffer = momentum buffer + d. Muon, NorMuon: a moving average */
    double dampening; /* (step) SGD */
    int32_t nesterov; /* SGD, Shampoo, Muon, NorMuon */

    /* --- AdamW, SOAP, Shampoo: moving averages of the gradient (beta1) and of its square or of the factors (beta2).
     * Lion: the gradient's average in the direction (beta1) and from step to step (beta2). NorMuon: the rows' second
     * moments (beta2) */
    double beta1, beta2; /* (step) Shampoo: beta1 = 0 leaves the gradient as it is, beta2 = 1 sums the factors */
    double eps;          /* (step) AdamW, SOAP: beside a root. Muon: the least norm of a matrix. NorMuon: both. Shampoo:
                                damping of the factors, absolute */
    int32_t bias_correction; /* AdamW (always on), SOAP, Shampoo */
    int32_t amsgrad;         /* AdamW */

    /* --- AdamW for what Shampoo, SOAP, Muon and NorMuon do not take */
    double scalar_lr;      /* (step) It follows lr: AdamW gets scalar_lr lr / scalar_base_lr. 0, not given: lr itself;
                              0.3 lr for Muon and NorMuon unless muon_lr is MATCH_RMS_ADAMW, since lr is not of AdamW's
                              size then. The group's configuration has the number */
    double scalar_base_lr; /* (step) the lr that scalar_lr goes with. 0: the lr of the configuration that brings
                              scalar_lr; where that is 0 too there is no ratio, and scalar_lr stays as it is while lr is
                              not 0 */
    double scalar_beta1, scalar_beta2; /* (step) */
    double scalar_eps;                 /* (step) */
    double scalar_weight_decay;        /* (step) -1 for weight_decay itself */

    /* --- Shampoo and SOAP: which matrices have factors */
    int64_t max_preconditioner_dim; /* Shampoo: larger dimensions are cut into blocks of at most this size. SOAP: into
                                       blocks too if `block` is set, otherwise a larger dimension has no factor. Nor
                                       has a side of a block that is over 100 times as long as the others' product */
    int32_t block;                  /* SOAP */
    int32_t merge_dims;      /* tensors of rank above 2: neighboring dimensions, innermost first, are merged while
                                       their product stays within max_preconditioner_dim; 0 keeps a factor for each */
    int32_t precondition_1d; /* SOAP, Shampoo: vectors too */
    int32_t packed_factors;  /* SOAP, Shampoo: factors, and Shampoo's roots, are kept as lower triangles: half the
                                memory, the same numbers. Every step unpacks as many at a time as memory_budget holds */
    int32_t precondition_frequency; /* (step) refresh every so many steps, at least 1; with refresh_drift, that many at
                                       most */
    double refresh_drift;  /* (step) Shampoo, SOAP: adaptive refresh. The steps between two refreshes of a factor, 1 at
                              first, are doubled where one found its root or basis off by less than half of this, and
                              halved where it was off by more: see docs/optimizers.md. 0: a fixed period */
    double refresh_budget; /* (step) adaptive refresh: the largest share of all factors refreshed at one step */
    int32_t start_preconditioning_step; /* Shampoo: the grafted method alone (SGD without one) before this step, counted
                                           from 1; -1 begins at once */
    int32_t stagger; /* (step) Shampoo, SOAP: spread the refreshes over the steps of a period by their cost */
    tch_precision precision;
    int32_t world_invariant; /* every block is worked on by itself. A GPU's libraries choose by the size of a batch, and
                                so by how many ranks share an optimizer; with this results have the same bits for any
                                number of them, and take longer. On the CPU they have anyway */

    /* --- Shampoo */
    double relative_eps;   /* (step) damping is max(eps, relative_eps largest eigenvalue); see tch_root_config. Taken
                                    as at least 2 u sqrt(T), u the unit roundoff and T the gradients in the factor up to
                                    a power of two: below that a factor is rounding. 0: eps alone, for which a refresh
                                    has to wait for the device */
    double root_tolerance; /* 0: the default of tch_inverse_root */
    tch_state_dtype
        root_dtype; /* how roots of float32 factors are kept: TCH_STATE_FLOAT32, or TCH_STATE_BFLOAT16, lower
                                   triangles in a quarter of the memory. Rounding, to nearest, adds at most 2^-9 of its
                                   norm to the error of a root */
    tch_root_method root_method; /* TCH_ROOT_AUTO */
    int32_t exponent_override;   /* the root: the power is -1/override. 0: twice the number of factors */
    tch_grafting grafting;
    double grafting_beta2, grafting_eps; /* (step) */

    /* --- SOAP */
    double shampoo_beta;     /* (step) of the factors; below 0 for beta2 */
    int32_t normalize_grads; /* every step of a matrix is scaled to a mean square of 1 */

    /* --- Muon, NorMuon */
    tch_ortho_method muon_method; /* TCH_ORTHO_MINIMAX */
    double muon_coefficients[3];  /* for TCH_ORTHO_MUON; all 0 for its own */
    int32_t muon_steps;           /* 0 for as many as the method usually takes: 5, 5, 3 */
    tch_muon_lr muon_lr;

    /* --- half-precision parameters */
    int32_t master_weights;      /* keep a float32 copy, of which the parameter is the rounding */
    int32_t stochastic_rounding; /* bfloat16 parameters without a copy: round at random, right on average */

    /* --- elementwise updates */
    tch_state_dtype state_dtype; /* of their moments; parameters below 4096 elements keep float32, and float64 ones
                                    float64. Not with amsgrad, and not where ranks share the optimizer */

    /* --- of the whole optimizer: the first group's count */
    tch_nonfinite nonfinite;
    uint64_t seed;         /* of stochastic rounding, of parameters and of moments */
    int64_t memory_budget; /* extra memory a step may take beyond the state, in bytes; 0: an eighth of the state, and at
                              least 2 GiB and a 32nd of the GPU's memory. Work is cut into chunks to stay within it */
} tch_optim_config;

/* One parameter, or one gradient's place in the list. */
typedef struct tch_parameter {
    tch_tensor *tensor;  /* updated in place; the description is copied, the memory is not */
    const char *name;    /* for state, messages and checkpoints; copied. NULL: "parameterN" */
    int32_t elementwise; /* 1: AdamW for this one, whatever its shape, as for embeddings */
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

/* The change people make most; what AdamW gets of the group follows it, see scalar_lr. */
TCH_API tch_status tch_optimizer_set_lr(tch_optimizer *optimizer, int32_t group, double lr);

/* A learning rate that lives on the device, float32 or float64 with one element, read at every step from now on; NULL
 * returns to the number in the configuration. scalar_lr follows it too. */
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
