/* Operations table, chapter 3: optimizer steps on parameters, gradients and states. A backend without it supports
 * neither optimizers nor loss scaling.
 *
 * One call gets all rectangles of a step. Clocks, hyperparameters, the skip flag and the loss scale are read on the
 * device when the work runs, so that a recorded step sees their changes and nothing waits for the host. */
#ifndef TORCHIUM_BACKEND_UPDATE_H
#define TORCHIUM_BACKEND_UPDATE_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/status.h>

/* The clock of one parameter, on the device: its step count and what the current step derives from it. Each parameter
 * has one, since gradients may be missing in some steps. */
typedef struct tch_clock {
    double step;         /* steps with a gradient; after `advance` including the current one */
    double correction1;  /* 1 - beta1^step, or 1 without bias correction */
    double correction2;  /* 1 - beta2^step, or 1 */
    double graft;        /* 1 - graft_beta2^step */
    double factor[2];    /* C = factor[0] G G' + factor[1] C for a factor C */
    float factor_f32[2]; /* both rounded to float32 */
    double spare;        /* pads to 64 bytes */
} tch_clock;

/* The hyperparameters of one group, on the device, so that a replayed graph sees their changes. */
typedef struct tch_hyper {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    double momentum, dampening;
    double graft_beta2, graft_eps;
    double spare[7];
} tch_hyper;

/* How moments are kept: state[0] and state[1] of `elementwise`, and state[0] of `gather`.
 *
 * BF16: stochastic rounding. CODES: one byte for an element, and in `scale` a float32 for each TCH_CODE_BLOCK elements,
 * whose upper and lower halves are two bfloat16, the top and the floor of the block. With bits(x) for the bits of the
 * float32 x as a number and float(b) for its inverse,
 *     state[1]: code 0 is 0; code c > 0 is float(bits(floor) + (c - 1) step), at most top,
 *               step being the least power of two with bits(floor) + 254 step >= bits(top)
 *     state[0]: the highest bit is the sign, the others are c: float(bits(floor) + c step), at most top + floor, less
 *               floor; step = (bits(top + floor) - bits(floor)) / 127, rounded up
 * A scale of 0 goes with codes of 0. Codes fill whole words of 4 bytes; those beyond the last element become 0.
 * src/core/codes.h says how top and floor are chosen and how numbers are rounded.
 *
 * With codes `first` is a multiple of TCH_CODE_BLOCK, and so are `cols` and `stride` of more than one row: a block of
 * codes lies in one row. The arithmetic is the same float32, and what it results in reaches the parameter or the block
 * before it is rounded to be kept. */
typedef enum tch_moments {
    TCH_MOMENTS_REAL = 0, /* of the type of the arithmetic */
    TCH_MOMENTS_BF16 = 1,
    TCH_MOMENTS_CODES = 2
} tch_moments;
#define TCH_CODE_BLOCK 128 /* a warp of a GPU with four elements per thread */

/* One rectangle of one parameter. Element (i, j) is at i * stride + j of the parameter, its master copy, its gradient
 * and its state, and at i * block_ld + j of the blocks, or at j * block_ld + i of transposed ones. Parameters are
 * dense, so a whole one is a rectangle of one row. Pointers that an operation does not use may be NULL. */
typedef struct tch_rect {
    void *param;     /* of param_type */
    void *master;    /* NULL, or the authoritative copy in float32, which is rounded to param */
    void *grad;      /* of grad_type; only `inspect_gradients` writes to it */
    void *state[3];  /* of the type of the arithmetic; moments as tch_moments says */
    float *scale[2]; /* of state[0] and state[1] as codes */
    void *block[2];  /* of block_type */
    const tch_clock *clock;
    int64_t rows, cols, stride, block_ld;
    int64_t first;       /* index of element (0, 0) in its parameter: random numbers depend on it */
    int64_t skipped;     /* elements between two rows that are not in this memory: element (i, j) has the index first +
                            i (stride + skipped) + j */
    int32_t parameter;   /* its index in the optimizer, likewise */
    int32_t block_index; /* into the arrays with one element per block; rectangles of a block are consecutive */
    int32_t transposed;  /* of the blocks */
    int32_t by_column;   /* apply_rows: rows of the parameter are columns of the rectangle */
    double factor;       /* of this rectangle's learning rate */
} tch_rect;

/* Arguments shared by all operations on rectangles. Results on CPU and GPU are the same up to rounding and do not
 * depend on how rectangles are divided among calls. */
typedef struct tch_update {
    const tch_rect *rects; /* on the host; read before the call returns */
    int64_t count;
    tch_scalar real; /* the arithmetic and the state: F32, or F64 where parameters are float64 */
    tch_scalar param_type, grad_type, block_type;
    const tch_hyper *hyper;  /* on the device */
    const int32_t *skip;     /* on the device, or NULL: if not 0 nothing is written */
    const float *grad_scale; /* on the device, or NULL: gradients are divided by it */
    int32_t maximize;        /* gradients are negated */
    int32_t stochastic;      /* unbiased stochastic rounding of a bfloat16 param without master */
    uint64_t seed;           /* of it: random bits depend only on seed, clock->step, parameter and element */
    tch_moments moments;     /* of `elementwise` and `gather`; REAL unless `real` is F32, without amsgrad */
} tch_update;

/* Stochastic rounding is the same on every device: the 16 random bits for element `e` of parameter `p` at step `t` are
 * the low half of word e % 4 of Philox-4x32-10 with the counter (e / 4 low, e / 4 high, p, t) and the key (seed low,
 * seed high). They are added below the kept bits of the float32, and the sum is truncated; non-finite values are
 * rounded to nearest. Moments use the word of p + 2^31: state[0] its low half, state[1] its high half. */

typedef enum tch_filter {
    TCH_FILTER_NONE = 0,    /* f is g */
    TCH_FILTER_EMA = 1,     /* s = beta1 s + (1 - beta1) g in state[0]; f = s / correction1 */
    TCH_FILTER_NESTEROV = 2 /* the same s; f = beta1 s + (1 - beta1) g */
} tch_filter;

/* The direction d of the grafted method, whose norm Shampoo's step gets; v is state[1]. */
typedef enum tch_graft {
    TCH_GRAFT_NONE = 0,
    TCH_GRAFT_SGD = 1,     /* d = f */
    TCH_GRAFT_ADAGRAD = 2, /* v = v + g^2; d = f / (sqrt(v) + graft_eps) */
    TCH_GRAFT_RMSPROP = 3, /* v = graft_beta2 v + (1 - graft_beta2) g^2; d as for ADAGRAD */
    TCH_GRAFT_ADAM = 4     /* v as for RMSPROP; d = f / (sqrt(v / clock->graft) + graft_eps) */
} tch_graft;

/* The factors of a two-sided product: roots, symmetric positive definite, or bases, whose rows are unit vectors. */
typedef enum tch_sides { TCH_SIDES_ROOTS = 0, TCH_SIDES_INTO_BASES = 1, TCH_SIDES_OUT_OF_BASES = 2 } tch_sides;

/* How `apply` scales block b. */
typedef enum tch_block_scale {
    TCH_BLOCK_AS_IS = 0,
    TCH_BLOCK_GRAFT = 1,    /* target_norms[b] / norms[b], 0 where norms[b] is 0 */
    TCH_BLOCK_UNIT_RMS = 2, /* sqrt(target_norms[b]) / norms[b], 0 where norms[b] is 0; targets are element counts */
    TCH_BLOCK_CLIP_RMS = 3  /* the same, at most 1 */
} tch_block_scale;

/* The weights of a factor's update, which `advance` computes: factor[0] and factor[1]. */
typedef enum tch_factor_rule {
    TCH_FACTOR_SUM = 0, /* 1 and 1 */
    TCH_FACTOR_EMA = 1, /* 1 - beta2 and beta2 */
    TCH_FACTOR_CORRECTED =
        2 /* w = (1 - beta2) / (1 - beta2^step) and 1 - w: the factor is bias-corrected at every step */
} tch_factor_rule;

/* The factors and roots or bases of a batch of blocks, for their rows and for their columns. */
typedef struct tch_block_sides {
    tch_matrices blocks;     /* the shape in a work buffer; no data */
    void *buffers[2];        /* the work buffers that contain block[0] and block[1] of the rectangles, or NULL */
    tch_matrices factors[2]; /* as stored: if `ld` is 0 packed as by `pack`, `stride` elements apart */
    tch_matrices sides[2];   /* roots or bases, as stored */
    void *room;              /* to unpack packed ones */
} tch_block_sides;

/* How `gather` converts gradients to blocks. */
typedef struct tch_gathering {
    tch_filter filter;
    int32_t l2; /* weight_decay p is added to g */
    tch_graft graft;
    double *norms; /* with a graft: norms[block_index] = |d|; NULL: d replaces f */
    void *scratch; /* with a graft: TCH_SCRATCH_GRAFT bytes */
    /* Not NULL if only `update_factors` and `precondition` with these sides use the blocks: a backend may then store
     * them in another type, at the beginning of their buffers, if the results are bitwise the same. */
    const tch_block_sides *sides;
    uint32_t *notes[2]; /* with sides: private to the backend, per block of g and of f, for these two operations */
} tch_gathering;

/* Blocks from `gather`; `notes` may be NULL. */
typedef struct tch_blocks {
    tch_matrices matrices;
    const uint32_t *notes;
} tch_blocks;

/* Y = L X R', or L' X R out of bases. */
typedef struct tch_preconditioner {
    tch_sides sides;
    const tch_matrices *left, *right; /* as stored, see tch_block_sides; NULL for one of them: I */
    void *room;                       /* to unpack them */
    int32_t rounded;                  /* float32 operands may be rounded to 11 bits (TF32), with float32 accumulation */
} tch_preconditioner;

/* How factors are updated. `rows`, `columns` and `root` are as stored, see tch_block_sides. */
typedef struct tch_factor_update {
    const tch_clock *clock;
    const tch_matrices *rows, *columns; /* one of them may be NULL */
    int32_t rounded;                    /* as in tch_preconditioner */
    void *room;                         /* to unpack those that are packed */
    void *scratch;                      /* of any size, 0 too: time may depend on it, but no bit of the result */
    int64_t scratch_bytes;
    /* NULL, or for a single factor the root X of the other side: scale A X replaces A for rows, scale X A for columns.
     * It is computed in `product`, a work buffer as large as A in the type of the arithmetic. */
    const tch_matrices *root;
    double scale;
    void *product;
} tch_factor_update;

/* The elementwise optimizers. */
typedef enum tch_elementwise_kind {
    TCH_ELEMENTWISE_ADAMW = 0,
    TCH_ELEMENTWISE_SGD = 1,
    TCH_ELEMENTWISE_LION = 2
} tch_elementwise_kind;

/* Weight decay; the step subtracts lr factor u, with u its direction. */
typedef enum tch_decay {
    TCH_DECAY_DECOUPLED = 0, /* p = p (1 - lr weight_decay), before the step */
    TCH_DECAY_L2 = 1,        /* g = g + weight_decay p, in `gather` and `elementwise`; `apply` does not decay */
    TCH_DECAY_CAUTIOUS = 2,  /* decoupled, only of elements with u p >= 0 */
    TCH_DECAY_WHOLE = 3      /* `apply`: p = 0 before the step */
} tch_decay;

typedef struct tch_elementwise_rule {
    tch_elementwise_kind kind;
    tch_decay decay;
    int32_t amsgrad;  /* AdamW */
    int32_t nesterov; /* SGD */
} tch_elementwise_rule;

/* --- skipping and clocks ----------------------------------------------------------------------------------------- */

/* *found = 1 and *found_inf = 1 if a gradient of the rectangles is not finite; otherwise unchanged. Either may be NULL.
 * With `unscale` gradients are divided by *grad_scale in place, if it is not NULL, and checked before and after.
 * Ignores skip. */
typedef tch_status tch_inspect_gradients_op(void *state, const tch_update *update, int32_t unscale, int32_t *found,
                                            float *found_inf);
/* skip = found or found_inf or a disagreement of ranks; counts[0] += 1, and counts[1] += 1 if skip is set. NULL inputs
 * count as 0. `agreement` is the maximum over the ranks of a number and of its complement, which are no longer
 * complements if ranks had different numbers. */
typedef tch_status tch_decide_skip_op(void *state, const int32_t *found, const float *found_inf,
                                      const int32_t *agreement, int32_t *skip, double *counts);
/* Advances every clock: step += 1 unless skip is set; corrections from beta1, beta2 and graft_beta2 (correction1 and
 * correction2 are 1 if `correct` is 0); factor weights by the rule, or 0 and 1 if skip is set. `clocks` is a host array
 * of device addresses. */
typedef tch_status tch_advance_op(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                                  const int32_t *skip, int32_t correct, tch_factor_rule rule);

/* --- steps ------------------------------------------------------------------------------------------------------- */

/* As in PyTorch, except for the decay. AdamW: p = p (1 - lr weight_decay); m (state[0]) = beta1 m + (1 - beta1) g; v
 * (state[1]) = beta2 v + (1 - beta2) g^2; p = p - lr factor m / correction1 / (sqrt(v / correction2) + eps). With
 * amsgrad the maximum of v so far (state[2]) replaces v.
 *
 * SGD: with momentum != 0, buffer (state[0]) = momentum buffer + (1 - dampening) g, or g at the first step of the
 * clock; nesterov: g = g + momentum buffer, else g = buffer; p = p (1 - lr weight_decay) - lr g. state[0] is NULL
 * without momentum.
 *
 * Lion: c = beta1 m + (1 - beta1) g with the previous m (state[0]); p = p (1 - lr weight_decay) - lr factor sign(c),
 * where the sign of 0 and NaN is 0; m = beta2 m + (1 - beta2) g. */
typedef tch_status tch_elementwise_op(void *state, const tch_update *update, const tch_elementwise_rule *rule);
/* Converts gradients to blocks: g to block[0] and, with a filter, f to block[1]. With a graft, v is updated, and the
 * norm of d is stored, or d replaces f (g without a filter). Norms are summed in a fixed order over the rectangles of a
 * block. If skip is set blocks are zeroed. Either block may be NULL unless d is written to it. *chosen is set to the
 * type of the blocks, block_type without sides; without them it may be NULL. */
typedef tch_status tch_gather_op(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen);
/* Adds the Gram matrices of A to the factors: rows = clock->factor[0] A A' + clock->factor[1] rows, and columns the
 * same with A' A. Both triangles are written, unless they are packed. */
typedef tch_status tch_update_factors_op(void *state, const tch_blocks *a, const tch_factor_update *how);
/* Y from X, of the arithmetic's type. With both sides Y may lie where X does, and `other` has room for as much; with
 * one it may not, and `other` is not used. norms[i] becomes |Y_i| where norms is not NULL. */
typedef tch_status tch_precondition_op(void *state, const tch_preconditioner *preconditioner, const tch_blocks *x,
                                       void *other, const tch_matrices *y, double *norms);
/* Adam on blocks, for SOAP: v (state[1]) = beta2 v + (1 - beta2) block[0]^2; block[1] = block[1] / (sqrt(v) + eps)
 * sqrt(correction2). `notes` as in `gather`, for block[1], or NULL. */
typedef tch_status tch_rotated_adam_op(void *state, const tch_update *update, uint32_t *notes);
/* d = block[1], or block[0] if that is NULL, scaled as `scale` says; with momentum != 0 and state[2] not NULL, buffer
 * (state[2]) = momentum buffer + d and d = d + momentum buffer (nesterov) or buffer; p = p (1 - lr weight_decay) as
 * `decay` says; p = p - lr factor d. If skip is set, norms of these blocks are set to -1 and nothing else changes. */
typedef tch_status tch_apply_op(void *state, const tch_update *update, tch_block_scale scale,
                                const double *target_norms, double *norms, int32_t nesterov, tch_decay decay);
/* NorMuon's step, for blocks of one rectangle each, whose rows are the rectangle's rows, or its columns with by_column:
 * v (state[1], one element per row) = beta2 v + (1 - beta2) (mean of block[0]^2 over the row); d is block[0] with each
 * row divided by sqrt(v) + eps, 0 where that is 0; norms[block_index] = |d|; p = p (1 - lr weight_decay) as `decay`
 * says, then p = p - lr factor d / |d| unless |d| is 0. Sums are float64, in a fixed order. `parts` has one element per
 * row of all rectangles. */
typedef tch_status tch_apply_rows_op(void *state, const tch_update *update, double *norms, double *parts,
                                     tch_decay decay);

/* --- loss scaling ------------------------------------------------------------------------------------------------ */

/* PyTorch's rule: if *found_inf, scale = scale backoff and tracker = 0; otherwise tracker += 1, and when it reaches
 * `interval`, scale = scale growth, unless that is infinite, and tracker = 0. */
typedef tch_status tch_update_scale_op(void *state, float *scale, int32_t *tracker, const float *found_inf,
                                       double growth, double backoff, int32_t interval);

/* All REQUIRED. */
typedef struct tch_update_ops {
    tch_inspect_gradients_op *inspect_gradients;
    tch_decide_skip_op *decide_skip;
    tch_advance_op *advance;
    tch_elementwise_op *elementwise;
    tch_gather_op *gather;
    tch_update_factors_op *update_factors;
    tch_precondition_op *precondition;
    tch_rotated_adam_op *rotated_adam; /* its v has the layout of blocks, unlike that of grafting */
    tch_apply_op *apply;
    tch_apply_rows_op *apply_rows; /* sums over rows of the parameter, unlike `apply` */
    tch_update_scale_op *update_scale;
} tch_update_ops;

#endif
