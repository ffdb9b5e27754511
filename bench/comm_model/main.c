/* Replays the plans of shared optimizers for models and groups that are not available, and writes JSON: bytes and
 * collectives are counted in the plans of all ranks; times are modeled by a clock that adds what a link and a GPU of
 * the rates below would take, in the order of exchange.c.
 *
 *     comm_model [--quick] >bench/results/comm-model.json
 *
 * Parameters are float32, and directions of Muon bfloat16, as on a GPU. Replicated embeddings are left out, since
 * tables of other libraries count matrices alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/version.h>

#include "core/context.h"
#include "replay.h"
#include "support/backend/table_copy.h"

enum { NODE = 8, PERIOD = 10, MOST_RANKS = 1024, MOST_PARAMETERS = 512, NAME = 24 };

/* Bytes a second of one GPU to those of its node and to others, seconds until a collective has begun, floating-point
 * operations a second in bfloat16 and, for Shampoo, in float32. */
static const double NEAR = 450e9, FAR = 50e9, LATENCY = 20e-6, BF16 = 600e12, F32 = 50e12;

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
        w->parameters[i] = (tch_parameter){.tensor = &w->tensors[i], .name = s->name, .elementwise = s->elementwise};
    }
}

/* --- the clock --------------------------------------------------------------------------------------------------- */

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* An all_gather goes between nodes once for each pair of ranks of the same number in their nodes, and is spread inside
 * them. */
static double gather_seconds(int64_t segment, int32_t ranks)
{
    double far = ranks > NODE ? (double)segment * (ranks - NODE) / NODE : 0.0;
    return segment == 0 || ranks == 1 ? 0.0 : LATENCY + larger((double)segment * (ranks - 1) / NEAR, far / FAR);
}

static double route_seconds(replay_bytes bytes)
{
    return LATENCY + larger((double)bytes.near / NEAR, (double)bytes.far / FAR);
}

/* Of a bucket, on the slowest rank. */
typedef struct bucket_times {
    double in, work, out;
} bucket_times;

static bucket_times times_of(const world *w, int32_t ranks, int32_t bucket, double rate)
{
    bucket_times t = {0};
    for (int32_t r = 0; r < ranks; r++) {
        const replay_bucket *b = &w->ranks[r].bucket[bucket];
        bool travels = b->sharded && ranks > 1;
        t.in = larger(t.in, travels ? route_seconds(b->in) : 0.0);
        t.work = larger(t.work, b->work / rate);
        t.out = larger(t.out, (travels ? route_seconds(b->out) : 0.0) + (b->levels ? route_seconds(b->level) : 0.0) +
                                  gather_seconds(b->segment, ranks));
    }
    return t;
}

/* Links and GPU take turns as in exchange.c: two buckets set out at once, the next one whenever one has arrived; what
 * comes back waits for its work, and the third bucket for the buffers of the first. */
static double step_seconds(const world *w, int32_t ranks, double rate, double *links)
{
    bucket_times t[REPLAY_MOST_BUCKETS];
    double arrived[REPLAY_MOST_BUCKETS] = {0.0};
    double back[REPLAY_MOST_BUCKETS] = {0.0};
    int32_t count = w->ranks[0].buckets;
    double link = LATENCY * (ranks > 1); /* the agreement */
    double gpu = link;
    *links = link;
    for (int32_t b = 0; b < count; b++) {
        t[b] = times_of(w, ranks, b, rate);
        *links += t[b].in + t[b].out;
    }
    for (int32_t b = 0; b < count && b < 2; b++) {
        arrived[b] = link += t[b].in;
    }
    for (int32_t b = 0; b < count; b++) {
        gpu = larger(gpu, arrived[b]);
        if (b + 2 < count) {
            arrived[b + 2] = link = larger(link, gpu) + t[b + 2].in;
        }
        gpu = larger(gpu + t[b].work, b >= 2 ? back[b - 2] : 0.0);
        back[b] = link = larger(link, gpu) + t[b].out;
    }
    return larger(gpu, link);
}

/* --- one row ----------------------------------------------------------------------------------------------------- */

/* The largest of all ranks over their mean; of the steps of a period, that of the worst. */
static double imbalance(const world *w, int32_t ranks, int32_t phase)
{
    double most = 0.0;
    double sum = 0.0;
    for (int32_t r = 0; r < ranks; r++) {
        double work = phase < 0 ? w->ranks[r].work : w->ranks[r].refresh[phase];
        most = larger(most, work);
        sum += work;
    }
    return sum > 0.0 ? most * ranks / sum : 0.0;
}

static double refresh_seconds(const world *w, int32_t ranks, int32_t phase)
{
    double most = 0.0;
    for (int32_t r = 0; r < ranks; r++) {
        most = larger(most, w->ranks[r].refresh[phase] / F32);
    }
    return most;
}

typedef struct totals {
    int64_t most_bytes, all_bytes, most_collectives, most_state, most_beside;
    double most_seconds, refresh, refresh_imbalance;
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
        t.most_beside = x->beside_bytes > t.most_beside ? x->beside_bytes : t.most_beside;
        t.most_seconds = larger(t.most_seconds, x->plan_seconds);
    }
    for (int32_t k = 0; k < PERIOD; k++) {
        t.refresh = larger(t.refresh, refresh_seconds(w, ranks, k));
        t.refresh_imbalance = larger(t.refresh_imbalance, imbalance(w, ranks, k));
    }
    return t;
}

static void print_row(const world *w, const char *name, const char *optimizer, bool by_rows, int32_t ranks, double rate)
{
    static bool any;
    double links;
    double step = step_seconds(w, ranks, rate, &links);
    totals t = add_up(w, ranks);
    printf("%s  {\"work\": \"%s step\", \"size\": \"%s\", \"placement\": \"%s\", \"ranks\": %d, \"embeddings\": %s, ",
           any ? ",\n" : "", optimizer, name, by_rows ? "sharded by rows" : "replicated", ranks,
           by_rows ? "true" : "false");
    printf("\"tiles\": %lld, \"buckets\": %d, \"collectives\": %lld, \"bytes_most\": %lld, \"bytes_mean\": %.0f, ",
           (long long)w->ranks[0].tiles, w->ranks[0].buckets, (long long)t.most_collectives, (long long)t.most_bytes,
           (double)t.all_bytes / ranks);
    printf("\"state_bytes_most\": %lld, \"beside_bytes_most\": %lld, ", (long long)t.most_state,
           (long long)t.most_beside);
    printf("\"work_imbalance\": %.4g, \"refresh_imbalance\": %.4g, \"plan_ms\": %.4g, ", imbalance(w, ranks, -1),
           t.refresh_imbalance, 1e3 * t.most_seconds);
    printf("\"modeled_links_ms\": %.4g, \"modeled_step_ms\": %.4g, \"modeled_refresh_ms\": %.4g}", 1e3 * links,
           1e3 * step, 1e3 * t.refresh);
    fflush(stdout);
    any = true;
}

static tch_optim_config config_of(bool muon)
{
    tch_optim_config c = tch_optim_defaults(muon ? TCH_OPTIM_MUON : TCH_OPTIM_SHAMPOO);
    c.grafting = TCH_GRAFTING_NONE;
    c.precondition_frequency = PERIOD;
    c.max_preconditioner_dim = 1024;
    return c;
}

static tch_status replay_all(tch_context *context, world *w, bool muon, int32_t ranks, bool by_rows)
{
    tch_optim_config config = config_of(muon);
    replay_group group = {.size = ranks, .node = NODE};
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
            print_row(w, m->name, muon ? "Muon" : "Shampoo", by_rows, sizes[i], muon ? BF16 : F32);
        }
    }
    return TCH_OK;
}

static tch_status print_all(tch_context *context, world *w, bool quick)
{
    printf("{\n \"machine\": {\n  \"device\": \"none: plans are made on a CPU, times are a model\",\n");
    printf("  \"torchium\": \"%s\"\n },\n", TCH_VERSION_STRING);
    printf(" \"model\": {\n  \"node\": %d,\n  \"bytes_per_s_in_node\": %.3g,\n  \"bytes_per_s_between\": %.3g,\n", NODE,
           NEAR, FAR);
    printf("  \"latency_s\": %.3g,\n  \"flops_muon\": %.3g,\n  \"flops_shampoo\": %.3g,\n  \"period\": %d\n },\n",
           LATENCY, BF16, F32, PERIOD);
    printf(" \"rows\": [\n");
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < (quick ? 1 : 2) && status == TCH_OK; i++) {
        status = print_rows(context, w, &models[i], quick ? NODE : MOST_RANKS);
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
