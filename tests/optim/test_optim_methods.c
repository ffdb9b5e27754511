/* Every method vs its plain reference: every option, alone and combined, all layouts, in float64 and float32; groups
 * whose hyperparameters change between steps; zero gradients.
 *
 * Tolerances are relative to the length of a parameter's path. In float32 an elementwise step has a dozen roundings,
 * and a moving average carries those of earlier steps: 2 (steps + 10) u. A beta rounded before it is subtracted from 1
 * would cost a hundred times as much. A step of Lion has length lr for any gradient, so an error shows only in a sign:
 * if c = beta1 m + (1 - beta1) g is within its rounding, about 3e-7 of all elements in float32. Its float32 shapes are
 * small enough to expect none.
 *
 * A GPU orthogonalizes float32 matrices in bfloat16: measured for these shapes and options, that is 0.0005 to 0.02 of
 * the path, most for the smallest matrix. Second moments of NorMuon's rows add nothing to it: they are means of
 * squares, and their roots halve an error.
 *
 * Shampoo in float64 with the eigen method: a root is exact to about u / (root d), with d the relative damping, and its
 * smallest direction is cond^(1/root) times weaker than its norm: 1e-11 leaves room. In float32 the same is 1.5e-5
 * times 5.6. Other methods guarantee an error of `tolerance` in norm, 5.6 times that in the weakest direction, for each
 * of at most four factors.
 *
 * SOAP's trajectory is determined only if the first gradient determines the bases, up to signs: every dimension with a
 * factor is at most as large as all others together. In float32 the error of a basis is u |C| / gap; gaps of these
 * factors are 0.01 and more, and their effect on a direction is second order in neighboring second moments. */
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/elements.h"
#include "support/testing.h"

#define STEPS 30
#define EXACT 1e-11 /* Shampoo's, in float64 */

#define SHAPES(list) (int32_t) TEST_COUNT(list), list

/* Vectors and scalars, empty ones, row-major and column-major matrices, channels last; gradients in other layouts. */
static const trial_shape elementwise_shapes[] = {
    {.ndim = 1, .shape = {37}},
    {.ndim = 0},
    {.ndim = 1, .shape = {0}},
    {.ndim = 2, .shape = {13, 9}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {2, 2}, .gradient = LAYOUT_TRANSPOSED}, /* the smallest whose transpose is another */
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}},
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 3, .shape = {3, 1, 5}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {17, 31}, .gradient = LAYOUT_REVERSED},
    {.ndim = 1, .shape = {5003}, .gradient = LAYOUT_OFFSET}, /* not of Lion in float32 */
};

/* Wide and tall ones share classes; column-major ones have the tensor's rows along memory's columns. */
static const trial_shape matrix_shapes[] = {
    {.ndim = 2, .shape = {12, 12}},
    {.ndim = 2, .shape = {31, 7}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {7, 31}},
    {.ndim = 2, .shape = {31, 7}, .order = {1, 0}},
    {.ndim = 2, .shape = {7, 31}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 2, .shape = {5, 40}},
    {.ndim = 2, .shape = {2, 2}},
    {.ndim = 2, .shape = {64, 33}},
    {.ndim = 3, .shape = {1, 9, 16}, .order = {0, 2, 1}},
    {.ndim = 4, .shape = {6, 3, 2, 2}},
    {.ndim = 4, .shape = {9, 2, 2, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 4, .shape = {9, 2, 2, 4}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 5, .shape = {3, 1, 3, 2, 3}},
    {.ndim = 2, .shape = {31, 7}},
    {.ndim = 2, .shape = {1, 17}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};

/* Sides that are powers of two times a few: a GPU has kernels for evenly divisible parameters. */
static const trial_shape even[] = {
    {.ndim = 2, .shape = {64, 64}},
    {.ndim = 2, .shape = {128, 64}},
    {.ndim = 2, .shape = {64, 128}},
    {.ndim = 2, .shape = {192, 32}, .order = {1, 0}},
};

/* Blocks of 8: partial, full, tall, wide; shapes that become a vector; ranks 3 to 5 with sizes of 1 between;
 * column-major; channels last; and parameters for AdamW. */
static const trial_shape shampoo_shapes[] = {
    {.ndim = 2, .shape = {20, 13}},
    {.ndim = 2, .shape = {16, 8}},
    {.ndim = 2, .shape = {21, 3}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {3, 21}},
    {.ndim = 2, .shape = {1, 17}},
    {.ndim = 3, .shape = {4, 3, 5}, .gradient = LAYOUT_REVERSED},
    {.ndim = 3, .shape = {5, 1, 11}},
    {.ndim = 4, .shape = {6, 3, 2, 2}},
    {.ndim = 4, .shape = {9, 2, 2, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 5, .shape = {3, 2, 3, 2, 3}},
    {.ndim = 5, .shape = {4, 5, 2, 3, 4}},
    {.ndim = 2, .shape = {7, 12}, .order = {1, 0}},
    {.ndim = 2, .shape = {7, 12}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};
/* Determined by the first gradient. */
static const trial_shape soap_shapes[] = {
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {7, 7}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 5, 6}, .gradient = LAYOUT_REVERSED},
    {.ndim = 3, .shape = {3, 4, 2}},
    {.ndim = 4, .shape = {5, 2, 3, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 5, .shape = {2, 3, 2, 3, 2}},
    {.ndim = 4, .shape = {1, 6, 1, 6}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};

/* A dimension above the limit has no factor, nor has a thin one; blocks of a square matrix have both. */
static const trial_shape one_sided[] = {
    {.ndim = 2, .shape = {30, 6}},
    {.ndim = 2, .shape = {5, 33}},
    {.ndim = 2, .shape = {20, 7}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 21, 5}},
    {.ndim = 4, .shape = {9, 2, 2, 3}},
};
static const trial_shape thin[] = {{.ndim = 2, .shape = {2, 201}}, {.ndim = 2, .shape = {301, 3}}};
static const trial_shape cut[] = {{.ndim = 2, .shape = {16, 24}}, {.ndim = 3, .shape = {16, 3, 8}}};
static const trial_shape merged[] = {{.ndim = 4, .shape = {12, 3, 2, 2}}, {.ndim = 3, .shape = {4, 2, 2}}};

#define CAUTIOUS SET(weight_decay, 0.3), SET(weight_decay_type, TCH_WEIGHT_DECAY_CAUTIOUS)

static const trial_option sgd_options[] = {
    {.name = "plain"},
    {"maximize", {SET(maximize, 1)}},
    {"decoupled", {SET(weight_decay, 0.3), SET(weight_decay_type, TCH_WEIGHT_DECAY_DECOUPLED)}},
    {"cautious decay", {CAUTIOUS}},
    {"momentum", {SET(momentum, 0.9)}},
    {"dampening", {SET(momentum, 0.9), SET(dampening, 0.3)}},
    {"nesterov", {SET(momentum, 0.8), SET(nesterov, 1)}},
    {"nesterov with decay", {SET(momentum, 0.8), SET(nesterov, 1), SET(weight_decay, 0.3), SET(amsgrad, 1)}},
    {"much at once", {SET(momentum, 0.9), SET(dampening, 0.3), SET(maximize, 1), CAUTIOUS}},
    {.name = NULL},
};

static const trial_option adamw_options[] = {
    {.name = "defaults"},
    {"maximize", {SET(maximize, 1)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"l2", {SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(weight_decay, 0.3)}},
    {"cautious decay", {CAUTIOUS}},
    {"amsgrad", {SET(amsgrad, 1), SET(beta2, 0.5)}}, /* so that the largest is not always the latest */
    {"betas", {SET(beta1, 0.0), SET(beta2, 0.99), SET(eps, 0.1)}},
    {"much at once",
     {SET(amsgrad, 1), SET(beta2, 0.5), SET(maximize, 1), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2),
      SET(weight_decay, 0.3)}},
    {.name = NULL},
};

static const trial_option lion_options[] = {
    {.name = "defaults"},
    {"decay", {SET(weight_decay, 0.3)}},
    {"maximize", {SET(maximize, 1)}},
    {"betas", {SET(beta1, 0.5), SET(beta2, 0.7)}},
    {"no average", {SET(beta1, 0.0), SET(beta2, 0.0)}}, /* the sign of the gradient itself */
    {"cautious decay", {CAUTIOUS}},
    /* Hyperparameters of other kinds, which Lion ignores. */
    {"l2, options of others",
     {SET(weight_decay, 0.3), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(momentum, 0.5), SET(nesterov, 1),
      SET(eps, 0.1), SET(use_bias_correction, 0), SET(amsgrad, 1), SET(adamw.lr, 3.0)}},
    {"much at once", {SET(weight_decay, 0.3), SET(maximize, 1), SET(beta1, 0.5), SET(beta2, 0.7)}},
    {.name = NULL},
};

static const trial_option muon_options[] = {
    {.name = "defaults"},
    {"Muon's polynomial", {SET(muon.method, TCH_ORTHO_MUON)}},
    {"float32 products", {SET(muon.ns_dtype, TCH_NS_FLOAT32)}},
    {"own polynomial",
     {SET(muon.method, TCH_ORTHO_MUON), SET(muon.ns_coefficients[0], 2.0), SET(muon.ns_coefficients[1], -1.5),
      SET(muon.ns_coefficients[2], 0.5), SET(muon.ns_steps, 7)}},
    {"Polar Express", {SET(muon.method, TCH_ORTHO_POLAR_EXPRESS)}},
    {"eight steps of it", {SET(muon.method, TCH_ORTHO_POLAR_EXPRESS), SET(muon.ns_steps, 8)}},
    {"short steps after the long ones", {SET(muon.ns_steps, 5)}},
    {"one step", {SET(muon.ns_steps, 1)}},
    /* A lower bound of the norm: the direction shrinks with a gradient far below it. */
    {"a large eps", {SET(eps, 100.0), SET(muon.ns_steps, 2), SET(muon.method, TCH_ORTHO_MUON), SET(weight_decay, 0.0)}},
    {"no momentum", {SET(momentum, 0.0)}},
    {"no decay, nor AdamW's amsgrad", {SET(weight_decay, 0.0), SET(amsgrad, 1)}},
    {"l2", {SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
    {"cautious decay", {CAUTIOUS}},
    {"match_rms_adamw", {SET(muon.adjust_lr_fn, TCH_ADJUST_LR_MATCH_RMS_ADAMW)}},
    {"plain lr", {SET(muon.adjust_lr_fn, TCH_ADJUST_LR_PLAIN)}},
    {"maximize", {SET(maximize, 1)}},
    {"constant norm", {SET(constant_norm, 1)}},
    {"constant norm, maximize, l2",
     {SET(constant_norm, 1), SET(maximize, 1), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
    {"other numbers for scalars",
     {SET(adamw.lr, 0.003), SET(adamw.beta1, 0.7), SET(adamw.beta2, 0.8), SET(adamw.eps, 0.1),
      SET(adamw.weight_decay, 0.0)}},
    {"much at once",
     {SET(muon.method, TCH_ORTHO_MUON), SET(muon.adjust_lr_fn, TCH_ADJUST_LR_MATCH_RMS_ADAMW), SET(nesterov, 0),
      SET(maximize, 1), SET(adamw.lr, 0.003), SET(adamw.beta1, 0.7), SET(adamw.beta2, 0.8), SET(adamw.eps, 0.1),
      SET(adamw.weight_decay, 0.0), SET(weight_decay, 0.4)}},
    {.name = NULL},
};

/* Muon shares the code; these are NorMuon's own options, and their combinations. */
static const trial_option normuon_options[] = {
    {.name = "defaults"},
    {"other beta2", {SET(beta2, 0.5)}},
    {"no memory of rows", {SET(beta2, 0.0)}}, /* every row by its own norm of this step */
    {"a large eps", {SET(eps, 0.3)}},         /* as large as the roots it is added to */
    {"no eps", {SET(eps, 0.0)}},
    {"cautious decay", {CAUTIOUS}},
    {"much at once",
     {SET(muon.method, TCH_ORTHO_MUON), SET(muon.adjust_lr_fn, TCH_ADJUST_LR_ORIGINAL), SET(nesterov, 0),
      SET(maximize, 1), SET(adamw.lr, 0.003), SET(adamw.beta1, 0.7), SET(adamw.beta2, 0.8), SET(adamw.eps, 0.1),
      SET(adamw.weight_decay, 0.0), SET(beta2, 0.5), SET(weight_decay, 0.4)}},
    {.name = NULL},
};

static const trial_option shampoo_options[] = {
    {.name = "sums"},
    {"packed", {SET(memory.packed_factors, 1)}},
    {"averaged factors", {SET(beta2, 0.95), SET(use_bias_correction, 0)}},
    {"corrected factors", {SET(beta2, 0.95), SET(use_bias_correction, 1)}},
    {"no filter", {SET(beta1, 0.0)}},
    {"uncorrected filter", {SET(use_bias_correction, 0)}},
    {"absolute damping", {SET(numerics.damping, 0.0), SET(eps, 0.05)}},
    {"decoupled decay", {SET(weight_decay, 0.2)}},
    {"l2", {SET(weight_decay, 0.2), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
    {"cautious decay", {CAUTIOUS}},
    {"maximize", {SET(maximize, 1)}},
    {"amsgrad, which is AdamW's own", {SET(amsgrad, 1)}},
    {"momentum", {SET(momentum, 0.8)}},
    {"nesterov", {SET(momentum, 0.8), SET(nesterov, 1)}},
    {"no merging", {SET(shampoo.merge_dims, 0)}},
    {"vectors too", {SET(shampoo.precondition_1d, 1)}},
    {"blocks of 3", {SET(shampoo.max_preconditioner_dim, 3)}},
    {"whole matrices", {SET(shampoo.max_preconditioner_dim, 1024)}},
    {"staggered at every step", {SET(shampoo.stagger, 1)}},
    {"every third step", {SET(shampoo.precondition_frequency, 3)}},
    {"from the fifth step, every fourth",
     {SET(shampoo.start_preconditioning_step, 5), SET(shampoo.precondition_frequency, 4)}},
    {"other numbers for scalars",
     {SET(adamw.lr, 0.01), SET(adamw.beta1, 0.7), SET(adamw.beta2, 0.8), SET(adamw.eps, 0.1),
      SET(adamw.weight_decay, 0.5), SET(weight_decay, 0.1)}},
    /* Typical settings: Adam's step lengths, moving averages, decoupled weight decay, momentum after
     * preconditioning. */
    {"as in practice",
     {SET(beta2, 0.95), SET(use_bias_correction, 1), SET(weight_decay, 0.2), SET(momentum, 0.8),
      SET(shampoo.grafting, TCH_GRAFTING_ADAM), SET(shampoo.start_preconditioning_step, 3),
      SET(shampoo.precondition_frequency, 5)}},
    {"as in the paper",
     {SET(beta1, 0.0), SET(momentum, 0.8), SET(numerics.damping, 0.0), SET(eps, 0.05),
      SET(shampoo.grafting, TCH_GRAFTING_ADAGRAD)}},
    {"much at once",
     {SET(beta2, 0.95), SET(use_bias_correction, 0), SET(weight_decay, 0.2),
      SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(momentum, 0.8), SET(nesterov, 1), SET(maximize, 1),
      SET(shampoo.merge_dims, 0), SET(shampoo.precondition_1d, 1), SET(shampoo.grafting, TCH_GRAFTING_RMSPROP),
      SET(shampoo.grafting_beta2, 0.9), SET(shampoo.grafting_eps, 1e-3), SET(shampoo.precondition_frequency, 2)}},
    {.name = NULL},
};

static const trial_option kl_shampoo_options[] = {
    {.name = "defaults"},
    {"packed", {SET(memory.packed_factors, 1)}},
    {"other betas", {SET(beta1, 0.5), SET(beta2, 0.8)}},
    {"no filter", {SET(beta1, 0.0)}},
    {"no correction", {SET(use_bias_correction, 0)}},
    {"absolute damping", {SET(numerics.damping, 0.0), SET(eps, 0.05)}},
    {"decoupled decay", {SET(weight_decay, 0.2)}},
    {"l2", {SET(weight_decay, 0.2), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
    {"cautious decay", {CAUTIOUS}},
    {"maximize", {SET(maximize, 1)}},
    {"no merging", {SET(shampoo.merge_dims, 0)}},
    {"vectors too", {SET(shampoo.precondition_1d, 1)}},
    {"blocks of 3", {SET(shampoo.max_preconditioner_dim, 3)}},
    {"whole matrices", {SET(shampoo.max_preconditioner_dim, 1024)}},
    {"staggered at every step", {SET(shampoo.stagger, 1)}},
    {"every third step", {SET(shampoo.precondition_frequency, 3)}},
    {"other numbers for scalars",
     {SET(adamw.lr, 0.01), SET(adamw.beta1, 0.7), SET(adamw.beta2, 0.8), SET(adamw.eps, 0.1),
      SET(adamw.weight_decay, 0.5), SET(weight_decay, 0.1)}},
    {"much at once",
     {SET(beta1, 0.8), SET(use_bias_correction, 0), SET(weight_decay, 0.2), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2),
      SET(maximize, 1), SET(shampoo.merge_dims, 0), SET(shampoo.precondition_1d, 1),
      SET(shampoo.precondition_frequency, 2)}},
    {.name = NULL},
};

static const trial_option soap_options[] = {
    {.name = "defaults"},
    {"packed", {SET(memory.packed_factors, 1)}},
    {"every step", {SET(shampoo.precondition_frequency, 1)}},
    {"every tenth step", {SET(shampoo.precondition_frequency, 10)}},
    {"other betas", {SET(beta1, 0.8), SET(beta2, 0.99), SET(eps, 1e-3)}},
    {"own beta for factors", {SET(soap.shampoo_beta, 0.7)}},
    {"no correction", {SET(use_bias_correction, 0)}},
    {"normalized", {SET(soap.normalize_grads, 1)}},
    {"orthogonalized", {SET(soap.orthogonalize, 1)}},
    {"constant norm", {SET(constant_norm, 1), SET(soap.normalize_grads, 1)}},
    {"constant norm, orthogonalized, l2",
     {SET(constant_norm, 1), SET(soap.orthogonalize, 1), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
    {"orthogonalized, cautious decay", {SET(soap.orthogonalize, 1), CAUTIOUS}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"l2", {SET(weight_decay, 0.2), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
    {"cautious decay", {CAUTIOUS}},
    {"maximize", {SET(maximize, 1)}},
    {"amsgrad, which is AdamW's own", {SET(amsgrad, 1)}},
    {"other numbers for scalars",
     {SET(adamw.lr, 0.01), SET(adamw.beta1, 0.7), SET(adamw.beta2, 0.8), SET(adamw.eps, 0.1),
      SET(adamw.weight_decay, 0.0)}},
    {"much at once",
     {SET(shampoo.precondition_frequency, 1), SET(beta1, 0.8), SET(beta2, 0.99), SET(eps, 1e-3),
      SET(soap.shampoo_beta, 0.7), SET(soap.normalize_grads, 1), SET(weight_decay, 0.2),
      SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(maximize, 1)}},
    {.name = NULL},
};

#define ROOT(k) SET(shampoo.exponent_override, k), SET(numerics.damping, 1e-2), SET(lr, 0.01)
#define ADAPTIVE SET(shampoo.refresh_drift, 1.2), SET(shampoo.precondition_frequency, 9), SET(beta2, 0.95)
#define METHOD(name, error)                                                                                            \
    SET(numerics.method, TCH_ROOT_##name), SET(shampoo.max_preconditioner_dim, 24), SET(numerics.tolerance, error)

/* Options with their own shapes or float64 error bounds. */
static const struct special_case {
    tch_optim_kind kind;
    trial_option option;
    double tolerance; /* 0: the method's */
    int32_t count;
    const trial_shape *shapes; /* NULL: the method's */
} special_cases[] = {
    {TCH_OPTIM_MUON, {"even sides", {SET(weight_decay, 0.1)}}, 0.0, SHAPES(even)},
    {TCH_OPTIM_MUON, {"even sides, Muon's polynomial", {SET(muon.method, TCH_ORTHO_MUON)}}, 0.0, SHAPES(even)},
    {TCH_OPTIM_NORMUON, {"even sides", {SET(weight_decay, 0.1)}}, 0.0, SHAPES(even)},
    {TCH_OPTIM_SOAP, {"one-sided", {SET(shampoo.max_preconditioner_dim, 8)}}, 0.0, SHAPES(one_sided)},
    {TCH_OPTIM_SOAP,
     {"one-sided, orthogonalized", {SET(shampoo.max_preconditioner_dim, 8), SET(soap.orthogonalize, 1)}},
     0.0,
     SHAPES(one_sided)},
    {TCH_OPTIM_SOAP,
     {"orthogonalized blocks",
      {SET(shampoo.max_preconditioner_dim, 8), SET(soap.block, 1), SET(soap.orthogonalize, 1), SET(constant_norm, 1)}},
     0.0,
     SHAPES(cut)},
    {TCH_OPTIM_SOAP, {"thin", {SET(shampoo.max_preconditioner_dim, 1000)}}, 0.0, SHAPES(thin)},
    {TCH_OPTIM_SOAP, {"blocks", {SET(shampoo.max_preconditioner_dim, 8), SET(soap.block, 1)}}, 0.0, SHAPES(cut)},
    {TCH_OPTIM_SOAP,
     {"merged", {SET(shampoo.max_preconditioner_dim, 64), SET(shampoo.merge_dims, 1)}},
     0.0,
     SHAPES(merged)},
    {TCH_OPTIM_SHAMPOO, {"adaptive", {ADAPTIVE}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"adaptive, grafted", {ADAPTIVE, SET(shampoo.grafting, TCH_GRAFTING_ADAM)}}, EXACT, 0, NULL},
    {TCH_OPTIM_KL_SHAMPOO, {"adaptive", {ADAPTIVE}}, 10.0 * EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"inverses", {ROOT(1)}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"square roots", {ROOT(2)}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"third roots", {ROOT(3)}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"fourth roots", {ROOT(4)}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"sixth roots", {ROOT(6)}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"eighth roots", {ROOT(8)}}, EXACT, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"any method", {METHOD(AUTO, 0.0)}}, 4 * 5.6 * 1e-9, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"any method, 1e-6", {METHOD(AUTO, 1e-6)}}, 4 * 5.6 * 1e-6, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"products", {METHOD(NEWTON, 0.0)}}, 4 * 5.6 * 1e-9, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"products, 1e-6", {METHOD(NEWTON, 1e-6)}}, 4 * 5.6 * 1e-6, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"fractions", {METHOD(RATIONAL, 0.0)}}, 4 * 5.6 * 1e-9, 0, NULL},
    {TCH_OPTIM_SHAMPOO, {"fractions, 1e-6", {METHOD(RATIONAL, 1e-6)}}, 4 * 5.6 * 1e-6, 0, NULL},
};

/* In addition to `base`, `first` is one group's initial setting and `changes` are applied to all between steps. */
typedef struct method {
    tch_optim_kind kind;
    double rounded; /* with factors: the tolerance on a GPU with products of TCH_PRECISION_HIGH, which have 11 bits */
    const trial_option *options;
    int32_t count;
    const trial_shape *shapes;
    trial_setting base[9], first[8], changes[9];
} method;

static const method methods[] = {
    {TCH_OPTIM_SGD,
     0.0,
     sgd_options,
     SHAPES(elementwise_shapes),
     {SET(lr, 0.02)},
     {SET(momentum, 0.8), SET(dampening, 0.1), SET(weight_decay, 0.05)},
     {SET(dampening, 0.0), SET(momentum, 0.5)}},
    {TCH_OPTIM_ADAMW,
     0.0,
     adamw_options,
     SHAPES(elementwise_shapes),
     {SET(lr, 0.02), SET(weight_decay, 0.1)},
     {SET(weight_decay, 0.15), SET(beta1, 0.8), SET(beta2, 0.97), SET(eps, 1e-6)},
     {SET(beta1, 0.5), SET(eps, 1e-3)}},
    {TCH_OPTIM_LION,
     0.0,
     lion_options,
     SHAPES(elementwise_shapes),
     {SET(lr, 0.02)},
     {SET(weight_decay, 0.05), SET(beta1, 0.85), SET(beta2, 0.95)},
     {SET(beta1, 0.7)}},
    {TCH_OPTIM_SHAMPOO,
     5e-3,
     shampoo_options,
     SHAPES(shampoo_shapes),
     {SET(lr, 0.05), SET(eps, 1e-8), SET(numerics.damping, 1e-3), SET(shampoo.max_preconditioner_dim, 8),
      SET(shampoo.precondition_frequency, 1), SET(shampoo.stagger, 0), SET(numerics.method, TCH_ROOT_EIGEN),
      SET(numerics.precision, TCH_PRECISION_HIGHEST)},
     {SET(beta2, 0.95), SET(weight_decay, 0.2), SET(momentum, 0.8), SET(shampoo.grafting, TCH_GRAFTING_ADAM)},
     {SET(momentum, 0.6), SET(beta1, 0.8), SET(beta2, 0.9), SET(numerics.damping, 3e-3),
      SET(shampoo.grafting_beta2, 0.99), SET(shampoo.grafting_eps, 1e-5), SET(adamw.beta1, 0.6), SET(adamw.eps, 1e-3)}},
    {TCH_OPTIM_KL_SHAMPOO,
     5e-3,
     kl_shampoo_options,
     SHAPES(shampoo_shapes),
     {SET(lr, 0.05), SET(numerics.damping, 1e-3), SET(shampoo.max_preconditioner_dim, 8),
      SET(shampoo.precondition_frequency, 1), SET(shampoo.stagger, 0), SET(numerics.method, TCH_ROOT_EIGEN),
      SET(numerics.precision, TCH_PRECISION_HIGHEST)},
     {SET(weight_decay, 0.2)},
     {SET(beta1, 0.8), SET(beta2, 0.9), SET(numerics.damping, 3e-3), SET(adamw.beta1, 0.6), SET(adamw.eps, 1e-3)}},
    {TCH_OPTIM_SOAP,
     2e-2,
     soap_options,
     SHAPES(soap_shapes),
     {SET(lr, 0.02), SET(shampoo.precondition_frequency, 3), SET(shampoo.stagger, 0),
      SET(numerics.precision, TCH_PRECISION_HIGHEST)},
     {SET(weight_decay, 0.05)},
     {SET(beta1, 0.9), SET(beta2, 0.95), SET(eps, 1e-5), SET(soap.shampoo_beta, 0.8),
      SET(shampoo.precondition_frequency, 2)}},
    {TCH_OPTIM_MUON,
     0.0,
     muon_options,
     SHAPES(matrix_shapes),
     {SET(lr, 0.02)},
     {SET(momentum, 0.8)},
     {SET(weight_decay, 0.1), SET(adamw.lr, 0.01), SET(adamw.weight_decay, 0.2), SET(adamw.beta1, 0.5)}},
    {TCH_OPTIM_NORMUON,
     0.0,
     normuon_options,
     SHAPES(matrix_shapes),
     {SET(lr, 0.02)},
     {SET(momentum, 0.8), SET(beta2, 0.9), SET(eps, 1e-3)},
     {SET(weight_decay, 0.1), SET(beta2, 0.7), SET(adamw.lr, 0.01)}},
};

static tch_optim_config base_of(const method *m)
{
    tch_optim_config c = test_optim_defaults(m->kind);
    trial_set(&c, m->base);
    return c;
}

static double tolerance_of(const method *m, tch_dtype dtype, tch_precision precision)
{
    bool elementwise = m->rounded == 0.0 && !ref_orthogonalizes(m->kind);
    bool rounded = m->rounded > 0.0 && dtype.bits == 32 && precision == TCH_PRECISION_HIGH;
    return elementwise ? 2.0 * (STEPS + 10) * test_arithmetic_roundoff(dtype)
           : rounded   ? m->rounded
                       : trial_tolerance(m->kind, dtype);
}

static void take_trial(tch_context *context, tch_dtype dtype, const tch_optim_config *c, int32_t count,
                       const trial_shape *shapes, double tolerance)
{
    trial t;
    trial_open(&t, context, dtype, dtype, c, count, shapes);
    trial_steps(&t, STEPS);
    trial_check(&t, tolerance);
}

static void check_option(tch_context *context, const method *m, const struct special_case *s, tch_dtype dtype,
                         tch_precision precision)
{
    double tolerance = s->tolerance > 0.0 ? s->tolerance : tolerance_of(m, dtype, precision);
    tch_optim_config c = base_of(m);
    c.numerics.precision = precision;
    trial_set(&c, s->option.settings);
    tolerance = c.muon.ns_dtype == TCH_NS_FLOAT32 && dtype.bits == 32 ? 1e-4 : tolerance; /* a GPU's too */
    test_case("%s, %s, %s, precision %d", tch_optim_kind_name(m->kind), s->option.name, tch_dtype_name(dtype),
              precision);
    if (test_offers_method(c.numerics.method)) {
        take_trial(context, dtype, &c, s->shapes != NULL ? s->count : m->count,
                   s->shapes != NULL ? s->shapes : m->shapes, tolerance);
    }
}

static void check_method(tch_context *context, const method *m, tch_dtype dtype, tch_precision precision)
{
    for (const trial_option *o = m->options; o->name != NULL; o++) {
        const struct special_case usual = {.option = *o};
        check_option(context, m, &usual, dtype, precision);
    }
    for (const struct special_case *s = special_cases; s < special_cases + TEST_COUNT(special_cases); s++) {
        if (s->kind == m->kind && (s->tolerance == 0.0 || dtype.bits == 64)) {
            check_option(context, m, s, dtype, precision);
        }
    }
}

TEST(every_option)
{
    for (const method *m = methods; m < methods + TEST_COUNT(methods); m++) {
        check_method(*state, m, TCH_FLOAT64, TCH_PRECISION_HIGHEST);
        check_method(*state, m, TCH_FLOAT32, TCH_PRECISION_HIGHEST);
        if (m->rounded > 0.0 && !test_on_cpu()) { /* which rounds no products */
            check_method(*state, m, TCH_FLOAT32, TCH_PRECISION_HIGH);
        }
    }
}

static const method *method_of(tch_optim_kind kind)
{
    const method *m = methods;
    while (m->kind != kind) {
        m++;
    }
    return m;
}

/* Every grafting, with and without filtering, before and after the first refresh. */
TEST(graftings)
{
    const method *m = method_of(TCH_OPTIM_SHAMPOO);
    for (int i = 0; i < 4 * (TCH_GRAFTING_ADAM + 1); i++) {
        tch_optim_config c = base_of(m);
        c.shampoo.grafting = (tch_grafting)(i / 4);
        c.shampoo.grafting_beta2 = 0.97;
        c.shampoo.grafting_eps = 1e-4;
        c.beta1 = i % 2 ? 0.0 : 0.9;
        c.shampoo.start_preconditioning_step = i / 2 % 2 ? 7 : -1;
        test_case("grafting %d, beta1 %g, from step %d", (int)c.shampoo.grafting, c.beta1,
                  c.shampoo.start_preconditioning_step);
        take_trial(*state, TCH_FLOAT64, &c, m->count, m->shapes, EXACT);
    }
}

/* The defaults, and those of Shampoo's paper, but with a refresh within the test. */
TEST(defaults_of_shampoo_in_float32)
{
    const method *m = method_of(TCH_OPTIM_SHAMPOO);
    for (int paper = 0; paper < 2; paper++) {
        tch_optim_config c = paper ? test_optim_defaults(m->kind) : tch_optim_defaults(m->kind);
        c.shampoo.precondition_frequency = 1;
        c.shampoo.stagger = 0;
        c.numerics.damping =
            c.numerics.damping > 1e-4 ? c.numerics.damping : 1e-4; /* 10 times weaker in the weakest direction */
        test_case("%s defaults, float32", paper ? "the paper's" : "the");
        take_trial(*state, TCH_FLOAT32, &c, m->count, m->shapes, 2 * 10 * 1e-3);
    }
}

/* Three groups of two configurations, the last one added during training, whose step counts begin at their first step.
 * Hyperparameters of all change, one by tch_optimizer_set_lr, and a parameter moves to other memory. */
TEST(groups_and_changing_numbers)
{
    for (const method *m = methods; m < methods + TEST_COUNT(methods); m++) {
        trial t;
        tch_optim_config first = base_of(m);
        tch_optim_config second = base_of(m);
        tch_optim_config now;
        test_tensor *old = NULL;
        const trial_option *many = m->options;
        while (strcmp(many->name, "much at once") != 0) {
            many++;
        }
        trial_set(&first, m->first);
        trial_set(&second, many->settings);
        test_case("%s, groups whose numbers change", tch_optim_kind_name(m->kind));
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &first, 6, m->shapes);
        trial_add_group(&t, &second, m->count - 8, m->shapes + 6);
        for (int i = 0; i < 2 * STEPS; i++) {
            if (i == STEPS) {
                trial_add_group(&t, &second, 2, m->shapes + m->count - 2);
                old = trial_move_parameter(&t, 3);
            }
            if (i % 7 == 5) {
                first.lr *= 0.5;
                first.weight_decay += 0.05;
                trial_set(&first, m->changes);
                trial_set(&second, m->changes);
                trial_set_config(&t, 0, &first);
                trial_set_config(&t, 1, &second);
            }
            if (i > STEPS) {
                t.configs[2].lr = 0.02 / i;
                CHECK_OK(tch_optimizer_set_lr(t.optimizer, 2, t.configs[2].lr));
            }
            trial_step(&t);
        }
        trial_check(&t, 2.0 * tolerance_of(m, TCH_FLOAT64, TCH_PRECISION_HIGHEST));
        test_tensor_check_unchanged(old, "the old memory");
        CHECK(tch_optimizer_group_count(t.optimizer) == 3, "%d groups", tch_optimizer_group_count(t.optimizer));
        CHECK(tch_optimizer_parameter_count(t.optimizer) == m->count, "%d", tch_optimizer_parameter_count(t.optimizer));
        CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
        CHECK(now.lr == first.lr && now.beta2 == first.beta2 && now.eps == first.eps, "the numbers are not kept");
    }
}

/* A zero gradient has no direction, and nothing moves; a zero row in a gradient causes no division by 0, even if
 * NorMuon has no eps. After zero gradients, SOAP's first bases and NorMuon's rows without eps are undetermined. */
static void check_zeros(tch_context *context, const method *m, const tch_optim_config *c, bool rows)
{
    trial t;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, c, m->count, m->shapes);
    for (int i = 0; i < (rows ? STEPS : 2); i++) {
        trial_draw(&t);
        for (int32_t k = 0; k < t.count; k++) {
            const trial_parameter *p = &t.parameters[k];
            bool has_rows = p->shape.ndim == 2 && p->shape.shape[0] > 1;
            trial_erase(&t, k, !rows ? p->memory->count : has_rows ? p->shape.shape[1] : 0);
        }
        CHECK_OK(trial_step_library(&t));
        trial_step_references(&t);
    }
    for (int32_t k = 0; k < t.count && !rows; k++) {
        test_tensor_check_unchanged(t.parameters[k].memory, "a parameter");
    }
    if (rows || (m->kind != TCH_OPTIM_SOAP && m->kind != TCH_OPTIM_NORMUON)) {
        trial_steps(&t, STEPS);
        trial_check(&t, 2.0 * tolerance_of(m, TCH_FLOAT64, TCH_PRECISION_HIGHEST));
    }
}

TEST(zero_gradients)
{
    for (const method *m = methods; m < methods + TEST_COUNT(methods); m++) {
        tch_optim_config c = base_of(m);
        int last = m->kind == TCH_OPTIM_SHAMPOO ? TCH_GRAFTING_ADAM : TCH_GRAFTING_NONE;
        c.weight_decay = c.adamw.weight_decay = 0.0;
        c.eps = m->kind == TCH_OPTIM_NORMUON ? 0.0 : m->kind == TCH_OPTIM_SHAMPOO ? 1e-4 : c.eps;
        for (int grafting = TCH_GRAFTING_NONE; grafting <= last; grafting++) {
            c.shampoo.grafting = (tch_grafting)grafting;
            test_case("%s, gradients of zeros, grafting %d", tch_optim_kind_name(m->kind), grafting);
            check_zeros(*state, m, &c, false);
        }
        test_case("%s, a row of zeros", tch_optim_kind_name(m->kind));
        check_zeros(*state, m, &c, true);
    }
}

/* For any gradient, however small, Lion's step has length lr. */
TEST(steps_of_lion_have_one_length)
{
    enum { COUNT = 5 };
    static const double gradients[COUNT] = {1e-30, -1e-30, 1e30, -1e30, 0.0};
    static const trial_shape shape = {.ndim = 1, .shape = {COUNT}};
    trial t;
    tch_optim_config c = base_of(method_of(TCH_OPTIM_LION));
    c.lr = 0x1p-6;
    test_case("tiny and huge gradients");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, &shape);
    test_tensor_write(t.parameters[0].memory, (const double[COUNT]){1.0, 1.0, 1.0, 1.0, 1.0});
    test_tensor_write(t.parameters[0].gradient_memory, gradients);
    CHECK_OK(trial_step_library(&t));
    double *got = test_tensor_read(t.parameters[0].memory);
    for (int i = 0; i < COUNT; i++) {
        double expected = 1.0 - 0x1p-6 * ((gradients[i] > 0) - (gradients[i] < 0));
        CHECK(got[i] == expected, "from gradient %g: %.9g, expected %.9g", gradients[i], got[i], expected);
    }
}

TEST_MAIN(test_open_context, test_close_context)
