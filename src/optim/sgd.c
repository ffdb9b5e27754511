/* SGD as in PyTorch, elementwise.
 *
 *     g <- g + weight_decay p                    unless weight_decay_type says otherwise
 *     B <- momentum B + (1 - dampening) g        g itself at a parameter's first step
 *     p <- p - lr (g + momentum B)  (nesterov), or p - lr B */
#include "core/status.h"

#include "config.h"
#include "method.h"

static void set_defaults(tch_optim_config *c)
{
    c->weight_decay_type = TCH_WEIGHT_DECAY_L2;
}

static tch_status check(const char *function, const tch_optim_config *c)
{
    if (c->nesterov && (c->momentum == 0.0 || c->dampening != 0.0)) {
        return tchi_fail(
            TCH_ERR_INVALID_ARGUMENT,
            "%s: nesterov is 1 with momentum %.10g and dampening %.10g, expected a momentum above 0 and no "
            "dampening",
            function, c->momentum, c->dampening);
    }
    return TCH_OK;
}

static tch_status check_change(const tch_optim_config *now, const tch_optim_config *next)
{
    return tchi_config_check_kept("momentum", now->momentum, next->momentum);
}

static void moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = config->momentum != 0.0 ? "momentum_buffer" : NULL;
}

static const tchi_elementwise elementwise = {.moments = moments, .kind = TCH_ELEMENTWISE_SGD};

const tchi_optim_method tchi_method_sgd = {
    .name = "sgd",
    .set_defaults = set_defaults,
    .check = check,
    .check_change = check_change,
    .elementwise = &elementwise,
};
