/* Optimizers in checkpoints: the named state as tensors, the host's counters as one more tensor, hyperparameters as
 * settings. Loading validates the whole file before the first write. */
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "core/check.h"
#include "core/status.h"

#include "config.h"
#include "core/list.h"
#include "refresh.h"
#include "method.h"
#include "saved_state.h"
#include "shared/shared.h"

/* The settings of a group: "prefix/group0.lr". */
static const char *group_prefix(char text[TCHI_SAVED_NAME], const char *prefix, int32_t group)
{
    snprintf(text, TCHI_SAVED_NAME, "%s/group%d.", prefix, group);
    return text;
}

/* Sharded checkpoints name the model they belong to, since no rank has all of it. */
static const char model_name[] = "model";
#define MODEL_SIZE 17

static const char *model_text(const tch_optimizer *o, char text[MODEL_SIZE])
{
    snprintf(text, MODEL_SIZE, "%016llx", (unsigned long long)tchi_saved_model(o));
    return text;
}

static tch_status save_settings(const tch_optimizer *o, tch_checkpoint_writer *writer, const char *prefix)
{
    char key[TCHI_SAVED_NAME];
    TCHI_TRY(tch_checkpoint_writer_set_text(writer, tchi_saved_name(key, prefix, "kind"), o->method->name));
    TCHI_TRY(tch_checkpoint_writer_set_integer(writer, tchi_saved_name(key, prefix, "seed"),
                                               (int64_t)tchi_group_at(o, 0)->config.memory.seed));
    if (o->shared != NULL) {
        char text[MODEL_SIZE];
        TCHI_TRY(tch_checkpoint_writer_set_text(writer, tchi_saved_name(key, prefix, model_name), model_text(o, text)));
    }
    for (int32_t g = 0; g < o->groups.count; g++) {
        TCHI_TRY(
            tchi_options_save(&tchi_optim_options, &tchi_group_at(o, g)->config, writer, group_prefix(key, prefix, g)));
    }
    return TCH_OK;
}

tch_status tch_optimizer_save(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix)
{
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_save: optimizer is NULL");
    }
    TCHI_TRY(tchi_saved_check_arguments("tch_optimizer_save", writer, "writer", prefix));
    TCHI_ENTER(optimizer->context, "tch_optimizer_save");
    if (optimizer->failed != TCH_OK) {
        return tchi_fail(optimizer->failed,
                         "tch_optimizer_save: a step of this optimizer failed, and its state is incomplete");
    }
    TCHI_TRY(tchi_saved_counts_add(optimizer, writer, prefix));
    for (int32_t i = 0; i < optimizer->states.count; i++) {
        TCHI_TRY(tchi_saved_state_add(optimizer, i, writer, prefix));
    }
    return save_settings(optimizer, writer, prefix);
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* The file must have as many tensors under the prefix as the optimizer. */
static tch_status check_nothing_else(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix)
{
    char start[TCHI_SAVED_NAME];
    int64_t count = 0;
    int64_t expected = 1;
    for (int64_t i = 0; i < o->states.count; i++) {
        expected += tchi_saved_state_count(o, i, file, prefix);
    }
    tchi_saved_name(start, prefix, "");
    for (int64_t i = 0; i < tch_checkpoint_count(file); i++) {
        count += strncmp(tch_checkpoint_name(file, i), start, strlen(start)) == 0;
    }
    if (count != expected) {
        return tchi_fail(
            TCH_ERR_INVALID_ARGUMENT,
            "the checkpoint has %lld tensors under '%s', this optimizer %lld: it is of another model or of "
            "other options",
            (long long)count, start, (long long)expected);
    }
    return TCH_OK;
}

/* Compares the model's name in a sharded checkpoint; one process's checkpoint is compared tensor by tensor. */
static tch_status check_model(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix)
{
    char key[TCHI_SAVED_NAME];
    char mine[MODEL_SIZE];
    if (!tchi_saved_by_ranks(file, prefix)) {
        return o->shared == NULL ? check_nothing_else(o, file, prefix) : TCH_OK;
    }
    const char *theirs = tch_checkpoint_text(file, tchi_saved_name(key, prefix, model_name));
    if (strcmp(theirs, model_text(o, mine)) != 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the checkpoint's '%s' is of another model: names, shapes, types and groups of the parameters "
                         "are not the same, by their hash %.32s, expected %s",
                         prefix, theirs, mine);
    }
    return TCH_OK;
}

/* Reads and checks a group's settings; options that cannot change must be equal. */
static tch_status read_settings(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix, int32_t group,
                                tch_optim_config *config)
{
    char key[TCHI_SAVED_NAME];
    *config = tchi_group_at(o, group)->config;
    TCHI_TRY(tchi_options_load(&tchi_optim_options, config, file, group_prefix(key, prefix, group)));
    TCHI_TRY(tchi_config_check("tch_optimizer_load", config));
    return tchi_config_check_change(&tchi_group_at(o, group)->config, config);
}

/* Ranks that share an optimizer convert no moments. */
static tch_status check_state_dtype(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix,
                                    int32_t group)
{
    char key[TCHI_SAVED_NAME];
    double value = 0.0;
    snprintf(key, sizeof key, "%s/group%d.state_dtype", prefix, group);
    if (tch_checkpoint_text(file, key) != NULL) {
        TCHI_TRY(tch_checkpoint_number(file, key, &value));
    }
    int kept = tchi_group_at(o, group)->config.memory.state_dtype;
    if (o->shared != NULL && value != kept) {
        return tchi_fail(TCH_ERR_UNSUPPORTED,
                         "the checkpoint's '%s' is %.10g, expected %d: ranks that share an optimizer convert no "
                         "moments. One process that loads it with this state_dtype, and saves it again, makes a "
                         "checkpoint for them",
                         key, value, kept);
    }
    return TCH_OK;
}

static tch_status check_settings(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix)
{
    char key[TCHI_SAVED_NAME];
    TCHI_TRY(tchi_saved_check_kind(file, prefix, o->method->name));
    int64_t seed;
    TCHI_TRY(tch_checkpoint_integer(file, tchi_saved_name(key, prefix, "seed"), &seed));
    for (int32_t g = 0; g < o->groups.count; g++) {
        tch_optim_config config;
        TCHI_TRY(check_state_dtype(o, file, prefix, g));
        TCHI_TRY(read_settings(o, file, prefix, g, &config));
    }
    return TCH_OK;
}

/* The host's state in the file, read and checked before the first write: the counters, and the clocks, which are
 * authoritative on the device. */
typedef struct host_side {
    tchi_list counts; /* int64_t */
    tchi_list clocks; /* double, one for each parameter */
} host_side;

static tch_status read_clock(const tchi_param *p, const tch_checkpoint *file, const char *prefix, double *step)
{
    char name[TCHI_SAVED_NAME];
    char clock[TCHI_SAVED_NAME];
    tch_tensor view = tch_tensor_view(step, TCH_FLOAT64, 0, NULL);
    snprintf(clock, sizeof clock, "%s/step", p->name);
    TCHI_TRY(tch_checkpoint_read(file, NULL, tchi_saved_name(name, prefix, clock), &view));
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
    TCHI_TRY(tchi_saved_counts_read(o, file, prefix, &read->counts));
    for (int32_t i = 0; i < o->params.count; i++) {
        double step = 0.0;
        TCHI_TRY(read_clock(tchi_param_at(o, i), file, prefix, &step));
        TCHI_TRY(tchi_list_add(&read->clocks, &step));
    }
    return TCH_OK;
}

static tch_status load_all(tch_optimizer *o, const tch_checkpoint *file, const char *prefix, const host_side *read)
{
    char name[TCHI_SAVED_NAME];
    for (int32_t i = 0; i < o->params.count; i++) {
        tchi_param_resume(tchi_param_at(o, i), ((const int64_t *)read->counts.items)[i],
                          ((const double *)read->clocks.items)[i]);
    }
    tchi_saved_counts_take(o, &read->counts);
    for (int32_t i = 0; i < o->states.count; i++) {
        TCHI_TRY(tchi_saved_state_read(o, i, file, prefix));
    }
    for (int32_t g = 0; g < o->groups.count; g++) {
        TCHI_TRY(read_settings(o, file, prefix, g, &tchi_group_at(o, g)->config));
        tchi_group_at(o, g)->numbers_changed = true;
    }
    int64_t seed;
    TCHI_TRY(tch_checkpoint_integer(file, tchi_saved_name(name, prefix, "seed"), &seed));
    tchi_group_at(o, 0)->config.memory.seed = (uint64_t)seed;
    tchi_recordings_clear(o->context, &o->recordings); /* the seed is one of their arguments */
    return TCH_OK;
}

/* Checks everything but the tensors' bytes, before the first write. */
static tch_status check_all(tch_optimizer *o, const tch_checkpoint *file, const char *prefix, host_side *read)
{
    TCHI_TRY(tchi_saved_check_arguments("tch_optimizer_load", file, "checkpoint", prefix));
    TCHI_TRY(check_settings(o, file, prefix));
    for (int32_t i = 0; i < o->states.count; i++) {
        TCHI_TRY(tchi_saved_state_check(o, i, file, prefix));
    }
    TCHI_TRY(tchi_saved_counts_check(o, file, prefix));
    TCHI_TRY(check_model(o, file, prefix));
    return read_host_side(o, file, prefix, read);
}

static tch_status agree(const tch_optimizer *o, tch_status status, const host_side *read, const char *otherwise)
{
    int64_t alike = o->params.count + 1; /* equal on all ranks, except for factors */
    tchi_loading loading = {.comm = o->shared == NULL ? NULL : o->shared->comm,
                            .context = o->context,
                            .function = "tch_optimizer_load",
                            .counts = read->counts.items,
                            .count = read->counts.count < alike ? read->counts.count : alike};
    return tchi_loading_agree(&loading, status, otherwise);
}

tch_status tch_optimizer_load(tch_optimizer *optimizer, tch_checkpoint *checkpoint, const char *prefix)
{
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_load: optimizer is NULL");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_load");
    host_side read = {.counts = {.item_size = sizeof(int64_t)}, .clocks = {.item_size = sizeof(double)}};
    tch_status status = agree(optimizer, check_all(optimizer, checkpoint, prefix, &read), &read, "nothing was changed");
    if (status == TCH_OK) {
        status = agree(optimizer, load_all(optimizer, checkpoint, prefix, &read), &read, "the state is incomplete");
        optimizer->failed = status;
    }
    tchi_list_release(&read.counts);
    tchi_list_release(&read.clocks);
    return status;
}
