/* The options of KFAC: their ranges, which of them may change, and their values by number for checkpoints. A new option
 * is a field in kfac.h and a line in the table. */
#include <math.h>

#include "core/status.h"

#include "kfac.h"

typedef enum option_type { REAL, INTEGER } option_type; /* enumerations have the size of an int32_t */

typedef struct option {
    const char *key; /* in checkpoints */
    const char *name;
    size_t offset;
    option_type type;
    bool changes;       /* may change between steps */
    double least, most; /* both allowed */
    const char *range;  /* in words, for the message: both ends, since a value may lie beyond either */
} option;

#define AT(field) #field, offsetof(tch_kfac_config, field)
#define SMALLEST 1e-300
#define LARGEST 1e300

static const option options[] = {
    {"method", AT(method), INTEGER, false, 0, TCH_KFAC_METHOD_COUNT - 1, "one of tch_kfac_method"},
    {"sharing", AT(sharing), INTEGER, false, 0, TCH_SHARING_COUNT - 1, "one of tch_sharing"},
    {"damping", AT(damping), REAL, true, SMALLEST, LARGEST, "1e-300 to 1e300"},
    {"factor_decay", AT(factor_decay), REAL, true, 0, 1, "0 to 1"},
    {"kl_clip", AT(kl_clip), REAL, true, 0, LARGEST, "0 to 1e300"},
    {"bias_correction", AT(use_bias_correction), INTEGER, false, 0, 1, "0 or 1"},
    {"accumulation", AT(accumulation_steps), INTEGER, true, 1, 1 << 30, "1 to 1073741824"},
};
#define OPTIONS ((int32_t)(sizeof options / sizeof options[0]))

const char *tchi_kfac_option_key(int32_t index)
{
    return index < OPTIONS ? options[index].key : NULL;
}

double tchi_kfac_option_get(const tch_kfac_config *config, int32_t index)
{
    const char *at = (const char *)config + options[index].offset;
    return options[index].type == REAL ? *(const double *)at : *(const int32_t *)at;
}

void tchi_kfac_option_set(tch_kfac_config *config, int32_t index, double value)
{
    char *at = (char *)config + options[index].offset;
    if (options[index].type == REAL) {
        *(double *)at = value;
    } else {
        *(int32_t *)at = (int32_t)value;
    }
}

static bool in_range(const option *o, double value)
{
    return value >= o->least && value <= o->most;
}

tch_status tchi_kfac_check_value(const char *what, int32_t index, double value)
{
    const option *o = &options[index];
    if (!in_range(o, value) || (o->type != REAL && value != floor(value))) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s is %.10g, expected %s", what, value, o->range);
    }
    return TCH_OK;
}

tch_status tchi_kfac_check_config(const char *function, const tch_kfac_config *config)
{
    if (config == NULL || config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: config must point to a struct set to TCH_KFAC_CONFIG_INIT",
                         function);
    }
    for (int32_t i = 0; i < OPTIONS; i++) {
        double value = tchi_kfac_option_get(config, i);
        if (!in_range(&options[i], value)) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is %.10g, expected %s", function, options[i].name, value,
                             options[i].range);
        }
    }
    tch_scalar type = tchi_scalar_of(config->factor_dtype);
    if (type != TCH_SCALAR_F32 && type != TCH_SCALAR_F64) {
        return tchi_fail(TCH_ERR_DTYPE, "%s: factor_dtype is %s, expected float32 or float64", function,
                         tch_dtype_name(config->factor_dtype));
    }
    return TCH_OK;
}

tch_status tchi_kfac_check_change(const tch_kfac_config *now, const tch_kfac_config *next)
{
    for (int32_t i = 0; i < OPTIONS; i++) {
        double before = tchi_kfac_option_get(now, i);
        double after = tchi_kfac_option_get(next, i);
        if (before != after && !options[i].changes) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                             "%s is %.10g, expected %.10g: it cannot change once KFAC is made", options[i].name, after,
                             before);
        }
    }
    if (!tch_dtype_equal(now->factor_dtype, next->factor_dtype)) {
        return tchi_fail(TCH_ERR_DTYPE, "factor_dtype is %s, expected %s: it cannot change once KFAC is made",
                         tch_dtype_name(next->factor_dtype), tch_dtype_name(now->factor_dtype));
    }
    return TCH_OK;
}
