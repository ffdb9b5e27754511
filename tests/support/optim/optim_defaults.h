/* Common settings of optimizer tests: the library's defaults, but a fixed interval; Shampoo with its paper's sums,
 * absolute damping and no grafting; KL-Shampoo with roots that float32 determines. The error bounds were found with
 * these. */
#ifndef TEST_OPTIM_DEFAULTS_H
#define TEST_OPTIM_DEFAULTS_H

#include <torchium/optim.h>

static inline tch_optim_config test_optim_defaults(tch_optim_kind kind)
{
    tch_optim_config config = tch_optim_defaults(kind);
    config.shampoo.refresh_drift = 0.0;
    if (kind == TCH_OPTIM_SOAP) {
        config.shampoo.precondition_frequency = 10;
    }
    if (kind == TCH_OPTIM_SHAMPOO) {
        config.lr = 0.03;
        config.beta2 = 1.0;
        config.eps = 1e-4;
        config.shampoo.exponent_override = 0;
        config.shampoo.grafting = TCH_GRAFTING_NONE;
    }
    if (kind == TCH_OPTIM_KL_SHAMPOO) {
        config.shampoo.precondition_frequency = 1;
        config.numerics.damping = 1e-3;
        config.numerics.method = TCH_ROOT_EIGEN;
    }
    return config;
}

#endif
