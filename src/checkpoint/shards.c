/* Shards of tensors. Settings are untrusted: a description that does not fit the tensor and its name is an error. */
#include "shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "core/tensor.h"
#include "chunks.h"
#include "reader.h"
#include "text.h"

const char *tchi_shard_suffix(const tchi_slice *slice, char text[TCHI_SHARD_SUFFIX_SIZE])
{
    size_t used = 0;
    for (int32_t k = 0; k < slice->ndim; k++) {
        used += (size_t)snprintf(text + used, TCHI_SHARD_SUFFIX_SIZE - used, "%s%lld:%lld", k == 0 ? "[" : ",",
                                 (long long)slice->start[k], (long long)(slice->start[k] + slice->size[k]));
    }
    snprintf(text + used, TCHI_SHARD_SUFFIX_SIZE - used, "]");
    return text;
}

/* --- finding them ------------------------------------------------------------------------------------------------ */

static tchi_stored *stored_at(const tch_checkpoint *c, int64_t number)
{
    return (tchi_stored *)c->header.tensors.items + number;
}

static tchi_shard_entry *entry_at(const tch_checkpoint *c, int64_t number)
{
    return (tchi_shard_entry *)c->shards.entries.items + number;
}

static tchi_whole *whole_at(const tch_checkpoint *c, int64_t number)
{
    return (tchi_whole *)c->shards.wholes.items + number;
}

/* Parses `count` numbers separated by commas, and `end`. Returns the position after them, or NULL. */
static const char *parse_numbers(const char *text, int32_t count, char end, int64_t *numbers)
{
    for (int32_t k = 0; k < count; k++) {
        char *after;
        if (*text < '0' || *text > '9') {
            return NULL;
        }
        numbers[k] = strtoll(text, &after, 10);
        if (*after != (k + 1 < count ? ',' : end)) {
            return NULL;
        }
        text = after + (*after != '\0');
    }
    return text;
}

/* Parses the rectangle of a tensor from its setting; false if they do not match. */
static bool parse_shard(const tch_checkpoint *c, const tchi_stored *stored, const char *text, int64_t *shape,
                        int64_t *start)
{
    if (stored->ndim < 1 || stored->ndim > TCH_MAX_RANK) {
        return false;
    }
    text = parse_numbers(text, stored->ndim, ';', shape);
    tchi_slice slice = {stored->ndim, shape, start, tchi_checkpoint_sizes(c, stored)};
    return text != NULL && parse_numbers(text, stored->ndim, '\0', start) != NULL && tchi_slice_is_sound(&slice);
}

/* Takes ownership of `name` on success. */
static tch_status add_whole(tchi_shards *s, char *name, size_t bytes, int32_t ndim, const int64_t *shape)
{
    TCHI_TRY(tchi_list_reserve(&s->wholes, s->wholes.count + 1));
    TCHI_TRY(tchi_names_add(&s->names, name, s->wholes.count));
    tchi_whole *whole = tchi_list_extend(&s->wholes);
    *whole = (tchi_whole){.name = name, .name_bytes = bytes, .ndim = ndim, .first = -1};
    memcpy(whole->shape, shape, (size_t)ndim * sizeof *shape);
    return TCH_OK;
}

/* Finds or adds the whole of this name, the first `length` bytes of a shard's. */
static tch_status find_whole(tchi_shards *s, const char *shard, size_t length, int32_t ndim, const int64_t *shape,
                             int64_t *number)
{
    char *name;
    TCHI_TRY(tchi_host_take(length + 1, "the name of a sharded tensor", &name));
    memcpy(name, shard, length);
    *number = tchi_names_find(&s->names, name);
    tch_status status = TCH_OK;
    bool added = false;
    if (*number < 0) {
        *number = s->wholes.count;
        status = add_whole(s, name, length + 1, ndim, shape);
        added = status == TCH_OK;
    }
    if (!added) {
        tchi_host_release(name, length + 1);
    }
    return status;
}

static tch_status fail_shard(const tch_checkpoint *c, const char *name, const char *why)
{
    return tchi_fail(TCH_ERR_IO, "%.600s: the shard \"%s\" %s", c->path, tchi_quote(name).text, why);
}

static bool is_like(const tch_checkpoint *c, const tchi_whole *whole, const tchi_stored *stored, const int64_t *shape)
{
    return whole->ndim == stored->ndim && memcmp(whole->shape, shape, (size_t)whole->ndim * sizeof *shape) == 0 &&
           (whole->first < 0 || stored_at(c, entry_at(c, whole->first)->tensor)->type == stored->type);
}

static tch_status add_shard(tch_checkpoint *c, const char *name, const char *text)
{
    tchi_shard_entry entry = {.tensor = tchi_names_find(&c->header.names, name)};
    int64_t shape[TCH_MAX_RANK] = {0};
    char suffix[TCHI_SHARD_SUFFIX_SIZE];
    if (entry.tensor < 0) {
        return fail_shard(c, name, "is described, but there is no such tensor");
    }
    const tchi_stored *stored = stored_at(c, entry.tensor);
    if (!parse_shard(c, stored, text, shape, entry.start)) {
        return fail_shard(c, name, "does not fit its description");
    }
    tchi_slice slice = {stored->ndim, shape, entry.start, tchi_checkpoint_sizes(c, stored)};
    size_t end = strlen(tchi_shard_suffix(&slice, suffix));
    size_t length = strlen(name);
    if (length <= end || strcmp(name + length - end, suffix) != 0) {
        return fail_shard(c, name, "does not have its rectangle in its name");
    }
    TCHI_TRY(find_whole(&c->shards, name, length - end, stored->ndim, shape, &entry.whole));
    tchi_whole *whole = whole_at(c, entry.whole);
    if (!is_like(c, whole, stored, shape)) {
        return fail_shard(c, name, "is of another type than another shard of its tensor, or of another whole");
    }
    entry.next = whole->first;
    TCHI_TRY(tchi_list_add(&c->shards.entries, &entry));
    whole->first = c->shards.entries.count - 1;
    return TCH_OK;
}

tch_status tchi_shards_find(tch_checkpoint *checkpoint)
{
    const tchi_setting *settings = checkpoint->header.settings.items;
    size_t prefix = strlen(TCHI_SHARD_PREFIX);
    checkpoint->shards.entries.item_size = sizeof(tchi_shard_entry);
    checkpoint->shards.wholes.item_size = sizeof(tchi_whole);
    for (int64_t i = 0; i < checkpoint->header.settings.count; i++) {
        if (strncmp(settings[i].key, TCHI_SHARD_PREFIX, prefix) == 0) {
            TCHI_TRY(add_shard(checkpoint, settings[i].key + prefix, settings[i].value));
        }
    }
    return TCH_OK;
}

void tchi_shards_release(tchi_shards *shards)
{
    const tchi_whole *wholes = shards->wholes.items;
    for (int64_t i = 0; i < shards->wholes.count; i++) {
        tchi_host_release(wholes[i].name, wholes[i].name_bytes);
    }
    tchi_list_release(&shards->entries);
    tchi_list_release(&shards->wholes);
    tchi_names_release(&shards->names);
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

/* The sources of a rectangle: the full tensor, or its shards in turn. */
typedef struct source {
    const tch_checkpoint *checkpoint;
    int64_t tensor; /* its index; -1 after the last one */
    int64_t shard;  /* the same, or -1 for a full tensor */
} source;

static source first_source(const tch_checkpoint *c, const char *name)
{
    int64_t tensor = tchi_names_find(&c->header.names, name);
    int64_t whole = tensor >= 0 ? -1 : tchi_names_find(&c->shards.names, name);
    int64_t shard = whole < 0 ? -1 : whole_at(c, whole)->first;
    return (source){c, shard < 0 ? tensor : entry_at(c, shard)->tensor, shard};
}

static void next_source(source *s)
{
    s->shard = s->shard < 0 ? -1 : entry_at(s->checkpoint, s->shard)->next;
    s->tensor = s->shard < 0 ? -1 : entry_at(s->checkpoint, s->shard)->tensor;
}

static tchi_slice slice_of(const source *s)
{
    static const int64_t nowhere[TCH_MAX_RANK];
    const tchi_stored *stored = stored_at(s->checkpoint, s->tensor);
    const int64_t *sizes = tchi_checkpoint_sizes(s->checkpoint, stored);
    if (s->shard < 0) {
        return (tchi_slice){stored->ndim, sizes, nowhere, sizes};
    }
    const tchi_shard_entry *entry = entry_at(s->checkpoint, s->shard);
    return (tchi_slice){stored->ndim, whole_at(s->checkpoint, entry->whole)->shape, entry->start, sizes};
}

/* Counts the elements of a rectangle in one source. */
static int64_t count_shared(const source *s, const tchi_slice *target)
{
    int64_t shared = 0;
    tchi_slice slice = slice_of(s);
    (void)tchi_slice_meet(&slice, target, NULL, NULL, &shared); /* fails only if its callback does */
    return shared;
}

static const char *describe_whole(const tchi_slice *slice, char *text, size_t size)
{
    tch_tensor whole = {.ndim = slice->ndim, .shape = (int64_t *)slice->shape};
    return tchi_describe_shape(&whole, text, size);
}

static tch_status check_source(const source *s, const char *name, const tchi_slice *target, tch_dtype dtype)
{
    char theirs[TCHI_DESCRIBE_SIZE];
    char ours[TCHI_DESCRIBE_SIZE];
    const tchi_stored *stored = stored_at(s->checkpoint, s->tensor);
    if (stored->ndim > TCH_MAX_RANK) {
        return tchi_fail(TCH_ERR_SHAPE, "\"%s\" of %.600s has %d dimensions, this library has %d",
                         tchi_quote(name).text, s->checkpoint->path, stored->ndim, TCH_MAX_RANK);
    }
    tchi_slice slice = slice_of(s);
    if (!tch_dtype_equal(stored->type->dtype, dtype) || !tchi_slice_same_whole(&slice, target)) {
        return tchi_fail(TCH_ERR_SHAPE, "\"%s\" of %.600s is %s %s, expected %s %s", tchi_quote(name).text,
                         s->checkpoint->path, stored->type->name, describe_whole(&slice, theirs, sizeof theirs),
                         tch_dtype_name(dtype), describe_whole(target, ours, sizeof ours));
    }
    return TCH_OK;
}

/* Rejects a shard that shares an element with an earlier one. */
static tch_status check_overlap(const source *s, const char *name)
{
    const tch_checkpoint *c = s->checkpoint;
    tchi_slice slice = slice_of(s);
    for (source before = first_source(c, name); before.tensor != s->tensor; next_source(&before)) {
        tchi_slice theirs = slice_of(&before);
        if (tchi_slice_overlap(&slice, &theirs)) {
            return tchi_fail(TCH_ERR_IO,
                             "%.600s: the shards \"%s\" and \"%s\" of \"%s\" overlap, expected each element in one of "
                             "them; save it again from shards that do not",
                             c->path, tchi_quote(stored_at(c, s->tensor)->name).text,
                             tchi_quote(stored_at(c, before.tensor)->name).text, tchi_quote(name).text);
        }
    }
    return TCH_OK;
}

tch_status tchi_shards_check_overlaps(const tch_checkpoint *checkpoint)
{
    for (int64_t i = 0; i < checkpoint->shards.wholes.count; i++) {
        const char *name = whole_at(checkpoint, i)->name;
        for (source s = first_source(checkpoint, name); s.tensor >= 0; next_source(&s)) {
            TCHI_TRY(check_overlap(&s, name));
        }
    }
    return TCH_OK;
}

/* Sets a bit per element of the run; fails, without a message, if one is already set. */
static tch_status mark_run(void *user, int64_t in_from, int64_t in_to, int64_t count)
{
    uint64_t *words = user;
    int64_t end = in_to + count;
    for (int64_t x = in_to; x < end; x = (x | 63) + 1) {
        int64_t last = (x | 63) < end ? x | 63 : end - 1;
        uint64_t mask = (UINT64_MAX << (x & 63)) & (UINT64_MAX >> (63 - (last & 63)));
        if ((words[x / 64] & mask) != 0) {
            return TCH_ERR_IO;
        }
        words[x / 64] |= mask;
    }
    return TCH_OK;
}

/* Rejects shards that overlap inside the rectangle, which would hide a gap from the count of elements. A bitmap makes
 * the time linear in the shards, of which a hostile file may have a million. */
static tch_status check_marks(const tch_checkpoint *checkpoint, const char *name, const tchi_slice *target)
{
    size_t bytes = (size_t)((tchi_slice_count(target) + 63) / 64 * 8);
    uint64_t *words;
    tch_status status = TCH_OK;
    TCHI_TRY(tchi_host_take(bytes, "a map of shards", &words));
    for (source s = first_source(checkpoint, name); s.tensor >= 0 && status == TCH_OK; next_source(&s)) {
        int64_t shared;
        tchi_slice slice = slice_of(&s);
        if (tchi_slice_meet(&slice, target, mark_run, words, &shared) != TCH_OK) {
            status = check_overlap(&s, name);
        }
    }
    tchi_host_release(words, bytes);
    return status;
}

/* Whether a rectangle of this type is complete; reads no elements. */
static tch_status check_sources(const tch_checkpoint *checkpoint, const char *name, const tchi_slice *target,
                                tch_dtype dtype)
{
    int64_t covered = 0;
    int32_t parts = 0;
    source s = first_source(checkpoint, name);
    if (s.tensor < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%.600s has no tensor with the name \"%s\", whole or in shards",
                         checkpoint->path, tchi_quote(name).text);
    }
    for (; s.tensor >= 0; next_source(&s)) {
        TCHI_TRY(check_source(&s, name, target, dtype));
        int64_t shared = count_shared(&s, target);
        covered += shared;
        parts += shared > 0;
    }
    TCHI_TRY(parts > 1 ? check_marks(checkpoint, name, target) : TCH_OK);
    if (covered != tchi_slice_count(target)) {
        return tchi_fail(TCH_ERR_IO, "%.600s: the shards of \"%s\" have %lld of %lld elements that are requested",
                         checkpoint->path, tchi_quote(name).text, (long long)covered,
                         (long long)tchi_slice_count(target));
    }
    return TCH_OK;
}

/* A sliding window of a tensor's bytes, forward only. */
typedef struct window {
    const tch_checkpoint *file;
    int descriptor;
    const tchi_stored *stored;
    int64_t size; /* of an element */
    char *buffer;
    int64_t room, begin, end; /* elements */
    char *to;
} window;

static tch_status move_window(window *w, int64_t first)
{
    int64_t left = (w->stored->end - w->stored->begin) / w->size - first;
    w->begin = first;
    w->end = first + (left < w->room ? left : w->room);
    return tchi_checkpoint_bytes(w->descriptor, w->file->path, w->file->data_begin + w->stored->begin + first * w->size,
                                 w->buffer, (w->end - w->begin) * w->size);
}

static tch_status copy_run(void *user, int64_t in_from, int64_t in_to, int64_t count)
{
    window *w = user;
    while (count > 0) {
        if (in_from < w->begin || in_from >= w->end) {
            TCHI_TRY(move_window(w, in_from));
        }
        int64_t here = w->end - in_from < count ? w->end - in_from : count;
        memcpy(w->to + in_to * w->size, w->buffer + (in_from - w->begin) * w->size, (size_t)(here * w->size));
        in_from += here;
        in_to += here;
        count -= here;
    }
    return TCH_OK;
}

/* Copies one source's part of the rectangle. */
static tch_status copy_source(const source *s, const tchi_slice *target, char *buffer, int64_t room, char *to)
{
    int64_t shared;
    tchi_slice slice = slice_of(s);
    const tchi_stored *stored = stored_at(s->checkpoint, s->tensor);
    window w = {.file = tchi_checkpoint_file(s->checkpoint, stored),
                .stored = stored,
                .size = (int64_t)tch_dtype_size(stored->type->dtype),
                .buffer = buffer,
                .to = to};
    w.room = room / w.size;
    TCHI_TRY(tchi_descriptor_borrow(w.file, &w.descriptor));
    tch_status status = tchi_slice_meet(&slice, target, copy_run, &w, &shared);
    tchi_descriptor_return(w.file, w.descriptor);
    return status;
}

static int64_t buffer_of(const tch_checkpoint *c, const char *name)
{
    int64_t most = 0;
    for (source s = first_source(c, name); s.tensor >= 0; next_source(&s)) {
        const tchi_stored *stored = stored_at(c, s.tensor);
        most = stored->end - stored->begin > most ? stored->end - stored->begin : most;
    }
    return most < TCHI_BUFFER_BYTES ? most : TCHI_BUFFER_BYTES;
}

/* Verifies all checksums before the first element is written. */
static tch_status copy_sources(const tch_checkpoint *c, const char *name, const tchi_slice *target, char *to)
{
    char *buffer;
    for (source s = first_source(c, name); s.tensor >= 0; next_source(&s)) {
        TCHI_TRY(count_shared(&s, target) > 0 ? tchi_checkpoint_verify_once(c, stored_at(c, s.tensor)) : TCH_OK);
    }
    int64_t room = buffer_of(c, name);
    TCHI_TRY(tchi_host_take((size_t)room, "a buffer", &buffer));
    tch_status status = TCH_OK;
    for (source s = first_source(c, name); s.tensor >= 0 && status == TCH_OK; next_source(&s)) {
        status = count_shared(&s, target) > 0 ? copy_source(&s, target, buffer, room, to) : TCH_OK;
    }
    tchi_host_release(buffer, (size_t)room);
    return status;
}

/* Assembled in host memory, then copied to its device. */
static tch_status read_through_memory(const tch_checkpoint *c, tch_context *context, const char *name,
                                      const tchi_slice *target, tch_tensor *out)
{
    size_t bytes = (size_t)tchi_tensor_bytes(out);
    char *packed;
    TCHI_TRY(tchi_host_take(bytes, "a shard", &packed));
    tch_status status = copy_sources(c, name, target, packed);
    if (status == TCH_OK && tchi_on_host(out)) {
        tchi_unpack(out, packed);
    } else if (status == TCH_OK) {
        tch_tensor view = tch_tensor_view(packed, out->dtype, out->ndim, out->shape);
        status = tch_tensor_copy(context, out, &view);
    }
    tchi_host_release(packed, bytes);
    return status;
}

tch_status tch_checkpoint_check_shard(const tch_checkpoint *checkpoint, const char *name, const int64_t *shape,
                                      const int64_t *start, const tch_tensor *out)
{
    static const char function[] = "tch_checkpoint_check_shard";
    TCHI_TRY(tchi_check_not_null(function, "checkpoint", checkpoint));
    TCHI_TRY(tchi_check_not_null(function, "name", name));
    TCHI_TRY(tchi_check_not_null(function, "out", out));
    bool has_rank = out->ndim >= 0 && out->ndim <= TCH_MAX_RANK && (out->ndim == 0 || out->shape != NULL);
    tchi_slice target = {has_rank ? out->ndim : 0, shape, start, out->shape};
    if (!has_rank || (out->ndim > 0 && (shape == NULL || start == NULL || !tchi_slice_is_sound(&target)))) {
        return tchi_fail(TCH_ERR_SHAPE, "%s: shape or start is NULL, or out is not inside the whole", function);
    }
    return check_sources(checkpoint, name, &target, out->dtype);
}

tch_status tch_checkpoint_read_shard(const tch_checkpoint *checkpoint, tch_context *context, const char *name,
                                     const int64_t *shape, const int64_t *start, tch_tensor *out)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_read_shard", "checkpoint", checkpoint));
    TCHI_TRY(tch_checkpoint_check_shard(checkpoint, name, shape, start, out));
    TCHI_TRY(tchi_checkpoint_check_out("tch_checkpoint_read_shard", context, out));
    tchi_slice target = {out->ndim, shape, start, out->shape};
    if (tchi_slice_count(&target) == 0) {
        return TCH_OK;
    }
    for (source s = first_source(checkpoint, name); s.tensor >= 0; next_source(&s)) {
        tchi_slice slice = slice_of(&s);
        if (tchi_slice_equal(&slice, &target)) {
            return tch_checkpoint_read(checkpoint, context, stored_at(checkpoint, s.tensor)->name, out);
        }
    }
    return tchi_is_plain(out) ? copy_sources(checkpoint, name, &target, tchi_tensor_data(out))
                              : read_through_memory(checkpoint, context, name, &target, out);
}
