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
    double step;        /* steps taken, the one under way included once `advance` has run */
    double correction1; /* 1 - beta1^step, or 1 where nothing is corrected */
    double correction2; /* 1 - beta2^step, or 1 */
    double graft;       /* 1 - graft_beta2^step */
    double factor[2];   /* a factor C becomes factor[0] G G' + factor[1] C */
    float narrow[2];    /* the same two rounded */
    double spare;       /* a clock is 64 bytes */
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

/* How the moments of adamw, sgd and lion are kept: state[0] and state[1].
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
    void *grad;      /* of grad_type; read only, except by `unscale` */
    void *state[3];  /* of the type of the arithmetic; moments as tch_moments says */
    float *scale[2]; /* of the codes of state[0] and state[1] */
    void *block[2];  /* of block_type */
    const tch_clock *clock;
    int64_t rows, cols, stride, block_ld;
    int64_t first;       /* the number, in its parameter, of element (0, 0): what random numbers count by */
    int32_t parameter;   /* its number in the optimizer, for the same */
    int32_t block_index; /* which of the numbers per block belong to it; rectangles of one block follow each other */
    int32_t transposed;
    int32_t by_column; /* of row_moments and apply_rows: rows of the parameter are columns of the rectangle */
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
    tch_moments moments; /* of adamw, sgd and lion; not REAL only where `real` is F32 and there is no amsgrad */
} tch_update;

/* The generator of stochastic rounding, the same on every device: 16 random bits for element `e` of parameter `p` at
 * step `t` are the low half of word e % 4 of Philox-4x32-10 with the counter (e / 4 low, e / 4 high, p, t) and the key
 * (seed low, seed high). They are added below the kept bits of the float32, and the sum is cut off; what is not finite
 * is rounded to nearest. Moments have the word of p + 2^31: state[0] its low half, state[1] its high half. */

typedef enum tch_filter {
    TCH_FILTER_NONE = 0,    /* block[1] is not written */
    TCH_FILTER_EMA = 1,     /* s = beta1 s + (1 - beta1) g in state[0]; block[1] = s / correction1 */
    TCH_FILTER_NESTEROV = 2 /* the same s; block[1] = beta1 s + (1 - beta1) g */
} tch_filter;

/* Where a layer-wise step length comes from, when Shampoo gives only the direction. */
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
    TCH_BLOCK_GRAFT = 1,   /* wanted[b] / norms[b], 0 where norms[b] is 0 */
    TCH_BLOCK_UNIT_RMS = 2 /* sqrt(wanted[b]) / norms[b], 0 where norms[b] is 0; wanted[b] is its number of elements */
} tch_block_scale;

/* How clocks turn hyperparameters into a factor's weights. */
typedef enum tch_factor_rule {
    TCH_FACTOR_SUM = 0, /* 1 and 1 */
    TCH_FACTOR_EMA = 1, /* 1 - beta2 and beta2 */
    TCH_FACTOR_CORRECTED =
        2 /* (1 - beta2) / (1 - beta2^step), and 1 less that: the factor is always the corrected one */
} tch_factor_rule;

/* --- numbers of a step ------------------------------------------------------------------------------------------- */

/* *found = 1 if a gradient of the rectangles is not finite; otherwise *found stays. */
typedef tch_status tch_find_nonfinite_op(void *state, const tch_update *update, int32_t *found);
/* skip = found or found_inf says so; counts[0] grows by 1, and counts[1] by 1 where skip is set. Either input may be
 * NULL, for no. */
typedef tch_status tch_decide_skip_op(void *state, const int32_t *found, const float *found_inf, int32_t *skip,
                                      double *counts);
/* What the ranks of a group must agree on, after the largest of each number was taken over the group: numbers[2] is set
 * where numbers[0] is not the complement of numbers[1], that is, where ranks came with different ones. */
typedef tch_status tch_agree_op(void *state, int32_t *numbers);
/* Every clock takes a step, unless skip is set (the other numbers are filled in all the same): step + 1, corrections
 * from beta1, beta2 and graft_beta2 (correction1 and correction2 are 1 where `correct` is 0), factor weights by the
 * rule, which are 0 and 1 where skip is set. `clocks` is an array on the host of addresses on the device. */
typedef tch_status tch_advance_op(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                                  const int32_t *skip, int32_t correct, tch_factor_rule rule);

/* --- steps ------------------------------------------------------------------------------------------------------- */

/* AdamW as PyTorch defines it: p = p (1 - lr weight_decay); m (state[0]) = beta1 m + (1 - beta1) g; v (state[1]) =
 * beta2 v + (1 - beta2) g^2; p = p - lr factor m / correction1 / (sqrt(v / correction2) + eps), v being the largest so
 * far (state[2]) with amsgrad. l2: weight decay is added to g instead. */
typedef tch_status tch_adamw_op(void *state, const tch_update *update, int32_t amsgrad, int32_t l2);
/* SGD as PyTorch defines it: g = g + weight_decay p; with momentum != 0, buffer (state[0]) = momentum buffer + (1 -
 * dampening) g, or g at the first step of the clock; nesterov: g = g + momentum buffer, else g = buffer; p = p - lr g.
 * state[0] may be NULL, for no momentum. */
typedef tch_status tch_sgd_op(void *state, const tch_update *update, int32_t nesterov);
/* Lion: c = beta1 m + (1 - beta1) g, m being state[0] as it was; p = p (1 - lr weight_decay) - lr factor sign(c), the
 * sign of 0 and of a NaN being 0; m = beta2 m + (1 - beta2) g. */
typedef tch_status tch_lion_op(void *state, const tch_update *update);
/* Reads gradients into blocks: block[0] = g, with weight_decay p added where l2 is set; block[1] by the filter. Where
 * skip is set blocks are zeroed. Either block may be NULL. Where `largest` is not NULL, as it is only for backends that
 * have `two_sided`, largest[block_index] becomes the bits, as float32, of the largest |g| of a block, of which a NaN
 * counts as more than anything, and with a filter filtered[block_index] those of |f|; 0 where skip is set. */
typedef tch_status tch_gather_op(void *state, const tch_update *update, tch_filter filter, int32_t l2,
                                 uint32_t *largest, uint32_t *filtered);
/* The grafted direction d from g in block[0], f in block[1] (or block[0] where that is NULL) and v in state[1]:
 * norms[block_index] = |d| over the rectangles of a block, each summed in a fixed order; with `replace`, d takes f's
 * place. `scratch` of TCH_SCRATCH_GRAFT bytes. */
typedef tch_status tch_graft_op(void *state, const tch_update *update, tch_graft kind, int32_t replace, double *norms,
                                void *scratch);
/* Both in one pass, without `replace`, for blocks of the arithmetic's type and a kind that has a v. */
typedef tch_status tch_gather_graft_op(void *state, const tch_update *update, tch_filter filter, int32_t l2,
                                       tch_graft kind, double *norms, void *scratch, uint32_t *largest,
                                       uint32_t *filtered);
/* Adam inside blocks, for SOAP: v (state[1]) = beta2 v + (1 - beta2) block[0]^2; block[1] = block[1] / (sqrt(v) + eps)
 * times sqrt(correction2) / correction1, and largest[block_index] as in gather of that. */
typedef tch_status tch_rotated_adam_op(void *state, const tch_update *update, uint32_t *largest);
/* d = block[1], or block[0] where that is NULL, scaled by the rule; with momentum != 0 and state[2] not NULL, buffer
 * (state[2]) = momentum buffer + d; d = d + momentum buffer (nesterov) or buffer; p = p (1 - lr weight_decay) where
 * `decay` is set; p = p - lr factor d. */
typedef tch_status tch_apply_op(void *state, const tch_update *update, tch_block_scale scale, const double *wanted,
                                const double *norms, int32_t nesterov, int32_t decay);
/* NorMuon's second moments, for blocks of one rectangle each, whose rows are those of the rectangle, or its columns
 * where by_column is set: v (state[1], one number for each row) = beta2 v + (1 - beta2) times the mean of block[0]^2
 * over the row; norms[block_index] = |d|, d being block[0] with every row divided by sqrt(v) + eps, and 0 where that is
 * 0. Sums are in double and in a fixed order. `parts` has room for one number for every row of all rectangles. */
typedef tch_status tch_row_moments_op(void *state, const tch_update *update, double *norms, double *parts);
/* The step with those: p = p (1 - lr weight_decay) - lr factor d / norms[block_index], 0 being taken where the norm is
 * 0. */
typedef tch_status tch_apply_rows_op(void *state, const tch_update *update, const double *norms);
/* C = clock->factor[0] A A' + clock->factor[1] C (transpose: A' A), both triangles written. `rounded` allows operands
 * to be rounded as in gemm_rounded. */
typedef tch_status tch_factor_update_op(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                        int32_t rounded, const tch_matrices *c);
/* Both at once: rows as above, cols transposed. `largest` is NULL, or what gather_graft has left of each matrix of A.
 * `scratch` of any size, 0 too: time may depend on it, but no bit of the result. Factors whose `ld` is 0 are packed as
 * `pack` does it, `stride` elements apart; `halves_take` has then said that these can be. */
typedef tch_status tch_factors_update_op(void *state, const tch_matrices *a, const uint32_t *largest,
                                         const tch_clock *clock, int32_t rounded, const tch_matrices *rows,
                                         const tch_matrices *cols, void *scratch, int64_t scratch_bytes);
/* Y = L X R', or L' X R out of bases, for float32, with operands that may be rounded to 11 bits as in gemm_rounded. Y
 * may be X. `largest` is NULL or the bits, as float32, of the largest |x| of each matrix, of which a NaN counts as more
 * than anything. `other` has room for as much as X; norms[i] becomes |Y_i| where norms is not NULL. */
typedef tch_status tch_two_sided_op(void *state, tch_sides sides, const tch_matrices *left, const tch_matrices *right,
                                    const tch_matrices *x, const uint32_t *largest, void *other, const tch_matrices *y,
                                    double *norms);
/* The two are there together, with those before. Whether `factors_update` of these factors and `two_sided` with these
 * roots or bases, to y, take blocks as `gather_halves` writes them, with their largest elements: the bits are then
 * those of blocks of float32. Of data only where it lies is looked at. */
typedef int32_t tch_halves_take_op(void *state, const tch_matrices *rows, const tch_matrices *cols,
                                   const tch_matrices *left, const tch_matrices *right, const tch_matrices *y);
/* After gather or gather_graft, with what it left: g to block[0] and f to block[1] once more, of float16 and times the
 * power of two that brings the largest of a block to between 2^14 and 2^15. States are read. Either block may be
 * NULL. */
typedef tch_status tch_gather_halves_op(void *state, const tch_update *update, tch_filter filter, int32_t l2,
                                        const uint32_t *largest, const uint32_t *filtered);

/* --- loss scaling ------------------------------------------------------------------------------------------------ */

/* Loss scaling: gradients are divided by *grad_scale in place, and *found_inf = 1 where one of them is not finite
 * (before or after); otherwise *found_inf stays. */
typedef tch_status tch_unscale_op(void *state, const tch_update *update, float *found_inf);
/* PyTorch's rule: with *found_inf, scale = scale backoff and tracker = 0; otherwise tracker + 1, and at `interval`
 * scale = scale growth, unless that is infinite, and tracker = 0. */
typedef tch_status tch_update_scale_op(void *state, float *scale, int32_t *tracker, const float *found_inf,
                                       double growth, double backoff, int32_t interval);

typedef struct tch_update_ops {
    /* all but the last five REQUIRED */
    tch_find_nonfinite_op *find_nonfinite;
    tch_decide_skip_op *decide_skip;
    tch_agree_op *agree;
    tch_advance_op *advance;
    tch_adamw_op *adamw;
    tch_sgd_op *sgd;
    tch_lion_op *lion;
    tch_gather_op *gather;
    tch_graft_op *graft;
    tch_rotated_adam_op *rotated_adam;
    tch_apply_op *apply;
    tch_row_moments_op *row_moments;
    tch_apply_rows_op *apply_rows;
    tch_factor_update_op *factor_update;
    tch_unscale_op *unscale;
    tch_update_scale_op *update_scale;
    /* or NULL: one after the other is as good */
    tch_gather_graft_op *gather_graft;
    tch_factors_update_op *factors_update;
    tch_two_sided_op *two_sided;
    tch_halves_take_op *halves_take;
    tch_gather_halves_op *gather_halves;
} tch_update_ops;

#endif
