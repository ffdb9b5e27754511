/* KFAC in checkpoints: the named state as tensors, the counts as one more, options as settings. Loading compares
 * everything with the file before it writes anything. */
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"

#include "kfac.h"

#define FULL_NAME (TCHI_KFAC_STATE_NAME + TCHI_KFAC_NAME)

static const char *const kind_value = "kfac";

static tch_status check_call(const char *function, const tch_kfac *kfac, const void *file, const char *what,
                             const char *prefix)
{
    if (kfac == NULL || file == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function, kfac == NULL ? "kfac" : what);
    }
    if (prefix == NULL || prefix[0] == '\0' || strlen(prefix) >= TCHI_KFAC_NAME) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: prefix must have 1 to %d bytes", function, TCHI_KFAC_NAME - 1);
    }
    return TCH_OK;
}

static const char *join(char *text, const char *prefix, const char *name)
{
    snprintf(text, FULL_NAME, "%s/%s", prefix, name);
    return text;
}

/* What the host counts, [layers, TCH_KFAC_COUNTS]; it lives as long as the writer may read it. */
static tch_tensor counts_view(const tch_kfac *k, int64_t shape[2])
{
    shape[0] = k->count;
    shape[1] = TCH_KFAC_COUNTS;
    return tch_tensor_view(k->counts, TCH_INT64, 2, shape);
}

tch_status tch_kfac_save(tch_kfac *kfac, tch_checkpoint_writer *writer, const char *prefix)
{
    char name[FULL_NAME];
    int64_t shape[2];
    const char *option;
    TCHI_TRY(check_call("tch_kfac_save", kfac, writer, "writer", prefix));
    TCHI_TRY(tchi_kfac_usable(kfac, "tch_kfac_save"));
    TCHI_ENTER(kfac->context, "tch_kfac_save");
    tch_tensor counts = counts_view(kfac, shape);
    TCHI_TRY(tch_checkpoint_writer_add(writer, join(name, prefix, "counts"), &counts));
    for (int32_t i = 0; i < kfac->state_count; i++) {
        tchi_kfac_state *s = &kfac->states[i];
        TCHI_TRY(tch_checkpoint_writer_add(writer, join(name, prefix, s->name), &s->tensor));
    }
    TCHI_TRY(tch_checkpoint_writer_set_text(writer, join(name, prefix, "kind"), kind_value));
    for (int32_t i = 0; tchi_kfac_option(i, &option); i++) {
        double value = tchi_kfac_option_get(&kfac->config, i);
        TCHI_TRY(tch_checkpoint_writer_set_number(writer, join(name, prefix, option), value));
    }
    return TCH_OK;
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
    if (same) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "the checkpoint's '%s' has another shape or type, expected %s %s", name,
                     tch_dtype_name(tensor->dtype), tchi_describe_shape(tensor, text, sizeof text));
}

static tch_status check_tensors(const tch_kfac *k, const tch_checkpoint *file, const char *prefix)
{
    char name[FULL_NAME];
    int64_t shape[2];
    tch_tensor counts = counts_view(k, shape);
    TCHI_TRY(check_entry(file, join(name, prefix, "counts"), &counts));
    for (int32_t i = 0; i < k->state_count; i++) {
        TCHI_TRY(check_entry(file, join(name, prefix, k->states[i].name), &k->states[i].tensor));
    }
    int64_t count = 0;
    join(name, prefix, "");
    for (int64_t i = 0; i < tch_checkpoint_count(file); i++) {
        count += strncmp(tch_checkpoint_name(file, i), name, strlen(name)) == 0;
    }
    if (count != k->state_count + 1) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the checkpoint has %lld tensors under '%s', expected %d: it is of another model or of other "
                         "options",
                         (long long)count, name, k->state_count + 1);
    }
    return TCH_OK;
}

/* The options as the file has them; what cannot change must be the same. */
static tch_status read_options(const tch_kfac *k, const tch_checkpoint *file, const char *prefix,
                               tch_kfac_config *config)
{
    char name[FULL_NAME];
    char what[FULL_NAME + 32];
    const char *option;
    const char *kind = tch_checkpoint_text(file, join(name, prefix, "kind"));
    if (kind == NULL || strcmp(kind, kind_value) != 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint's '%s' is a state of %s, expected one of %s", prefix,
                         kind == NULL ? "nothing" : kind, kind_value);
    }
    *config = k->config;
    for (int32_t i = 0; tchi_kfac_option(i, &option); i++) {
        double value;
        TCHI_TRY(tch_checkpoint_number(file, join(name, prefix, option), &value));
        snprintf(what, sizeof what, "the checkpoint's '%s'", name);
        TCHI_TRY(tchi_kfac_check_value(what, i, value));
        tchi_kfac_option_set(config, i, value);
    }
    TCHI_TRY(tchi_kfac_check_config("tch_kfac_load", config));
    return tchi_kfac_check_change(&k->config, config);
}

/* The counts as the file has them, checked, into memory of their own: `read` is [layers, TCH_KFAC_COUNTS]. */
static tch_status read_counts(const tch_kfac *k, const tch_checkpoint *file, const char *prefix, int64_t *read)
{
    char name[FULL_NAME];
    char what[FULL_NAME + 32];
    int64_t shape[2];
    tch_tensor counts = counts_view(k, shape);
    counts.data = read;
    TCHI_TRY(tch_checkpoint_read(file, NULL, join(name, prefix, "counts"), &counts));
    snprintf(what, sizeof what, "the checkpoint's '%s'", name);
    for (int32_t i = 0; i < k->count; i++) {
        TCHI_TRY(tchi_kfac_check_counts(what, k->layers[i].name, read + (int64_t)i * TCH_KFAC_COUNTS));
    }
    return TCH_OK;
}

static tch_status read_states(const tch_kfac *k, const tch_checkpoint *file, const char *prefix)
{
    char name[FULL_NAME];
    for (int32_t i = 0; i < k->state_count; i++) {
        tchi_kfac_state *s = &k->states[i];
        TCHI_TRY(tch_checkpoint_read(file, k->context, join(name, prefix, s->name), &s->tensor));
    }
    return TCH_OK;
}

/* Everything but the tensors is read and checked before the first of them is written. */
static tch_status load(tch_kfac *k, const tch_checkpoint *file, const char *prefix, int64_t *counts)
{
    tch_kfac_config config;
    TCHI_TRY(read_options(k, file, prefix, &config));
    TCHI_TRY(check_tensors(k, file, prefix));
    TCHI_TRY(read_counts(k, file, prefix, counts));
    k->failed = read_states(k, file, prefix);
    for (int64_t i = 0; k->failed == TCH_OK && i < (int64_t)k->count * TCH_KFAC_COUNTS; i++) {
        k->counts[i] = counts[i];
    }
    k->config = k->failed == TCH_OK ? config : k->config;
    return k->failed;
}

tch_status tch_kfac_load(tch_kfac *kfac, tch_checkpoint *checkpoint, const char *prefix)
{
    TCHI_TRY(check_call("tch_kfac_load", kfac, checkpoint, "checkpoint", prefix));
    TCHI_ENTER(kfac->context, "tch_kfac_load");
    size_t bytes = (size_t)kfac->count * TCH_KFAC_COUNTS * sizeof *kfac->counts;
    int64_t *counts = NULL;
    TCHI_TRY(tchi_host_take(bytes, "KFAC's counts", &counts));
    tch_status status = load(kfac, checkpoint, prefix, counts);
    tchi_host_release(counts, bytes);
    return status;
}
