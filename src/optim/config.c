/* A new option is a field in optim.h, a row of this table and a default: a common one below, or an optimizer's in its
 * own file. */
#include "config.h"

#include "core/status.h"

#include "method.h"

#define LARGEST 1e300

#define AT(field) #field, offsetof(tch_optim_config, field)
#define SWITCH(flags) TCHI_INT32, (flags), 0, 1, "0 or 1"
#define POSITIVE TCHI_REAL, TCHI_STEP, 0, LARGEST, "0 to 1e300"
#define RATE TCHI_REAL, TCHI_STEP | TCHI_BELOW, 0, 1, "0 or more, and below 1"

static const tchi_option rows[] = {
    {"lr", AT(lr), POSITIVE},
    {"weight_decay", AT(weight_decay), POSITIVE},
    {"weight_decay_type", AT(weight_decay_type), TCHI_INT32, TCHI_OPTIONAL, 0, TCH_WEIGHT_DECAY_CAUTIOUS,
     "one of tch_weight_decay_type"},
    {"maximize", AT(maximize), SWITCH(0)},
    {"momentum", AT(momentum), RATE},
    {"dampening", AT(dampening), TCHI_REAL, TCHI_STEP, -LARGEST, 1, "-1e300 to 1"},
    {"nesterov", AT(nesterov), SWITCH(0)},
    {"beta1", AT(beta1), RATE},
    {"beta2", AT(beta2), TCHI_REAL, TCHI_STEP, 0, 1, "0 to 1"},
    {"eps", AT(eps), POSITIVE},
    {"bias_correction", AT(use_bias_correction), SWITCH(0)},
    {"amsgrad", AT(amsgrad), SWITCH(0)},
    {"constant_norm", AT(constant_norm), SWITCH(TCHI_OPTIONAL)},
    {"scalar_lr", AT(adamw.lr), POSITIVE},
    {"scalar_base_lr", AT(adamw.base_lr), TCHI_REAL, TCHI_STEP | TCHI_OPTIONAL, 0, LARGEST, "0 to 1e300"},
    {"scalar_beta1", AT(adamw.beta1), RATE},
    {"scalar_beta2", AT(adamw.beta2), RATE},
    {"scalar_eps", AT(adamw.eps), POSITIVE},
    {"scalar_weight_decay", AT(adamw.weight_decay), TCHI_REAL, TCHI_STEP, -1, LARGEST, "0 to 1e300, or -1"},
    {"max_preconditioner_dim", AT(shampoo.max_preconditioner_dim), TCHI_INT64, 0, 1, 1 << 20, "1 to 1048576"},
    {"block", AT(soap.block), SWITCH(0)},
    {"merge_dims", AT(shampoo.merge_dims), SWITCH(0)},
    {"precondition_1d", AT(shampoo.precondition_1d), SWITCH(0)},
    {"packed_factors", AT(memory.packed_factors), SWITCH(TCHI_LOCAL | TCHI_OPTIONAL)},
    {"precondition_frequency", AT(shampoo.precondition_frequency), TCHI_INT32, TCHI_STEP, 1, 1 << 30,
     "1 to 1073741824"},
    {"refresh_drift", AT(shampoo.refresh_drift), TCHI_REAL, TCHI_STEP | TCHI_OPTIONAL, 0, 1e6, "0 to 1e6"},
    {"start_preconditioning_step", AT(shampoo.start_preconditioning_step), TCHI_INT32, 0, -1, 1 << 30,
     "-1, or 0 to 1073741824"},
    {"stagger", AT(shampoo.stagger), SWITCH(TCHI_STEP)},
    {"precision", AT(numerics.precision), TCHI_INT32, TCHI_LOCAL, 0, TCH_PRECISION_HIGHEST, "one of tch_precision"},
    {"world_invariant", AT(numerics.world_invariant), SWITCH(TCHI_LOCAL | TCHI_OPTIONAL)},
    {"relative_eps", AT(numerics.damping), TCHI_REAL, TCHI_STEP, 0, 1, "0 to 1"},
    {"root_tolerance", AT(numerics.tolerance), TCHI_REAL, TCHI_BELOW, 0, 1, "0 or more, and below 1"},
    {"root_dtype", AT(memory.root_dtype), TCHI_INT32, TCHI_LOCAL | TCHI_OPTIONAL, 0, TCH_STATE_BFLOAT16,
     "float32 (0) or bfloat16 (1)"},
    {"root_method", AT(numerics.method), TCHI_INT32, 0, 0, TCH_ROOT_RATIONAL, "one of tch_root_method"},
    {"exponent_override", AT(shampoo.exponent_override), TCHI_INT32, 0, 0, 8, "0, 1, 2, 3, 4, 6 or 8"},
    {"grafting", AT(shampoo.grafting), TCHI_INT32, 0, 0, TCH_GRAFTING_ADAM, "one of tch_grafting"},
    {"grafting_beta2", AT(shampoo.grafting_beta2), RATE},
    {"grafting_eps", AT(shampoo.grafting_eps), POSITIVE},
    {"shampoo_beta", AT(soap.shampoo_beta), TCHI_REAL, TCHI_STEP | TCHI_BELOW, -1, 1, "0 or more and below 1, or -1"},
    {"normalize_grads", AT(soap.normalize_grads), SWITCH(0)},
    {"orthogonalize", AT(soap.orthogonalize), SWITCH(TCHI_OPTIONAL)},
    {"muon_method", AT(muon.method), TCHI_INT32, 0, 0, TCH_ORTHO_MINIMAX, "one of tch_ortho_method"},
    {"muon_coefficients[0]", AT(muon.ns_coefficients[0]), TCHI_REAL, 0, -1e3, 1e3, "-1000 to 1000"},
    {"muon_coefficients[1]", AT(muon.ns_coefficients[1]), TCHI_REAL, 0, -1e3, 1e3, "-1000 to 1000"},
    {"muon_coefficients[2]", AT(muon.ns_coefficients[2]), TCHI_REAL, 0, -1e3, 1e3, "-1000 to 1000"},
    {"muon_steps", AT(muon.ns_steps), TCHI_INT32, 0, 0, 100, "1 to 100, or 0"},
    {"muon_lr", AT(muon.adjust_lr_fn), TCHI_INT32, 0, 0, TCH_ADJUST_LR_PLAIN, "one of tch_adjust_lr_fn"},
    {"muon_ns_dtype", AT(muon.ns_dtype), TCHI_INT32, TCHI_LOCAL | TCHI_OPTIONAL, 0, TCH_NS_FLOAT32,
     "one of tch_ns_dtype"},
    {"master_weights", AT(memory.master_weights), SWITCH(0)},
    {"stochastic_rounding", AT(memory.stochastic_rounding), SWITCH(0)},
    {"state_dtype", AT(memory.state_dtype), TCHI_INT32, TCHI_LOCAL | TCHI_OPTIONAL, 0, TCH_STATE_INT8,
     "one of tch_state_dtype"},
    {"nonfinite", AT(numerics.nonfinite), TCHI_INT32, TCHI_LOCAL, 0, TCH_NONFINITE_IGNORE, "one of tch_nonfinite"},
    {"memory_budget", AT(memory.budget), TCHI_INT64, TCHI_LOCAL, 0, 9e18, "0 to 9e18"},
};

const tchi_options tchi_optim_options = {"the optimizer", rows, sizeof rows / sizeof rows[0]};

/* --- defaults ---------------------------------------------------------------------------------------------------- */

tch_optim_config tchi_config_defaults(void)
{
    return (tch_optim_config){
        .struct_size = sizeof(tch_optim_config),
        .lr = 1e-3,
        .use_bias_correction = 1,
        .adamw.beta1 = 0.9,
        .adamw.beta2 = 0.999,
        .adamw.eps = 1e-8,
        .adamw.weight_decay = -1.0,
        .shampoo.max_preconditioner_dim = 1024,
        .shampoo.precondition_frequency = 1,
        .shampoo.start_preconditioning_step = -1,
        .shampoo.stagger = 1,
        .numerics.damping = 1e-6,
        .shampoo.grafting_beta2 = 0.999,
        .shampoo.grafting_eps = 1e-8,
        .soap.shampoo_beta = -1.0,
    };
}

/* --- the learning rate of AdamW's part ---------------------------------------------------------------------------- */

static double rest_share(const tch_optim_config *config)
{
    const tchi_optim_method *method = tchi_method_of(config);
    return method->rest_share == NULL ? 1.0 : method->rest_share(config);
}

/* Sets adamw.lr if it is not given, for methods that give AdamW a share of lr. A group whose own value is 0 comes from
 * a file of an earlier version, where 0 meant lr; it stays 0. */
static void fill_in_rate(tch_optim_config *next, const tch_optim_config *now)
{
    double share = rest_share(next);
    if (share != 1.0 && next->adamw.lr == 0.0 && (now == NULL || now->adamw.lr != 0.0)) {
        next->adamw.base_lr = next->lr > 0.0 ? next->lr : 1.0;
        next->adamw.lr = share * next->adamw.base_lr;
    }
}

static double base_for(const tch_optim_config *next, const tch_optim_config *now)
{
    bool brought = now == NULL || next->adamw.lr != now->adamw.lr;
    if (brought && (now == NULL || next->lr > 0.0)) {
        return next->lr;
    }
    /* filled in while lr was 0: the ratio is right, but there is no base for another rate */
    double share = rest_share(now);
    bool has_no_base = share != 1.0 && now->adamw.base_lr == 1.0 && now->adamw.lr == share;
    return brought && has_no_base ? 0.0 : now->adamw.base_lr;
}

void tchi_config_fix_ratio(tch_optim_config *next, const tch_optim_config *now)
{
    fill_in_rate(next, now);
    if (next->adamw.base_lr == 0.0) {
        next->adamw.base_lr = base_for(next, now);
    }
}

double tchi_config_adamw_ratio(const tch_optim_config *config)
{
    bool kept = config->adamw.lr > 0.0 && config->adamw.base_lr > 0.0;
    return kept ? config->adamw.lr / config->adamw.base_lr : 0.0;
}

double tchi_config_adamw_lr(const tch_optim_config *config)
{
    if (config->adamw.lr == 0.0 || config->lr == 0.0) {
        return config->lr;
    }
    double ratio = tchi_config_adamw_ratio(config);
    bool as_given = ratio == 0.0 || config->lr == config->adamw.base_lr; /* bit for bit */
    return as_given ? config->adamw.lr : ratio * config->lr;
}

/* --- ranges ------------------------------------------------------------------------------------------------------ */

tch_status tchi_config_refuse(const char *function, const char *name, double value, const char *range)
{
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is %.10g, expected %s", function, name, value, range);
}

tch_status tchi_config_check_beta2(const char *function, const tch_optim_config *config)
{
    return config->beta2 < 1.0 ? TCH_OK
                               : tchi_config_refuse(function, "beta2", config->beta2, "0 or more, and below 1");
}

tch_status tchi_config_check(const char *function, const tch_optim_config *config)
{
    if (config == NULL || config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: config must come from tch_optim_defaults", function);
    }
    TCHI_TRY(tchi_method_check(function, config));
    TCHI_TRY(tchi_options_check(&tchi_optim_options, function, config));
    const tchi_optim_method *method = tchi_method_of(config);
    if (config->shampoo.exponent_override == 5 || config->shampoo.exponent_override == 7) {
        return tchi_config_refuse(function, "shampoo.exponent_override", config->shampoo.exponent_override,
                                  "0, 1, 2, 3, 4, 6 or 8");
    }
    if (config->constant_norm && !method->keeps_norm) {
        return tchi_config_refuse(function, "constant_norm", 1.0, "0: only SOAP and Muon have it");
    }
    return method->check == NULL ? TCH_OK : method->check(function, config); /* conditions on several options */
}

tch_status tchi_config_check_kept(const char *name, double now, double next)
{
    if (now == 0.0 && next != 0.0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s is %.10g, but it was 0 when the optimizer was made, and there is no state for it", name,
                         next);
    }
    return TCH_OK;
}

tch_status tchi_config_check_change(const tch_optim_config *now, const tch_optim_config *next)
{
    const tchi_optim_method *method = tchi_method_of(now);
    if (tchi_method_of(next) != method) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "kind is %s, expected %s: it cannot change",
                         tchi_method_of(next)->name, method->name);
    }
    TCHI_TRY(tchi_options_check_change(&tchi_optim_options, now, next));
    if (next->memory.seed != now->memory.seed) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "seed cannot change once the optimizer is made");
    }
    return TCH_OK;
}
