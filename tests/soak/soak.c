/* Training for hours: refreshes of roots and bases, checkpoints, steps skipped by loss scaling and, on a GPU, replays
 * of recorded steps. Each method is trained twice. The first run continues without interruption; the second is
 * destroyed after every round, recreated, and loaded from the checkpoint of the first. Checks:
 *
 *     - the parameters of both are bitwise identical after every round;
 *     - the context's pool, resident memory and open files are as after the first rounds;
 *     - a restarted program computes the same fingerprints (scripts/soak).
 *
 *     soak [--device cuda] [--seconds 3600 | --rounds 8] [--folder .] */
#include <dirent.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <torchium/amp.h>
#include <torchium/checkpoint.h>
#include <torchium/kfac.h>
#include <torchium/memory.h>
#include <torchium/network.h>
#include <torchium/optim.h>
#include <torchium/torchium.h>

enum {
    INPUTS = 32,
    CLASSES = 10,
    LAYERS = 3,
    PARAMETERS = 2 * LAYERS,
    BATCH = 64,
    STEPS = 100, /* of a round */
    BATCHES = 8, /* of a round's data, in sequence */
    WARM_ROUNDS = 4,
    OVERFLOW_EVERY = 23, /* steps, of which one has an infinite gradient */
    MOST_PARAMETER = 96 * 64
};
static const int64_t hidden[LAYERS - 1] = {96, 64};
static const long resident_room = 2 << 20; /* growth of the C library's allocator, in bytes */

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "soak: %s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

static void require(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "soak: %s\n", what);
        exit(1);
    }
}

/* --- data -------------------------------------------------------------------------------------------------------- */

/* SplitMix64 of a counter. */
static uint64_t bits_of(uint64_t counter)
{
    uint64_t z = (counter + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static float uniform(uint64_t counter)
{
    return (float)(bits_of(counter) >> 40) / 8388608.0F - 1.0F;
}

typedef struct data {
    float points[BATCHES * BATCH * INPUTS];
    int32_t labels[BATCHES * BATCH];
} data;

/* The class is the largest of some fixed linear functions, and random for one row in eight, so that gradients never
 * vanish. Every round has its own rows. */
static void make_data(data *d, uint64_t round)
{
    for (int i = 0; i < BATCHES * BATCH; i++) {
        uint64_t row = round * (BATCHES * BATCH) + (uint64_t)i + 1;
        float best = -1e30F;
        for (int j = 0; j < INPUTS; j++) {
            d->points[i * INPUTS + j] = uniform(row << 8 | (uint64_t)j);
        }
        for (int c = 0; c < CLASSES; c++) {
            float sum = 0.0F;
            for (int j = 0; j < INPUTS; j++) {
                sum += uniform((uint64_t)(c * INPUTS + j)) * d->points[i * INPUTS + j];
            }
            d->labels[i] = sum > best ? c : d->labels[i];
            best = sum > best ? sum : best;
        }
        uint64_t lot = bits_of(row << 8 | 255);
        d->labels[i] = lot % 8 == 0 ? (int32_t)(lot / 8 % CLASSES) : d->labels[i];
    }
}

/* --- a run ------------------------------------------------------------------------------------------------------- */

typedef struct method {
    const char *name;
    tch_optim_kind kind;
    double lr;
    bool kfac; /* with the optimizer; without loss scaling, since it checks gradients itself */
} method;

static const method methods[] = {
    {"shampoo", TCH_OPTIM_SHAMPOO, 0.01, false}, {"soap", TCH_OPTIM_SOAP, 0.003, false},
    {"muon", TCH_OPTIM_MUON, 0.01, false},       {"normuon", TCH_OPTIM_NORMUON, 0.01, false},
    {"adamw", TCH_OPTIM_ADAMW, 0.003, false},    {"kfac", TCH_OPTIM_SGD, 0.02, true},
};
enum { METHODS = sizeof methods / sizeof methods[0] };

typedef struct run {
    const method *method;
    tch_network *network;
    tch_optimizer *optimizer;
    tch_kfac *kfac;
    tch_scaler *scaler;
    int64_t step;
} run;

typedef struct place {
    tch_context *context;
    tch_tensor *points, *labels, *totals;
    const char *folder;
} place;

static tch_kfac *make_kfac(const place *at, tch_network *network)
{
    tch_kfac_layer layers[LAYERS];
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    tch_kfac *kfac;
    for (int32_t k = 0; k < LAYERS; k++) {
        const tch_tensor *weight = tch_network_parameter(network, 2 * k);
        layers[k] = (tch_kfac_layer){.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR), .bias = 1};
        layers[k].outputs = weight->shape[0];
        layers[k].inputs = weight->shape[1];
    }
    must(tch_kfac_create(at->context, &config, NULL, LAYERS, layers, &kfac));
    return kfac;
}

static void make_optimizer(const place *at, run *r)
{
    tch_parameter parameters[PARAMETERS];
    tch_optim_config config = tch_optim_defaults(r->method->kind);
    for (int32_t i = 0; i < PARAMETERS; i++) {
        parameters[i] = (tch_parameter){.tensor = tch_network_parameter(r->network, i),
                                        .name = tch_network_parameter_name(r->network, i)};
    }
    config.lr = r->method->lr;
    config.weight_decay = 0.01;
    config.shampoo.precondition_frequency = 10;
    must(tch_optimizer_create(at->context, &config, NULL, PARAMETERS, parameters, &r->optimizer));
}

/* The scale doubles after 16 good steps and halves at every OVERFLOW_EVERY-th, so it keeps changing. */
static void start(const place *at, const method *m, run *r)
{
    tch_network_config shape = TCH_NETWORK_CONFIG_INIT;
    tch_scaler_config scaling = TCH_SCALER_CONFIG_INIT;
    *r = (run){.method = m};
    shape.inputs = INPUTS;
    shape.outputs = CLASSES;
    shape.hidden_count = LAYERS - 1;
    shape.hidden = hidden;
    shape.max_batch = BATCH;
    scaling.growth_interval = 16;
    must(tch_network_create(at->context, &shape, &r->network));
    make_optimizer(at, r);
    must(tch_scaler_create(at->context, &scaling, &r->scaler));
    r->kfac = m->kfac ? make_kfac(at, r->network) : NULL;
}

static void stop(run *r)
{
    tch_kfac_destroy(r->kfac);
    tch_scaler_destroy(r->scaler);
    tch_optimizer_destroy(r->optimizer);
    tch_network_destroy(r->network);
}

static void precondition(run *r)
{
    tch_tensor *gradients[PARAMETERS];
    for (int32_t k = 0; k < LAYERS; k++) {
        tch_network_layer seen = TCH_NETWORK_LAYER_INIT;
        must(tch_network_get_layer(r->network, k, &seen));
        must(tch_kfac_observe(r->kfac, k, seen.input, seen.output_gradient, seen.layer.scale, NULL));
    }
    for (int32_t i = 0; i < PARAMETERS; i++) {
        gradients[i] = tch_network_gradient(r->network, i);
    }
    if (r->step % 10 == 0) {
        must(tch_kfac_refresh(r->kfac));
    }
    must(tch_kfac_precondition(r->kfac, r->method->lr, PARAMETERS, gradients));
}

static void one_step(const place *at, run *r)
{
    const tch_tensor *gradients[PARAMETERS];
    int64_t point_shape[] = {BATCH, INPUTS};
    int64_t label_shape[] = {BATCH};
    int64_t row = r->step % BATCHES * BATCH;
    tch_tensor points = *at->points;
    tch_tensor labels = *at->labels;
    points.data = (float *)at->points->data + row * INPUTS;
    points.shape = point_shape;
    labels.data = (int32_t *)at->labels->data + row;
    labels.shape = label_shape;
    for (int32_t i = 0; i < PARAMETERS; i++) {
        gradients[i] = tch_network_gradient(r->network, i);
    }
    const tch_tensor *scale = r->kfac == NULL ? tch_scaler_scale(r->scaler) : NULL;
    must(tch_network_loss_and_gradients(r->network, &points, &labels, scale, at->totals));
    if (r->kfac != NULL) {
        precondition(r);
        must(tch_optimizer_step(r->optimizer, PARAMETERS, gradients));
    } else {
        if (r->step % OVERFLOW_EVERY == OVERFLOW_EVERY - 1) {
            must(tch_tensor_fill(at->context, tch_network_gradient(r->network, 1), INFINITY));
        }
        must(tch_scaler_step(r->scaler, r->optimizer, PARAMETERS, gradients));
        must(tch_scaler_update(r->scaler));
    }
    r->step++;
}

/* --- checkpoints ------------------------------------------------------------------------------------------------- */

static const char *file_of(const place *at, const method *m)
{
    static char path[1024];
    snprintf(path, sizeof path, "%s/soak-%s.safetensors", at->folder, m->name);
    return path;
}

static void save(const place *at, run *r)
{
    tch_checkpoint_writer *writer;
    tch_scaler_state scaler = TCH_SCALER_STATE_INIT;
    must(tch_scaler_get_state(r->scaler, &scaler));
    must(tch_checkpoint_writer_create(&writer));
    for (int32_t i = 0; i < PARAMETERS; i++) {
        must(tch_checkpoint_writer_add(writer, tch_network_parameter_name(r->network, i),
                                       tch_network_parameter(r->network, i)));
    }
    must(tch_optimizer_save(r->optimizer, writer, "optimizer"));
    if (r->kfac != NULL) {
        must(tch_kfac_save(r->kfac, writer, "kfac"));
    }
    must(tch_checkpoint_writer_set_number(writer, "scale", scaler.scale));
    must(tch_checkpoint_writer_set_integer(writer, "tracker", scaler.growth_tracker));
    must(tch_checkpoint_writer_set_integer(writer, "step", r->step));
    must(tch_checkpoint_writer_save(writer, at->context, file_of(at, r->method)));
    tch_checkpoint_writer_destroy(writer);
}

static void load(const place *at, run *r)
{
    tch_checkpoint *file;
    tch_scaler_state scaler = TCH_SCALER_STATE_INIT;
    int64_t tracker;
    must(tch_scaler_get_state(r->scaler, &scaler));
    must(tch_checkpoint_open(file_of(at, r->method), &file));
    for (int32_t i = 0; i < PARAMETERS; i++) {
        must(tch_checkpoint_read(file, at->context, tch_network_parameter_name(r->network, i),
                                 tch_network_parameter(r->network, i)));
    }
    must(tch_optimizer_load(r->optimizer, file, "optimizer"));
    if (r->kfac != NULL) {
        must(tch_kfac_load(r->kfac, file, "kfac"));
    }
    must(tch_checkpoint_number(file, "scale", &scaler.scale));
    must(tch_checkpoint_integer(file, "tracker", &tracker));
    must(tch_checkpoint_integer(file, "step", &r->step));
    scaler.growth_tracker = (int32_t)tracker;
    must(tch_scaler_set_state(r->scaler, &scaler));
    tch_checkpoint_close(file);
}

/* --- bits -------------------------------------------------------------------------------------------------------- */

static int64_t fetch(const place *at, const run *r, int32_t index, float *values)
{
    const tch_tensor *from = tch_network_parameter(r->network, index);
    tch_tensor to = tch_tensor_view(values, TCH_FLOAT32, from->ndim, from->shape);
    must(tch_tensor_copy(at->context, &to, from));
    return tch_tensor_numel(from);
}

/* FNV-1a over the first run's parameters, after comparison with the second's. */
static uint64_t compare(const place *at, const run *first, const run *second, uint64_t fingerprint)
{
    static float a[MOST_PARAMETER];
    static float b[MOST_PARAMETER];
    for (int32_t i = 0; i < PARAMETERS; i++) {
        size_t bytes = (size_t)fetch(at, first, i, a) * sizeof *a;
        (void)fetch(at, second, i, b);
        if (memcmp(a, b, bytes) != 0) {
            fprintf(stderr, "soak: %s, step %lld: %s of the run that was resumed is not that of the other\n",
                    first->method->name, (long long)first->step, tch_network_parameter_name(first->network, i));
            exit(1);
        }
        for (size_t k = 0; k < bytes; k++) {
            fingerprint = (fingerprint ^ ((const unsigned char *)a)[k]) * 0x100000001b3;
        }
    }
    return fingerprint;
}

/* --- figures ----------------------------------------------------------------------------------------------------- */

typedef struct figures {
    tch_memory_info pool;
    long resident;  /* bytes */
    int64_t misses; /* of the pool in this round: destroyed state was returned to the device */
    int files;      /* open */
} figures;

static int count_files(void)
{
    int count = 0;
    DIR *entries = opendir("/proc/self/fd");
    for (const struct dirent *e = entries == NULL ? NULL : readdir(entries); e != NULL; e = readdir(entries)) {
        count++;
    }
    if (entries != NULL) {
        closedir(entries);
    }
    return count;
}

static figures look(const place *at)
{
    figures f = {.pool = TCH_MEMORY_INFO_INIT, .files = count_files()};
    long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (statm != NULL) {
        require(fscanf(statm, "%*d %ld", &pages) == 1, "/proc/self/statm is not as expected");
        fclose(statm);
    }
    f.resident = pages * sysconf(_SC_PAGESIZE);
    must(tch_memory_get_info(at->context, &f.pool));
    return f;
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct totals {
    int64_t steps, skipped, refreshes, failed;
} totals;

static totals count_of(const run *firsts)
{
    totals sum = {0};
    for (int m = 0; m < METHODS; m++) {
        tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
        must(tch_optimizer_get_stats(firsts[m].optimizer, &stats));
        sum.steps += stats.steps;
        sum.skipped += stats.skipped;
        sum.refreshes += stats.refreshes;
        sum.failed += stats.failed;
    }
    return sum;
}

static double loss_of(const place *at)
{
    double sums[TCH_NETWORK_TOTALS];
    int64_t size = TCH_NETWORK_TOTALS;
    tch_tensor host = tch_tensor_view(sums, TCH_FLOAT64, 1, &size);
    must(tch_tensor_copy(at->context, &host, at->totals));
    must(tch_tensor_fill(at->context, at->totals, 0.0));
    return sums[TCH_TOTAL_LOSS] / sums[TCH_TOTAL_ROWS];
}

/* --- rounds ------------------------------------------------------------------------------------------------------ */

typedef struct soak {
    place at;
    data data;
    run first[METHODS], second[METHODS];
    uint64_t fingerprint;
    double loss, first_loss;
} soak;

static void one_round(soak *s, int64_t round)
{
    int64_t point_shape[] = {BATCHES * BATCH, INPUTS};
    int64_t label_shape[] = {BATCHES * BATCH};
    make_data(&s->data, (uint64_t)round);
    tch_tensor points = tch_tensor_view(s->data.points, TCH_FLOAT32, 2, point_shape);
    tch_tensor labels = tch_tensor_view(s->data.labels, TCH_INT32, 1, label_shape);
    must(tch_tensor_copy(s->at.context, s->at.points, &points));
    must(tch_tensor_copy(s->at.context, s->at.labels, &labels));
    for (int m = 0; m < METHODS; m++) {
        for (int i = 0; i < STEPS; i++) {
            one_step(&s->at, &s->first[m]);
            one_step(&s->at, &s->second[m]);
        }
        s->fingerprint = compare(&s->at, &s->first[m], &s->second[m], s->fingerprint);
        save(&s->at, &s->first[m]);
        stop(&s->second[m]);
        start(&s->at, &methods[m], &s->second[m]);
        load(&s->at, &s->second[m]);
    }
    s->loss = loss_of(&s->at);
    require(isfinite(s->loss), "the loss is not finite");
    s->first_loss = round == 0 ? s->loss : s->first_loss;
}

static void begin(soak *s, const char *device, const char *folder)
{
    int64_t point_shape[] = {BATCHES * BATCH, INPUTS};
    int64_t label_shape[] = {BATCHES * BATCH};
    int64_t total_shape[] = {TCH_NETWORK_TOTALS};
    place *at = &s->at;
    at->folder = folder;
    s->fingerprint = 0xcbf29ce484222325;
    must(tch_context_create(device, &at->context));
    must(tch_tensor_create(at->context, TCH_FLOAT32, 2, point_shape, TCH_CONTIGUOUS, &at->points));
    must(tch_tensor_create(at->context, TCH_INT32, 1, label_shape, TCH_CONTIGUOUS, &at->labels));
    must(tch_tensor_create(at->context, TCH_FLOAT64, 1, total_shape, TCH_CONTIGUOUS, &at->totals));
    must(tch_tensor_fill(at->context, at->totals, 0.0));
    for (int m = 0; m < METHODS; m++) {
        start(at, &methods[m], &s->first[m]);
        start(at, &methods[m], &s->second[m]);
    }
}

static void finish(soak *s)
{
    for (int m = 0; m < METHODS; m++) {
        stop(&s->first[m]);
        stop(&s->second[m]);
        remove(file_of(&s->at, &methods[m]));
    }
    tch_tensor_destroy(s->at.points);
    tch_tensor_destroy(s->at.labels);
    tch_tensor_destroy(s->at.totals);
    tch_context_destroy(s->at.context);
}

static void print_row(const soak *s, int64_t round, const figures *f)
{
    totals sum = count_of(s->first);
    printf(
        "round %lld: %lld steps, %lld skipped, %lld refreshes, loss %.4f; %.2f MB resident, pool %lld of %lld bytes, "
        "%lld misses, %d files\n",
        (long long)round, (long long)sum.steps, (long long)sum.skipped, (long long)sum.refreshes, s->loss,
        (double)f->resident / 1e6, (long long)f->pool.allocated, (long long)f->pool.reserved, (long long)f->misses,
        f->files);
    fflush(stdout);
}

static void check_flat(const figures *early, const figures *now)
{
    require(now->pool.allocated == early->pool.allocated, "the pool has handed out more than after the first rounds");
    require(now->pool.reserved == early->pool.reserved, "the pool holds more than after the first rounds");
    require(now->misses == early->misses, "the pool asks the device for memory more often than in the first rounds");
    require(now->files == early->files, "more files are open than after the first rounds");
}

static void check_end(const soak *s, int64_t rounds, long early, long late)
{
    totals sum = count_of(s->first);
    printf("%lld rounds of %d steps of %d methods, each twice; %lld steps skipped, %lld refreshes, %lld factors whose "
           "latest one failed\n",
           (long long)rounds, STEPS, METHODS, (long long)sum.skipped, (long long)sum.refreshes, (long long)sum.failed);
    printf("resident: at most %.2f MB in the first two tenths, %.2f MB in the last\n", (double)early / 1e6,
           (double)late / 1e6);
    require(sum.skipped > 0 && sum.refreshes > 0, "no step was skipped, or nothing refreshed: it tried nothing");
    require(s->loss < s->first_loss, "the loss did not fall");
    require(late <= early + resident_room, "the process has grown");
}

static void soak_for(soak *s, double seconds, int64_t rounds)
{
    double start_time = seconds_now();
    figures early = {.pool = TCH_MEMORY_INFO_INIT};
    long resident[3] = {0}; /* maximum in the first two tenths, in between, in the last */
    double share = 0.0;
    int64_t round = 0;
    int64_t misses = 0;
    for (double shown = -1.0; share < 1.0; round++) {
        double before = share;
        one_round(s, round);
        figures now = look(&s->at);
        now.misses = now.pool.misses - misses;
        misses = now.pool.misses;
        share = seconds > 0 ? (seconds_now() - start_time) / seconds : (double)(round + 1) / (double)rounds;
        early = round + 1 == WARM_ROUNDS ? now : early;
        if (round >= WARM_ROUNDS) {
            check_flat(&early, &now);
            bool few = round < 2 * WARM_ROUNDS; /* of a short run these are the beginning */
            int part = few || before < 0.2 ? 0 : before >= 0.9 ? 2 : 1;
            resident[part] = now.resident > resident[part] ? now.resident : resident[part];
        }
        if (share >= shown + 0.05) {
            shown = share;
            print_row(s, round + 1, &now);
        }
        if (((round + 1) & round) == 0) {
            printf("fingerprint of %lld rounds: %016llx\n", (long long)round + 1, (unsigned long long)s->fingerprint);
        }
    }
    check_end(s, round, resident[0], resident[2]);
}

int main(int argc, char **argv)
{
    static soak s;
    const char *device = "cpu";
    const char *folder = ".";
    double seconds = 0.0;
    int64_t rounds = 20;
    for (int i = 1; i + 1 < argc; i += 2) {
        device = strcmp(argv[i], "--device") == 0 ? argv[i + 1] : device;
        folder = strcmp(argv[i], "--folder") == 0 ? argv[i + 1] : folder;
        seconds = strcmp(argv[i], "--seconds") == 0 ? strtod(argv[i + 1], NULL) : seconds;
        rounds = strcmp(argv[i], "--rounds") == 0 ? strtoll(argv[i + 1], NULL, 10) : rounds;
    }
    begin(&s, device, folder);
    soak_for(&s, seconds, rounds);
    finish(&s);
    printf("soak: passed\n");
    return 0;
}
