/* Optimizers in checkpoints: the named state as tensors, what the host counts as one more tensor, hyperparameters as
 * settings. Loading compares everything with the file before it writes anything. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "config.h"
#include "core/list.h"
#include "counts.h"
#include "failures.h"
#include "method.h"

#define FULL_NAME (3 * TCHI_NAME_SIZE)

/* What the host keeps: for each parameter the steps with a gradient, then the number of steps asked for, then for each
 * factor the trouble it has had. */
static const char *const counts_name = "counts";

static tch_status check_prefix(const char *function, const char *prefix)
{
    if (prefix == NULL || prefix[0] == '\0' || strlen(prefix) >= TCHI_NAME_SIZE) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: prefix must have 1 to %d bytes", function, TCHI_NAME_SIZE - 1);
    }
    return TCH_OK;
}

static const char *join(char *text, const char *prefix, const char *name)
{
    snprintf(text, FULL_NAME, "%s/%s", prefix, name);
    return text;
}

static const char *option_key(char *text, const char *prefix, int32_t group, const char *option)
{
    snprintf(text, FULL_NAME, "%s/group%d.%s", prefix, group, option);
    return text;
}

static tch_status save_settings(const tch_optimizer *o, tch_checkpoint_writer *writer, const char *prefix)
{
    char key[FULL_NAME];
    TCHI_TRY(tch_checkpoint_writer_set_text(writer, join(key, prefix, "kind"), o->method->name));
    TCHI_TRY(tch_checkpoint_writer_set_integer(writer, join(key, prefix, "seed"),
                                               (int64_t)tchi_group_at(o, 0)->config.seed));
    for (int32_t g = 0; g < o->groups.count; g++) {
        const char *name;
        int changes;
        for (int32_t i = 0; tchi_config_option(i, &name, &changes); i++) {
            TCHI_TRY(tch_checkpoint_writer_set_number(writer, option_key(key, prefix, g, name),
                                                      tchi_config_get(&tchi_group_at(o, g)->config, i)));
        }
    }
    return TCH_OK;
}

static int64_t counts_length(const tch_optimizer *o)
{
    int64_t length = o->params.count + 1;
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        length += tchi_factor_batch_at(o, i)->count;
    }
    return length;
}

/* The counts live in the optimizer, in host memory, for as long as the writer may read them. */
static tch_status refresh_counts(tch_optimizer *o)
{
    TCHI_TRY(tchi_failures_settle(o));
    TCHI_TRY(tchi_list_reserve(&o->counts, counts_length(o)));
    int64_t *at = o->counts.items;
    for (int32_t i = 0; i < o->params.count; i++) {
        *at++ = tchi_param_at(o, i)->steps_seen;
    }
    *at++ = o->steps;
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        for (int64_t k = 0; k < f->count; k++) {
            *at++ = f->failures[k];
        }
    }
    o->counts.count = counts_length(o);
    return TCH_OK;
}

tch_status tch_optimizer_save(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix)
{
    if (optimizer == NULL || writer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_save: %s is NULL",
                         optimizer == NULL ? "optimizer" : "writer");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_save");
    TCHI_TRY(check_prefix("tch_optimizer_save", prefix));
    if (optimizer->failed != TCH_OK) {
        return tchi_fail(optimizer->failed,
                         "tch_optimizer_save: a step of this optimizer failed, and its state is not whole");
    }
    char name[FULL_NAME];
    TCHI_TRY(refresh_counts(optimizer));
    tch_tensor counts = tch_tensor_view(optimizer->counts.items, TCH_INT64, 1, &optimizer->counts.count);
    TCHI_TRY(tch_checkpoint_writer_add(writer, join(name, prefix, counts_name), &counts));
    for (int32_t i = 0; i < optimizer->states.count; i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        TCHI_TRY(tch_optimizer_get_state(optimizer, i, &state));
        TCHI_TRY(tch_checkpoint_writer_add(writer, join(name, prefix, state.name), state.tensor));
    }
    return save_settings(optimizer, writer, prefix);
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

static tch_status check_entry(const tch_checkpoint *file, const char *name, const tch_tensor *tensor)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    int64_t index = tch_checkpoint_find(file, name);
    if (index < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the checkpoint has no '%s': it is of another model or of other options", name);
    }
    TCHI_TRY(tch_checkpoint_get_info(file, index, &info));
    bool same = info.ndim == tensor->ndim && tch_dtype_equal(info.dtype, tensor->dtype);
    for (int32_t k = 0; same && k < tensor->ndim; k++) {
        same = info.shape[k] == tensor->shape[k];
    }
    if (!same) {
        char wanted[TCHI_DESCRIBE_SIZE];
        char found[TCHI_DESCRIBE_SIZE];
        tch_tensor theirs = {.ndim = info.ndim > TCH_MAX_RANK ? TCH_MAX_RANK : info.ndim,
                             .shape = (int64_t *)info.shape};
        return tchi_fail(TCH_ERR_SHAPE, "the checkpoint's '%s' is %s %s, expected %s %s", name, info.type,
                         tchi_describe_shape(&theirs, found, sizeof found), tch_dtype_name(tensor->dtype),
                         tchi_describe_shape(tensor, wanted, sizeof wanted));
    }
    return TCH_OK;
}

/* How many of the file's tensors are under the prefix: as many as we have, or something there is not ours. */
static tch_status check_nothing_else(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix)
{
    char start[FULL_NAME];
    int64_t count = 0;
    join(start, prefix, "");
    for (int64_t i = 0; i < tch_checkpoint_count(file); i++) {
        count += strncmp(tch_checkpoint_name(file, i), start, strlen(start)) == 0;
    }
    if (count != o->states.count + 1) {
        return tchi_fail(
            TCH_ERR_INVALID_ARGUMENT,
            "the checkpoint has %lld tensors under '%s', this optimizer %lld: it is of another model or of "
            "other options",
            (long long)count, start, (long long)o->states.count + 1);
    }
    return TCH_OK;
}

static tch_status check_tensors(tch_optimizer *o, const tch_checkpoint *file, const char *prefix)
{
    char name[FULL_NAME];
    for (int32_t i = 0; i < o->states.count; i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        TCHI_TRY(tch_optimizer_get_state(o, i, &state));
        TCHI_TRY(check_entry(file, join(name, prefix, state.name), state.tensor));
    }
    int64_t length = counts_length(o);
    tch_tensor counts = tch_tensor_view(NULL, TCH_INT64, 1, &length);
    TCHI_TRY(check_entry(file, join(name, prefix, counts_name), &counts));
    return check_nothing_else(o, file, prefix);
}

/* The settings of one group as the file has them, checked; options that cannot change must be the same. */
static tch_status read_settings(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix, int32_t group,
                                tch_optim_config *config)
{
    char key[FULL_NAME];
    char what[FULL_NAME + 32];
    const char *name;
    int changes;
    *config = tchi_group_at(o, group)->config;
    for (int32_t i = 0; tchi_config_option(i, &name, &changes); i++) {
        double value;
        TCHI_TRY(tch_checkpoint_number(file, option_key(key, prefix, group, name), &value));
        snprintf(what, sizeof what, "the checkpoint's '%s'", key);
        TCHI_TRY(tchi_config_check_value(what, i, value));
        if (strcmp(name, "memory_budget") != 0 && strcmp(name, "nonfinite") != 0 && strcmp(name, "precision") != 0) {
            tchi_config_set(config, i, value);
        }
    }
    TCHI_TRY(tchi_config_check("tch_optimizer_load", config));
    return tchi_config_check_change(&tchi_group_at(o, group)->config, config);
}

static tch_status check_settings(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix)
{
    char key[FULL_NAME];
    const char *kind = tch_checkpoint_text(file, join(key, prefix, "kind"));
    const char *mine = o->method->name;
    if (kind == NULL || strcmp(kind, mine) != 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint's '%s' is a state of %s, expected one of %s", prefix,
                         kind == NULL ? "no optimizer" : kind, mine);
    }
    int64_t seed;
    TCHI_TRY(tch_checkpoint_integer(file, join(key, prefix, "seed"), &seed));
    for (int32_t g = 0; g < o->groups.count; g++) {
        tch_optim_config config;
        TCHI_TRY(read_settings(o, file, prefix, g, &config));
    }
    return TCH_OK;
}

/* What the file says of the host's side, read and checked before anything is written: the counts, then the clocks,
 * which live on the device and decide there. */
typedef struct host_side {
    tchi_list counts; /* int64_t */
    tchi_list clocks; /* double, one for each parameter */
} host_side;

static tch_status check_count(const char *name, const char *what, const char *whose, int64_t count, int64_t most)
{
    if (count >= 0 && count <= most) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint's '%s' has %lld for %s%s, expected 0 to %lld", name,
                     (long long)count, what, whose, (long long)most);
}

static tch_status check_counts(const tch_optimizer *o, const char *name, const int64_t *counts)
{
    for (int32_t i = 0; i < o->params.count; i++) {
        TCHI_TRY(check_count(name, "the steps of ", tchi_param_at(o, i)->name, *counts++, TCHI_MOST_STEPS));
    }
    TCHI_TRY(check_count(name, "the steps of the optimizer", "", *counts++, TCHI_MOST_STEPS));
    for (int64_t left = counts_length(o) - o->params.count - 1; left > 0; left--) {
        TCHI_TRY(check_count(name, "the failures of a factor", "", *counts++, TCHI_MOST_FAILURES));
    }
    return TCH_OK;
}

static tch_status read_counts(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix, tchi_list *counts)
{
    char name[FULL_NAME];
    TCHI_TRY(tchi_list_reserve(counts, counts_length(o)));
    counts->count = counts_length(o);
    tch_tensor view = tch_tensor_view(counts->items, TCH_INT64, 1, &counts->count);
    TCHI_TRY(tch_checkpoint_read(file, NULL, join(name, prefix, counts_name), &view));
    return check_counts(o, name, counts->items);
}

static tch_status read_clock(const tchi_param *p, const tch_checkpoint *file, const char *prefix, double *step)
{
    char name[FULL_NAME];
    char clock[FULL_NAME];
    tch_tensor view = tch_tensor_view(step, TCH_FLOAT64, 0, NULL);
    snprintf(clock, sizeof clock, "%s/step", p->name);
    TCHI_TRY(tch_checkpoint_read(file, NULL, join(name, prefix, clock), &view));
    if (!tchi_is_clock(*step)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the checkpoint's '%s' is %.17g, expected a whole number from 0 to %lld", name, *step,
                         (long long)TCHI_MOST_STEPS);
    }
    return TCH_OK;
}

static tch_status read_host_side(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix,
                                 host_side *read)
{
    TCHI_TRY(read_counts(o, file, prefix, &read->counts));
    for (int32_t i = 0; i < o->params.count; i++) {
        double step = 0.0;
        TCHI_TRY(read_clock(tchi_param_at(o, i), file, prefix, &step));
        TCHI_TRY(tchi_list_add(&read->clocks, &step));
    }
    return TCH_OK;
}

static void take_host_side(tch_optimizer *o, const host_side *read)
{
    const int64_t *numbers = read->counts.items;
    const double *clocks = read->clocks.items;
    for (int32_t i = 0; i < o->params.count; i++) {
        tchi_param_resume(tchi_param_at(o, i), *numbers++, clocks[i]);
    }
    o->steps = *numbers++;
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        for (int64_t k = 0; k < f->count; k++) {
            f->failures[k] = (uint8_t)*numbers++;
            tchi_failures_forget(f, k);
        }
    }
}

static tch_status load_all(tch_optimizer *o, const tch_checkpoint *file, const char *prefix, const host_side *read)
{
    char name[FULL_NAME];
    take_host_side(o, read);
    for (int32_t i = 0; i < o->states.count; i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        TCHI_TRY(tch_optimizer_get_state(o, i, &state));
        TCHI_TRY(tch_checkpoint_read(file, o->context, join(name, prefix, state.name), state.tensor));
    }
    for (int32_t g = 0; g < o->groups.count; g++) {
        TCHI_TRY(read_settings(o, file, prefix, g, &tchi_group_at(o, g)->config));
        tchi_group_at(o, g)->stale = true;
    }
    int64_t seed;
    TCHI_TRY(tch_checkpoint_integer(file, join(name, prefix, "seed"), &seed));
    tchi_group_at(o, 0)->config.seed = (uint64_t)seed;
    tchi_recordings_clear(o->context, &o->recordings); /* the seed is an argument of theirs */
    return TCH_OK;
}

tch_status tch_optimizer_load(tch_optimizer *optimizer, tch_checkpoint *checkpoint, const char *prefix)
{
    if (optimizer == NULL || checkpoint == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_load: %s is NULL",
                         optimizer == NULL ? "optimizer" : "checkpoint");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_load");
    TCHI_TRY(check_prefix("tch_optimizer_load", prefix));
    TCHI_TRY(check_settings(optimizer, checkpoint, prefix));
    TCHI_TRY(check_tensors(optimizer, checkpoint, prefix));
    host_side read = {.counts = {.item_size = sizeof(int64_t)}, .clocks = {.item_size = sizeof(double)}};
    tch_status status = read_host_side(optimizer, checkpoint, prefix, &read);
    if (status == TCH_OK) {
        status = optimizer->failed = load_all(optimizer, checkpoint, prefix, &read);
    }
    tchi_list_release(&read.counts);
    tchi_list_release(&read.clocks);
    return status;
}
