/* Replays the plans of shared optimizers for models and groups that are not available, and writes JSON: bytes,
 * collectives, state and work, counted in the plans of all ranks.
 *
 *     comm_model [--quick] >bench/results/comm-model.json
 *
 * Parameters are float32, and directions of Muon bfloat16, as on a GPU. Replicated embeddings are left out, since
 * tables of other libraries count matrices alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/version.h>

#include "core/context.h"
#include "replay.h"
#include "support/backend/table_copy.h"

enum { PERIOD = 10, MOST_RANKS = 1024, MOST_PARAMETERS = 512, NAME = 24 };

/* --- models ------------------------------------------------------------------------------------------------------ */

typedef struct shape {
    char name[NAME];
    int64_t size[2];
    int32_t ndim, elementwise;
} shape;

typedef struct model {
    const char *name;
    int32_t layers, heads; /* embeddings: one for both ends, or two */
    int64_t width, keys, inner, words;
} model;

static const model models[] = {
    {"Llama 1B", 16, 1, 2048, 512, 8192, 128256},
    {"Llama 7B", 32, 2, 4096, 4096, 11008, 32000},
};

typedef struct parameter_list {
    shape shapes[MOST_PARAMETERS];
    int32_t count;
} parameter_list;

static void add_parameter(parameter_list *list, int32_t ndim, int64_t rows, int64_t cols, int32_t elementwise)
{
    shape *s = &list->shapes[list->count];
    *s = (shape){.size = {rows, cols}, .ndim = ndim, .elementwise = elementwise};
    snprintf(s->name, sizeof s->name, "p%d", list->count++);
}

static void add_layer(parameter_list *list, const model *m)
{
    add_parameter(list, 1, m->width, 1, 0);
    add_parameter(list, 2, m->width, m->width, 0);
    add_parameter(list, 2, m->keys, m->width, 0);
    add_parameter(list, 2, m->keys, m->width, 0);
    add_parameter(list, 2, m->width, m->width, 0);
    add_parameter(list, 1, m->width, 1, 0);
    add_parameter(list, 2, m->inner, m->width, 0);
    add_parameter(list, 2, m->inner, m->width, 0);
    add_parameter(list, 2, m->width, m->inner, 0);
}

static void list_parameters(parameter_list *list, const model *m, bool embeddings)
{
    list->count = 0;
    for (int32_t i = 0; embeddings && i < m->heads; i++) {
        add_parameter(list, 2, m->words, m->width, 1);
    }
    for (int32_t i = 0; i < m->layers; i++) {
        add_layer(list, m);
    }
}

/* --- how they lie ------------------------------------------------------------------------------------------------ */

typedef struct world {
    parameter_list list;
    tch_shard *shards; /* of each parameter, one for each rank */
    tch_placement placements[MOST_PARAMETERS];
    tch_parameter parameters[MOST_PARAMETERS];
    tch_tensor tensors[MOST_PARAMETERS];
    int64_t sizes[MOST_PARAMETERS][2]; /* of one rank's tensors */
    replay_rank *ranks;
} world;

/* Rows in equal parts, the last ones shorter or empty, as fully_shard cuts. */
static void cut_rows(const shape *s, int32_t ranks, tch_shard *shards)
{
    int64_t each = (s->size[0] + ranks - 1) / ranks;
    for (int32_t r = 0; r < ranks; r++) {
        int64_t first = r * each < s->size[0] ? r * each : s->size[0];
        int64_t end = first + each < s->size[0] ? first + each : s->size[0];
        shards[r] = (tch_shard){.rank = r, .start = {first}, .size = {end - first, s->size[1]}};
    }
}

static void place_parameters(world *w, int32_t ranks, bool by_rows)
{
    for (int32_t i = 0; i < w->list.count; i++) {
        const shape *s = &w->list.shapes[i];
        tch_placement p = TCH_PLACEMENT_INIT;
        p.ndim = s->ndim;
        p.shape = s->size;
        p.count = by_rows ? ranks : 0;
        p.shards = w->shards + (int64_t)i * ranks;
        cut_rows(s, ranks, w->shards + (int64_t)i * ranks);
        w->placements[i] = p;
    }
}

static void be_rank(world *w, int32_t rank, int32_t ranks, bool by_rows)
{
    for (int32_t i = 0; i < w->list.count; i++) {
        const shape *s = &w->list.shapes[i];
        const tch_shard *own = w->shards + (int64_t)i * ranks + rank;
        memcpy(w->sizes[i], by_rows ? own->size : s->size, sizeof w->sizes[i]);
        w->tensors[i] = tch_tensor_view(NULL, TCH_FLOAT32, s->ndim, w->sizes[i]);
        w->parameters[i] = (tch_parameter){.tensor = &w->tensors[i], .name = s->name, .use_adamw = s->elementwise};
    }
}

/* --- one row ----------------------------------------------------------------------------------------------------- */

/* The largest of all ranks over their mean; of the steps of a period, that of the worst. */
static double imbalance(const world *w, int32_t ranks, int32_t phase)
{
    double most = 0.0;
    double sum = 0.0;
    for (int32_t r = 0; r < ranks; r++) {
        double work = phase < 0 ? w->ranks[r].work : w->ranks[r].refresh[phase];
        most = fmax(most, work);
        sum += work;
    }
    return sum > 0.0 ? most * ranks / sum : 0.0;
}

typedef struct totals {
    int64_t most_bytes, all_bytes, most_collectives, most_state, most_extra;
    double most_seconds, refresh_imbalance;
} totals;

static totals add_up(const world *w, int32_t ranks)
{
    totals t = {0};
    for (int32_t r = 0; r < ranks; r++) {
        const replay_rank *x = &w->ranks[r];
        t.most_bytes = x->bytes > t.most_bytes ? x->bytes : t.most_bytes;
        t.all_bytes += x->bytes;
        t.most_collectives = x->collectives > t.most_collectives ? x->collectives : t.most_collectives;
        t.most_state = x->state_bytes > t.most_state ? x->state_bytes : t.most_state;
        t.most_extra = x->extra_bytes > t.most_extra ? x->extra_bytes : t.most_extra;
        t.most_seconds = fmax(t.most_seconds, x->plan_seconds);
    }
    for (int32_t k = 0; k < PERIOD; k++) {
        t.refresh_imbalance = fmax(t.refresh_imbalance, imbalance(w, ranks, k));
    }
    return t;
}

static void print_row(const world *w, const char *name, const char *optimizer, bool by_rows, int32_t ranks)
{
    static bool any;
    totals t = add_up(w, ranks);
    printf("%s  {\"work\": \"%s step\", \"size\": \"%s\", \"placement\": \"%s\", \"ranks\": %d, \"embeddings\": %s, ",
           any ? ",\n" : "", optimizer, name, by_rows ? "sharded by rows" : "replicated", ranks,
           by_rows ? "true" : "false");
    printf("\"tiles\": %lld, \"buckets\": %d, \"collectives\": %lld, \"bytes_most\": %lld, \"bytes_mean\": %.0f, ",
           (long long)w->ranks[0].tiles, w->ranks[0].buckets, (long long)t.most_collectives, (long long)t.most_bytes,
           (double)t.all_bytes / ranks);
    printf("\"state_bytes_most\": %lld, \"extra_bytes_most\": %lld, ", (long long)t.most_state,
           (long long)t.most_extra);
    printf("\"work_imbalance\": %.4g, \"refresh_imbalance\": %.4g, \"plan_ms\": %.4g}", imbalance(w, ranks, -1),
           t.refresh_imbalance, 1e3 * t.most_seconds);
    fflush(stdout);
    any = true;
}

static tch_optim_config config_of(bool muon)
{
    tch_optim_config c = tch_optim_defaults(muon ? TCH_OPTIM_MUON : TCH_OPTIM_SHAMPOO);
    c.shampoo.grafting = TCH_GRAFTING_NONE;
    c.shampoo.precondition_frequency = PERIOD;
    c.shampoo.max_preconditioner_dim = 1024;
    return c;
}

static tch_status replay_all(tch_context *context, world *w, bool muon, int32_t ranks, bool by_rows)
{
    tch_optim_config config = config_of(muon);
    replay_group group = {.size = ranks};
    place_parameters(w, ranks, by_rows);
    tch_status status = TCH_OK;
    for (int32_t r = 0; r < ranks && status == TCH_OK; r++) {
        be_rank(w, r, ranks, by_rows);
        status = replay_step(context, &config, &group, r, w->list.count, w->parameters, w->placements, &w->ranks[r]);
    }
    return status;
}

/* --- all of them ------------------------------------------------------------------------------------------------- */

static tch_status print_rows(tch_context *context, world *w, const model *m, int32_t most)
{
    static const int32_t sizes[] = {8, 64, 256, 1024};
    for (int32_t i = 0; i < 4 && sizes[i] <= most; i++) {
        for (int32_t kind = 0; kind < 4; kind++) {
            bool muon = kind < 2;
            bool by_rows = kind % 2 == 1;
            list_parameters(&w->list, m, by_rows);
            tch_status status = replay_all(context, w, muon, sizes[i], by_rows);
            if (status != TCH_OK) {
                return status;
            }
            print_row(w, m->name, muon ? "Muon" : "Shampoo", by_rows, sizes[i]);
        }
    }
    return TCH_OK;
}

static tch_status print_all(tch_context *context, world *w, bool quick)
{
    printf("{\n \"machine\": {\n  \"device\": \"none: plans are made on a CPU\",\n");
    printf("  \"torchium\": \"%s\"\n },\n", TCH_VERSION_STRING);
    printf(" \"rows\": [\n");
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < (quick ? 1 : 2) && status == TCH_OK; i++) {
        status = print_rows(context, w, &models[i], quick ? 8 : MOST_RANKS);
    }
    printf("\n ]\n}\n");
    return status;
}

/* --- a CPU whose products in bfloat16 are as fast as a GPU's ------------------------------------------------------ */

static void gpu_rates(void *state, tch_product_rates *rates)
{
    (void)state;
    *rates = (tch_product_rates){.f64 = 60.0, .f32 = 50.0, .bf16x2 = 200.0, .bf16 = 700.0};
}

int main(int argc, char **argv)
{
    tch_context *context = NULL;
    tch_status status = tch_context_create("cpu", &context);
    world *w = calloc(1, sizeof *w);
    tch_shard *shards = calloc((size_t)MOST_PARAMETERS * MOST_RANKS, sizeof *shards);
    replay_rank *ranks = calloc(MOST_RANKS, sizeof *ranks);
    if (status == TCH_OK && w != NULL && shards != NULL && ranks != NULL) {
        const tch_backend *own = context->backend;
        table_copy table;
        table_copy_make(&table, own);
        table.matrix.product_rates = gpu_rates;
        context->backend = &table.backend;
        w->shards = shards;
        w->ranks = ranks;
        status = print_all(context, w, argc > 1 && strcmp(argv[1], "--quick") == 0);
        context->backend = own;
    }
    if (status != TCH_OK) {
        fprintf(stderr, "comm_model: %s\n", tch_last_error());
    }
    free(ranks);
    free(shards);
    free(w);
    tch_context_destroy(context);
    return status == TCH_OK ? 0 : 1;
}
