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
 * bfloat16, in any dense layout (row-major, channels last, transposed). The second-order methods update parameters
 * with at least two dimensions larger than 1; AdamW updates the others, in the same optimizer.
 *
 * A step never synchronizes, allocates nothing after warm-up, and can be captured in a CUDA graph. Results are bitwise
 * reproducible on the same device. */
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
    TCH_WEIGHT_DECAY_L2 = 1,        /* adds weight_decay p to the gradient */
    TCH_WEIGHT_DECAY_CAUTIOUS = 2   /* decoupled, only where the step reduces |p| (Chen and others, 2025) */
} tch_weight_decay_type;

/* What a step does when a gradient has an infinity or a NaN. The device decides, once for the whole step: a non-finite
 * gradient never reaches a factor, a moment or a parameter. (On a GPU the host does not wait for this decision, except
 * at the first refresh of roots and bases, so those scheduled for this step are still refreshed, from unchanged
 * factors.) */
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

/* The type of Muon's products for parameters other than float64, where the device multiplies bfloat16; elsewhere it is
 * float32. */
typedef enum tch_ns_dtype {
    TCH_NS_AUTO = 0,     /* bfloat16, with Gram matrices in float16 where there are kernels for both (Hopper) */
    TCH_NS_BFLOAT16 = 1, /* bfloat16 alone; TCH_ORTHO_MINIMAX becomes two more steps of Polar Express */
    TCH_NS_FLOAT32 = 2
} tch_ns_dtype;

/* Precision of products with float32 gradients. Roots and bases always reach their own tolerance. */
typedef enum tch_precision {
    TCH_PRECISION_HIGH = 0,   /* TF32 on a GPU that has it: operands are rounded to 11 bits, far below gradient noise */
    TCH_PRECISION_HIGHEST = 1 /* float32 */
} tch_precision;

/* Storage of the moments of elementwise updates, SGD's, Lion's and AdamW's, and of the first moment of matrices. Second
 * moments of matrices, and the buffer of Shampoo's `momentum`, stay float32. Rounding is stochastic, by bits that
 * depend only on `seed`, the step and the element. */
typedef enum tch_state_dtype {
    TCH_STATE_FLOAT32 = 0,
    TCH_STATE_BFLOAT16 = 1,
    TCH_STATE_INT8 = 2 /* 8 bits, scaled in blocks of 128 elements: 2.06 bytes for AdamW's two moments instead of 8 */
} tch_state_dtype;

/* The configuration of a parameter group. Start from tch_optim_defaults and change what you need; each kind reads the
 * fields that name it, and KL-Shampoo those of Shampoo except momentum, nesterov and those marked as Shampoo only.
 * Fields are named and grouped as in Python. Those marked (step) may change between steps. */
typedef struct tch_optim_config {
    size_t struct_size;
    tch_optim_kind kind;

    double lr;                               /* (step) */
    double weight_decay;                     /* (step) */
    tch_weight_decay_type weight_decay_type; /* decoupled; SGD: L2 */
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
    int32_t constant_norm;       /* SOAP, Muon: a block W of a parameter, the whole matrix without soap.block, keeps its
                              Frobenius norm, and its step has the norm lr |W|; of weight decay only L2 has effect */

    /* AdamW for the parameters that the methods below do not precondition */
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

    /* Shampoo, KL-Shampoo, and SOAP, which runs Adam in the eigenbasis of Shampoo's factors */
    struct {
        int64_t max_preconditioner_dim; /* Shampoo, and SOAP with soap.block: larger dimensions are split into blocks of
                                           at most this size. SOAP otherwise: a larger dimension has no factor. Nor has
                                           a side of a block over 100 times as long as the product of its others */
        int32_t merge_dims;             /* tensors of rank above 2: merge neighboring dimensions, innermost first, while
                                           their product is at most max_preconditioner_dim; 0: a factor for each */
        int32_t precondition_1d;        /* vectors too */
        int32_t precondition_frequency; /* (step) steps between refreshes, at least 1; the maximum with refresh_drift */
        double refresh_drift;           /* (step) adaptive refresh; see docs/optimizers.md. Shampoo: also when the mean
                                           square of a block's direction has grown by this factor since the latest
                                           refresh, and more often early on. SOAP: the interval of a basis, 1 at first,
                                           doubles when a refresh finds it off by less than half of this, and halves
                                           when off by more than this. 0: a fixed interval */
        int32_t stagger;                /* (step) spread refreshes over the steps of an interval, balanced by cost */
        /* Shampoo only */
        int32_t start_preconditioning_step; /* before this step, counted from 1, the grafted method alone (SGD without
                                               grafting); -1: precondition from the first step */
        int32_t exponent_override;          /* the root is the power -1/override. 0: twice the number of factors, as in
                                               the paper */
        tch_grafting grafting;
        double grafting_beta2, grafting_eps; /* (step) */
    } shampoo;

    struct {
        int32_t block;           /* split dimensions above shampoo.max_preconditioner_dim into blocks */
        double shampoo_beta;     /* (step) decay rate of the factors; -1: beta2 */
        int32_t normalize_grads; /* scale the direction of each matrix to a root mean square of 1 */
        int32_t orthogonalize;   /* the direction of each block becomes 0.2 sqrt(max(m, n)) times its polar factor, by
                                    TCH_ORTHO_MINIMAX as in Muon; not with normalize_grads */
    } soap;

    /* Muon, NorMuon */
    struct {
        tch_ortho_method method;   /* TCH_ORTHO_MINIMAX */
        double ns_coefficients[3]; /* for TCH_ORTHO_MUON; all 0: its published ones */
        int32_t ns_steps;          /* 0: the method's usual number, 5, 5 or 3 */
        tch_adjust_lr_fn adjust_lr_fn;
        tch_ns_dtype ns_dtype;
    } muon;

    struct {
        tch_state_dtype state_dtype; /* float32 for parameters below 4096 elements, float64 for float64 ones. Not with
                                        amsgrad. INT8: bfloat16 for matrices of which a row, or a block's row, is not a
                                        multiple of 128 elements; not where shards cut its blocks of 128, and not for
                                        matrices that ranks share */
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

/* One parameter. */
typedef struct tch_parameter {
    tch_tensor *tensor; /* updated in place; the description is copied, the memory is not */
    const char *name;   /* for state, messages and checkpoints; copied. NULL: "parameterN" */
    int32_t use_adamw;  /* 1: AdamW updates it, whatever its shape, as for embeddings */
    /* Several matrices in one contiguous tensor, which the second-order methods update as separate parameters */
    int32_t batch_dims;  /* leading batch dimensions: 1 for experts, [E, m, n] */
    int32_t cut_count;   /* pieces of the next dimension, or 0 */
    const int64_t *cuts; /* their rows, as Q, K and V in one weight, or heads; they sum to its size. Copied */
} tch_parameter;

/* The rectangle of a sharded tensor that a rank holds, and its position in the local tensor. */
typedef struct tch_shard {
    int32_t rank;
    int64_t start[TCH_MAX_RANK], size[TCH_MAX_RANK]; /* in the whole tensor */
    int64_t offset[TCH_MAX_RANK];                    /* in the rank's local tensor; see tch_placement */
} tch_shard;

/* How a parameter is distributed over a group; the same on all ranks. Shards may be empty, uneven or replicated; every
 * element is on at least one rank.
 *
 * If the local tensor has one dimension and the whole has more, it is a range of the whole's elements in row-major
 * order: the rank's shards are the rectangles of that range, in order, and offset[0] is the first element of each in
 * the local tensor. */
typedef struct tch_placement {
    size_t struct_size;
    int32_t ndim;         /* of the whole tensor */
    const int64_t *shape; /* of the whole tensor */
    int32_t count;        /* of shards; 0: every rank has the whole tensor, and the same gradient */
    const tch_shard *shards;
} tch_placement;
#define TCH_PLACEMENT_INIT                                                                                             \
    {                                                                                                                  \
        sizeof(tch_placement), 0, NULL, 0, NULL                                                                        \
    }

/* Allocates the state instead of the context's pool: a few large chunks on the context's device, aligned to 256 bytes,
 * which are released when the optimizer is destroyed. */
typedef struct tch_state_allocator {
    size_t struct_size; /* sizeof(tch_state_allocator) */
    tch_status (*allocate)(void *user, int64_t bytes, void **pointer);
    void (*release)(void *user, void *pointer, int64_t bytes);
    void *user;
} tch_state_allocator;

/* Further arguments of tch_optimizer_create; NULL or 0 for each is the default. Copied.
 *
 * The ranks of `comm`, which must outlive the optimizer, divide the work and the state. Each rank makes the same call
 * with its part of the same parameters. `placements` has one entry per parameter; NULL: every parameter is replicated,
 * as in data-parallel training. A group of one rank that holds every parameter as one shard is not used.
 *
 * The number of ranks does not change the mathematics. tch_optimizer_step is a collective: each rank passes the
 * gradients of its shards, an empty gradient, not NULL, for a parameter of which it has no elements. If ranks disagree
 * about the model, the options or which gradients exist, all get TCH_ERR_COMM and nothing changes. After a failure of
 * the group the optimizer is marked failed. */
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

/* The defaults of a kind; those of SGD for an invalid kind. */
TCH_API tch_optim_config tch_optim_defaults(tch_optim_kind kind);

/* "sgd", "adamw", "shampoo", "soap", "muon", "lion", "normuon", "kl_shampoo"; NULL for an invalid kind. The inverse
 * returns -1 for an unknown name. */
TCH_API const char *tch_optim_kind_name(tch_optim_kind kind);
TCH_API int32_t tch_optim_kind_parse(const char *name);

/* === Creation ===================================================================================================== */

/* An optimizer with one group of `count` parameters, 0 allowed. The context must outlive it. `setup` may be NULL. */
TCH_API tch_status tch_optimizer_create(tch_context *context, const tch_optim_config *config,
                                        const tch_optim_setup *setup, int32_t count, const tch_parameter *parameters,
                                        tch_optimizer **optimizer);

/* Adds a group of the same kind, also during training. Its parameters are numbered after the existing ones.
 * `placements` as in tch_optim_setup; `group` receives the group's number and may be NULL. */
TCH_API tch_status tch_optimizer_add_group(tch_optimizer *optimizer, const tch_optim_config *config, int32_t count,
                                           const tch_parameter *parameters, const tch_placement *placements,
                                           int32_t *group);

/* Waits for the device. NULL is allowed. */
TCH_API void tch_optimizer_destroy(tch_optimizer *optimizer);

/* === Stepping ===================================================================================================== */

/* One step. `gradients` has one entry for every parameter of all groups, in order; NULL leaves the parameter and its
 * state unchanged. A gradient has its parameter's shape, any layout, and its dtype; a float32 parameter also takes
 * float16 and bfloat16 gradients. Gradients are not modified.
 *
 * After a caller's error nothing has changed. After a device error the optimizer is marked failed, and later steps
 * return that error. */
TCH_API tch_status tch_optimizer_step(tch_optimizer *optimizer, int32_t count, const tch_tensor *const *gradients);

/* The same with loss scaling, see amp.h: gradients are divided by `grad_scale`, and the step is skipped if `found_inf`
 * is not 0. Both are float32 with one element on the device; either may be NULL. */
TCH_API tch_status tch_optimizer_step_scaled(tch_optimizer *optimizer, int32_t count,
                                             const tch_tensor *const *gradients, const tch_tensor *grad_scale,
                                             const tch_tensor *found_inf);

/* === Groups and hyperparameters ================================================================================== */

TCH_API int32_t tch_optimizer_group_count(const tch_optimizer *optimizer);
TCH_API int32_t tch_optimizer_parameter_count(const tch_optimizer *optimizer);

/* A group's current configuration. */
TCH_API tch_status tch_optimizer_get_config(const tch_optimizer *optimizer, int32_t group, tch_optim_config *config);

/* Changes the fields marked (step) of a group; a change of any other is an error that names it. */
TCH_API tch_status tch_optimizer_set_config(tch_optimizer *optimizer, int32_t group, const tch_optim_config *config);

/* Sets lr; AdamW's learning rate follows, see adamw.lr. */
TCH_API tch_status tch_optimizer_set_lr(tch_optimizer *optimizer, int32_t group, double lr);

/* A learning rate on the device, float32 or float64 with one element, which every later step reads; NULL returns to
 * that of the configuration. AdamW's learning rate follows it. */
TCH_API tch_status tch_optimizer_set_lr_tensor(tch_optimizer *optimizer, int32_t group, const tch_tensor *lr);

/* Replaces a parameter's memory: same shape, dtype and layout. Its state stays. */
TCH_API tch_status tch_optimizer_set_parameter(tch_optimizer *optimizer, int32_t parameter, tch_tensor *tensor);

/* === State, memory, statistics ==================================================================================== */

typedef struct tch_optim_state {
    size_t struct_size;
    const char *name; /* "layer1.weight/exp_avg", "layer1.weight/factor.0.1": parameter / what . block . dimension */
    int32_t parameter;
    tch_tensor *tensor; /* a view; valid while the optimizer exists */
} tch_optim_state;
#define TCH_OPTIM_STATE_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_optim_state), NULL, 0, NULL                                                                         \
    }

/* The state as named tensors: what a checkpoint holds, with the counts below. */
TCH_API int32_t tch_optimizer_state_count(const tch_optimizer *optimizer);
TCH_API tch_status tch_optimizer_get_state(tch_optimizer *optimizer, int32_t index, tch_optim_state *state);

/* The host's counters of one parameter, for callers who save the state themselves: steps of the optimizer, steps with
 * a gradient for this parameter, and for each factor its failed refreshes and refresh interval in one number. With the
 * tensors and counters of all parameters a new optimizer continues bitwise-identically. */
TCH_API int64_t tch_optimizer_counts_length(const tch_optimizer *optimizer, int32_t parameter); /* 0 if there is none */
TCH_API tch_status tch_optimizer_get_counts(tch_optimizer *optimizer, int32_t parameter, int64_t length,
                                            int64_t *counts);

/* Call it after restoring the parameter's tensors: it reads the step count. Waits for the device. */
TCH_API tch_status tch_optimizer_set_counts(tch_optimizer *optimizer, int32_t parameter, int64_t length,
                                            const int64_t *counts);

/* A preconditioned block and the rank that owns it; the same list on every rank. Dimensions are those of the parameter
 * after merging, outermost first. */
typedef struct tch_optim_tile {
    size_t struct_size;
    int32_t parameter, number; /* as in the names of its state */
    int32_t owner;             /* the rank */
    int32_t order;
    int32_t factors; /* of its dimensions */
    int64_t dims[4], start[4], size[4];
} tch_optim_tile;
#define TCH_OPTIM_TILE_INIT                                                                                            \
    {                                                                                                                  \
        sizeof(tch_optim_tile), 0, 0, 0, 0, 0, {0}, {0},                                                               \
        {                                                                                                              \
            0                                                                                                          \
        }                                                                                                              \
    }
TCH_API int64_t tch_optimizer_tile_count(const tch_optimizer *optimizer); /* 0 without a group */
TCH_API tch_status tch_optimizer_get_tile(const tch_optimizer *optimizer, int64_t index, tch_optim_tile *tile);

typedef struct tch_optim_memory {
    size_t struct_size;
    int64_t state;   /* bytes of moments, factors, roots and master copies */
    int64_t scratch; /* bytes of step buffers, held while the optimizer exists */
    int64_t refresh; /* bytes of the context's workspace that a refresh uses */
    int64_t blocks;  /* preconditioned matrices, after blocking */
    int64_t factors; /* of these blocks */
    /* On a GPU, bytes the driver needs for recorded steps, outside any pool: an estimate from the number of kernels,
     * of which a forecast has an upper bound. Reached within the first steps. */
    int64_t recorded;
} tch_optim_memory;
#define TCH_OPTIM_MEMORY_INIT                                                                                          \
    {                                                                                                                  \
        sizeof(tch_optim_memory), 0, 0, 0, 0, 0, 0                                                                     \
    }

/* The memory an optimizer would use; allocates nothing, and the tensors' data may be NULL. */
TCH_API tch_status tch_optim_forecast(tch_context *context, const tch_optim_config *config, int32_t count,
                                      const tch_parameter *parameters, tch_optim_memory *memory);

/* The same of this rank's part, with a group and placements; no collective. */
TCH_API tch_status tch_optim_forecast_with(tch_context *context, const tch_optim_config *config,
                                           const tch_optim_setup *setup, int32_t count, const tch_parameter *parameters,
                                           tch_optim_memory *memory);

/* The memory this optimizer uses. */
TCH_API tch_status tch_optimizer_get_memory(tch_optimizer *optimizer, tch_optim_memory *memory);

typedef struct tch_optim_stats {
    size_t struct_size;
    int64_t steps;         /* calls of tch_optimizer_step */
    int64_t skipped;       /* of these, for a non-finite gradient or by loss scaling */
    int64_t refreshes;     /* of roots or bases, counting every factor */
    int64_t failed;        /* factors whose latest refresh failed and which keep their previous root */
    double worst_residual; /* the largest residual of the latest roots; see tch_inverse_root */
    /* Of the factors that were refreshed since the optimizer was made or loaded, on this rank, in steps: */
    int64_t refreshed_factors;
    double interval_mean, interval_max;   /* from one refresh to the next, as scheduled now */
    double staleness_mean, staleness_max; /* since the latest refresh */
} tch_optim_stats;
#define TCH_OPTIM_STATS_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_optim_stats), 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0                                                \
    }

/* Waits for the device; changes nothing. (A factor whose refresh failed gets ten times the relative damping at the next
 * one and the eigen method if that fails too, whether or not this is called.) */
TCH_API tch_status tch_optimizer_get_stats(tch_optimizer *optimizer, tch_optim_stats *stats);

/* === Checkpoints ================================================================================================== */

/* Adds the state to a writer, under names that begin with `prefix` and a slash, and the hyperparameters as settings.
 * The writer reads the tensors when it saves: save before the next step.
 *
 * Where ranks share the optimizer, each adds its part to its own writer, for tch_checkpoint_writer_save_sharded: its
 * tiles, its shards of parameter-like state, and a share of replicated state. */
TCH_API tch_status tch_optimizer_save(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix);

/* Loads the state of an optimizer of the same kind, with parameters of the same names and shapes, and the
 * hyperparameters marked (step). Training continues bitwise-identically on the same device. Everything but the tensors'
 * bytes is checked before the first write; after a device error or a wrong checksum the optimizer is marked failed.
 *
 * One process and any number of ranks, replicated or sharded, load each other's checkpoints. With a group this is a
 * collective that succeeds on all ranks or none: a rank that could not open the checkpoint passes NULL. */
TCH_API tch_status tch_optimizer_load(tch_optimizer *optimizer, tch_checkpoint *checkpoint, const char *prefix);

TCH_END_DECLS

#endif
