/* CUDA graphs and streams. A root, and reductions of per-sample gradients, are captured from the caller's stream after
 * one call, and replayed with other data: nothing may synchronize, allocate, or depend on values read by the host. */
#include "support/cuda/graphs.h"
#include "support/linalg/operations.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

enum { BATCH = 3, MOST_OUTPUTS = 6 };

/* Calls without the host in between, their outputs, and the generator of their inputs. */
typedef struct captured_work {
    tch_context *context;
    cudaStream_t stream;
    tch_status (*calls)(const void *work);
    void (*draw)(const void *work, uint64_t numbers);
    test_tensor *outputs[MOST_OUTPUTS]; /* NULL for none */
} captured_work;

static void enter_work(captured_work *work, tch_context *context)
{
    work->context = context;
    work->stream = test_enter_stream(context);
}

static void leave_work(captured_work *work, cudaGraphExec_t graph)
{
    test_leave_stream(work->context, work->stream, graph);
    for (int i = 0; i < MOST_OUTPUTS; i++) {
        if (work->outputs[i] != NULL) {
            test_tensor_free(work->outputs[i]);
        }
    }
}

static void poison_outputs(const captured_work *work)
{
    for (int i = 0; i < MOST_OUTPUTS; i++) {
        if (work->outputs[i] != NULL) {
            test_tensor_poison(work->outputs[i]);
        }
    }
}

static void launch_graph(const captured_work *work, cudaGraphExec_t graph)
{
    CHECK_CUDA(cudaGraphLaunch(graph, work->stream));
    CHECK_CUDA(cudaStreamSynchronize(work->stream));
}

/* The calls, then their graph with the same data. */
static void compare_replay(const captured_work *work, cudaGraphExec_t graph, uint64_t numbers)
{
    double *expected[MOST_OUTPUTS] = {NULL};
    work->draw(work, numbers);
    poison_outputs(work);
    CHECK_OK(work->calls(work));
    for (int i = 0; i < MOST_OUTPUTS; i++) {
        expected[i] = work->outputs[i] != NULL ? test_tensor_read(work->outputs[i]) : NULL;
    }
    poison_outputs(work);
    launch_graph(work, graph);
    for (int i = 0; i < MOST_OUTPUTS && work->outputs[i] != NULL; i++) {
        double *got = test_tensor_read(work->outputs[i]);
        test_tensor_check_written(work->outputs[i], "an output");
        CHECK(memcmp(got, expected[i], (size_t)work->outputs[i]->count * sizeof *got) == 0,
              "output %d of the replay differs from the call's", i);
    }
}

/* Replays a graph with two sets of data, captured with a third, without allocations. */
static void check_work(captured_work *work)
{
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    work->draw(work, 1);
    CHECK_OK(work->calls(work)); /* sizes the workspace */
    CHECK_OK(tch_context_synchronize(work->context));
    CHECK_OK(tch_memory_get_info(work->context, &before));
    cudaGraphExec_t graph = test_capture(work->stream, work->calls, work);
    compare_replay(work, graph, 2);
    compare_replay(work, graph, 3);
    CHECK_OK(tch_memory_get_info(work->context, &after));
    CHECK(after.misses == before.misses, "%lld allocations after the first call",
          (long long)(after.misses - before.misses));
    leave_work(work, graph);
}

/* --- roots ------------------------------------------------------------------------------------------------------- */

typedef struct root_case {
    captured_work work;
    int64_t n;
    tch_root_config config;
    test_tensor *a, *out, *residual, *report;
} root_case;

/* Symmetric matrices that differ with `stream`, of condition 1e4. */
static void write_matrices(const void *work, uint64_t stream)
{
    const root_case *c = work;
    int64_t size = c->n * c->n;
    double *values = test_alloc((size_t)(BATCH * size) * sizeof *values);
    double *spectrum = test_alloc((size_t)c->n * sizeof *spectrum);
    test_random random = test_random_stream(stream);
    ref_spectrum(c->n, 1e4, spectrum);
    for (int64_t b = 0; b < BATCH; b++) {
        ref_symmetric(&random, c->n, spectrum, values + b * size);
    }
    test_tensor_write(c->a, values);
}

static tch_status take_root(const void *work)
{
    const root_case *c = work;
    return tch_inverse_root(c->work.context, &c->a->tensor, 4, &c->config, &c->out->tensor, &c->residual->tensor,
                            &c->report->tensor);
}

static root_case make_case(tch_context *context, int64_t n, tch_root_method method, tch_dtype dtype)
{
    const int64_t shape[] = {BATCH, n, n};
    root_case c = {.work = {.calls = take_root, .draw = write_matrices}, .n = n, .config = TCH_ROOT_CONFIG_INIT};
    c.config.relative_eps = 1e-4;
    c.config.method = method;
    enter_work(&c.work, context);
    c.a = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    c.work.outputs[0] = c.out = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    c.work.outputs[1] = c.residual = test_tensor_make(context, TCH_FLOAT64, 1, shape, LAYOUT_CONTIGUOUS);
    c.work.outputs[2] = c.report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    return c;
}

static void check_roots(tch_context *context, int64_t n, tch_root_method method)
{
    test_case("%s, n = %lld", tch_root_method_name(method), (long long)n);
    root_case c = make_case(context, n, method, TCH_FLOAT32);
    write_matrices(&c, 2);
    CHECK_OK(take_root(&c));
    double *report = test_tensor_read(c.report);
    for (int b = 0; b < BATCH; b++) {
        CHECK(report[b] == TCH_REPORT_OK, "matrix %d is reported as %g", b, report[b]);
    }
    check_work(&c.work);
    test_tensor_free(c.a);
}

TEST(roots_are_captured_and_replayed)
{
    static const int64_t sizes[] = {17, 64, 128, 200, 512};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        tch_root_config config = TCH_ROOT_CONFIG_INIT;
        tch_root_method chosen;
        config.relative_eps = 1e-4;
        check_roots(*state, sizes[i], TCH_ROOT_NEWTON);
        CHECK_OK(tch_inverse_root_plan(*state, TCH_FLOAT32, BATCH, sizes[i], 4, &config, &chosen, NULL));
        if (chosen == TCH_ROOT_NEWTON) { /* cuSOLVER's eigensolver synchronizes, which capture forbids */
            check_roots(*state, sizes[i], TCH_ROOT_AUTO);
        }
    }
}

/* A failing matrix is detected on the device: its output is kept, the others are bitwise as without it. By a replay,
 * except for cuSOLVER's eigensolver. */
static void check_bad_matrix(tch_context *context, int64_t n, tch_root_method method, tch_dtype dtype, double bad)
{
    test_case("%s, n = %lld, %s, %g in one matrix", tch_root_method_name(method), (long long)n, tch_dtype_name(dtype),
              bad);
    root_case c = make_case(context, n, method, dtype);
    write_matrices(&c, 4);
    CHECK_OK(take_root(&c));
    test_tensor_check_written(c.out, "out");
    double *expected = test_tensor_read(c.out);
    cudaGraphExec_t graph = method == TCH_ROOT_NEWTON ? test_capture(c.work.stream, take_root, &c) : NULL;
    double *values = test_tensor_read(c.a);
    values[n * n + n + 1] = bad;
    test_tensor_write(c.a, values);
    poison_outputs(&c.work);
    if (graph != NULL) {
        launch_graph(&c.work, graph);
    } else {
        CHECK_OK(take_root(&c));
    }
    double *report = test_tensor_read(c.report);
    double *out = test_tensor_read(c.out);
    CHECK(report[0] == TCH_REPORT_OK && report[1] == TCH_REPORT_NOT_FINITE && report[2] == TCH_REPORT_OK,
          "the reports are %g, %g, %g", report[0], report[1], report[2]);
    for (int64_t i = 0; i < BATCH * n * n; i++) {
        CHECK(i / (n * n) == 1 ? isnan(out[i]) : out[i] == expected[i], "element %lld of matrix %lld is %g",
              (long long)(i % (n * n)), (long long)(i / (n * n)), out[i]);
    }
    leave_work(&c.work, graph);
    test_tensor_free(c.a);
}

TEST(one_bad_matrix_in_a_batch)
{
    static const int64_t sizes[] = {33, 128, 160, 300, 640};
    for (size_t i = 0; i < TEST_COUNT(sizes); i++) {
        check_bad_matrix(*state, sizes[i], TCH_ROOT_NEWTON, TCH_FLOAT32, i % 2 == 0 ? NAN : INFINITY);
        check_bad_matrix(*state, sizes[i], TCH_ROOT_EIGEN, TCH_FLOAT32, i % 2 == 0 ? INFINITY : NAN);
    }
    check_bad_matrix(*state, 160, TCH_ROOT_NEWTON, TCH_FLOAT64, NAN);
}

/* --- per-sample gradients ---------------------------------------------------------------------------------- */

enum { SAMPLES = 3 };

/* One layer, its batch, and all reductions. */
typedef struct gradient_case {
    captured_work work;
    tch_layer layer;
    test_tensor *input, *gradient;
    test_tensor *samples, *norms, *weights, *sum; /* of the weight's gradients */
    test_tensor *gram, *factor;                   /* factor: for products, otherwise NULL */
} gradient_case;

/* Clipping, one call after the other without the host in between; then curvature. */
static tch_status take_gradients(const void *data)
{
    const gradient_case *c = data;
    const tch_tensor *x = &c->input->tensor;
    const tch_tensor *g = &c->gradient->tensor;
    tch_status status = tch_grad_samples(c->work.context, &c->layer, x, g, &c->samples->tensor, NULL);
    if (status == TCH_OK) {
        status = tch_grad_norms(c->work.context, &c->layer, x, g, TCH_GRAD_WEIGHT, 0, &c->norms->tensor);
    }
    if (status == TCH_OK) {
        status = tch_grad_clip_weights(c->work.context, &c->norms->tensor, 0.5, &c->weights->tensor);
    }
    if (status == TCH_OK) {
        status =
            tch_grad_weighted_sum(c->work.context, &c->layer, x, g, &c->weights->tensor, 0.0, &c->sum->tensor, NULL);
    }
    if (status == TCH_OK) {
        status = tch_grad_gram(c->work.context, &c->layer, x, g, TCH_GRAD_WEIGHT, 0, &c->gram->tensor);
    }
    if (status == TCH_OK && c->factor != NULL) {
        status = tch_grad_factors(c->work.context, &c->layer, x, NULL, 0, TCH_SHARING_EXPAND, 1.0, 0.0,
                                  &c->factor->tensor, NULL);
    }
    return status;
}

/* Tokens if the layer is an embedding. */
static void write_batch(const void *work, uint64_t numbers)
{
    const gradient_case *c = work;
    test_random random = test_random_stream(numbers);
    test_tensor *inputs[] = {c->input, c->gradient};
    for (int k = 0; k < 2; k++) {
        double *values = test_alloc((size_t)inputs[k]->count * sizeof *values);
        for (int64_t i = 0; i < inputs[k]->count; i++) {
            double uniform = test_random_uniform(&random);
            bool token = k == 0 && c->layer.kind == TCH_LAYER_EMBEDDING;
            values[i] = token ? floor(uniform * (double)c->layer.rows) : 2.0 * uniform - 1.0;
        }
        test_tensor_write(inputs[k], values);
    }
}

static void check_gradients(gradient_case *c, const char *what)
{
    test_tensor *outputs[MOST_OUTPUTS] = {c->samples, c->norms, c->weights, c->sum, c->gram, c->factor};
    test_case("gradients of %s", what);
    memcpy(c->work.outputs, outputs, sizeof outputs);
    enter_work(&c->work, c->work.context);
    check_work(&c->work);
    test_tensor_free(c->input);
    test_tensor_free(c->gradient);
}

static test_tensor *tensor_of(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape)
{
    return test_tensor_make(context, dtype, ndim, shape, LAYOUT_CONTIGUOUS);
}

/* `weight` has a leading dimension of samples. */
static gradient_case gradients_of(tch_context *context, tch_layer_kind kind, int32_t ndim, const int64_t *weight)
{
    gradient_case c = {.work = {.context = context, .calls = take_gradients, .draw = write_batch},
                       .layer = TCH_LAYER_INIT(kind)};
    c.samples = tensor_of(context, TCH_FLOAT32, ndim, weight);
    c.sum = tensor_of(context, TCH_FLOAT32, ndim - 1, weight + 1);
    c.norms = tensor_of(context, TCH_FLOAT64, 1, weight);
    c.weights = tensor_of(context, TCH_FLOAT64, 1, weight);
    c.gram = tensor_of(context, TCH_FLOAT64, 2, (const int64_t[]){SAMPLES, SAMPLES});
    return c;
}

TEST(gradients_are_captured_and_replayed)
{
    tch_context *context = *state;
    gradient_case linear = gradients_of(context, TCH_LAYER_LINEAR, 3, (const int64_t[]){SAMPLES, 70, 33});
    linear.input = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 9, 33});
    linear.gradient = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 9, 70});
    linear.factor = tensor_of(context, TCH_FLOAT32, 2, (const int64_t[]){33, 33});
    check_gradients(&linear, "a linear layer");
    gradient_case conv = gradients_of(context, TCH_LAYER_CONV, 4, (const int64_t[]){SAMPLES, 6, 5, 3});
    conv.layer.dims = 1;
    conv.layer.kernel[0] = 3;
    conv.input = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 5, 40});
    conv.gradient = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 6, 38});
    conv.factor = tensor_of(context, TCH_FLOAT32, 2, (const int64_t[]){15, 15});
    check_gradients(&conv, "a convolution");
    gradient_case embedding = gradients_of(context, TCH_LAYER_EMBEDDING, 3, (const int64_t[]){SAMPLES, 300, 20});
    embedding.layer.rows = 300;
    embedding.input = tensor_of(context, TCH_INT64, 2, (const int64_t[]){SAMPLES, 100});
    embedding.gradient = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 100, 20});
    check_gradients(&embedding, "an embedding");
    gradient_case norm = gradients_of(context, TCH_LAYER_LAYER_NORM, 2, (const int64_t[]){SAMPLES, 50});
    norm.input = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 200, 50});
    norm.gradient = tensor_of(context, TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 200, 50});
    check_gradients(&norm, "a layer norm");
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

/* Work queued after a change of streams sees work queued before it, without synchronization. */
TEST(a_change_of_streams_keeps_the_order)
{
    enum { N = 2048, ROUNDS = 20 };
    tch_context *context = *state;
    const int64_t shape[] = {N, N};
    cudaStream_t streams[2];
    test_case("two streams in turns");
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams[0], cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking));
    tch_tensor *t[2] = {NULL, NULL};
    tch_tensor *factor = NULL;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &t[i]));
    }
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &factor));
    CHECK_OK(tch_tensor_fill(context, t[0], 1.0));
    CHECK_OK(tch_tensor_fill(context, factor, 2.0 / N));
    for (int round = 0; round < ROUNDS; round++) { /* ones times 2/N is 2, and so on: each round doubles, exactly */
        CHECK_OK(tch_context_set_stream(context, streams[round % 2]));
        CHECK_OK(tch_matmul(context, t[round % 2], factor, t[(round + 1) % 2]));
    }
    float *host = test_alloc(sizeof(float) * N * N);
    int64_t host_shape[] = {N, N};
    tch_tensor view = tch_tensor_view(host, TCH_FLOAT32, 2, host_shape);
    CHECK_OK(tch_tensor_copy(context, &view, t[ROUNDS % 2]));
    CHECK_OK(tch_context_synchronize(context));
    for (int i = 0; i < N * N; i++) {
        CHECK(host[i] == 1 << ROUNDS, "element %d is %g", i, host[i]);
    }
    CHECK_OK(tch_context_set_stream(context, NULL));
    tch_tensor_destroy(t[0]);
    tch_tensor_destroy(t[1]);
    tch_tensor_destroy(factor);
    CHECK_CUDA(cudaStreamDestroy(streams[0]));
    CHECK_CUDA(cudaStreamDestroy(streams[1]));
}

/* A caller's kernels on the same stream, before and after the library's, run in order. */
TEST(calls_are_ordered_on_the_callers_stream)
{
    enum { COUNT = 1 << 22 };
    tch_context *context = *state;
    const int64_t shape[] = {COUNT};
    tch_tensor *t = NULL;
    test_case("between the caller's own work");
    cudaStream_t stream = test_enter_stream(context);
    assert_ptr_equal(tch_context_get_stream(context), stream);
    CHECK_OK(tch_tensor_create(context, TCH_INT32, 1, shape, TCH_CONTIGUOUS, &t));
    unsigned char *host = test_alloc(sizeof(int32_t) * COUNT);
    for (int round = 0; round < 10; round++) {
        CHECK_CUDA(cudaMemsetAsync(t->data, 0xff, sizeof(int32_t) * COUNT, stream));
        CHECK_OK(tch_tensor_fill(context, t, round));
        CHECK_CUDA(cudaMemcpyAsync(host, t->data, sizeof(int32_t) * COUNT, cudaMemcpyDeviceToHost, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        for (int i = 0; i < COUNT; i += 4097) {
            int32_t got;
            memcpy(&got, host + sizeof got * (size_t)i, sizeof got);
            CHECK(got == round, "element %d of round %d is %d", i, round, got);
        }
    }
    test_leave_stream(context, stream, NULL);
    tch_tensor_destroy(t);
}

TEST_MAIN(test_open_context, test_close_context)
