/* Host counters in checkpoints: see saved_state.h. */
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/status.h"

#include "create.h"
#include "refresh.h"
#include "saved_state.h"
#include "shared/shared.h"

static const char counts_name[] = "counts";

/* The counts of factors follow those of parameters and the optimizer's, in the order of factor batches. */
static int64_t first_of_factors(const tch_optimizer *o, int32_t factor_batch)
{
    int64_t at = o->params.count + 1;
    for (int32_t i = 0; i < factor_batch; i++) {
        at += tchi_factor_batch_at(o, i)->count;
    }
    return at;
}

static int64_t counts_length(const tch_optimizer *o)
{
    return first_of_factors(o, (int32_t)o->factor_batches.count);
}

static void fill_counts(const tch_optimizer *o, int64_t *at)
{
    for (int32_t i = 0; i < o->params.count; i++) {
        *at++ = tchi_param_at(o, i)->steps_seen;
    }
    *at++ = o->steps;
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        for (int64_t k = 0; k < f->count; k++) {
            *at++ = tchi_factor_count(f, k);
        }
    }
}

/* --- blocks ------------------------------------------------------------------------------------------------------ */

/* A local block, and the positions of its factors' counts in the list, one per dimension; -1 for no factor. */
typedef struct counted_block {
    int32_t batch, param, number, order;
    int64_t block, factors, at[TCHI_MOST_ORDER];
} counted_block;

/* Advances to the next block; false at the end. Starts from zeros. */
static bool next_block(const tch_optimizer *o, counted_block *b)
{
    while (b->batch < o->block_batches.count && b->block == tchi_block_batch_at(o, b->batch)->count) {
        b->batch++;
        b->block = 0;
    }
    if (b->batch == o->block_batches.count) {
        return false;
    }
    const tchi_block_batch *batch = tchi_block_batch_at(o, b->batch);
    const tchi_block *block = tchi_block_at(o, batch->first + b->block);
    b->param = tchi_block_param(o, block)->index;
    b->number = tchi_block_number(o, block);
    b->order = batch->order;
    b->factors = 0;
    for (int32_t k = 0; k < batch->order; k++) {
        bool has = batch->factor_batch[k] >= 0;
        b->factors += has;
        b->at[k] = has ? first_of_factors(o, batch->factor_batch[k]) + batch->position[k] + b->block : -1;
    }
    b->block++;
    return true;
}

/* --- saving ------------------------------------------------------------------------------------------------------ */

/* The numbers stay in the optimizer, in host memory, until the writer has saved them. */
static tch_status add_numbers(tch_checkpoint_writer *writer, const char *name, int64_t *numbers, int64_t count)
{
    tch_tensor view = tch_tensor_view(numbers, TCH_INT64, 1, &count);
    return tch_checkpoint_writer_add(writer, name, &view);
}

/* The names of a block's and of a parameter's counts in sharded checkpoints. */
static void name_failures(const tch_optimizer *o, const char *prefix, const counted_block *b,
                          char name[TCHI_SAVED_NAME])
{
    snprintf(name, TCHI_SAVED_NAME, "%s/%s/failures.%d", prefix, tchi_param_at(o, b->param)->name, b->number);
}

static void name_counts(const tch_optimizer *o, const char *prefix, int32_t param, char name[TCHI_SAVED_NAME])
{
    snprintf(name, TCHI_SAVED_NAME, "%s/%s/%s", prefix, tchi_param_at(o, param)->name, counts_name);
}

/* Adds counts by name: for each parameter its steps and steps with a gradient, for each tile those of its factors.
 * Numbers are stored at `next`. */
static tch_status add_by_name(const tch_optimizer *o, tch_checkpoint_writer *writer, const char *prefix, int64_t *next)
{
    const int64_t *all = o->counts.items;
    char name[TCHI_SAVED_NAME];
    for (int32_t i = 0; i < o->params.count; i++) {
        if (tchi_saves_param(o, i)) {
            next[0] = o->steps;
            next[1] = all[i];
            name_counts(o, prefix, i, name);
            TCHI_TRY(add_numbers(writer, name, next, 2));
            next += 2;
        }
    }
    for (counted_block b = {0}; next_block(o, &b);) {
        int64_t *numbers = next;
        for (int32_t k = 0; k < b.order; k++) {
            if (b.at[k] >= 0) {
                *next++ = all[b.at[k]];
            }
        }
        name_failures(o, prefix, &b, name);
        TCHI_TRY(b.factors == 0 ? TCH_OK : add_numbers(writer, name, numbers, b.factors));
    }
    return TCH_OK;
}

tch_status tchi_saved_counts_add(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix)
{
    char name[TCHI_SAVED_NAME];
    int64_t length = counts_length(optimizer);
    int64_t room = optimizer->shared == NULL ? length : 2 * length + optimizer->params.count;
    TCHI_TRY(tchi_outcomes_settle(optimizer));
    TCHI_TRY(tchi_list_reserve(&optimizer->counts, room));
    optimizer->counts.count = room;
    fill_counts(optimizer, optimizer->counts.items);
    if (optimizer->shared == NULL) {
        return add_numbers(writer, tchi_saved_name(name, prefix, counts_name), optimizer->counts.items, length);
    }
    return add_by_name(optimizer, writer, prefix, (int64_t *)optimizer->counts.items + length);
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

static tch_status check_count(const char *name, const char *what, const char *whose, int64_t count, int64_t most)
{
    if (count >= 0 && count <= most) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the checkpoint's '%s' has %lld for %s%s, expected 0 to %lld", name,
                     (long long)count, what, whose, (long long)most);
}

static tch_status check_factor(const char *name, int64_t count)
{
    if (tchi_is_factor_count(count)) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                     "the checkpoint's '%s' has %lld for a factor, expected its failures, 0 to %d, and its gaps, "
                     "together at most %d",
                     name, (long long)count, TCHI_MOST_FAILURES, TCHI_MOST_FACTOR_COUNT);
}

static tch_status check_counts(const tch_optimizer *o, const char *name, const int64_t *counts)
{
    for (int32_t i = 0; i < o->params.count; i++) {
        TCHI_TRY(check_count(name, "the steps of ", tchi_param_at(o, i)->name, *counts++, TCHI_MOST_STEPS));
    }
    TCHI_TRY(check_count(name, "the steps of the optimizer", "", *counts++, TCHI_MOST_STEPS));
    for (int64_t left = counts_length(o) - o->params.count - 1; left > 0; left--) {
        TCHI_TRY(check_factor(name, *counts++));
    }
    return TCH_OK;
}

static tch_status read_numbers(const tch_checkpoint *file, const char *name, int64_t *numbers, int64_t count)
{
    tch_tensor view = tch_tensor_view(numbers, TCH_INT64, 1, &count);
    TCHI_TRY(tchi_saved_check(file, name, &view));
    return tch_checkpoint_read(file, NULL, name, &view);
}

/* Reads a sharded checkpoint. */
static tch_status read_by_name(const tch_optimizer *o, const tch_checkpoint *file, const char *prefix, int64_t *counts)
{
    char name[TCHI_SAVED_NAME];
    for (int32_t i = 0; i < o->params.count; i++) {
        int64_t numbers[2];
        name_counts(o, prefix, i, name);
        TCHI_TRY(read_numbers(file, name, numbers, 2));
        counts[i] = numbers[1];
        counts[o->params.count] = numbers[0];
    }
    for (counted_block b = {0}; next_block(o, &b);) {
        int64_t numbers[TCHI_MOST_ORDER] = {0};
        name_failures(o, prefix, &b, name);
        TCHI_TRY(b.factors == 0 ? TCH_OK : read_numbers(file, name, numbers, b.factors));
        for (int32_t k = 0, i = 0; k < b.order; k++) {
            if (b.at[k] >= 0) {
                counts[b.at[k]] = numbers[i++];
            }
        }
    }
    return TCH_OK;
}

/* --- checkpoints of one process, read by ranks ------------------------------------------------------------------- */

/* Plans a group as one process would. */
static tch_status plan_group(const tch_optimizer *o, int32_t group, tch_tensor *tensors, tch_parameter *parameters,
                             tch_optimizer *alone)
{
    const tchi_group *g = tchi_group_at(o, group);
    for (int32_t i = 0; i < g->params; i++) {
        const tchi_param *p = tchi_param_at(o, g->first_param + i);
        const int64_t *shape;
        int32_t ndim = tchi_saved_shape(o, p->index, &shape);
        tensors[i] = tch_tensor_view(NULL, tchi_dtype_of(p->type), ndim, (int64_t *)shape);
        parameters[i] = (tch_parameter){.tensor = &tensors[i],
                                        .name = p->name,
                                        .use_adamw = !p->blocked,
                                        .batch_dims = p->batch_dims,
                                        .cut_count = p->cut_count > 1 ? p->cut_count : 0,
                                        .cuts = p->cuts};
    }
    return tchi_optim_plan(alone, &g->config, g->params, parameters, NULL, false);
}

static tch_status plan_alone(const tch_optimizer *o, tch_optimizer *alone)
{
    size_t tensor_bytes = (size_t)o->params.count * sizeof(tch_tensor);
    size_t parameter_bytes = (size_t)o->params.count * sizeof(tch_parameter);
    tch_tensor *tensors;
    tch_parameter *parameters = NULL;
    TCHI_TRY(tchi_host_take(tensor_bytes, "a plan for one process", &tensors));
    tch_status status = tchi_host_take(parameter_bytes, "a plan for one process", &parameters);
    for (int32_t g = 0; g < o->groups.count && status == TCH_OK; g++) {
        status = plan_group(o, g, tensors, parameters, alone);
    }
    tchi_host_release(parameters, parameters == NULL ? 0 : parameter_bytes);
    tchi_host_release(tensors, tensor_bytes);
    return status;
}

/* Memory holds the number of each parameter's first tile, the positions of each tile's factors in the list of one
 * process, and that list. */
static tch_status read_alone(const tch_optimizer *o, const tch_optimizer *alone, const tch_checkpoint *file,
                             const char *name, int64_t *counts)
{
    int64_t params = o->params.count;
    int64_t tiles = o->shared->tiles.count;
    int64_t length = counts_length(alone);
    size_t bytes = (size_t)(params + TCHI_MOST_ORDER * tiles + length) * sizeof(int64_t);
    int64_t *first_tile;
    TCHI_TRY(tchi_host_take(bytes, "the counts of one process", &first_tile));
    int64_t *places = first_tile + params;
    int64_t *theirs = places + TCHI_MOST_ORDER * tiles;
    for (int64_t i = tiles - 1; i >= 0; i--) {
        first_tile[tchi_shared_tile(o, i)->param] = i;
    }
    tch_status status = read_numbers(file, name, theirs, length);
    if (status == TCH_OK) {
        memcpy(counts, theirs, (size_t)(params + 1) * sizeof *counts);
    }
    for (counted_block b = {0}; status == TCH_OK && next_block(alone, &b);) {
        memcpy(places + TCHI_MOST_ORDER * (first_tile[b.param] + b.number), b.at, sizeof b.at);
    }
    for (counted_block b = {0}; status == TCH_OK && next_block(o, &b);) {
        const int64_t *at = places + TCHI_MOST_ORDER * (first_tile[b.param] + b.number);
        for (int32_t k = 0; k < b.order; k++) {
            if (b.at[k] >= 0) {
                counts[b.at[k]] = theirs[at[k]];
            }
        }
    }
    tchi_host_release(first_tile, bytes);
    return status;
}

/* The positions follow from the layout of one process, which is planned for this purpose. */
static tch_status read_for_ranks(const tch_optimizer *o, const tch_checkpoint *file, const char *name, int64_t *counts)
{
    tch_optimizer alone;
    tchi_optim_prepare(&alone, o->context, &tchi_group_at(o, 0)->config, NULL);
    tch_status status = plan_alone(o, &alone);
    if (status == TCH_OK) {
        status = read_alone(o, &alone, file, name, counts);
    }
    tchi_optim_empty(&alone);
    return status;
}

/* --- all of it --------------------------------------------------------------------------------------------------- */

bool tchi_saved_by_ranks(const tch_checkpoint *file, const char *prefix)
{
    char name[TCHI_SAVED_NAME];
    return tch_checkpoint_find(file, tchi_saved_name(name, prefix, counts_name)) < 0 &&
           tch_checkpoint_text(file, tchi_saved_name(name, prefix, "model")) != NULL;
}

tch_status tchi_saved_counts_check(const tch_optimizer *optimizer, const tch_checkpoint *file, const char *prefix)
{
    char name[TCHI_SAVED_NAME];
    int64_t length = counts_length(optimizer);
    tch_tensor view = tch_tensor_view(NULL, TCH_INT64, 1, &length);
    bool other = optimizer->shared != NULL || tchi_saved_by_ranks(file, prefix);
    return other ? TCH_OK : tchi_saved_check(file, tchi_saved_name(name, prefix, counts_name), &view);
}

tch_status tchi_saved_counts_read(const tch_optimizer *optimizer, const tch_checkpoint *file, const char *prefix,
                                  tchi_list *counts)
{
    char name[TCHI_SAVED_NAME];
    tchi_saved_name(name, prefix, counts_name);
    TCHI_TRY(tchi_list_reserve(counts, counts_length(optimizer)));
    while (counts->count < counts_length(optimizer)) {
        tchi_list_extend(counts);
    }
    TCHI_TRY(tchi_saved_by_ranks(file, prefix) ? read_by_name(optimizer, file, prefix, counts->items)
             : optimizer->shared == NULL       ? read_numbers(file, name, counts->items, counts->count)
                                               : read_for_ranks(optimizer, file, name, counts->items));
    return check_counts(optimizer, name, counts->items);
}

void tchi_saved_counts_take(tch_optimizer *optimizer, const tchi_list *counts)
{
    const int64_t *numbers = (const int64_t *)counts->items + optimizer->params.count;
    optimizer->steps = *numbers++;
    for (int32_t i = 0; i < optimizer->factor_batches.count; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        for (int64_t k = 0; k < f->count; k++) {
            tchi_factor_resume(f, k, *numbers++);
        }
    }
}

/* --- the model --------------------------------------------------------------------------------------------------- */

uint64_t tchi_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ c[i]) * 0x100000001B3u;
    }
    return hash;
}

uint64_t tchi_hash_number(uint64_t hash, int64_t number)
{
    return tchi_hash(hash, &number, sizeof number);
}

uint64_t tchi_saved_model(const tch_optimizer *optimizer)
{
    uint64_t hash = TCHI_HASH_BEGIN;
    for (int32_t i = 0; i < optimizer->params.count; i++) {
        const tchi_param *p = tchi_param_at(optimizer, i);
        const int64_t *shape;
        int32_t ndim = tchi_saved_shape(optimizer, i, &shape);
        hash = tchi_hash(hash, p->name, strlen(p->name) + 1);
        hash = tchi_hash_number(hash, p->group);
        hash = tchi_hash_number(hash, p->type);
        hash = tchi_hash_number(hash, p->blocked);
        hash = tchi_hash_number(hash, ndim);
        for (int32_t k = 0; k < ndim; k++) {
            hash = tchi_hash_number(hash, shape[k]);
        }
    }
    return hash;
}
