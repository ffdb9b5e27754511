/* KFAC in checkpoints: state as tensors, counts as one more, options as settings. Loading checks everything before it
 * writes anything.
 *
 * The owner of a layer saves all of it, including its row of the counts. So each tensor is in the checkpoint once,
 * under a name that does not depend on the number of ranks, and any number of processes can load it. */
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/saved.h"
#include "core/status.h"

#include "kfac.h"

static const char *const kind_value = "kfac";
static const char counts_name[] = "counts";

/* The host's counters, [layers, TCH_KFAC_COUNTS]; must live until the writer has saved. */
static tch_tensor counts_view(const tch_kfac *k, int64_t shape[2])
{
    shape[0] = k->count;
    shape[1] = TCH_KFAC_COUNTS;
    return tch_tensor_view(k->counts, TCH_INT64, 2, shape);
}

static tch_status add_counts(const tch_kfac *k, tch_checkpoint_writer *writer, const char *name)
{
    int64_t shape[2];
    tch_tensor counts = counts_view(k, shape);
    if (k->comm == NULL || k->count == 0) {
        return tch_checkpoint_writer_add(writer, name, &counts);
    }
    for (int32_t i = 0; i < k->count; i++) {
        int64_t row[] = {1, TCH_KFAC_COUNTS};
        const int64_t start[] = {i, 0};
        tch_tensor counts_of_layer = tch_tensor_view(tchi_kfac_counts(k, i), TCH_INT64, 2, row);
        TCHI_TRY(tchi_kfac_is_mine(k, i) ? tch_checkpoint_writer_add_shard(writer, name, &counts_of_layer, shape, start)
                                         : TCH_OK);
    }
    return TCH_OK;
}

tch_status tch_kfac_save(tch_kfac *kfac, tch_checkpoint_writer *writer, const char *prefix)
{
    char name[TCHI_SAVED_NAME];
    TCHI_TRY(tchi_kfac_usable(kfac, "tch_kfac_save"));
    TCHI_TRY(tchi_saved_check_arguments("tch_kfac_save", writer, "writer", prefix));
    TCHI_ENTER(kfac->context, "tch_kfac_save");
    TCHI_TRY(add_counts(kfac, writer, tchi_saved_name(name, prefix, counts_name)));
    for (int32_t i = 0; i < kfac->state_count; i++) {
        tchi_kfac_state *s = &kfac->states[i];
        if (tchi_kfac_is_mine(kfac, s->layer)) {
            TCHI_TRY(tch_checkpoint_writer_add(writer, tchi_saved_name(name, prefix, s->name), &s->tensor));
        }
    }
    TCHI_TRY(tch_checkpoint_writer_set_text(writer, tchi_saved_name(name, prefix, "kind"), kind_value));
    return tchi_options_save(&tchi_kfac_options, &kfac->config, writer, tchi_saved_name(name, prefix, ""));
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* Saved whole by one process, in rows by ranks. */
static tch_status check_counts(const tch_kfac *k, const tch_checkpoint *file, const char *name)
{
    const int64_t start[] = {0, 0};
    int64_t shape[2];
    tch_tensor counts = counts_view(k, shape);
    if (tch_checkpoint_find(file, name) >= 0) {
        return tchi_saved_check(file, name, &counts);
    }
    tch_status status = tch_checkpoint_check_shard(file, name, shape, start, &counts);
    return status == TCH_ERR_INVALID_ARGUMENT ? tchi_saved_missing(name) : status;
}

/* Whether a name after the prefix is that of the counts, or of a row: those of layers have a slash. */
static bool is_of_counts(const char *name)
{
    size_t length = sizeof counts_name - 1;
    return strncmp(name, counts_name, length) == 0 && strchr(name, '/') == NULL &&
           (name[length] == '\0' || name[length] == '[');
}

/* Detects additional layers in the file. */
static tch_status check_nothing_else(const tch_kfac *k, const tch_checkpoint *file, const char *prefix)
{
    char start[TCHI_SAVED_NAME];
    int64_t count = 0;
    static const int64_t of_layer[] = {
        [TCH_KFAC_INVERSE] = 4, [TCH_KFAC_EIGEN] = 6, [TCH_KFAC_EKFAC] = TCHI_KFAC_STATES}; /* on its owner */
    int64_t expected = k->count * of_layer[k->config.method];
    size_t length = strlen(tchi_saved_name(start, prefix, ""));
    for (int64_t i = 0; i < tch_checkpoint_count(file); i++) {
        const char *name = tch_checkpoint_name(file, i);
        count += strncmp(name, start, length) == 0 && !is_of_counts(name + length);
    }
    if (count != expected) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the checkpoint has %lld tensors of layers under '%s', expected %lld: it is of another model "
                         "or of other options",
                         (long long)count, start, (long long)expected);
    }
    return TCH_OK;
}

/* Compares the options with the file's; fixed ones must be equal. */
static tch_status read_options(const tch_kfac *k, const tch_checkpoint *file, const char *prefix,
                               tch_kfac_config *config)
{
    char name[TCHI_SAVED_NAME];
    TCHI_TRY(tchi_saved_check_kind(file, prefix, kind_value));
    *config = k->config;
    TCHI_TRY(tchi_options_load(&tchi_kfac_options, config, file, tchi_saved_name(name, prefix, "")));
    TCHI_TRY(tchi_kfac_check_config("tch_kfac_load", config));
    return tchi_kfac_check_change(&k->config, config);
}

/* Reads and checks the counts: `read` is [layers, TCH_KFAC_COUNTS]. */
static tch_status read_counts(const tch_kfac *k, const tch_checkpoint *file, const char *prefix, int64_t *read)
{
    char name[TCHI_SAVED_NAME];
    char what[TCHI_SAVED_NAME + 32];
    int64_t shape[2];
    const int64_t start[] = {0, 0};
    tch_tensor counts = counts_view(k, shape);
    counts.data = read;
    TCHI_TRY(tch_checkpoint_read_shard(file, NULL, tchi_saved_name(name, prefix, counts_name), shape, start, &counts));
    snprintf(what, sizeof what, "the checkpoint's '%s'", name);
    for (int32_t i = 0; i < k->count; i++) {
        TCHI_TRY(tchi_kfac_check_counts(what, k->layers[i].name, read + (int64_t)i * TCH_KFAC_COUNTS));
    }
    return TCH_OK;
}

static tch_status read_states(const tch_kfac *k, const tch_checkpoint *file, const char *prefix)
{
    char name[TCHI_SAVED_NAME];
    for (int32_t i = 0; i < k->state_count; i++) {
        tchi_kfac_state *s = &k->states[i];
        TCHI_TRY(tch_checkpoint_read(file, k->context, tchi_saved_name(name, prefix, s->name), &s->tensor));
    }
    return TCH_OK;
}

/* Checks everything except the tensors' bytes before the first of them is written. */
static tch_status check_checkpoint(const tch_kfac *k, const tch_checkpoint *file, const char *prefix,
                                   tch_kfac_config *config, int64_t *counts)
{
    char name[TCHI_SAVED_NAME];
    TCHI_TRY(tchi_saved_check_arguments("tch_kfac_load", file, "checkpoint", prefix));
    TCHI_TRY(read_options(k, file, prefix, config));
    for (int32_t i = 0; i < k->state_count; i++) {
        TCHI_TRY(tchi_saved_check(file, tchi_saved_name(name, prefix, k->states[i].name), &k->states[i].tensor));
    }
    TCHI_TRY(
        check_counts(k, file, tchi_saved_name(name, prefix, counts_name))); /* behind the states, which name a layer */
    TCHI_TRY(check_nothing_else(k, file, prefix));
    return read_counts(k, file, prefix, counts);
}

static tch_status load_kfac(tch_kfac *k, const tch_checkpoint *file, const char *prefix, int64_t *counts,
                            tch_status status)
{
    tch_kfac_config config = k->config;
    tchi_loading loading = {k->comm, k->context, "tch_kfac_load", counts, 0};
    if (status == TCH_OK) {
        status = check_checkpoint(k, file, prefix, &config, counts);
        loading.count = (int64_t)k->count * TCH_KFAC_COUNTS;
    }
    TCHI_TRY(tchi_loading_agree(&loading, status, "nothing was changed"));
    k->failed = tchi_loading_agree(&loading, read_states(k, file, prefix), "the state is incomplete");
    for (int64_t i = 0; k->failed == TCH_OK && i < loading.count; i++) {
        k->counts[i] = counts[i];
    }
    k->config = k->failed == TCH_OK ? config : k->config;
    return k->failed;
}

tch_status tch_kfac_load(tch_kfac *kfac, tch_checkpoint *checkpoint, const char *prefix)
{
    if (kfac == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_load: kfac is NULL");
    }
    TCHI_ENTER(kfac->context, "tch_kfac_load");
    size_t bytes = (size_t)kfac->count * TCH_KFAC_COUNTS * sizeof *kfac->counts;
    int64_t *counts = NULL;
    tch_status status = tchi_host_take(bytes, "KFAC's counts", &counts);
    status = load_kfac(kfac, checkpoint, prefix, counts, status); /* also if out of memory: the other ranks wait */
    tchi_host_release(counts, bytes);
    return status;
}
