/* See saved.h. */
#include "core/saved.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"

/* --- options ------------------------------------------------------------------------------------------------------ */

double tchi_option_value(const tchi_option *option, const void *config)
{
    const char *at = (const char *)config + option->offset;
    return option->type == TCHI_REAL    ? *(const double *)at
           : option->type == TCHI_INT64 ? (double)*(const int64_t *)at
                                        : *(const int32_t *)at;
}

static void set_option(const tchi_option *option, void *config, double value)
{
    char *at = (char *)config + option->offset;
    if (option->type == TCHI_REAL) {
        *(double *)at = value;
    } else if (option->type == TCHI_INT64) {
        *(int64_t *)at = (int64_t)value;
    } else {
        *(int32_t *)at = (int32_t)value;
    }
}

static bool is_in_range(const tchi_option *o, double value)
{
    return value >= o->least && value <= o->most && !((o->flags & TCHI_BELOW) != 0 && value >= o->most);
}

tch_status tchi_options_check(const tchi_options *options, const char *function, const void *config)
{
    for (int32_t i = 0; i < options->count; i++) {
        const tchi_option *o = &options->rows[i];
        double value = tchi_option_value(o, config);
        if (!is_in_range(o, value)) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is %.10g, expected %s", function, o->name, value,
                             o->range);
        }
    }
    return TCH_OK;
}

tch_status tchi_options_check_change(const tchi_options *options, const void *now, const void *next)
{
    for (int32_t i = 0; i < options->count; i++) {
        const tchi_option *o = &options->rows[i];
        double before = tchi_option_value(o, now);
        double after = tchi_option_value(o, next);
        if (before != after && (o->flags & TCHI_STEP) == 0) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s is %.10g, expected %.10g: it cannot change once %s is made",
                             o->name, after, before, options->owner);
        }
    }
    return TCH_OK;
}

tch_status tchi_options_save(const tchi_options *options, const void *config, tch_checkpoint_writer *writer,
                             const char *prefix)
{
    char key[TCHI_SAVED_NAME];
    for (int32_t i = 0; i < options->count; i++) {
        snprintf(key, sizeof key, "%s%s", prefix, options->rows[i].key);
        TCHI_TRY(tch_checkpoint_writer_set_number(writer, key, tchi_option_value(&options->rows[i], config)));
    }
    return TCH_OK;
}

tch_status tchi_options_load(const tchi_options *options, void *config, const tch_checkpoint *file, const char *prefix)
{
    char key[TCHI_SAVED_NAME];
    for (int32_t i = 0; i < options->count; i++) {
        const tchi_option *o = &options->rows[i];
        double value;
        snprintf(key, sizeof key, "%s%s", prefix, o->key);
        if ((o->flags & TCHI_OPTIONAL) != 0 && tch_checkpoint_text(file, key) == NULL) {
            continue;
        }
        TCHI_TRY(tch_checkpoint_number(file, key, &value));
        if (!is_in_range(o, value) || (o->type != TCHI_REAL && value != floor(value))) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint's '%s' is %.10g, expected %s", key, value,
                             o->range);
        }
        if ((o->flags & TCHI_LOCAL) == 0) {
            set_option(o, config, value);
        }
    }
    return TCH_OK;
}

/* --- names and tensors -------------------------------------------------------------------------------------------- */

const char *tchi_saved_name(char text[TCHI_SAVED_NAME], const char *prefix, const char *name)
{
    snprintf(text, TCHI_SAVED_NAME, "%s/%s", prefix, name);
    return text;
}

tch_status tchi_saved_check_arguments(const char *function, const void *file, const char *what, const char *prefix)
{
    if (file == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function, what);
    }
    if (prefix == NULL || prefix[0] == '\0' || strlen(prefix) >= TCHI_PREFIX_SIZE) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: prefix must have 1 to %d bytes", function,
                         TCHI_PREFIX_SIZE - 1);
    }
    return TCH_OK;
}

tch_status tchi_saved_check_kind(const tch_checkpoint *file, const char *prefix, const char *kind)
{
    char key[TCHI_SAVED_NAME];
    const char *found = tch_checkpoint_text(file, tchi_saved_name(key, prefix, "kind"));
    if (found != NULL && strcmp(found, kind) == 0) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint's '%s' is a state of %s, expected one of %s", prefix,
                     found == NULL ? "no optimizer" : found, kind);
}

tch_status tchi_saved_missing(const char *name)
{
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint has no '%s': it is of another model or of other options",
                     name);
}

tch_status tchi_saved_check(const tch_checkpoint *file, const char *name, const tch_tensor *tensor)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    int64_t index = tch_checkpoint_find(file, name);
    if (index < 0) {
        return tchi_saved_missing(name);
    }
    TCHI_TRY(tch_checkpoint_get_info(file, index, &info));
    bool same = info.ndim == tensor->ndim && tch_dtype_equal(info.dtype, tensor->dtype);
    for (int32_t k = 0; same && k < tensor->ndim; k++) {
        same = info.shape[k] == tensor->shape[k];
    }
    if (same) {
        return TCH_OK;
    }
    char expected[TCHI_DESCRIBE_SIZE];
    char found[TCHI_DESCRIBE_SIZE];
    tch_tensor saved = {.ndim = info.ndim > TCH_MAX_RANK ? TCH_MAX_RANK : info.ndim, .shape = (int64_t *)info.shape};
    return tchi_fail(TCH_ERR_SHAPE, "the checkpoint's '%s' is %s %s, expected %s %s", name, info.type,
                     tchi_describe_shape(&saved, found, sizeof found), tch_dtype_name(tensor->dtype),
                     tchi_describe_shape(tensor, expected, sizeof expected));
}
