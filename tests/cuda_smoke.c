/* Every public operation once or twice at small odd sizes, in a few seconds: what compute-sanitizer runs, and a first
 * sign of life on a new GPU.
 *
 *     cuda_smoke [device [ours | alone]]      0: all is well, 77: no such device, 1: something failed
 *
 * `ours` leaves out what cuSOLVER does, which takes racecheck minutes, and large products of cuBLAS's. `alone` is for
 * initcheck: what runs without cuBLAS, whose kernels write in a way that initcheck does not see, and in sizes that are
 * multiples of eight, since it counts all 16 bytes of an asynchronous copy as read, also where only those inside the
 * matrix were asked for.
 *
 * Results are looked at only so far as a wrong one is plainly wrong; the conformance tests are the judges. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/torchium.h>

#define SKIPPED 77
#define MOST_TENSORS 16
#define MOST_MATRICES 4 /* of a batch */

static tch_context *context;
static tch_tensor *taken[MOST_TENSORS]; /* of the running case; destroyed after it */
static int taken_count;
static int failures;
static int ours;  /* no decompositions of the libraries */
static int alone; /* nor anything else of theirs */
static double damping = 1e-2;

static void expect(int good, const char *what, const char *detail)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, detail);
        failures++;
    }
}

static void done(tch_status status, const char *what)
{
    expect(status == TCH_OK, what, tch_last_error());
}

static tch_tensor *make(tch_dtype dtype, int32_t ndim, const int64_t *shape)
{
    tch_tensor *t = NULL;
    if (tch_tensor_create_uninitialized(context, dtype, ndim, shape, TCH_CONTIGUOUS, &t) != TCH_OK) {
        fprintf(stderr, "no tensor: %s\n", tch_last_error());
        exit(EXIT_FAILURE);
    }
    taken[taken_count++] = t;
    return t;
}

static tch_tensor *matrices(tch_dtype dtype, int64_t batch, int64_t rows, int64_t cols)
{
    return make(dtype, 3, (const int64_t[]){batch, rows, cols});
}

static tch_tensor *per_matrix(tch_dtype dtype, int64_t batch)
{
    return make(dtype, 1, (const int64_t[]){batch});
}

static void end_case(void)
{
    while (taken_count > 0) {
        tch_tensor_destroy(taken[--taken_count]);
    }
}

/* Copies between host and device do not convert: numbers travel as float64, and integers as they are. */
static tch_tensor flat(const tch_tensor *t, int64_t *count)
{
    tch_tensor row = *t;
    *count = tch_tensor_numel(t);
    row.ndim = 1;
    row.shape = count;
    row.strides = NULL;
    return row;
}

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "cannot copy: %s\n", tch_last_error());
        exit(EXIT_FAILURE);
    }
}

/* The elements as float64; free with free. */
static double *read_back(const tch_tensor *t)
{
    int64_t count;
    tch_tensor row = flat(t, &count);
    double *values = malloc((size_t)count * sizeof *values);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, 1, &count);
    tch_tensor *wide = NULL;
    must(tch_tensor_create_uninitialized(context, TCH_FLOAT64, 1, &count, TCH_CONTIGUOUS, &wide));
    must(tch_tensor_copy(context, wide, &row));
    must(tch_tensor_copy(context, &host, wide));
    must(tch_context_synchronize(context));
    tch_tensor_destroy(wide);
    return values;
}

static void write_values(tch_tensor *t, double *values)
{
    int64_t count;
    tch_tensor row = flat(t, &count);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, 1, &count);
    tch_tensor *wide = NULL;
    must(tch_tensor_create_uninitialized(context, TCH_FLOAT64, 1, &count, TCH_CONTIGUOUS, &wide));
    must(tch_tensor_copy(context, wide, &host));
    must(tch_tensor_copy(context, &row, wide));
    must(tch_context_synchronize(context));
    tch_tensor_destroy(wide);
}

static tch_tensor *waves(tch_dtype dtype, int64_t batch, int64_t rows, int64_t cols)
{
    tch_tensor *t = matrices(dtype, batch, rows, cols);
    int64_t count = batch * rows * cols;
    double *values = malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count && values != NULL; i++) {
        values[i] = sin(1.7 * (double)i) + 0.1;
    }
    write_values(t, values);
    free(values);
    return t;
}

/* Positive definite, condition about 20: second differences plus a multiple of the identity. */
static tch_tensor *positive(tch_dtype dtype, int64_t batch, int64_t n)
{
    tch_tensor *t = matrices(dtype, batch, n, n);
    int64_t size = n * n;
    double *values = calloc((size_t)(batch * size), sizeof *values);
    for (int64_t i = 0; i < batch * size && values != NULL; i++) {
        int64_t gap = llabs(i % size / n - i % n);
        values[i] = gap == 0 ? 2.2 + 0.1 * (double)(i / size) : gap == 1 ? -1.0 : 0.0;
    }
    write_values(t, values);
    free(values);
    return t;
}

static void expect_finite(const tch_tensor *t, const char *what)
{
    int64_t count = tch_tensor_numel(t);
    double *values = read_back(t);
    double largest = 0.0;
    int bad = 0;
    for (int64_t i = 0; i < count; i++) {
        bad += !isfinite(values[i]);
        largest = fmax(largest, fabs(values[i]));
    }
    expect(bad == 0, what, "an element is not finite");
    expect(count == 0 || (largest > 0.0 && largest < 1e6), what, "the result has no sensible size");
    free(values);
}

static void expect_at_most(const tch_tensor *t, double limit, const char *what)
{
    double *values = read_back(t);
    for (int64_t i = 0; i < tch_tensor_numel(t); i++) {
        char text[64];
        snprintf(text, sizeof text, "matrix %lld has %g", (long long)i, values[i]);
        expect(values[i] <= limit, what, text);
    }
    free(values);
}

static void expect_good(const tch_tensor *report, const char *what)
{
    int32_t codes[MOST_MATRICES] = {0};
    int64_t count;
    tch_tensor row = flat(report, &count);
    tch_tensor host = tch_tensor_view(codes, TCH_INT32, 1, &count);
    must(tch_tensor_copy(context, &host, &row));
    must(tch_context_synchronize(context));
    for (int64_t i = 0; i < count; i++) {
        char text[64];
        snprintf(text, sizeof text, "matrix %lld is reported as %d", (long long)i, codes[i]);
        expect(codes[i] == TCH_REPORT_OK, what, text);
    }
}

static void copies_and_fills(tch_dtype dtype)
{
    tch_tensor *a = waves(dtype, 2, 37, 19);
    tch_tensor *b = matrices(TCH_FLOAT32, 2, 19, 37);
    int64_t shape[] = {2, 37, 19};
    int64_t strides[] = {703, 1, 37};
    tch_tensor turned = *b;
    turned.shape = shape;
    turned.strides = strides;
    done(tch_tensor_copy(context, &turned, a), "copy");
    expect_finite(b, "copy");
    done(tch_tensor_fill(context, a, 1.5), "fill");
    expect_finite(a, "fill");
    end_case();
}

static void products(tch_dtype dtype, int64_t n)
{
    tch_tensor *a = waves(dtype, 2, n, n + 3);
    tch_tensor *b = waves(dtype, 2, n + 3, n);
    tch_tensor *out = matrices(dtype, 2, n, n);
    done(tch_matmul(context, a, b, out), "matmul");
    expect_finite(out, "matmul");
    done(tch_gemm(context, 0.5, b, 1, a, 1, 0.25, out), "gemm");
    expect_finite(out, "gemm");
    done(tch_gram(context, 1.0, a, 0, 0.0, out), "gram");
    done(tch_gram(context, 0.1, b, 1, 0.9, out), "gram, accumulating");
    expect_finite(out, "gram");
    done(tch_matmul_chunked(context, a, b, 1 << 20, out), "chunked");
    expect_finite(out, "chunked");
    end_case();
    tch_tensor *s = positive(dtype, 2, n);
    tch_tensor *same = positive(dtype, 2, n);
    tch_tensor *square = matrices(dtype, 2, n, n);
    done(tch_symmetric_product(context, s, same, square), "symmetric product");
    expect_finite(square, "symmetric product");
    end_case();
}

static void eigen(tch_dtype dtype, int64_t n)
{
    tch_tensor *a = positive(dtype, 3, n);
    tch_tensor *w = make(dtype, 2, (const int64_t[]){3, n});
    tch_tensor *v = matrices(dtype, 3, n, n);
    tch_tensor *report = per_matrix(TCH_INT32, 3);
    done(tch_eigh(context, a, w, v, report), "eigh");
    expect_finite(w, "eigenvalues");
    expect_finite(v, "eigenvectors");
    expect_good(report, "eigh's report");
    done(tch_matrix_power(context, a, -0.5, 1e-3, v, report), "power");
    expect_finite(v, "power");
    tch_tensor *gradient = waves(dtype, 3, n, n);
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = damping;
    done(tch_matrix_power_backward(context, a, -0.5, 1e-3, gradient, v, report), "gradient of a power");
    expect_finite(v, "gradient of a power");
    expect_good(report, "gradient of a power");
    done(tch_inverse_root_backward(context, a, 4, &config, gradient, v, report), "gradient of a root");
    expect_finite(v, "gradient of a root");
    end_case();
}

static void roots(tch_dtype dtype, int64_t n, int32_t root, tch_root_method method, int32_t exact)
{
    char what[64];
    snprintf(what, sizeof what, "root %d by %s, n = %lld, %s", root, tch_root_method_name(method), (long long)n,
             tch_dtype_name(dtype));
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = damping;
    config.method = method;
    config.exact_residual = exact;
    tch_tensor *a = positive(dtype, 3, n);
    tch_tensor *out = matrices(dtype, 3, n, n);
    tch_tensor *residual = per_matrix(TCH_FLOAT64, 3);
    tch_tensor *report = per_matrix(TCH_INT32, 3);
    done(tch_inverse_root(context, a, root, &config, out, residual, report), what);
    expect_good(report, what);
    expect_at_most(residual, dtype.bits == 16 ? 0.2 : 0.02, what);
    expect_finite(out, what);
    end_case();
}

static void orthogonal(tch_dtype dtype)
{
    tch_tensor *a = waves(dtype, 2, 33, 18);
    tch_tensor *out = matrices(dtype, 2, 33, 18);
    done(tch_orthogonalize(context, a, 5, TCH_ORTHO_POLAR_EXPRESS, out), "polar express");
    expect_finite(out, "polar express");
    done(tch_orthogonalize(context, a, 5, TCH_ORTHO_MUON, out), "muon");
    expect_finite(out, "muon");
    end_case();
}

/* Enough matrices, and large enough, for the kernels that want every multiprocessor to have several tiles. A step of Muon
 * is a Gram matrix, a polynomial in it and a whole product; that one is cuBLAS's, in which racecheck sees hazards. */
static void many_orthogonal(void)
{
    tch_tensor *a = waves(TCH_BFLOAT16, 90, 256, 264);
    tch_tensor *gram = matrices(TCH_BFLOAT16, 90, 256, 256);
    tch_tensor *square = matrices(TCH_BFLOAT16, 90, 256, 256);
    tch_tensor *out = matrices(TCH_BFLOAT16, 90, 256, 264);
    done(tch_gram(context, 1.0 / 256, a, 0, 0.0, gram), "gram, many");
    expect_finite(gram, "gram, many");
    done(tch_symmetric_product(context, gram, gram, square), "symmetric product, many");
    expect_finite(square, "symmetric product, many");
    if (!ours) {
        done(tch_orthogonalize(context, a, 1, TCH_ORTHO_MUON, out), "muon, many");
        expect_finite(out, "muon, many");
        done(tch_orthogonalize(context, a, 5, TCH_ORTHO_POLAR_EXPRESS, out), "polar express, many");
        expect_finite(out, "polar express, many");
    }
    end_case();
}

static void kronecker(tch_dtype dtype)
{
    tch_tensor *a = waves(dtype, 2, 3, 5);
    tch_tensor *b = waves(dtype, 2, 9, 7);
    tch_tensor *product = matrices(dtype, 2, 27, 35);
    tch_tensor *x = waves(dtype, 2, 35, 11);
    tch_tensor *y = matrices(dtype, 2, 27, 11);
    done(tch_kronecker_product(context, a, b, product), "kronecker product");
    expect_finite(product, "kronecker product");
    done(tch_kronecker_matmul(context, a, b, x, y), "kronecker matmul");
    expect_finite(y, "kronecker matmul");
    tch_tensor *error = per_matrix(TCH_FLOAT64, 2);
    done(tch_nearest_kronecker(context, product, a, b, error), "nearest kronecker");
    expect_at_most(error, dtype.bits == 16 ? 0.1 : 1e-3, "nearest kronecker");
    end_case();
    if (ours) {
        return;
    }
    tch_tensor *left = positive(dtype, 2, 13);
    tch_tensor *right = positive(dtype, 2, 6);
    tch_tensor *gradient = waves(dtype, 2, 13, 6);
    tch_tensor *out = matrices(dtype, 2, 13, 6);
    tch_tensor *report = per_matrix(TCH_INT32, 2);
    done(tch_kronecker_apply(context, left, right, gradient, out), "kronecker apply");
    expect_finite(out, "kronecker apply");
    done(tch_kronecker_solve(context, left, right, gradient, 1e-2, out, report), "kronecker solve");
    expect_finite(out, "kronecker solve");
    expect_good(report, "kronecker solve");
    end_case();
}

/* A product whose operands stay in memory of the host; on the CPU that is any product. */
static void streamed(void)
{
    static float a[70 * 50];
    static float b[50 * 30];
    static float out[70 * 30];
    int64_t shape_a[] = {70, 50};
    int64_t shape_b[] = {50, 30};
    int64_t shape_out[] = {70, 30};
    for (int i = 0; i < 70 * 50; i++) {
        a[i] = 1.0f;
        b[i % (50 * 30)] = 2.0f;
    }
    tch_tensor ta = tch_tensor_view(a, TCH_FLOAT32, 2, shape_a);
    tch_tensor tb = tch_tensor_view(b, TCH_FLOAT32, 2, shape_b);
    tch_tensor tout = tch_tensor_view(out, TCH_FLOAT32, 2, shape_out);
    done(tch_matmul_chunked(context, &ta, &tb, 1 << 20, &tout), "streamed product");
    done(tch_context_synchronize(context), "streamed product");
    int wrong = 0;
    for (int i = 0; i < 70 * 30; i++) {
        wrong += out[i] != 100.0f;
    }
    expect(wrong == 0, "streamed product", "an element is not 100");
}

/* A few steps of one optimizer on matrices of odd sizes, of which one is cut into blocks, and a vector. */
static void optimizer(tch_optim_kind kind, tch_dtype dtype, int half)
{
    static const int64_t odd[3][2] = {{37, 50}, {41, 19}, {23, 1}};
    tch_optim_config config = tch_optim_defaults(kind);
    tch_parameter parameters[3] = {{0}};
    const tch_tensor *gradients[3];
    config.precondition_frequency = 2;
    config.max_preconditioner_dim = kind == TCH_OPTIM_SHAMPOO ? 24 : 64;
    config.grafting = TCH_GRAFTING_ADAM;
    config.momentum = 0.9;
    config.amsgrad = 1;
    config.master_weights = half == 1;
    config.stochastic_rounding = half == 2;
    for (int i = 0; i < 3; i++) {
        parameters[i].tensor = waves(dtype, 1, odd[i][0], odd[i][1]);
        gradients[i] = waves(dtype, 1, odd[i][0], odd[i][1]);
    }
    tch_optimizer *o = NULL;
    done(tch_optimizer_create(context, &config, 3, parameters, &o), "optimizer");
    for (int step = 0; o != NULL && step < 4; step++) {
        done(tch_optimizer_step(o, 3, gradients), tch_optim_kind_name(kind));
    }
    for (int i = 0; i < 3; i++) {
        expect_finite(parameters[i].tensor, tch_optim_kind_name(kind));
    }
    tch_optimizer_destroy(o);
    end_case();
}

/* Matrices that are cut into whole chunks, for which Muon has kernels of their own. */
static void even_muon(tch_optim_kind kind)
{
    tch_optim_config config = tch_optim_defaults(kind);
    tch_parameter parameters[2] = {{0}};
    const tch_tensor *gradients[2];
    tch_optimizer *o = NULL;
    for (int i = 0; i < 2; i++) {
        parameters[i].tensor = waves(TCH_FLOAT32, 1, 256, 512);
        gradients[i] = waves(TCH_FLOAT32, 1, 256, 512);
    }
    done(tch_optimizer_create(context, &config, 2, parameters, &o), "even muon");
    if (o != NULL) {
        done(tch_optimizer_step(o, 2, gradients), "even muon");
        expect_finite(parameters[1].tensor, "even muon");
    }
    tch_optimizer_destroy(o);
    end_case();
}

static void optimizers(void)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        if (!ours || kind != TCH_OPTIM_SOAP) { /* which begins with an eigendecomposition */
            optimizer((tch_optim_kind)kind, TCH_FLOAT32, 0);
        }
        optimizer(TCH_OPTIM_ADAMW, TCH_FLOAT16, 1);
        optimizer(TCH_OPTIM_ADAMW, TCH_BFLOAT16, 2);
    }
    optimizer(TCH_OPTIM_SHAMPOO, TCH_BFLOAT16, 1);
    optimizer(TCH_OPTIM_MUON, TCH_BFLOAT16, 2);
    optimizer(TCH_OPTIM_NORMUON, TCH_BFLOAT16, 2);
    optimizer(TCH_OPTIM_NORMUON, TCH_FLOAT64, 0);
    optimizer(TCH_OPTIM_LION, TCH_BFLOAT16, 2);
    optimizer(TCH_OPTIM_SHAMPOO, TCH_FLOAT64, 0);
    if (!ours) {
        even_muon(TCH_OPTIM_MUON); /* whole products are cuBLAS's */
        even_muon(TCH_OPTIM_NORMUON);
    }
}

/* --- gradients of single samples ---------------------------------------------------------------------------------- */

static tch_tensor *waves_of(tch_dtype dtype, int32_t ndim, const int64_t *shape)
{
    tch_tensor *t = make(dtype, ndim, shape);
    int64_t count = tch_tensor_numel(t);
    double *values = malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count && values != NULL; i++) {
        values[i] = sin(1.7 * (double)i) + 0.1;
    }
    write_values(t, values);
    free(values);
    return t;
}

enum { SAMPLES = 3, POSITIONS = 70, TOKENS = 9 };

static tch_tensor *tokens_of(tch_dtype dtype)
{
    static int32_t narrow[SAMPLES * POSITIONS];
    static int64_t wide[SAMPLES * POSITIONS];
    tch_tensor *t = make(dtype, 2, (const int64_t[]){SAMPLES, POSITIONS});
    for (int i = 0; i < SAMPLES * POSITIONS; i++) {
        wide[i] = narrow[i] = i * i % 11 % TOKENS;
    }
    tch_tensor host = tch_tensor_view(dtype.bits == 64 ? (void *)wide : (void *)narrow, dtype, 2, t->shape);
    must(tch_tensor_copy(context, t, &host));
    must(tch_context_synchronize(context));
    return t;
}

/* A layer and what it saw of three samples. */
typedef struct layer_case {
    tch_layer layer;
    const tch_tensor *input, *gradient;
    int32_t ndim; /* of the weight */
    int64_t weight[5];
    int64_t bias; /* elements; 0 for none */
    const char *what;
} layer_case;

static tch_tensor *parameter(const layer_case *c, int bias, int samples)
{
    tch_dtype dtype = c->gradient->dtype.bits == 16 ? TCH_FLOAT32 : c->gradient->dtype;
    int64_t shape[6] = {SAMPLES, c->bias};
    for (int32_t i = 0; i < c->ndim && !bias; i++) {
        shape[1 + i] = c->weight[i];
    }
    int32_t ndim = bias ? 1 : c->ndim;
    return samples ? waves_of(dtype, ndim + 1, shape) : waves_of(dtype, ndim, shape + 1);
}

/* What is summed, which for embeddings and normalising layers takes no product. */
static void layer_sums(const layer_case *c)
{
    tch_tensor *weight = parameter(c, 0, 0);
    tch_tensor *bias = c->bias > 0 ? parameter(c, 1, 0) : NULL;
    tch_tensor *weights = parameter(c, 0, 1);
    tch_tensor *biases = c->bias > 0 ? parameter(c, 1, 1) : NULL;
    tch_tensor *norms = per_matrix(TCH_FLOAT64, SAMPLES);
    done(tch_grad_samples(context, &c->layer, c->input, c->gradient, weights, biases), c->what);
    expect_finite(weights, c->what);
    done(tch_grad_norms(context, &c->layer, c->input, c->gradient, TCH_GRAD_BOTH, 0, norms), c->what);
    done(tch_grad_norms(context, &c->layer, c->input, c->gradient, TCH_GRAD_WEIGHT, 1, norms), c->what);
    expect_finite(norms, c->what);
    done(tch_grad_clip_weights(context, norms, 0.5, norms), "clip weights");
    expect_at_most(norms, 1.0, "clip weights");
    done(tch_grad_weighted_sum(context, &c->layer, c->input, c->gradient, norms, 0.5, weight, bias), c->what);
    expect_finite(weight, c->what);
}

static void layer_products(const layer_case *c)
{
    tch_tensor *weight = parameter(c, 0, 0);
    tch_tensor *bias = c->bias > 0 ? parameter(c, 1, 0) : NULL;
    tch_tensor *numbers = per_matrix(TCH_FLOAT64, SAMPLES);
    tch_tensor *gram = make(TCH_FLOAT64, 2, (const int64_t[]){SAMPLES, SAMPLES});
    done(tch_grad_dots(context, &c->layer, c->input, c->gradient, weight, bias, 0, numbers), c->what);
    expect_finite(numbers, c->what);
    done(tch_grad_gram(context, &c->layer, c->input, c->gradient, TCH_GRAD_BOTH, 0, gram), c->what);
    expect_finite(gram, c->what);
    if (!ours) {
        tch_tensor *report = make(TCH_INT32, 0, NULL);
        done(tch_grad_natural_weights(context, gram, NULL, 1.0, numbers, report), "natural weights");
        expect_good(report, "natural weights");
    }
}

static void layer_gradients(const layer_case *c)
{
    layer_sums(c);
    if (!alone) {
        layer_products(c);
    }
    end_case();
}

static void linear_gradients(tch_dtype dtype, int64_t positions)
{
    const tch_tensor *x = waves_of(dtype, 3, (const int64_t[]){SAMPLES, positions, 21});
    const tch_tensor *g = waves_of(dtype, 3, (const int64_t[]){SAMPLES, positions, 18});
    layer_case c = {TCH_LAYER_INIT(TCH_LAYER_LINEAR), x, g, 2, {18, 21}, 18, "linear layer"};
    layer_gradients(&c);
}

/* Norms as exact as float32 sums: rows that are multiples of 16 bytes go to tensor cores in parts, others do not. */
static void exact_norms(int64_t positions, int64_t inputs, int64_t outputs)
{
    const tch_tensor *x = waves_of(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, positions, inputs});
    const tch_tensor *g = waves_of(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, positions, outputs});
    tch_tensor *norms = per_matrix(TCH_FLOAT64, SAMPLES);
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    layer.rounded = 0;
    done(tch_grad_norms(context, &layer, x, g, TCH_GRAD_WEIGHT, 0, norms), "exact norms");
    expect_finite(norms, "exact norms");
    end_case();
}

static void convolution_gradients(tch_dtype dtype, int64_t groups)
{
    const tch_tensor *x = waves_of(dtype, 4, (const int64_t[]){SAMPLES, 4, 7, 9});
    const tch_tensor *g = waves_of(dtype, 4, (const int64_t[]){SAMPLES, 6, 4, 9});
    layer_case c = {TCH_LAYER_INIT(TCH_LAYER_CONV), x, g, 4, {6, 4 / groups, 3, 3}, 6, "convolution"};
    c.layer.dims = 2;
    c.layer.groups = groups;
    c.layer.padding = groups > 1 ? TCH_PADDING_CIRCULAR : TCH_PADDING_REFLECT;
    c.layer.stride[0] = 2;
    for (int i = 0; i < 2; i++) {
        c.layer.kernel[i] = 3;
        c.layer.before[i] = c.layer.after[i] = 1;
    }
    layer_gradients(&c);
}

static void embedding_gradients(tch_dtype dtype, tch_dtype integers)
{
    const tch_tensor *x = tokens_of(integers);
    const tch_tensor *g = waves_of(dtype, 3, (const int64_t[]){SAMPLES, POSITIONS, 12});
    layer_case c = {TCH_LAYER_INIT(TCH_LAYER_EMBEDDING), x, g, 2, {TOKENS, 12}, 0, "embedding"};
    c.layer.rows = TOKENS;
    c.layer.padding_index = 4;
    const tch_tensor *linear_x = waves_of(dtype, 3, (const int64_t[]){SAMPLES, 5, 12});
    const tch_tensor *linear_g = waves_of(dtype, 3, (const int64_t[]){SAMPLES, 5, TOKENS});
    tch_tensor *norms = per_matrix(TCH_FLOAT64, SAMPLES);
    done(tch_tensor_fill(context, norms, 1.0), "tied norms");
    done(tch_grad_tied_norms(context, &c.layer, x, g, linear_x, linear_g, norms), "tied norms");
    expect_finite(norms, "tied norms");
    layer_gradients(&c);
}

static void normalizing_gradients(tch_dtype dtype, tch_layer_kind kind, const char *what)
{
    const tch_tensor *x = waves_of(dtype, 3, (const int64_t[]){SAMPLES, 12, 8});
    const tch_tensor *g = waves_of(dtype, 3, (const int64_t[]){SAMPLES, 12, 8});
    int64_t features = kind == TCH_LAYER_GROUP_NORM ? 12 : 8;
    layer_case c = {TCH_LAYER_INIT(kind), x, g, 1, {features}, kind == TCH_LAYER_RMS_NORM ? 0 : features, what};
    c.layer.groups = kind == TCH_LAYER_GROUP_NORM ? 3 : 1;
    layer_gradients(&c);
}

static void gradients_without_products(tch_dtype dtype, tch_dtype integers)
{
    embedding_gradients(dtype, integers);
    normalizing_gradients(dtype, TCH_LAYER_LAYER_NORM, "layer norm");
    normalizing_gradients(dtype, TCH_LAYER_RMS_NORM, "RMS norm");
    normalizing_gradients(dtype, TCH_LAYER_GROUP_NORM, "group norm");
}

/* --- curvature ---------------------------------------------------------------------------------------------------- */

static void factors(tch_dtype dtype, tch_sharing sharing)
{
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    tch_dtype wide = dtype.bits == 16 ? TCH_FLOAT32 : dtype;
    tch_tensor *x = waves_of(dtype, 3, (const int64_t[]){SAMPLES, 5, 21});
    tch_tensor *g = waves_of(dtype, 3, (const int64_t[]){SAMPLES, 5, 18});
    tch_tensor *a = make(wide, 2, (const int64_t[]){22, 22});
    tch_tensor *b = make(wide, 2, (const int64_t[]){18, 18});
    done(tch_grad_factors(context, &layer, x, g, 1, sharing, 1.0, 0.0, a, b), "factors");
    done(tch_grad_factors(context, &layer, x, g, 1, sharing, 0.05, 0.95, a, b), "factors, averaged");
    expect_finite(a, "input factor");
    expect_finite(b, "output factor");
    tch_tensor *scales = make(wide, 2, (const int64_t[]){18, 22});
    done(tch_grad_scales(context, &layer, x, g, 1, a, b, 1.0, 0.0, scales), "scales");
    expect_finite(scales, "scales");
    end_case();
}

/* Two steps of a linear layer with a bias and of a convolution without. */
static void kfac(tch_kfac_method method, tch_dtype dtype)
{
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    tch_kfac_layer layers[2] = {{TCH_LAYER_INIT(TCH_LAYER_LINEAR), 21, 18, 1, "linear"},
                                {TCH_LAYER_INIT(TCH_LAYER_CONV), 12, 5, 0, NULL}};
    tch_kfac *k = NULL;
    config.method = method;
    config.damping = 1e-2;
    layers[1].layer.dims = 1;
    layers[1].layer.kernel[0] = 3;
    tch_tensor *x[2] = {waves_of(dtype, 2, (const int64_t[]){SAMPLES, 21}),
                        waves_of(dtype, 3, (const int64_t[]){SAMPLES, 4, 11})};
    tch_tensor *g[2] = {waves_of(dtype, 2, (const int64_t[]){SAMPLES, 18}),
                        waves_of(dtype, 3, (const int64_t[]){SAMPLES, 5, TOKENS})};
    tch_tensor *gradients[4] = {waves_of(dtype, 2, (const int64_t[]){18, 21}),
                                waves_of(dtype, 1, (const int64_t[]){18}),
                                waves_of(dtype, 3, (const int64_t[]){5, 4, 3}), NULL};
    done(tch_kfac_create(context, &config, 2, layers, &k), "kfac");
    for (int step = 0; k != NULL && step < 2; step++) {
        done(tch_kfac_observe(k, 0, x[0], g[0], 1.0, NULL), "kfac observes");
        done(tch_kfac_observe(k, 1, x[1], g[1], 1.0, NULL), "kfac observes");
        done(tch_kfac_refresh(k), "kfac refreshes");
        done(tch_kfac_precondition(k, 0.1, 4, gradients), "kfac preconditions");
    }
    for (int i = 0; i < 3; i++) {
        expect_finite(gradients[i], "kfac");
    }
    tch_kfac_stats stats = TCH_KFAC_STATS_INIT;
    done(tch_kfac_get_stats(k, &stats), "kfac's statistics");
    expect(stats.failed == 0 && stats.rejected == 0, "kfac", "a refresh failed, or an observation was rejected");
    tch_kfac_destroy(k);
    end_case();
}

static void curvature(void)
{
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64, TCH_FLOAT16, TCH_BFLOAT16};
    for (int d = 0; d < 4; d++) {
        factors(dtypes[d], TCH_SHARING_EXPAND);
        factors(dtypes[d], TCH_SHARING_REDUCE);
        kfac(TCH_KFAC_INVERSE, dtypes[d]);
    }
    if (!ours) {
        kfac(TCH_KFAC_EIGEN, TCH_FLOAT32);
        kfac(TCH_KFAC_EKFAC, TCH_FLOAT32);
        kfac(TCH_KFAC_EKFAC, TCH_BFLOAT16);
    }
}

static void run_all(void)
{
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64, TCH_FLOAT16, TCH_BFLOAT16};
    static const int64_t sizes[] = {1, 33, 130};
    for (int d = 0; d < 4; d++) {
        copies_and_fills(dtypes[d]);
        orthogonal(dtypes[d]);
        kronecker(dtypes[d]);
        products(dtypes[d], 21);
        roots(dtypes[d], 19, 2, ours ? TCH_ROOT_NEWTON : TCH_ROOT_AUTO, 1);
        linear_gradients(dtypes[d], 1);
        linear_gradients(dtypes[d], 37);
        convolution_gradients(dtypes[d], 1);
        convolution_gradients(dtypes[d], 2);
        gradients_without_products(dtypes[d], d % 2 ? TCH_INT64 : TCH_INT32);
        if (!ours) {
            eigen(dtypes[d], 17);
        }
    }
    for (int s = 0; s < 3; s++) {
        products(TCH_FLOAT32, sizes[s]);
        for (int method = ours ? TCH_ROOT_NEWTON : TCH_ROOT_EIGEN; method <= TCH_ROOT_NEWTON; method++) {
            roots(TCH_FLOAT32, sizes[s], 4, (tch_root_method)method, 0);
            roots(TCH_FLOAT64, sizes[s], 3, (tch_root_method)method, 1);
        }
    }
    roots(TCH_FLOAT32, 100, 8, TCH_ROOT_NEWTON, 0);
    roots(TCH_FLOAT32, 290, 4, TCH_ROOT_NEWTON, 0);
    damping = 1e-6; /* early steps in float64 */
    roots(TCH_FLOAT32, 130, 3, TCH_ROOT_NEWTON, 0);
    roots(TCH_FLOAT32, 290, 4, TCH_ROOT_NEWTON, 0);
    streamed();
    many_orthogonal();
    exact_norms(130, 100, 72);
    exact_norms(70, 33, 50);
    optimizers();
    curvature();
}

static void run_alone(void)
{
    static const tch_dtype dtypes[] = {{TCH_FLOAT, 32, 1}, {TCH_FLOAT, 64, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};
    static const int64_t sizes[] = {40, 104, 136, 296};
    for (int d = 0; d < 4; d++) {
        copies_and_fills(dtypes[d]);
        tch_tensor *a = waves(dtypes[d], 2, 3, 5);
        tch_tensor *b = waves(dtypes[d], 2, 9, 7);
        tch_tensor *product = matrices(dtypes[d], 2, 27, 35);
        done(tch_kronecker_product(context, a, b, product), "kronecker product");
        expect_finite(product, "kronecker product");
        end_case();
        gradients_without_products(dtypes[d], TCH_INT64);
    }
    for (int s = 0; s < 4; s++) {
        roots(TCH_FLOAT32, sizes[s], 4, TCH_ROOT_NEWTON, 0);
        roots(TCH_FLOAT64, sizes[s], 3, TCH_ROOT_NEWTON, 0);
    }
    damping = 1e-6;
    roots(TCH_FLOAT32, 136, 3, TCH_ROOT_NEWTON, 0);
    optimizer(TCH_OPTIM_SGD, TCH_FLOAT32, 0);
    optimizer(TCH_OPTIM_ADAMW, TCH_BFLOAT16, 2);
}

int main(int argc, char **argv)
{
    const char *device = argc > 1 ? argv[1] : "cuda";
    alone = argc > 2 && strcmp(argv[2], "alone") == 0;
    ours = argc > 2 && strcmp(argv[2], "ours") == 0;
    tch_status status = tch_context_create(device, &context);
    if (status != TCH_OK) {
        printf("%s cannot be used here: %s\n", device, tch_last_error());
        int required = status != TCH_ERR_UNAVAILABLE || getenv("TORCHIUM_TEST_REQUIRE_DEVICE") != NULL;
        return required ? EXIT_FAILURE : SKIPPED;
    }
    if (alone) {
        run_alone();
    } else {
        run_all();
    }
    done(tch_context_synchronize(context), "the end");
    tch_context_destroy(context);
    printf("%s: %d failures\n", device, failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
