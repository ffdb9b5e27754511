/* The options of KFAC: their ranges, which of them may change, and their values by number for checkpoints. A new option
 * is a field in kfac.h and a line in the table. */
#include "core/status.h"

#include "kfac.h"

#define AT(field) #field, offsetof(tch_kfac_config, field)
#define SMALLEST 1e-300
#define LARGEST 1e300

static const tchi_option rows[] = {
    {"method", AT(method), TCHI_INT32, 0, 0, TCH_KFAC_METHOD_COUNT - 1, "one of tch_kfac_method"},
    {"sharing", AT(sharing), TCHI_INT32, 0, 0, TCH_SHARING_COUNT - 1, "one of tch_sharing"},
    {"damping", AT(damping), TCHI_REAL, TCHI_STEP, SMALLEST, LARGEST, "1e-300 to 1e300"},
    {"factor_decay", AT(factor_decay), TCHI_REAL, TCHI_STEP, 0, 1, "0 to 1"},
    {"kl_clip", AT(kl_clip), TCHI_REAL, TCHI_STEP, 0, LARGEST, "0 to 1e300"},
    {"bias_correction", AT(use_bias_correction), TCHI_INT32, 0, 0, 1, "0 or 1"},
    {"accumulation", AT(accumulation_steps), TCHI_INT32, TCHI_STEP, 1, 1 << 30, "1 to 1073741824"},
};

const tchi_options tchi_kfac_options = {"KFAC", rows, sizeof rows / sizeof rows[0]};

tch_status tchi_kfac_check_config(const char *function, const tch_kfac_config *config)
{
    if (config == NULL || config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: config must point to a struct set to TCH_KFAC_CONFIG_INIT",
                         function);
    }
    TCHI_TRY(tchi_options_check(&tchi_kfac_options, function, config));
    tch_scalar type = tchi_scalar_of(config->factor_dtype);
    if (type != TCH_SCALAR_F32 && type != TCH_SCALAR_F64) {
        return tchi_fail(TCH_ERR_DTYPE, "%s: factor_dtype is %s, expected float32 or float64", function,
                         tch_dtype_name(config->factor_dtype));
    }
    return TCH_OK;
}

tch_status tchi_kfac_check_change(const tch_kfac_config *now, const tch_kfac_config *next)
{
    TCHI_TRY(tchi_options_check_change(&tchi_kfac_options, now, next));
    if (!tch_dtype_equal(now->factor_dtype, next->factor_dtype)) {
        return tchi_fail(TCH_ERR_DTYPE, "factor_dtype is %s, expected %s: it cannot change once KFAC is made",
                         tch_dtype_name(next->factor_dtype), tch_dtype_name(now->factor_dtype));
    }
    return TCH_OK;
}
