#include "placed_model.h"

#include "support/random.h"
#include "support/testing.h"

static int64_t product(const int64_t *size, int32_t ndim)
{
    int64_t count = 1;
    for (int32_t k = 0; k < ndim; k++) {
        count *= size[k];
    }
    return count;
}

int64_t placed_count(const placed_shape *shape)
{
    return product(shape->size, shape->ndim);
}

/* --- placements -------------------------------------------------------------------------------------------------- */

tch_shard placed_whole(const placed_shape *shape, int32_t rank)
{
    tch_shard shard = {.rank = rank};
    memcpy(shard.size, shape->size, sizeof shape->size);
    return shard;
}

void placed_cut(tch_shard *shard, int32_t k, int32_t parts, int32_t part)
{
    int64_t each = (shard->size[k] + parts - 1) / parts;
    int64_t first = part * each < shard->size[k] ? part * each : shard->size[k];
    int64_t end = first + each < shard->size[k] ? first + each : shard->size[k];
    shard->start[k] += first;
    shard->size[k] = end - first;
}

int32_t placed_replicated(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    return 0;
}

static int32_t along(const placed_shape *shape, int32_t k, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(shape, r);
        placed_cut(&shards[r], k, ranks, r);
    }
    return ranks;
}

int32_t placed_by_rows(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    return along(shape, 0, ranks, shards);
}

int32_t placed_flat(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    return along(shape, 0, ranks, shards);
}

int32_t placed_by_columns(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    return along(shape, shape->ndim > 1 ? 1 : 0, ranks, shards);
}

static int32_t smallest_divisor(int32_t n)
{
    int32_t d = 2;
    while (d < n && n % d != 0) {
        d++;
    }
    return n < 2 ? 1 : d;
}

int32_t placed_by_both(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    int32_t side = smallest_divisor(ranks);
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(shape, r);
        placed_cut(&shards[r], 0, side, r % side);
        if (shape->ndim > 1) {
            placed_cut(&shards[r], 1, ranks / side, r / side);
        } else if (r / side > 0) {
            shards[r].size[0] = 0;
        }
    }
    return ranks;
}

int32_t placed_in_replicas(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    int32_t side = ranks / smallest_divisor(ranks);
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(shape, r);
        placed_cut(&shards[r], 0, side, r % side);
    }
    return ranks;
}

/* --- numbers ----------------------------------------------------------------------------------------------------- */

static double *draw(test_random *random, int64_t count)
{
    double *values = test_keep(test_alloc((size_t)count * sizeof *values));
    test_random_fill_normal(random, values, count);
    return values;
}

void placed_numbers_open(placed_numbers *numbers, uint64_t stream, int32_t count, const placed_shape *shapes,
                         int32_t steps)
{
    test_random random = test_random_stream(stream);
    memset(numbers, 0, sizeof *numbers);
    assert_true(count <= PLACED_MOST && steps <= PLACED_STEPS);
    for (int32_t i = 0; i < count; i++) {
        numbers->start[i] = draw(&random, placed_count(&shapes[i]));
        for (int32_t s = 0; s < steps; s++) {
            numbers->gradient[s][i] = draw(&random, placed_count(&shapes[i]));
        }
    }
}

void placed_numbers_close(placed_numbers *numbers)
{
    for (int32_t i = 0; i < PLACED_MOST; i++) {
        free(numbers->start[i]);
        for (int32_t s = 0; s < PLACED_STEPS; s++) {
            free(numbers->gradient[s][i]);
        }
    }
}

void placed_room(double **room, int32_t count, const placed_shape *shapes, int poison)
{
    for (int32_t i = 0; i < count; i++) {
        size_t bytes = (size_t)placed_count(&shapes[i]) * sizeof **room;
        room[i] = test_alloc(bytes);
        memset(room[i], poison, bytes);
    }
}

void placed_move(tch_context *context, tch_tensor *tensor, double *values, bool to_device)
{
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, tensor->ndim, tensor->shape);
    if (tch_tensor_numel(tensor) > 0) {
        assert_int_equal(to_device ? tch_tensor_copy(context, tensor, &host) : tch_tensor_copy(context, &host, tensor),
                         TCH_OK);
    }
}

/* --- one rank ---------------------------------------------------------------------------------------------------- */

/* The row-major index in the tensor of element i of a shard. */
static int64_t place_of(const tch_shard *s, const placed_shape *whole, int64_t i)
{
    int64_t at = 0;
    int64_t stride = 1;
    for (int32_t k = whole->ndim - 1; k >= 0; k--) {
        at += (s->start[k] + i % s->size[k]) * stride;
        i /= s->size[k];
        stride *= whole->size[k];
    }
    return at;
}

void placed_take(const placed_model *model, int32_t parameter, const double *whole, double *part)
{
    const placed_shape *shape = &model->shapes[parameter];
    const tch_shard *own = &model->own[parameter];
    int64_t count = product(own->size, shape->ndim);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = place_of(own, shape, i);
        part[i] = at < placed_count(shape) ? whole[at] : 0.0;
    }
}

static void placed_put(const placed_model *model, int32_t parameter, double *whole, const double *part)
{
    const placed_shape *shape = &model->shapes[parameter];
    const tch_shard *own = &model->own[parameter];
    int64_t count = product(own->size, shape->ndim);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = place_of(own, shape, i);
        if (at < placed_count(shape)) {
            whole[at] = part[i];
        }
    }
}

static tch_tensor *make_tensor(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *size)
{
    tch_tensor *tensor = NULL;
    assert_int_equal(tch_tensor_create(context, dtype, ndim, size, TCH_CONTIGUOUS, &tensor), TCH_OK);
    return tensor;
}

static void open_parameter(placed_model *m, const placed_config *config, tch_context *context, int32_t rank,
                           int32_t ranks, int32_t i)
{
    const placed_shape *s = &config->shapes[i];
    double values[PLACED_ELEMENTS];
    assert_true(2 * placed_count(s) <= PLACED_ELEMENTS); /* an invalid shard is larger than the tensor */
    m->placement[i] = (tch_placement)TCH_PLACEMENT_INIT;
    m->placement[i].ndim = s->ndim;
    m->placement[i].shape = s->size;
    m->placement[i].count = config->place(s, ranks, m->shards[i]);
    m->placement[i].shards = m->shards[i];
    m->own[i] = m->placement[i].count > 0 ? m->shards[i][rank] : placed_whole(s, rank);
    int64_t length = product(m->own[i].size, s->ndim);
    bool flat = config->place == placed_flat;
    m->parameter[i] = make_tensor(context, config->dtype, flat ? 1 : s->ndim, flat ? &length : m->own[i].size);
    m->gradient[i] = make_tensor(context, config->dtype, flat ? 1 : s->ndim, flat ? &length : m->own[i].size);
    placed_take(m, i, config->start[i], values);
    placed_move(context, m->parameter[i], values, true);
    snprintf(m->names[i], sizeof m->names[i], "%s%d", config->prefix, i);
    m->entries[i] = (tch_parameter){.tensor = m->parameter[i],
                                    .name = m->names[i],
                                    .use_adamw = s->elementwise,
                                    .batch_dims = s->batch_dims,
                                    .cut_count = s->cut_count,
                                    .cuts = s->cuts};
}

void placed_open(placed_model *model, const placed_config *config, tch_context *context, int32_t rank, int32_t ranks)
{
    assert_true(config->count <= PLACED_MOST && ranks <= PRETEND_MOST);
    model->shapes = config->shapes;
    model->count = config->count;
    for (int32_t i = 0; i < config->count; i++) {
        open_parameter(model, config, context, rank, ranks, i);
    }
}

tch_tensor placed_part(const placed_model *model, int32_t parameter)
{
    tch_tensor part = *model->parameter[parameter];
    part.ndim = model->shapes[parameter].ndim;
    part.shape = (int64_t *)model->own[parameter].size;
    part.strides = NULL;
    return part;
}

void placed_close(placed_model *model)
{
    for (int32_t i = 0; i < model->count; i++) {
        tch_tensor_destroy(model->parameter[i]);
        tch_tensor_destroy(model->gradient[i]);
    }
}

void placed_read(const placed_model *model, tch_context *context, double *const *end)
{
    double values[PLACED_ELEMENTS];
    for (int32_t i = 0; i < model->count; i++) {
        placed_move(context, model->parameter[i], values, false);
        placed_put(model, i, end[i], values);
    }
}
