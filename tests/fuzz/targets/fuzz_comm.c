/* Ranks and transports that send arbitrary data: collectives receive bytes from the input, after three bytes that
 * choose the optimizer or KFAC, the group's size, and its use. At the end of the input the others agree with this rank
 * and send zeros. Buffers have exactly the requested sizes, for AddressSanitizer. */
#include <string.h>

#include "fuzz.h"

enum { KINDS = TCH_OPTIM_KL_SHAMPOO + 2, ROWS = 8, COLS = 6, STEPS = 3, BEFORE_BYTES = 3 };
enum { SHARDED = 1, SMALL_BUCKETS = 2, SPANS = 4, SAVES = 8, ADDS_GROUP = 16, HALVES = 32 }; /* of the third byte */

typedef struct strangers {
    const uint8_t *bytes;
    size_t left;
    int32_t rank, size;
} strangers;

static uint8_t next(strangers *s)
{
    return s->left == 0 ? 0 : (s->left--, *s->bytes++);
}

static void fill(strangers *s, void *to, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++) {
        ((uint8_t *)to)[i] = next(s);
    }
}

/* One collective in eight fails, chosen by the input. */
static tch_status come_in(strangers *s)
{
    return next(s) % 8 == 7 ? TCH_ERR_COMM : TCH_OK;
}

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    strangers *s = user;
    REQUIRE(bytes >= 0);
    for (int32_t r = 0; r < s->size; r++) {
        if (r == s->rank) {
            memmove((char *)receive + r * bytes, send, (size_t)bytes);
        } else {
            fill(s, (char *)receive + r * bytes, bytes);
        }
    }
    return come_in(s);
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *c, void *stream)
{
    strangers *s = user;
    int64_t sent = 0;
    int64_t received = 0;
    for (int32_t r = 0; r < s->size; r++) { /* contiguous, as required by comm.h */
        REQUIRE(c->send_bytes[r] >= 0 && c->receive_bytes[r] >= 0);
        REQUIRE(c->send_bytes[r] == 0 || c->send_offsets[r] == sent);
        REQUIRE(c->receive_bytes[r] == 0 || c->receive_offsets[r] == received);
        sent += c->send_bytes[r];
        received += c->receive_bytes[r];
        fill(s, (char *)receive + c->receive_offsets[r], c->receive_bytes[r]);
    }
    int64_t own = c->receive_bytes[s->rank];
    REQUIRE(own == c->send_bytes[s->rank]);
    if (own > 0) {
        memcpy((char *)receive + c->receive_offsets[s->rank], (const char *)send + c->send_offsets[s->rank],
               (size_t)own);
    }
    return come_in(s);
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    strangers *s = user;
    uint8_t how = next(s) % 4; /* 0 and 1: the others have the same */
    for (int32_t i = 0; how > 1 && i < count; i++) {
        int32_t other;
        fill(s, &other, sizeof other);
        values[i] = how == 2 && values[i] > other ? values[i] : other;
    }
    return come_in(s);
}

/* --- uses of the group ------------------------------------------------------------------------------------------- */

typedef struct model {
    int64_t shapes[2][2];
    tch_tensor tensors[2], gradients[2];
    tch_parameter parameters[2];
    int64_t whole[2][2];
    tch_shard shards[2][8];
    tch_placement placements[2];
} model;

static void *take(size_t bytes)
{
    void *memory = malloc(bytes == 0 ? 1 : bytes);
    REQUIRE(memory != NULL);
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        memcpy((char *)memory + i, &(float){0.01F * (float)(i % 37)}, 4);
    }
    return memory;
}

/* A matrix and a vector, replicated or sharded along the first dimension; the last rank of five or more has nothing. */
static void place(model *m, const strangers *s, uint8_t use)
{
    static const char *const names[] = {"w", "b"};
    tch_dtype dtype = use & HALVES ? TCH_BFLOAT16 : TCH_FLOAT32;
    for (int i = 0; i < 2; i++) {
        int32_t ndim = 2 - i;
        memcpy(m->whole[i], (int64_t[]){ROWS, COLS}, sizeof m->whole[i]);
        memcpy(m->shapes[i], m->whole[i], sizeof m->shapes[i]);
        m->placements[i] = (tch_placement){sizeof(tch_placement), ndim, m->whole[i], 0, m->shards[i]};
        for (int32_t r = 0; (use & SHARDED) != 0 && r < s->size; r++) {
            tch_shard *shard = &m->shards[i][m->placements[i].count++];
            int64_t rows = (ROWS + s->size - 1) / s->size;
            *shard = (tch_shard){.rank = r, .size = {0, COLS}};
            shard->start[0] = r * rows < ROWS ? r * rows : ROWS;
            shard->size[0] = ROWS - shard->start[0] < rows ? ROWS - shard->start[0] : rows;
            if (r == s->rank) {
                m->shapes[i][0] = shard->size[0];
            }
        }
        size_t bytes = (size_t)(m->shapes[i][0] * (ndim == 2 ? COLS : 1)) * (use & HALVES ? 2 : 4);
        m->tensors[i] = tch_tensor_view(take(bytes), dtype, ndim, m->shapes[i]);
        m->gradients[i] = tch_tensor_view(take(bytes), dtype, ndim, m->shapes[i]);
        m->parameters[i] = (tch_parameter){.tensor = &m->tensors[i], .name = names[i]};
    }
}

static void save_and_load(tch_optimizer *optimizer, tch_comm *comm)
{
    char path[128];
    tch_checkpoint *file = NULL;
    tch_checkpoint_writer *writer = NULL;
    snprintf(path, sizeof path, "%s/model.index.json", fuzz_folder());
    REQUIRE(tch_checkpoint_writer_create(&writer) == TCH_OK);
    if (tch_optimizer_save(optimizer, writer, "o") == TCH_OK &&
        tch_checkpoint_writer_save_sharded(writer, fuzz_context(), comm, path) != TCH_OK) {
        snprintf(path, sizeof path, "%s/model.safetensors", fuzz_folder()); /* this rank's only */
        (void)tch_checkpoint_writer_save(writer, fuzz_context(), path);
    }
    if (tch_checkpoint_open(path, &file) == TCH_OK) {
        (void)tch_optimizer_load(optimizer, file, "o");
    }
    tch_checkpoint_close(file);
    tch_checkpoint_writer_destroy(writer);
    fuzz_empty_folder();
}

static void use_optimizer(int kind, uint8_t use, const strangers *s, tch_comm *comm)
{
    model m;
    tch_optimizer *optimizer = NULL;
    tch_optim_config config = tch_optim_defaults((tch_optim_kind)kind);
    const tch_tensor *gradients[] = {&m.gradients[0], &m.gradients[1]};
    bool silent = s->left == 0;
    int32_t first = use & ADDS_GROUP ? 1 : 2; /* parameters of the first group */
    config.shampoo.precondition_frequency = 2;
    place(&m, s, use);
    tch_status status = tch_optimizer_create(
        fuzz_context(), &config, &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = m.placements},
        first, m.parameters, &optimizer);
    if (status == TCH_OK && first == 1) {
        status = tch_optimizer_add_group(optimizer, &config, 1, m.parameters + 1, m.placements + 1, NULL);
    }
    REQUIRE(status == TCH_OK || tch_last_error()[0] != '\0');
    REQUIRE(status == TCH_OK || !silent);
    for (int i = 0; i < STEPS && status == TCH_OK; i++) {
        status = tch_optimizer_step(optimizer, 2, gradients);
        REQUIRE(status == TCH_OK || !silent);
    }
    if (optimizer != NULL && use & SAVES) {
        save_and_load(optimizer, comm);
        (void)tch_optimizer_step(optimizer, 2, gradients);
    }
    tch_optimizer_destroy(optimizer);
    for (int i = 0; i < 2; i++) {
        free(m.tensors[i].data);
        free(m.gradients[i].data);
    }
}

static void use_kfac(uint8_t use, tch_comm *comm)
{
    tch_kfac *kfac = NULL;
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    tch_kfac_layer layers[3];
    int64_t input_shape[] = {ROWS, COLS};
    int64_t square[] = {COLS, COLS};
    tch_tensor input = tch_tensor_view(take(sizeof(float) * ROWS * COLS), TCH_FLOAT32, 2, input_shape);
    tch_tensor gradient = tch_tensor_view(take(sizeof(float) * COLS * COLS), TCH_FLOAT32, 2, square);
    tch_tensor *gradients[] = {&gradient, NULL, NULL, NULL, NULL, NULL};
    config.method = (tch_kfac_method)(use % TCH_KFAC_METHOD_COUNT);
    for (int i = 0; i < 3; i++) {
        layers[i] = (tch_kfac_layer){.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR), .inputs = COLS, .outputs = COLS};
    }
    tch_status status = tch_kfac_create(fuzz_context(), &config,
                                        &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm}, 3, layers, &kfac);
    for (int i = 0; i < STEPS && status == TCH_OK; i++) {
        status = tch_kfac_observe(kfac, i, &input, &input, 1.0, NULL);
        status = status == TCH_OK ? tch_kfac_refresh(kfac) : status;
        status = status == TCH_OK ? tch_kfac_precondition(kfac, 0.1, 6, gradients) : status;
    }
    tch_kfac_destroy(kfac);
    free(input.data);
    free(gradient.data);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const tch_comm_ops ops = {sizeof ops, all_gather, all_to_all, reduce_max, NULL, NULL, NULL};
    tch_comm *comm = NULL;
    if (count < BEFORE_BYTES) {
        return 0;
    }
    strangers s = {bytes + BEFORE_BYTES, count - BEFORE_BYTES, 0, 2 + bytes[1] % 5};
    s.rank = bytes[1] / 5 % s.size;
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    config.rank = s.rank;
    config.size = s.size;
    config.ops = &ops;
    config.user = &s;
    config.bucket_bytes = bytes[2] & SMALL_BUCKETS ? 64 : 0;
    config.span_bytes = bytes[2] & SPANS ? 16 : 0;
    REQUIRE(tch_comm_create(&config, &comm) == TCH_OK);
    if (bytes[0] % KINDS > TCH_OPTIM_KL_SHAMPOO) {
        use_kfac(bytes[2], comm);
    } else {
        use_optimizer(bytes[0] % KINDS, bytes[2], &s, comm);
    }
    tch_comm_destroy(comm);
    return 0;
}
