/* Operations table, chapter 3: what the steps of optimizers do to parameters, gradients and states, element by element.
 * A backend without it offers no optimizer and no loss scaling.
 *
 * All rectangles of a step are handed down in one call. What a step depends on (clocks, hyperparameters, the flag that
 * says to skip, the loss scale) is read on the device when the work runs, so that a recorded step sees their changes
 * and nothing waits for the host. */
#ifndef TORCHIUM_BACKEND_UPDATE_H
#define TORCHIUM_BACKEND_UPDATE_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/status.h>

/* The clock of one parameter, on the device: the steps it has taken, and the numbers that follow for the step under
 * way. Parameters have clocks of their own since a gradient may be missing at some steps. */
typedef struct tch_clock {
    double step;         /* steps taken, the one under way included once `advance` has run */
    double correction1;  /* 1 - beta1^step, or 1 where nothing is corrected */
    double correction2;  /* 1 - beta2^step, or 1 */
    double graft;        /* 1 - graft_beta2^step */
    double factor[2];    /* a factor C becomes factor[0] G G' + factor[1] C */
    float factor_f32[2]; /* the same two rounded */
    double spare;        /* a clock is 64 bytes */
} tch_clock;

/* The numbers of one group, on the device, so that a graph that is replayed sees their changes. */
typedef struct tch_hyper {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    double momentum, dampening;
    double graft_beta2, graft_eps;
    double spare[7];
} tch_hyper;

/* How the moments of `elementwise` are kept: state[0] and state[1].
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
 * With either, rectangles have no gaps between rows, and `first` is a multiple of TCH_CODE_BLOCK. The arithmetic is the
 * same float32, and what it results in reaches the parameter before it is rounded to be kept. */
typedef enum tch_moments {
    TCH_MOMENTS_REAL = 0, /* of the type of the arithmetic */
    TCH_MOMENTS_BF16 = 1,
    TCH_MOMENTS_CODES = 2
} tch_moments;
#define TCH_CODE_BLOCK 128 /* what a warp of a GPU holds, four elements a thread */

/* One rectangle of one parameter. Element (i, j) lies at i * stride + j of the parameter, its master copy, its gradient
 * and its state, and at i * block_ld + j of the blocks, or at j * block_ld + i where they are transposed. Parameters
 * are dense, so a whole one is a rectangle of one row. What an operation does not use may be NULL. */
typedef struct tch_rect {
    void *param;     /* of param_type */
    void *master;    /* the parameter in float32, or NULL: then it is the truth, and param its rounding */
    void *grad;      /* of grad_type; read only, except by `inspect_gradients` */
    void *state[3];  /* of the type of the arithmetic; moments as tch_moments says */
    float *scale[2]; /* of the codes of state[0] and state[1] */
    void *block[2];  /* of block_type */
    const tch_clock *clock;
    int64_t rows, cols, stride, block_ld;
    int64_t first;       /* the number, in its parameter, of element (0, 0): what random numbers count by */
    int32_t parameter;   /* its number in the optimizer, for the same */
    int32_t block_index; /* which of the numbers per block belong to it; rectangles of one block follow each other */
    int32_t transposed;
    int32_t by_column; /* of apply_rows: rows of the parameter are columns of the rectangle */
    double factor;     /* of the learning rate, for this rectangle alone */
} tch_rect;

/* What all operations on rectangles share. On the CPU and on a GPU the results are the same up to rounding, and do not
 * depend on how rectangles are divided among calls. */
typedef struct tch_update {
    const tch_rect *rects; /* on the host; read before the call returns */
    int64_t count;
    tch_scalar real; /* the arithmetic and the state: F32, or F64 where parameters are float64 */
    tch_scalar param_type, grad_type, block_type;
    const tch_hyper *hyper;  /* on the device */
    const int32_t *skip;     /* on the device, or NULL: where it is not 0 nothing is written, and nothing that was not
                                finite reaches a state */
    const float *grad_scale; /* on the device, or NULL: gradients are divided by it */
    int32_t maximize;        /* gradients change their sign */
    int32_t stochastic; /* a bfloat16 param without master is rounded up or down at random, so that its mean is right */
    uint64_t seed;      /* of that: bits depend on seed, clock->step, parameter and element alone */
    tch_moments moments; /* of `elementwise`; not REAL only where `real` is F32 and there is no amsgrad */
} tch_update;

/* The generator of stochastic rounding, the same on every device: 16 random bits for element `e` of parameter `p` at
 * step `t` are the low half of word e % 4 of Philox-4x32-10 with the counter (e / 4 low, e / 4 high, p, t) and the key
 * (seed low, seed high). They are added below the kept bits of the float32, and the sum is cut off; what is not finite
 * is rounded to nearest. Moments have the word of p + 2^31: state[0] its low half, state[1] its high half. */

typedef enum tch_filter {
    TCH_FILTER_NONE = 0,    /* f is g */
    TCH_FILTER_EMA = 1,     /* s = beta1 s + (1 - beta1) g in state[0]; f = s / correction1 */
    TCH_FILTER_NESTEROV = 2 /* the same s; f = beta1 s + (1 - beta1) g */
} tch_filter;

/* The step d of a method that Shampoo grafts: its norm is the step length, v is state[1]. */
typedef enum tch_graft {
    TCH_GRAFT_NONE = 0,
    TCH_GRAFT_SGD = 1,     /* d = f */
    TCH_GRAFT_ADAGRAD = 2, /* v = v + g^2; d = f / (sqrt(v) + graft_eps) */
    TCH_GRAFT_RMSPROP = 3, /* v = graft_beta2 v + (1 - graft_beta2) g^2; d as before */
    TCH_GRAFT_ADAM = 4     /* that v; d = f / (sqrt(v / clock->graft) + graft_eps) */
} tch_graft;

/* What a product from both sides multiplies by: roots, which are symmetric and positive definite, or bases, whose rows
 * have length 1. */
typedef enum tch_sides { TCH_SIDES_ROOTS = 0, TCH_SIDES_INTO_BASES = 1, TCH_SIDES_OUT_OF_BASES = 2 } tch_sides;

/* How `apply` scales block b. */
typedef enum tch_block_scale {
    TCH_BLOCK_AS_IS = 0,
    TCH_BLOCK_GRAFT = 1,    /* target_norms[b] / norms[b], 0 where norms[b] is 0 */
    TCH_BLOCK_UNIT_RMS = 2, /* sqrt(target_norms[b]) / norms[b], 0 where norms[b] is 0; a target is an element count */
    TCH_BLOCK_CLIP_RMS = 3  /* the same, and at most 1 */
} tch_block_scale;

/* How clocks turn hyperparameters into a factor's weights. */
typedef enum tch_factor_rule {
    TCH_FACTOR_SUM = 0, /* 1 and 1 */
    TCH_FACTOR_EMA = 1, /* 1 - beta2 and beta2 */
    TCH_FACTOR_CORRECTED =
        2 /* (1 - beta2) / (1 - beta2^step), and 1 less that: the factor is always the corrected one */
} tch_factor_rule;

/* What blocks that are matrices meet between `gather` and `apply`, all of it along rows and along columns. */
typedef struct tch_block_sides {
    tch_matrices blocks;     /* their shape in a work buffer; no data */
    void *buffers[2];        /* the work buffers that block[0] and block[1] of the rectangles lead into, or NULL */
    tch_matrices factors[2]; /* as they are kept: where `ld` is 0 packed as `pack` does it, `stride` elements apart */
    tch_matrices sides[2];   /* the same of roots or bases */
    void *room;              /* to unpack those that are packed */
} tch_block_sides;

/* How `gather` makes blocks of gradients. */
typedef struct tch_gathering {
    tch_filter filter;
    int32_t l2; /* weight_decay p is added to g */
    tch_graft graft;
    double *norms; /* with a graft: norms[block_index] becomes |d|, or NULL: d takes f's place */
    void *scratch; /* with a graft: TCH_SCRATCH_GRAFT bytes */
    /* NULL, or the only use of the blocks is by `update_factors` and `precondition` with these: a backend may then keep
     * them in another type, at the front of their buffers, if no bit of the results depends on it. */
    const tch_block_sides *sides;
    uint32_t *notes[2]; /* with sides: what the backend notes of each block for those two, of g and of f */
} tch_gathering;

/* Blocks as they have been gathered. `notes` is NULL where there are none. */
typedef struct tch_blocks {
    tch_matrices matrices;
    const uint32_t *notes;
} tch_blocks;

/* Y = L X R', or L' X R out of bases. */
typedef struct tch_preconditioner {
    tch_sides sides;
    const tch_matrices *left, *right; /* as they are kept, see tch_block_sides; one of them may be NULL, for I */
    void *room;                       /* to unpack them */
    int32_t rounded;                  /* float32 operands may be rounded to 11 bits (TF32), with sums in float32 */
} tch_preconditioner;

/* How factors are updated. Those of rows and of columns, and `root`, are as they are kept, see tch_block_sides. */
typedef struct tch_factor_update {
    const tch_clock *clock;
    const tch_matrices *rows, *columns; /* one of them may be NULL */
    int32_t rounded;                    /* as in tch_preconditioner */
    void *room;                         /* to unpack those that are packed */
    void *scratch;                      /* of any size, 0 too: time may depend on it, but no bit of the result */
    int64_t scratch_bytes;
    /* NULL, or with one factor alone the root X of the other side: rows take scale A X in place of A, and columns
     * scale X A, computed in `product`, a work buffer of the size of A in the arithmetic's type. */
    const tch_matrices *root;
    double scale;
    void *product;
} tch_factor_update;

/* The optimizers that update every element by itself. */
typedef enum tch_elementwise_kind {
    TCH_ELEMENTWISE_ADAMW = 0,
    TCH_ELEMENTWISE_SGD = 1,
    TCH_ELEMENTWISE_LION = 2
} tch_elementwise_kind;

/* Weight decay, with u the final direction of the step: the learning rate and `factor` times it is subtracted. */
typedef enum tch_decay {
    TCH_DECAY_DECOUPLED = 0, /* p = p (1 - lr weight_decay), before the step */
    TCH_DECAY_L2 = 1,        /* g = g + weight_decay p, by `gather` and `elementwise`; `apply` decays nothing */
    TCH_DECAY_CAUTIOUS = 2,  /* decoupled, of the elements with u p >= 0 alone */
    TCH_DECAY_WHOLE = 3      /* of `apply`: p = 0, before the step */
} tch_decay;

typedef struct tch_elementwise_rule {
    tch_elementwise_kind kind;
    tch_decay decay;
    int32_t amsgrad;  /* AdamW */
    int32_t nesterov; /* SGD */
} tch_elementwise_rule;

/* --- numbers of a step ------------------------------------------------------------------------------------------- */

/* *found = 1 and *found_inf = 1 if a gradient of the rectangles is not finite; otherwise they stay. Either may be NULL.
 * With `unscale` gradients are divided by *grad_scale in place, where that is not NULL, and looked at before and after.
 * Not stopped by skip. */
typedef tch_status tch_inspect_gradients_op(void *state, const tch_update *update, int32_t unscale, int32_t *found,
                                            float *found_inf);
/* skip = found or found_inf or the agreement says so; counts[0] grows by 1, and counts[1] by 1 where skip is set. Each
 * input may be NULL, for no. The agreement is a number and its complement, of which the largest over the ranks of a
 * group was taken: ranks came with different ones where it is no longer the complement. */
typedef tch_status tch_decide_skip_op(void *state, const int32_t *found, const float *found_inf,
                                      const int32_t *agreement, int32_t *skip, double *counts);
/* Every clock takes a step, unless skip is set (the other numbers are filled in all the same): step + 1, corrections
 * from beta1, beta2 and graft_beta2 (correction1 and correction2 are 1 where `correct` is 0), factor weights by the
 * rule, which are 0 and 1 where skip is set. `clocks` is an array on the host of addresses on the device. */
typedef tch_status tch_advance_op(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                                  const int32_t *skip, int32_t correct, tch_factor_rule rule);

/* --- steps ------------------------------------------------------------------------------------------------------- */

/* As PyTorch defines them, but for the decay: AdamW: p = p (1 - lr weight_decay); m (state[0]) = beta1 m + (1 - beta1)
 * g; v (state[1]) = beta2 v + (1 - beta2) g^2; p = p - lr factor m / correction1 / (sqrt(v / correction2) + eps), v
 * being the largest so far (state[2]) with amsgrad.
 *
 * SGD: with momentum != 0, buffer (state[0]) = momentum buffer + (1 - dampening) g, or g at the first step of the
 * clock; nesterov: g = g + momentum buffer, else g = buffer; p = p (1 - lr weight_decay) - lr g. state[0] may be NULL,
 * for no momentum.
 *
 * Lion: c = beta1 m + (1 - beta1) g, m being state[0] as it was; p = p (1 - lr weight_decay) - lr factor sign(c), the
 * sign of 0 and of a NaN being 0; m = beta2 m + (1 - beta2) g. */
typedef tch_status tch_elementwise_op(void *state, const tch_update *update, const tch_elementwise_rule *rule);
/* Reads gradients into blocks: g to block[0] and, with a filter, f to block[1]; with a graft, v takes g in, and the
 * norm of d is taken or d is written in place of f, or of g without a filter. Norms are summed in a fixed order over
 * the rectangles of a block. Where skip is set blocks are zeroed. Either block may be NULL, but for that of a d that is
 * written. *chosen is the type that the blocks have, block_type without sides; it may be NULL there. */
typedef tch_status tch_gather_op(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen);
/* Adds the Gram matrices of A to its factors: rows = clock->factor[0] A A' + clock->factor[1] rows, and columns likewise
 * with A' A. Both triangles are written, unless they are packed. */
typedef tch_status tch_update_factors_op(void *state, const tch_blocks *a, const tch_factor_update *how);
/* Y from X, of the arithmetic's type. With both sides Y may lie where X does, and `other` has room for as much; with
 * one it may not, and `other` is not used. norms[i] becomes |Y_i| where norms is not NULL. */
typedef tch_status tch_precondition_op(void *state, const tch_preconditioner *preconditioner, const tch_blocks *x,
                                       void *other, const tch_matrices *y, double *norms);
/* Adam inside blocks, for SOAP: v (state[1]) = beta2 v + (1 - beta2) block[0]^2; block[1] = block[1] / (sqrt(v) + eps)
 * times sqrt(correction2) / correction1. `notes` as in `gather`, of block[1], or NULL. */
typedef tch_status tch_rotated_adam_op(void *state, const tch_update *update, uint32_t *notes);
/* d = block[1], or block[0] where that is NULL, scaled by the rule; with momentum != 0 and state[2] not NULL, buffer
 * (state[2]) = momentum buffer + d; d = d + momentum buffer (nesterov) or buffer; p = p (1 - lr weight_decay) as
 * `decay` says; p = p - lr factor d. Where skip is set, norms of these blocks become -1 and nothing else changes. */
typedef tch_status tch_apply_op(void *state, const tch_update *update, tch_block_scale scale,
                                const double *target_norms, double *norms, int32_t nesterov, tch_decay decay);
/* NorMuon's step, for blocks of one rectangle each, whose rows are those of the rectangle, or its columns where
 * by_column is set: v (state[1], one number for each row) = beta2 v + (1 - beta2) times the mean of block[0]^2 over the
 * row; d is block[0] with every row divided by sqrt(v) + eps, and 0 where that is 0; norms[block_index] = |d|; p = p (1
 * - lr weight_decay) as `decay` says, less lr factor d / |d|, 0 being taken where the norm is 0. Sums are in double and
 * in a fixed order. `parts` has room for one number for every row of all rectangles. */
typedef tch_status tch_apply_rows_op(void *state, const tch_update *update, double *norms, double *parts,
                                     tch_decay decay);

/* --- loss scaling ------------------------------------------------------------------------------------------------ */

/* PyTorch's rule: with *found_inf, scale = scale backoff and tracker = 0; otherwise tracker + 1, and at `interval`
 * scale = scale growth, unless that is infinite, and tracker = 0. */
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
    tch_rotated_adam_op *rotated_adam; /* Shampoo's grafting has no way to a v that lies by blocks */
    tch_apply_op *apply;
    tch_apply_rows_op *apply_rows;     /* sums over rows of the parameter, which `apply` knows none of */
    tch_update_scale_op *update_scale; /* what it changes stays on the device */
} tch_update_ops;

#endif
