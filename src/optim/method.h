/* What an optimizer is to everything else: one table, filled in by the optimizer's own file, and one entry in the list
 * of methods.c. Nothing else asks which kind an optimizer is. Functions may be NULL where that is said. */
#ifndef TCHI_OPTIM_METHOD_H
#define TCHI_OPTIM_METHOD_H

#include "optimizer.h"

/* The parameters without blocks, which are updated element by element. */
typedef struct tchi_elementwise {
    /* What its moments are called, NULL for those that are not kept; all are NULL before. */
    void (*moments)(const tch_optim_config *config, const char *names[TCHI_MOMENTS]);
    tch_elementwise_kind kind;
    bool of_rest; /* its hyperparameters are those of `adamw`, without amsgrad: the AdamW part of another optimizer */
} tchi_elementwise;

/* AdamW for what an optimizer with blocks leaves: adamw.c. */
extern const tchi_elementwise tchi_adamw_of_rest;

/* How the clocks of parameters with blocks advance; see tch_advance_op. */
typedef struct tchi_clock_rule {
    bool correct;
    tch_factor_rule factors;
} tchi_clock_rule;

/* The parameters with blocks. */
typedef struct tchi_block_method {
    /* --- how parameters are cut */
    /* Merges dimensions, but the first with none. NULL: as `merge_dims` says. */
    void (*set_dims)(const tch_optim_config *config, tchi_dims *dims);
    /* Whether a parameter of these dims has blocks. */
    bool (*has_blocks)(const tch_optim_config *config, const tchi_dims *dims);
    /* The largest side of a block. NULL: a parameter is one block. */
    int64_t (*cut_at)(const tch_optim_config *config);
    bool transposes_tall; /* a tall matrix is a wide block, so that matrices of both shapes share a block batch */

    /* --- what is kept for them */
    /* What the moments that are laid out like the parameter are called, NULL for those that are not kept. */
    void (*moments)(const tch_optim_config *config, const char *names[TCHI_MOMENTS]);
    /* Whether side k of a block has a factor. NULL: none has. */
    bool (*has_factor)(const tch_optim_config *config, int32_t order, const int64_t *size, int32_t k);
    /* Which root of its factors is taken, for blocks of this order. NULL: factors have bases. */
    int32_t (*root)(const tch_optim_config *config, int32_t order);
    /* How many numbers each block of a block batch has in block_batch->moment. NULL: none. */
    int64_t (*block_state)(const tchi_block_batch *block_batch);
    /* What those of one block are called, without the block's number, and what shape they have, without gaps; the
     * function returns how many dimensions that is. */
    const char *block_state_name;
    int32_t (*block_state_shape)(const tchi_block_batch *block_batch, const tchi_block *block, const tchi_param *param,
                                 int64_t *shape);

    /* --- when */
    tchi_clock_rule (*clock_rule)(const tch_optim_config *config);
    /* Whether a parameter's clock stands still at this step. NULL: it never does. */
    bool (*waits)(const tchi_param *param);
    /* Advances what other clocks the group has. NULL: it has none. */
    tch_status (*advance)(tch_optimizer *optimizer, tchi_group *group);
    /* The steps of a parameter by which all that the host schedules for it has begun. NULL: it schedules nothing. */
    int64_t (*begins)(const tch_optim_config *config);

    /* --- shared by a group of ranks */
    /* Where parameters are sharded, the filter of gradients, with moments[0], stays with the shards, and filtered
     * gradients of this type travel. NULL: gradients travel as they are. */
    tch_scalar (*filtered_type)(const tch_context *context, tch_scalar real);
    /* TCH_WEIGHT_DECAY_L2 adds decay to its gradients; otherwise decay is decoupled whatever the option says. */
    bool may_add_decay;
    /* The type that a direction has without loss. NULL: that of the arithmetic. */
    tch_scalar (*direction_type)(const tch_context *context, tch_scalar real);
    /* What the learning rate is multiplied by for a matrix of these sides. NULL: 1, or it is in the direction. */
    double (*step_factor)(const tch_optim_config *config, double rows, double cols);

    /* --- the step */
    /* Bytes of work buffers for one block of a block batch. */
    int64_t (*work)(const tch_context *context, const tch_optim_config *config, const tchi_block_batch *block_batch);
    /* One step of all blocks of a group whose parameters have gradients. */
    tch_status (*step)(tch_optimizer *optimizer, const tchi_step *now, int32_t group);
} tchi_block_method;

struct tchi_optim_method {
    const char *name; /* in checkpoints and messages */

    /* Its defaults, where they are not what all have. NULL: they are. */
    void (*set_defaults)(tch_optim_config *config);
    /* Says what is wrong with options that are in their ranges. NULL: nothing can be. */
    tch_status (*check)(const char *function, const tch_optim_config *config);
    /* Says which change between steps would need memory that was not taken. NULL: none does. */
    tch_status (*check_change)(const tch_optim_config *now, const tch_optim_config *next);
    /* Sets the numbers on the device that are not the options of their names. NULL: all are. */
    void (*set_numbers)(const tch_optim_config *config, tchi_group_numbers *numbers);

    /* AdamW's share of lr for the rest, where adamw.lr is 0. NULL: all of it. */
    double (*rest_share)(const tch_optim_config *config);

    const tchi_elementwise *elementwise;
    const tchi_block_method *blocks; /* NULL: every parameter is updated element by element */
};

extern const tchi_optim_method tchi_method_sgd;
extern const tchi_optim_method tchi_method_adamw;
extern const tchi_optim_method tchi_method_shampoo;
extern const tchi_optim_method tchi_method_soap;
extern const tchi_optim_method tchi_method_muon;
extern const tchi_optim_method tchi_method_lion;
extern const tchi_optim_method tchi_method_normuon;
extern const tchi_optim_method tchi_method_kl_shampoo;

/* Whether decay is added to the gradients of parameters with blocks. */
static inline bool tchi_adds_decay(const tchi_block_method *blocks, const tch_optim_config *config)
{
    return blocks->may_add_decay && config->weight_decay_type == TCH_WEIGHT_DECAY_L2;
}

/* The method of a configuration, NULL where its kind is none; and the same with a message. */
const tchi_optim_method *tchi_method_of(const tch_optim_config *config);
tch_status tchi_method_check(const char *function, const tch_optim_config *config);

#endif
