/* Lion (Chen and others, 2023), elementwise: every element moves by the learning rate, up or down.
 *
 *     c = beta1 m + (1 - beta1) g
 *     p <- (1 - lr weight_decay) p - lr sign(c)
 *     m <- beta2 m + (1 - beta2) g */
#include "config.h"
#include "method.h"

static void set_defaults(tch_optim_config *c)
{
    c->lr = 1e-4;
    c->beta1 = 0.9;
    c->beta2 = 0.99;
}

static void moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = "exp_avg";
}

static const tchi_elementwise elementwise = {.moments = moments, .kind = TCH_ELEMENTWISE_LION};

const tchi_optim_method tchi_method_lion = {
    .name = "lion",
    .set_defaults = set_defaults,
    .check = tchi_config_check_beta2,
    .elementwise = &elementwise,
};
