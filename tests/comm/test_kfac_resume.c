/* Sharded KFAC, interrupted and resumed on other numbers of ranks: with the same samples on all of them, gradients are
 * bitwise those of one uninterrupted process, and each refresh result has one owner. Ranks are threads of a fake group.
 * Also rejected resumes: a checkpoint that a rank cannot read, or an incomplete one. */
#include "support/comm/pretend_group.h"
#include "support/comm/shared_kfac.h"
#include "support/files.h"
#include "support/testing.h"

#define EACH 3 /* steps between interruptions: odd, so that some are at a step of two observations */
#define MOST_RANKS 16
#define INDEX "kfac.safetensors.index.json"

/* Steps by a number of ranks, from one checkpoint to the next. */
typedef struct training {
    tch_kfac_config config;
    int32_t ranks; /* 0: one process without a group */
    int32_t first, steps;
    const char *from, *to;  /* paths; NULL: start from scratch, save nothing */
    const char *other_path; /* opened by the last rank instead of `from`, or NULL */
    int32_t apart;          /* 1: rank r has r more batches than the first, and different ones */
    double *gradients[MOST_RANKS];
    tch_status status[MOST_RANKS];
    char message[MOST_RANKS][512];
    double factors[MOST_RANKS][KFAC_LAYERS]; /* the sum of a layer's input factor, in float64 */
    int32_t owned[MOST_RANKS][KFAC_LAYERS];  /* tensors that are neither factors nor scales */
    int64_t updates[MOST_RANKS][KFAC_LAYERS];
    tch_status after[MOST_RANKS];           /* of a step after a failed load */
    const char *repaired[MOST_RANKS];       /* loaded then */
    tch_status repaired_status[MOST_RANKS]; /* its result */
} training;

static training training_of(const tch_kfac_config *config, int32_t ranks)
{
    return (training){.config = *config, .ranks = ranks};
}

static tch_kfac_config config_of(tch_kfac_method method, tch_dtype dtype)
{
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    config.method = method;
    config.accumulation_steps = 2;
    config.factor_dtype = dtype;
    return config;
}

/* --- one rank ---------------------------------------------------------------------------------------------------- */

static tch_status save_kfac(tch_kfac *kfac, tch_context *context, tch_comm *comm, const char *path)
{
    tch_checkpoint_writer *writer = NULL;
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : tch_kfac_save(kfac, writer, "kfac");
    if (strstr(path, ".index.json") == NULL) {
        status = status != TCH_OK ? status : tch_checkpoint_writer_save(writer, context, path);
    } else if (status == TCH_OK || comm != NULL) {
        status = tch_checkpoint_writer_save_sharded(status == TCH_OK ? writer : NULL, context, comm, path);
    }
    tch_checkpoint_writer_destroy(writer);
    return status;
}

/* NULL: this rank cannot open it, and reports that. */
static tch_status load_kfac(tch_kfac *kfac, const char *path)
{
    tch_checkpoint *checkpoint = NULL;
    tch_status opened = tch_checkpoint_open(path, &checkpoint);
    tch_status loaded = tch_kfac_load(kfac, checkpoint, "kfac");
    tch_checkpoint_close(checkpoint);
    return opened != TCH_OK ? opened : loaded;
}

static tch_kfac *make_kfac(const training *r, tch_context *context, tch_comm *comm)
{
    tch_kfac *kfac = NULL;
    tch_kfac_layer layers[KFAC_LAYERS];
    shared_kfac_describe(layers);
    assert_int_equal(tch_kfac_create(context, &r->config, &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm},
                                     KFAC_LAYERS, layers, &kfac),
                     TCH_OK);
    return kfac;
}

static double sum_of(const tch_tensor *tensor)
{
    const double *values = (const double *)((const char *)tensor->data + tensor->byte_offset);
    double sum = 0.0;
    for (int64_t i = 0; i < tch_tensor_numel(tensor); i++) {
        sum += values[i];
    }
    return sum;
}

static void look_at_state(training *r, tch_kfac *kfac, int32_t rank)
{
    memset(r->owned[rank], 0, sizeof r->owned[rank]);
    for (int32_t i = 0; i < tch_kfac_state_count(kfac); i++) {
        int64_t counts[TCH_KFAC_COUNTS];
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        assert_int_equal(tch_kfac_get_state(kfac, i, &s), TCH_OK);
        assert_int_equal(tch_kfac_get_counts(kfac, s.parameter, counts), TCH_OK);
        r->updates[rank][s.parameter] = counts[0];
        r->owned[rank][s.parameter] += strstr(s.name, "_factor") == NULL && strstr(s.name, "scales") == NULL;
        if (strstr(s.name, "/input_factor") != NULL && tch_dtype_equal(r->config.factor_dtype, TCH_FLOAT64)) {
            r->factors[rank][s.parameter] = sum_of(s.tensor);
        }
    }
}

static tch_status train_from_checkpoint(training *r, tch_kfac *kfac, int32_t rank)
{
    const char *from = r->other_path != NULL && rank == r->ranks - 1 ? r->other_path : r->from;
    tch_status status = from == NULL ? TCH_OK : load_kfac(kfac, from);
    if (r->apart) {
        test_random random = test_random_stream(77 + (uint64_t)rank);
        for (int32_t i = 0; i <= rank && status == TCH_OK; i++) {
            status = shared_kfac_observe(kfac, &random);
        }
    }
    for (int32_t s = r->first; s < r->first + r->steps && status == TCH_OK; s++) {
        status = shared_kfac_step(kfac, s, r->gradients[rank]);
    }
    return status;
}

static void train_rank(tch_comm *comm, int32_t rank, void *user)
{
    training *r = user;
    tch_context *context = NULL;
    assert_int_equal(tch_context_create("cpu", &context), TCH_OK);
    tch_kfac *kfac = make_kfac(r, context, comm);
    tch_status status = train_from_checkpoint(r, kfac, rank);
    if (status == TCH_OK && r->to != NULL) {
        status = save_kfac(kfac, context, comm, r->to);
    }
    r->status[rank] = status;
    snprintf(r->message[rank], sizeof r->message[rank], "%s", status == TCH_OK ? "" : tch_last_error());
    look_at_state(r, kfac, rank);
    if (r->repaired[rank] != NULL) {
        r->after[rank] = tch_kfac_refresh(kfac);
        r->repaired_status[rank] = load_kfac(kfac, r->repaired[rank]);
    }
    tch_kfac_destroy(kfac);
    tch_context_destroy(context);
}

static void run_ranks(training *r)
{
    if (r->ranks == 0) {
        train_rank(NULL, 0, r);
        return;
    }
    pretend_group group;
    pretend_open(&group, r->ranks);
    pretend_run(&group, train_rank, r);
    CHECK(group.mismatches == 0, "%lld bytes were sent that no rank expected", (long long)group.mismatches);
    pretend_close(&group);
}

static void run_well(training *r)
{
    run_ranks(r);
    for (int32_t k = 0; k < (r->ranks > 0 ? r->ranks : 1); k++) {
        CHECK(r->status[k] == TCH_OK, "rank %d: %s", k, r->message[k]);
    }
}

/* --- interrupted and not ----------------------------------------------------------------------------------------- */

static const size_t gradient_bytes = KFAC_ELEMENTS * sizeof(double);

static void allocate_gradients(training *r)
{
    for (int32_t rank = 0; rank < MOST_RANKS; rank++) {
        r->gradients[rank] = test_alloc(gradient_bytes);
        memset(r->gradients[rank], 0, gradient_bytes);
    }
}

static void check_owners(const training *r)
{
    int32_t results = r->config.method == TCH_KFAC_INVERSE ? 2 : 4;
    for (int32_t i = 0; i < KFAC_LAYERS; i++) {
        int32_t owned = 0;
        for (int32_t rank = 0; rank < (r->ranks > 0 ? r->ranks : 1); rank++) {
            owned += r->owned[rank][i];
        }
        int32_t copies = r->config.method == TCH_KFAC_EKFAC && r->ranks > 0 ? r->ranks : 1;
        CHECK(owned == copies * results, "layer %d has %d tensors on all ranks, expected %d", i, owned,
              copies * results);
    }
}

static const int32_t sequences[][5] = {{2, 3, 1, 5, 2}, {0, 2, 0, 3, 16}, {1, 0, 7, 4, 0}};

/* `one` is the result of one uninterrupted process. */
static void try_sequence(const tch_kfac_config *config, const int32_t *ranks, const double *one)
{
    size_t mark = test_mark();
    const char *from = NULL;
    const char *const paths[] = {test_path(INDEX), test_path("kfac.safetensors")};
    for (int32_t k = 0; k < 5; k++) {
        training r = training_of(config, ranks[k]);
        r.first = EACH * k;
        r.steps = EACH;
        r.from = from;
        r.to = paths[k == 0 && ranks[k] == 0]; /* of one process a file alone, and one with an index */
        allocate_gradients(&r);
        run_well(&r);
        check_owners(&r);
        from = r.to;
        for (int32_t rank = 0; k == 4 && rank < (ranks[k] > 0 ? ranks[k] : 1); rank++) {
            CHECK(memcmp(one, r.gradients[rank], gradient_bytes) == 0, "rank %d has other gradients", rank);
        }
    }
    test_release_since(mark);
}

TEST_IN_FOLDER(goes_on)
{
    for (int variant = 0; variant < 3 * TCH_KFAC_METHOD_COUNT; variant++) {
        bool wide = variant % 3 > 0;
        tch_kfac_config config = config_of((tch_kfac_method)(variant / 3), wide ? TCH_FLOAT64 : TCH_FLOAT32);
        config.kl_clip = variant % 3 == 2 ? 0.0 : 1e-3;
        training alone = training_of(&config, 0);
        alone.steps = 5 * EACH;
        allocate_gradients(&alone);
        run_well(&alone);
        for (size_t q = 0; q < TEST_COUNT(sequences); q++) {
            test_case("method %d, %s, kl_clip %g, sequence %d", variant / 3, wide ? "float64" : "float32",
                      config.kl_clip, (int)q);
            try_sequence(&config, sequences[q], alone.gradients[0]);
        }
    }
}

/* Ranks with different samples, and another number of them: the checkpoint has each layer as its owner saw it. */
TEST_IN_FOLDER(factors_are_the_owners)
{
    int32_t owners = 0;
    const char *path = test_path(INDEX);
    tch_kfac_config config = config_of(TCH_KFAC_INVERSE, TCH_FLOAT64);
    config.accumulation_steps = 1;
    training r = training_of(&config, 3);
    r.apart = 1;
    r.to = path;
    run_well(&r);
    training one = training_of(&config, 0);
    one.from = path;
    run_well(&one);
    for (int32_t i = 0; i < KFAC_LAYERS; i++) {
        int32_t owner = r.owned[0][i] ? 0 : r.owned[1][i] ? 1 : 2;
        owners |= 1 << owner;
        CHECK(r.factors[0][i] != r.factors[1][i] && r.factors[1][i] != r.factors[2][i], "layer %d saw the same twice",
              i);
        CHECK(one.factors[0][i] == r.factors[owner][i], "layer %d has %.17g, expected %.17g", i, one.factors[0][i],
              r.factors[owner][i]);
        CHECK(one.updates[0][i] == r.updates[owner][i] && r.updates[owner][i] == owner + 1, "layer %d has %lld updates",
              i, (long long)one.updates[0][i]);
    }
    CHECK(owners == 7, "not every rank owns a layer");
}

/* --- rejected resumes -------------------------------------------------------------------------------------------- */

static void save_by(int32_t ranks, const tch_kfac_config *config, const char *path, int32_t steps)
{
    training r = training_of(config, ranks);
    r.steps = steps;
    r.to = path;
    allocate_gradients(&r);
    run_well(&r);
}

static void expect(const training *r, int32_t rank, tch_status status, const char *words)
{
    CHECK(r->status[rank] == status && strstr(r->message[rank], words) != NULL, "rank %d gave %s: %s", rank,
          tch_status_name(r->status[rank]), r->message[rank]);
}

static void expect_all(const training *r, tch_status status, const char *words)
{
    for (int32_t rank = 0; rank < r->ranks; rank++) {
        expect(r, rank, status, words);
    }
}

TEST_IN_FOLDER(different_checkpoints)
{
    const char *const paths[] = {test_path("early.safetensors"), test_path("late.safetensors")};
    tch_kfac_config config = config_of(TCH_KFAC_EIGEN, TCH_FLOAT32);
    save_by(0, &config, paths[0], 2);
    save_by(0, &config, paths[1], 4);
    training r = training_of(&config, 2);
    r.from = paths[0];
    r.other_path = paths[1];
    run_ranks(&r);
    expect_all(&r, TCH_ERR_COMM, "the ranks have opened different checkpoints");
}

/* A truncated file does not open; changed bytes are detected by the rank that reads them, after some state was written:
 * then KFAC has failed on all ranks until a checkpoint is loaded. */
TEST_IN_FOLDER(damaged_files)
{
    int64_t bytes;
    const char *good = test_path("good.safetensors");
    const char *bad = test_path("bad.safetensors");
    const char *cut = test_path("cut.safetensors");
    tch_kfac_config config = config_of(TCH_KFAC_EIGEN, TCH_FLOAT64);
    save_by(0, &config, good, 2);
    char *text = test_file_read(good, &bytes);
    test_file_write(cut, text, bytes - 100);
    for (int64_t i = bytes / 2; i < bytes; i += 64) {
        text[i] ^= 1;
    }
    test_file_write(bad, text, bytes);

    training r = training_of(&config, 3);
    r.from = good;
    r.other_path = cut;
    run_ranks(&r);
    expect(&r, 0, TCH_ERR_COMM, "nothing was changed");
    expect(&r, 1, TCH_ERR_COMM, "nothing was changed");
    CHECK(r.status[2] == TCH_ERR_IO, "rank 2 gave %s", tch_status_name(r.status[2]));

    r = training_of(&config, 3);
    r.from = good;
    r.other_path = bad;
    for (int32_t rank = 0; rank < 3; rank++) {
        r.repaired[rank] = good;
    }
    run_ranks(&r);
    expect(&r, 0, TCH_ERR_COMM, "the state is incomplete");
    expect(&r, 1, TCH_ERR_COMM, "the state is incomplete");
    expect(&r, 2, TCH_ERR_IO, "the file is damaged");
    for (int32_t rank = 0; rank < 3; rank++) {
        CHECK(r.after[rank] != TCH_OK, "rank %d went on with half a state", rank);
        CHECK(r.repaired_status[rank] == TCH_OK, "rank %d gave %s", rank, tch_status_name(r.repaired_status[rank]));
    }
}

TEST_MAIN(NULL, test_release)
