/* AdamW as in PyTorch, elementwise. Other optimizers use it, with its own hyperparameters and without amsgrad, for
 * parameters without blocks.
 *
 *     m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
 *     p <- (1 - lr weight_decay) p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) */
#include "core/status.h"

#include "config.h"
#include "method.h"

static void set_defaults(tch_optim_config *c)
{
    c->lr = 1e-3;
    c->beta1 = 0.9;
    c->beta2 = 0.999;
    c->eps = 1e-8;
    c->weight_decay = 1e-2;
}

static tch_status check(const char *function, const tch_optim_config *c)
{
    if (c->amsgrad && c->memory.state_dtype != TCH_STATE_FLOAT32) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: state_dtype is %s, expected float32 with amsgrad: its largest second moments are kept in "
                         "float32 alone",
                         function, c->memory.state_dtype == TCH_STATE_INT8 ? "int8" : "bfloat16");
    }
    return tchi_config_check_beta2(function, c);
}

static void moments_of_rest(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = "exp_avg";
    names[1] = "exp_avg_sq";
}

static void moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    moments_of_rest(config, names);
    names[2] = config->amsgrad ? "max_exp_avg_sq" : NULL;
}

static const tchi_elementwise elementwise = {.moments = moments, .kind = TCH_ELEMENTWISE_ADAMW};

const tchi_elementwise tchi_adamw_of_rest = {
    .moments = moments_of_rest, .kind = TCH_ELEMENTWISE_ADAMW, .of_rest = true};

const tchi_optim_method tchi_method_adamw = {
    .name = "adamw", .set_defaults = set_defaults, .check = check, .elementwise = &elementwise};
