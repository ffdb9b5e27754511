/* The interface of an optimizer: one table, defined in its file, and one entry in the list of methods.c. No other code
 * depends on the kind of an optimizer. Functions may be NULL where stated. */
#ifndef TCHI_OPTIM_METHOD_H
#define TCHI_OPTIM_METHOD_H

#include "optimizer.h"

/* Elementwise updates of parameters without blocks. */
typedef struct tchi_elementwise {
    /* Names of its moments, NULL for those not kept; all are NULL before. */
    void (*moments)(const tch_optim_config *config, const char *names[TCHI_MOMENTS]);
    tch_elementwise_kind kind;
    bool of_rest; /* its hyperparameters are those of `adamw`, without amsgrad: the AdamW part of another optimizer */
} tchi_elementwise;

/* AdamW for the parameters without blocks: adamw.c. */
extern const tchi_elementwise tchi_adamw_of_rest;

/* How clocks of parameters with blocks advance; see tch_advance_op. */
typedef struct tchi_clock_rule {
    bool correct;
    tch_factor_rule factors;
} tchi_clock_rule;

/* Parameters with blocks. */
typedef struct tchi_block_method {
    /* --- division into blocks */
    /* Merges dimensions except the first. NULL: according to `merge_dims`. */
    void (*set_dims)(const tch_optim_config *config, tchi_dims *dims);
    /* Whether a parameter of these dims has blocks. */
    bool (*has_blocks)(const tch_optim_config *config, const tchi_dims *dims);
    /* The largest side of a block. NULL: a parameter is one block. */
    int64_t (*cut_at)(const tch_optim_config *config);
    bool transposes_tall; /* tall matrices become wide blocks, so that both share a block batch */

    /* --- state */
    /* Names of the moments in the parameter's layout, NULL for those not kept. */
    void (*moments)(const tch_optim_config *config, const char *names[TCHI_MOMENTS]);
    /* Whether side k of a block has a factor. NULL: never. */
    bool (*has_factor)(const tch_optim_config *config, int32_t order, const int64_t *size, int32_t k);
    /* The exponent of the inverse roots of factors, for blocks of this order. NULL: factors have bases. */
    int32_t (*root)(const tch_optim_config *config, int32_t order);
    /* Not 0: adaptive refresh follows the norms of directions, not the drift of bases, and an interval is at most the
     * steps since the first refresh divided by this. */
    int32_t refreshes_by_norm;
    /* Elements per block in block_batch->moment. NULL: none. */
    int64_t (*block_state)(const tchi_block_batch *block_batch);
    /* Their name, without the block's number, and their contiguous shape; the function returns its rank. */
    const char *block_state_name;
    int32_t (*block_state_shape)(const tchi_block_batch *block_batch, const tchi_block *block, const tchi_param *param,
                                 int64_t *shape);

    /* --- clocks and schedule */
    tchi_clock_rule (*clock_rule)(const tch_optim_config *config);
    /* Whether a parameter's clock does not advance in this step. NULL: it always does. */
    bool (*waits)(const tchi_param *param);
    /* Advances other clocks of the group. NULL: none. */
    tch_status (*advance)(tch_optimizer *optimizer, tchi_group *group);
    /* The step of a parameter from which its host schedule is active. NULL: never. */
    int64_t (*begins)(const tch_optim_config *config);

    /* --- groups of ranks */
    /* For sharded parameters: the gradient filter, with moments[0], stays with the shards, and filtered gradients of
     * this type are sent. NULL: gradients are sent. */
    tch_scalar (*filtered_type)(const tch_context *context, const tch_optim_config *config, tch_scalar real);
    /* The type that represents a direction without loss. NULL: that of the arithmetic. */
    tch_scalar (*direction_type)(const tch_context *context, const tch_optim_config *config, tch_scalar real);
    /* Factor of the learning rate for a matrix of this size. NULL: 1, or included in the direction. */
    double (*step_factor)(const tch_optim_config *config, double rows, double cols);

    /* --- the step */
    /* Bytes of work buffers for one block of a block batch. */
    int64_t (*work)(const tch_context *context, const tch_optim_config *config, const tchi_block_batch *block_batch);
    /* One step of all blocks of a group whose parameters have gradients. */
    tch_status (*step)(tch_optimizer *optimizer, const tchi_step *now, int32_t group);
} tchi_block_method;

struct tchi_optim_method {
    const char *name; /* in checkpoints and messages */
    bool keeps_norm;  /* if asked by constant_norm */

    /* Sets defaults that differ from the common ones. NULL: none do. */
    void (*set_defaults)(tch_optim_config *config);
    /* Checks options against each other. NULL: nothing to check. */
    tch_status (*check)(const char *function, const tch_optim_config *config);
    /* Refuses changes between steps that need state which was not allocated. NULL: none do. */
    tch_status (*check_change)(const tch_optim_config *now, const tch_optim_config *next);
    /* Sets hyperparameters on the device that differ from the options of the same name. NULL: none do. */
    void (*set_numbers)(const tch_optim_config *config, tchi_group_numbers *numbers);

    /* The ratio of AdamW's learning rate to lr if adamw.lr is 0. NULL: 1. */
    double (*rest_share)(const tch_optim_config *config);

    const tchi_elementwise *elementwise;
    const tchi_block_method *blocks; /* NULL: all updates are elementwise */
};

extern const tchi_optim_method tchi_method_sgd;
extern const tchi_optim_method tchi_method_adamw;
extern const tchi_optim_method tchi_method_shampoo;
extern const tchi_optim_method tchi_method_soap;
extern const tchi_optim_method tchi_method_muon;
extern const tchi_optim_method tchi_method_lion;
extern const tchi_optim_method tchi_method_normuon;
extern const tchi_optim_method tchi_method_kl_shampoo;

/* Blocks and factors of Shampoo, shared with KL-Shampoo. */
bool tchi_shampoo_has_blocks(const tch_optim_config *config, const tchi_dims *dims);
int64_t tchi_shampoo_largest_side(const tch_optim_config *config);
bool tchi_shampoo_has_factor(const tch_optim_config *config, int32_t order, const int64_t *size, int32_t k);

static inline bool tchi_adds_decay(const tch_optim_config *config)
{
    return config->weight_decay_type == TCH_WEIGHT_DECAY_L2;
}

/* The method of a configuration, NULL for an invalid kind; and the same with a message. */
const tchi_optim_method *tchi_method_of(const tch_optim_config *config);
tch_status tchi_method_check(const char *function, const tch_optim_config *config);

#endif
