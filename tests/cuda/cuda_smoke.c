/* Every public operation once or twice at small odd sizes, in a few seconds: what compute-sanitizer runs, and a first
 * sign of life on a new GPU.
 *
 *     cuda_smoke [device [ours | alone | beside]]      0: all is well, 77: no such device, 1: something failed
 *
 * `ours` leaves out what cuSOLVER does, which takes racecheck minutes, and large products of cuBLAS's. `alone` is for
 * initcheck: what runs without cuBLAS, whose kernels write in a way that initcheck does not see, and in sizes that are
 * multiples of eight, since it counts all 16 bytes of an asynchronous copy as read, also where only those inside the
 * matrix were asked for. `beside` is for a device that is emulated: fewer and smaller matrices, and each result beside
 * the CPU's.
 *
 * Otherwise results are looked at only so far as a wrong one is plainly wrong; the conformance tests are the judges. */
#include "smoke_results.h"
#include "support/linalg/operations.h"
#include "support/optim/optim_defaults.h"

#define SKIPPED 77

static void copies_and_fills(tch_dtype dtype)
{
    tch_tensor *a = waves(dtype, 3, (const int64_t[]){2, 37, 19});
    tch_tensor *b = make(TCH_FLOAT32, 3, (const int64_t[]){2, 19, 37});
    int64_t shape[] = {2, 37, 19};
    int64_t strides[] = {703, 1, 37};
    tch_tensor transposed = *b;
    transposed.shape = shape;
    transposed.strides = strides;
    done(tch_tensor_copy(context, &transposed, a), "copy");
    expect_finite(b, "copy");
    done(tch_tensor_fill(context, a, 1.5), "fill");
    expect_finite(a, "fill");
    end_case();
}

/* --- rows of operations.c ---------------------------------------------------------------------------------------- */

/* Not covered there: accumulation, a single step of Muon, and roots with options. */
static struct {
    int32_t root;
    tch_root_config config;
} asked;

static tch_status call_gemm(tch_context *c, tch_tensor *const *t)
{
    return tch_gemm(c, 0.5, t[0], 1, t[1], 1, 0.25, t[2]);
}

static tch_status call_gram(tch_context *c, tch_tensor *const *t)
{
    return tch_gram(c, 0.1, t[0], 1, 0.9, t[1]);
}

static tch_status call_muon_once(tch_context *c, tch_tensor *const *t)
{
    return tch_orthogonalize(c, t[0], 1, TCH_ORTHO_MUON, t[1]);
}

static tch_status call_root(tch_context *c, tch_tensor *const *t)
{
    return tch_inverse_root(c, t[0], asked.root, &asked.config, t[1], t[2], t[3]);
}

/* clang-format off */
#define OPERAND(name, role) {(name), (role), KIND_REAL, 3, {0}}
static const test_operation more_operations[] = {
    {"gemm", "accumulating", 3,
     {OPERAND("a", ROLE_INPUT), OPERAND("b", ROLE_INPUT), OPERAND("out", ROLE_INPUT)}, call_gemm},
    {"gram", "accumulating", 2, {OPERAND("a", ROLE_INPUT), OPERAND("out", ROLE_INPUT)}, call_gram},
    {"muon", "one step", 2, {OPERAND("a", ROLE_INPUT), OPERAND("out", ROLE_OUTPUT)}, call_muon_once},
    {"root", "with options", 4,
     {OPERAND("a", ROLE_SYMMETRIC), OPERAND("out", ROLE_OUTPUT), {"residual", ROLE_OUTPUT, KIND_FLOAT64, 1, {0}},
      {"report", ROLE_OUTPUT, KIND_INT32, 1, {0}}}, call_root},
};

#define N (-1)
#define N3 (-2)   /* three more than N */
#define MANY (-3) /* enough matrices to occupy a GPU */

/* An operation and its sizes in this test. */
typedef struct smoke_row {
    const char *name, *variant;
    int modes;
    int64_t shapes[TEST_MAX_OPERANDS][3];
} smoke_row;

/* In every type. */
static const smoke_row rows[] = {
    {"tch_orthogonalize", "polar express", MOST, {{2, 33, 18}, {2, 33, 18}}},
    {"tch_orthogonalize", "muon", MOST, {{2, 33, 18}, {2, 33, 18}}},
    {"tch_kronecker_product", "", EVERY, {{2, 3, 5}, {2, 9, 7}, {2, 27, 35}}},
    {"tch_kronecker_matmul", "", MOST, {{2, 3, 5}, {2, 9, 7}, {2, 35, 11}, {2, 27, 11}}},
    {"tch_nearest_kronecker", "", MOST, {{2, 27, 35}, {2, 3, 5}, {2, 9, 7}, {2}}},
    {"tch_kronecker_apply", "", WHOLE, {{2, 13, 13}, {2, 6, 6}, {2, 13, 6}, {2, 13, 6}}},
    {"tch_kronecker_solve", "", WHOLE, {{2, 13, 13}, {2, 6, 6}, {2, 13, 6}, {2, 13, 6}, {2}}},
    {"tch_eigh", "", WHOLE, {{3, 17, 17}, {3, 17}, {3, 17, 17}, {3}}},
    {"tch_matrix_power", "", WHOLE, {{3, 17, 17}, {3, 17, 17}, {3}}},
    {"tch_matrix_power_backward", "", WHOLE, {{3, 17, 17}, {3, 17, 17}, {3, 17, 17}, {3}}},
    {"tch_inverse_root_backward", "", WHOLE, {{3, 17, 17}, {3, 17, 17}, {3, 17, 17}, {3}}},
};

/* In every type for one n, and in float32 for others. */
static const smoke_row products[] = {
    {"tch_matmul", "", MOST, {{2, N, N3}, {2, N3, N}, {2, N, N}}},
    {"gemm", "accumulating", MOST, {{2, N3, N}, {2, N, N3}, {2, N, N}}},
    {"tch_gram", "", MOST, {{2, N, N3}, {2, N, N}}},
    {"gram", "accumulating", MOST, {{2, N3, N}, {2, N, N}}},
    {"tch_matmul_chunked", "", MOST, {{2, N, N3}, {2, N3, N}, {2, N, N}}},
    {"tch_symmetric_product", "", MOST, {{2, N, N}, {2, N, N}, {2, N, N}}},
};

/* Enough large matrices for kernels that need several tiles per multiprocessor; in bfloat16. A step of Muon is a Gram
 * matrix, a polynomial in it and a general product, which is cuBLAS's, where racecheck reports hazards. */
static const smoke_row many[] = {
    {"tch_gram", "", MOST, {{MANY, 256, 264}, {MANY, 256, 256}}},
    {"tch_symmetric_product", "", MOST, {{MANY, 256, 256}, {MANY, 256, 256}, {MANY, 256, 256}}},
    {"muon", "one step", WHOLE, {{MANY, 256, 264}, {MANY, 256, 264}}},
    {"tch_orthogonalize", "polar express", WHOLE, {{MANY, 256, 264}, {MANY, 256, 264}}},
};

/* The number of matrices that an emulated device needs for tiles of 128. */
static const smoke_row several_roots = {"root", "with options", WHOLE, {{6, N, N}, {6, N, N}, {6}, {6}}};
static const smoke_row root_row = {"root", "with options", EVERY, {{3, N, N}, {3, N, N}, {3}, {3}}};
/* clang-format on */

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static const test_operation *operation_of(const smoke_row *row)
{
    for (int i = 0; i < COUNT(more_operations) + test_operation_rows(); i++) {
        const test_operation *o =
            i < COUNT(more_operations) ? &more_operations[i] : &test_operations[i - COUNT(more_operations)];
        if (strcmp(o->name, row->name) == 0 && strcmp(o->variant, row->variant) == 0) {
            return o;
        }
    }
    fprintf(stderr, "no operation %s %s\n", row->name, row->variant);
    exit(EXIT_FAILURE);
}

static tch_tensor *operand_of(const test_operand *operand, const int64_t *sizes, tch_dtype dtype, int64_t n)
{
    int64_t shape[3];
    dtype = operand->kind == KIND_FLOAT64 ? TCH_FLOAT64 : operand->kind == KIND_INT32 ? TCH_INT32 : dtype;
    for (int d = 0; d < 3; d++) {
        shape[d] = sizes[d] == N ? n : sizes[d] == N3 ? n + 3 : sizes[d] == MANY ? (small ? 6 : 90) : sizes[d];
    }
    tch_tensor *t = make(dtype, operand->ndim, shape);
    if (strcmp(operand->name, "m") == 0) { /* the Kronecker product of two constant matrices */
        must(tch_tensor_fill(context, t, 1.5));
        return t;
    }
    return test_is_output(operand) ? t : fill(t, operand->role == ROLE_SYMMETRIC ? positive : wave);
}

static void expect_operand(const test_operand *operand, const tch_tensor *t, tch_dtype dtype, const char *what)
{
    if (operand->kind == KIND_INT32) {
        expect_good(t, what);
    } else if (strcmp(operand->name, "residual") == 0) {
        expect_at_most(t, dtype.bits == 16 ? 0.2 : 0.02, what);
    } else if (strcmp(operand->name, "error") == 0) {
        expect_at_most(t, dtype.bits == 16 ? 0.1 : 1e-3, what);
    } else if (test_is_output(operand) || strcmp(operand->name, "out") == 0) {
        expect_finite(t, what);
    }
}

static void run_row(const smoke_row *row, tch_dtype dtype, int64_t n)
{
    const test_operation *operation = operation_of(row);
    tch_tensor *t[TEST_MAX_OPERANDS] = {NULL};
    char what[128];
    if ((row->modes & mode) == 0) {
        return;
    }
    snprintf(what, sizeof what, "%s %s, n = %lld, %s", row->name, row->variant, (long long)n, tch_dtype_name(dtype));
    for (int32_t i = 0; i < operation->count; i++) {
        t[i] = operand_of(&operation->operands[i], row->shapes[i], dtype, n);
    }
    done(operation->call(context, t), what);
    beside.rough = strcmp(row->name, "tch_orthogonalize") == 0 || strcmp(row->name, "muon") == 0;
    for (int32_t i = 0; i < operation->count; i++) { /* eigenvectors may have either sign */
        beside.paused = strcmp(row->name, "tch_eigh") == 0 && strcmp(operation->operands[i].name, "v") == 0;
        expect_operand(&operation->operands[i], t[i], dtype, what);
    }
    beside.paused = 0;
    beside.rough = 0;
    end_case();
}

static void run_rows(const smoke_row *first, int count, tch_dtype dtype, int64_t n)
{
    for (int i = 0; i < count; i++) {
        run_row(&first[i], dtype, n);
    }
}

/* Every row of operations.c once, but roots by a CPU-only method; operations missing from the tables above are still
 * covered. */
static void run_as_they_stand(void)
{
    for (int32_t i = 0; i < test_operation_rows() && mode == WHOLE; i++) {
        const test_operation *o = &test_operations[i];
        smoke_row row = {o->name, o->variant, WHOLE, {{0}}};
        for (int32_t k = 0; k < o->count; k++) {
            memcpy(row.shapes[k], o->operands[k].shape, sizeof row.shapes[k]);
        }
        if (strcmp(o->variant, "rational") != 0) {
            run_row(&row, TCH_FLOAT32, 0);
        }
    }
}

static void roots(tch_dtype dtype, int64_t n, int32_t root, tch_root_method method, int32_t exact, double damping)
{
    asked.root = root;
    asked.config = (tch_root_config)TCH_ROOT_CONFIG_INIT;
    asked.config.relative_eps = damping;
    asked.config.method = method;
    asked.config.exact_residual = exact;
    run_row(small && n > 128 ? &several_roots : &root_row, dtype, n);
}

/* A product with operands in host memory; on the CPU, any product. */
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

/* A few steps of an optimizer on matrices of odd sizes, one of them in blocks, and a vector; or, without options, on
 * matrices of whole chunks, for which Muon has specialized kernels. */
static void optimizer(tch_optim_kind kind, tch_dtype dtype, int half, int even)
{
    static const int64_t sizes[2][3][2] = {{{37, 50}, {41, 19}, {23, 1}}, {{256, 512}, {256, 512}, {256, 512}}};
    tch_optim_config config = test_optim_defaults(kind);
    tch_parameter parameters[3] = {{0}};
    const tch_tensor *gradients[3];
    int count = even && small ? 1 : 3;
    if (small) {
        config.lr = 0.1; /* so that updates exceed the tolerance */
    }
    if (!even) {
        config.shampoo.precondition_frequency = 2;
        config.shampoo.max_preconditioner_dim = kind == TCH_OPTIM_SHAMPOO ? 24 : 64;
        config.shampoo.grafting = TCH_GRAFTING_ADAM;
        config.momentum = 0.9;
        config.amsgrad = 1;
        config.memory.master_weights = half == 1;
        config.memory.stochastic_rounding = half == 2;
    }
    for (int i = 0; i < count; i++) {
        int64_t shape[] = {1, sizes[even][i][0], sizes[even][i][1]};
        parameters[i].tensor = waves(dtype, 3, shape);
        gradients[i] = waves(dtype, 3, shape);
    }
    tch_optimizer *o = NULL;
    done(tch_optimizer_create(context, &config, NULL, count, parameters, &o), "optimizer");
    for (int step = 0; o != NULL && step < (even ? 1 : 4); step++) {
        done(tch_optimizer_step(o, count, gradients), tch_optim_kind_name(kind));
    }
    /* SOAP scales directions of its basis without gradient: noise, which differs between devices. */
    beside.paused = kind == TCH_OPTIM_SOAP;
    beside.rough = kind == TCH_OPTIM_MUON || kind == TCH_OPTIM_NORMUON;
    for (int i = 0; i < count; i++) {
        expect_finite(parameters[i].tensor, tch_optim_kind_name(kind));
    }
    beside.paused = 0;
    beside.rough = 0;
    tch_optimizer_destroy(o);
    end_case();
}

static void optimizers(void)
{
    static const struct {
        tch_optim_kind kind;
        tch_dtype dtype;
        int half, even, modes;
    } cases[] = {
        {TCH_OPTIM_SGD, {TCH_FLOAT, 32, 1}, 0, 0, EVERY},
        {TCH_OPTIM_ADAMW, {TCH_FLOAT, 32, 1}, 0, 0, MOST},
        {TCH_OPTIM_SHAMPOO, {TCH_FLOAT, 32, 1}, 0, 0, MOST},
        {TCH_OPTIM_KL_SHAMPOO, {TCH_FLOAT, 32, 1}, 0, 0, MOST},
        {TCH_OPTIM_SOAP, {TCH_FLOAT, 32, 1}, 0, 0, WHOLE}, /* begins with an eigendecomposition */
        {TCH_OPTIM_MUON, {TCH_FLOAT, 32, 1}, 0, 0, MOST},
        {TCH_OPTIM_NORMUON, {TCH_FLOAT, 32, 1}, 0, 0, MOST},
        {TCH_OPTIM_LION, {TCH_FLOAT, 32, 1}, 0, 0, MOST},
        {TCH_OPTIM_ADAMW, {TCH_FLOAT, 16, 1}, 1, 0, MOST},
        {TCH_OPTIM_ADAMW, {TCH_BFLOAT, 16, 1}, 2, 0, EVERY},
        {TCH_OPTIM_SHAMPOO, {TCH_BFLOAT, 16, 1}, 1, 0, MOST},
        {TCH_OPTIM_MUON, {TCH_BFLOAT, 16, 1}, 2, 0, MOST},
        {TCH_OPTIM_NORMUON, {TCH_BFLOAT, 16, 1}, 2, 0, MOST},
        {TCH_OPTIM_LION, {TCH_BFLOAT, 16, 1}, 2, 0, MOST},
        {TCH_OPTIM_SHAMPOO, {TCH_FLOAT, 64, 1}, 0, 0, MOST},
        {TCH_OPTIM_NORMUON, {TCH_FLOAT, 64, 1}, 0, 0, MOST},
        {TCH_OPTIM_MUON, {TCH_FLOAT, 32, 1}, 0, 1, WHOLE}, /* general products are cuBLAS's */
        {TCH_OPTIM_NORMUON, {TCH_FLOAT, 32, 1}, 0, 1, WHOLE},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        if (cases[i].modes & mode) {
            optimizer(cases[i].kind, cases[i].dtype, cases[i].half, cases[i].even);
        }
    }
}

/* --- per-sample gradients ---------------------------------------------------------------------------------- */

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

/* A layer, and the shapes of three samples and of its parameters. */
typedef struct layer_row {
    const char *what;
    int modes;
    tch_layer layer;
    int32_t ndim; /* of input and output gradient */
    int64_t input[4], gradient[4];
    int32_t weight_ndim;
    int64_t weight[4];
    int64_t bias; /* elements; 0 for none */
} layer_row;

/* clang-format off */
#define CONVOLUTION(padding, groups)                                                                                   \
    {sizeof(tch_layer), TCH_LAYER_CONV, 1, 1.0, 2, {3, 3, 1}, {2, 1, 1}, {1, 1, 1}, {1, 1, 0}, {1, 1, 0}, (padding),   \
     (groups), 0, -1, 1, 1e-5}
#define ROWS_OF(kind, groups, rows, padding_index)                                                                     \
    {sizeof(tch_layer), (kind), 1, 1.0, 0, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0}, {0}, TCH_PADDING_ZEROS, (groups),     \
     (rows), (padding_index), 1, 1e-5}

/* Layers that need no product, for `alone`. */
static const layer_row layers[] = {
    {"linear layer", MOST, TCH_LAYER_INIT(TCH_LAYER_LINEAR), 3, {SAMPLES, 1, 21}, {SAMPLES, 1, 18}, 2, {18, 21}, 18},
    {"linear layer", MOST, TCH_LAYER_INIT(TCH_LAYER_LINEAR), 3, {SAMPLES, 37, 21}, {SAMPLES, 37, 18}, 2, {18, 21}, 18},
    {"convolution", MOST, CONVOLUTION(TCH_PADDING_REFLECT, 1), 4, {SAMPLES, 4, 7, 9}, {SAMPLES, 6, 4, 9}, 4,
     {6, 4, 3, 3}, 6},
    {"convolution", MOST, CONVOLUTION(TCH_PADDING_CIRCULAR, 2), 4, {SAMPLES, 4, 7, 9}, {SAMPLES, 6, 4, 9}, 4,
     {6, 2, 3, 3}, 6},
    {"embedding", EVERY, ROWS_OF(TCH_LAYER_EMBEDDING, 1, TOKENS, 4), 3, {SAMPLES, POSITIONS}, {SAMPLES, POSITIONS, 12},
     2, {TOKENS, 12}, 0},
    {"layer norm", EVERY, TCH_LAYER_INIT(TCH_LAYER_LAYER_NORM), 3, {SAMPLES, 12, 8}, {SAMPLES, 12, 8}, 1, {8}, 8},
    {"RMS norm", EVERY, TCH_LAYER_INIT(TCH_LAYER_RMS_NORM), 3, {SAMPLES, 12, 8}, {SAMPLES, 12, 8}, 1, {8}, 0},
    {"group norm", EVERY, ROWS_OF(TCH_LAYER_GROUP_NORM, 3, 0, -1), 3, {SAMPLES, 12, 8}, {SAMPLES, 12, 8}, 1, {12}, 12},
};
/* clang-format on */

/* A row with its tensors. */
typedef struct layer_case {
    const layer_row *row;
    const tch_tensor *input, *gradient;
} layer_case;

static tch_tensor *parameter(const layer_case *c, int bias, int samples)
{
    tch_dtype dtype = c->gradient->dtype.bits == 16 ? TCH_FLOAT32 : c->gradient->dtype;
    int64_t shape[6] = {SAMPLES};
    int32_t ndim = bias ? 1 : c->row->weight_ndim;
    if (bias && c->row->bias == 0) {
        return NULL;
    }
    memcpy(shape + 1, bias ? &c->row->bias : c->row->weight, (size_t)ndim * sizeof *shape);
    return samples ? waves(dtype, ndim + 1, shape) : waves(dtype, ndim, shape + 1);
}

/* Sums, which for embeddings and normalization layers need no product. */
static void layer_sums(const layer_case *c)
{
    tch_tensor *weight = parameter(c, 0, 0);
    tch_tensor *bias = parameter(c, 1, 0);
    tch_tensor *weights = parameter(c, 0, 1);
    tch_tensor *biases = parameter(c, 1, 1);
    tch_tensor *norms = per_matrix(TCH_FLOAT64, SAMPLES);
    done(tch_grad_samples(context, &c->row->layer, c->input, c->gradient, weights, biases), c->row->what);
    expect_finite(weights, c->row->what);
    done(tch_grad_norms(context, &c->row->layer, c->input, c->gradient, TCH_GRAD_BOTH, 0, norms), c->row->what);
    done(tch_grad_norms(context, &c->row->layer, c->input, c->gradient, TCH_GRAD_WEIGHT, 1, norms), c->row->what);
    expect_finite(norms, c->row->what);
    done(tch_grad_clip_weights(context, norms, 0.5, norms), "clip weights");
    expect_at_most(norms, 1.0, "clip weights");
    done(tch_grad_weighted_sum(context, &c->row->layer, c->input, c->gradient, norms, 0.5, weight, bias), c->row->what);
    expect_finite(weight, c->row->what);
}

static void layer_products(const layer_case *c)
{
    tch_tensor *weight = parameter(c, 0, 0);
    tch_tensor *bias = parameter(c, 1, 0);
    tch_tensor *numbers = per_matrix(TCH_FLOAT64, SAMPLES);
    tch_tensor *gram = make(TCH_FLOAT64, 2, (const int64_t[]){SAMPLES, SAMPLES});
    done(tch_grad_dots(context, &c->row->layer, c->input, c->gradient, weight, bias, 0, numbers), c->row->what);
    expect_finite(numbers, c->row->what);
    done(tch_grad_gram(context, &c->row->layer, c->input, c->gradient, TCH_GRAD_BOTH, 0, gram), c->row->what);
    expect_finite(gram, c->row->what);
    if (mode == WHOLE) {
        tch_tensor *report = make(TCH_INT32, 0, NULL);
        done(tch_grad_natural_weights(context, gram, NULL, 1.0, numbers, report), "natural weights");
        expect_good(report, "natural weights");
    }
}

/* An embedding's weight tied to a linear layer's. */
static void tied(const layer_case *c)
{
    tch_dtype dtype = c->gradient->dtype;
    const tch_tensor *x = waves(dtype, 3, (const int64_t[]){SAMPLES, 5, 12});
    const tch_tensor *g = waves(dtype, 3, (const int64_t[]){SAMPLES, 5, TOKENS});
    tch_tensor *norms = per_matrix(TCH_FLOAT64, SAMPLES);
    done(tch_tensor_fill(context, norms, 1.0), "tied norms");
    done(tch_grad_tied_norms(context, &c->row->layer, c->input, c->gradient, x, g, norms), "tied norms");
    expect_finite(norms, "tied norms");
}

static void layer_gradients(const layer_row *row, tch_dtype dtype, tch_dtype integers)
{
    int tokens = row->layer.kind == TCH_LAYER_EMBEDDING;
    layer_case c = {row, NULL, NULL};
    if ((row->modes & mode) == 0) {
        return;
    }
    c.input = tokens ? tokens_of(integers) : waves(dtype, row->ndim, row->input);
    c.gradient = waves(dtype, row->ndim, row->gradient);
    if (tokens) {
        tied(&c);
    }
    layer_sums(&c);
    if (mode != ALONE) {
        layer_products(&c);
    }
    end_case();
}

/* Inputs so small that the bias dominates the norm. */
static double small_wave(int64_t i, int64_t n)
{
    return wave(i, n) / 16.0;
}

/* Norms as accurate as float32 sums: rows that are multiples of 16 bytes use tensor cores in parts, others do not. */
static void linear_norms(int64_t positions, int64_t inputs, int64_t outputs, int32_t rounded)
{
    const tch_tensor *x = waves(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, positions, inputs});
    const tch_tensor *g = waves(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, positions, outputs});
    tch_tensor *norms = per_matrix(TCH_FLOAT64, SAMPLES);
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    layer.rounded = rounded;
    done(tch_grad_norms(context, &layer, x, g, TCH_GRAD_WEIGHT, 0, norms), "norms");
    expect_finite(norms, "norms");
    const tch_tensor *small_x = fill(make(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, positions, inputs}), small_wave);
    done(tch_grad_norms(context, &layer, small_x, g, TCH_GRAD_BOTH, 0, norms), "norms with a bias");
    expect_finite(norms, "norms with a bias");
    end_case();
}

/* Needs more positions or features than the rows above: sums in chunks, blocks of products, factors of many tiles. */
static void large_layers(void)
{
    /* clang-format off */
    static const layer_row larger[] = {
        {"layer norm", WHOLE, TCH_LAYER_INIT(TCH_LAYER_LAYER_NORM), 3, {SAMPLES, 130, 24}, {SAMPLES, 130, 24}, 1,
         {24}, 24},
        {"layer norm", WHOLE, TCH_LAYER_INIT(TCH_LAYER_LAYER_NORM), 3, {SAMPLES, 2, 4104}, {SAMPLES, 2, 4104}, 1,
         {4104}, 4104},
        {"linear layer", WHOLE, TCH_LAYER_INIT(TCH_LAYER_LINEAR), 3, {SAMPLES, 130, 400}, {SAMPLES, 130, 400}, 2,
         {400, 400}, 0},
    };
    /* clang-format on */
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    for (int i = 0; i < COUNT(larger); i++) {
        layer_gradients(&larger[i], TCH_FLOAT32, TCH_INT32);
    }
    linear_norms(64, 160, 320, 0);
    linear_norms(64, 160, 160, 1);
    linear_norms(128, 1664, 1664, 1);
    const tch_tensor *x = waves(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 22, 904});
    const tch_tensor *g = waves(TCH_FLOAT32, 3, (const int64_t[]){SAMPLES, 22, 16});
    tch_tensor *a = make(TCH_FLOAT32, 2, (const int64_t[]){904, 904});
    tch_tensor *b = make(TCH_FLOAT32, 2, (const int64_t[]){16, 16});
    done(tch_grad_factors(context, &layer, x, g, 0, TCH_SHARING_EXPAND, 1.0, 0.0, a, b), "large factors");
    expect_finite(a, "large factors");
    end_case();
}

/* --- curvature --------------------------------------------------------------------------------------------------- */

static void factors(tch_dtype dtype, tch_sharing sharing)
{
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    tch_dtype wide = dtype.bits == 16 ? TCH_FLOAT32 : dtype;
    tch_tensor *x = waves(dtype, 3, (const int64_t[]){SAMPLES, 5, 21});
    tch_tensor *g = waves(dtype, 3, (const int64_t[]){SAMPLES, 5, 18});
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
    tch_tensor *x[2] = {waves(dtype, 2, (const int64_t[]){SAMPLES, 21}),
                        waves(dtype, 3, (const int64_t[]){SAMPLES, 4, 11})};
    tch_tensor *g[2] = {waves(dtype, 2, (const int64_t[]){SAMPLES, 18}),
                        waves(dtype, 3, (const int64_t[]){SAMPLES, 5, TOKENS})};
    tch_tensor *gradients[4] = {waves(dtype, 2, (const int64_t[]){18, 21}), waves(dtype, 1, (const int64_t[]){18}),
                                waves(dtype, 3, (const int64_t[]){5, 4, 3}), NULL};
    done(tch_kfac_create(context, &config, NULL, 2, layers, &k), "kfac");
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
    for (int d = 0; d < 4; d++) {
        factors(dtypes[d], TCH_SHARING_EXPAND);
        factors(dtypes[d], TCH_SHARING_REDUCE);
        kfac(TCH_KFAC_INVERSE, dtypes[d]);
    }
    if (mode == WHOLE) {
        kfac(TCH_KFAC_EIGEN, TCH_FLOAT32);
        kfac(TCH_KFAC_EKFAC, TCH_FLOAT32);
        kfac(TCH_KFAC_EKFAC, TCH_BFLOAT16);
    }
}

/* Newton roots by the kernels of every size; only the full run has eigendecompositions. */
static void all_roots(void)
{
    static const int64_t sizes[2][4] = {{1, 33, 130, 0}, {40, 104, 136, 296}};
    if (small) {
        roots(TCH_FLOAT32, 1, 4, TCH_ROOT_EIGEN, 0, 1e-2);
        roots(TCH_FLOAT32, 33, 4, TCH_ROOT_EIGEN, 0, 1e-2);
        roots(TCH_FLOAT64, 33, 3, TCH_ROOT_NEWTON, 1, 1e-2);
        roots(TCH_FLOAT32, 130, 4, TCH_ROOT_NEWTON, 0, 1e-2);
        roots(TCH_FLOAT32, 136, 3, TCH_ROOT_NEWTON, 0, 1e-6);
        return;
    }
    for (int s = 0; s < 4 && sizes[mode == ALONE][s] > 0; s++) {
        for (int method = mode == WHOLE ? TCH_ROOT_EIGEN : TCH_ROOT_NEWTON; method <= TCH_ROOT_NEWTON; method++) {
            roots(TCH_FLOAT32, sizes[mode == ALONE][s], 4, (tch_root_method)method, 0, 1e-2);
            roots(TCH_FLOAT64, sizes[mode == ALONE][s], 3, (tch_root_method)method, mode != ALONE, 1e-2);
        }
    }
    roots(TCH_FLOAT32, mode == ALONE ? 136 : 130, 3, TCH_ROOT_NEWTON, 0, 1e-6); /* early steps in float64 */
    for (int d = 0; d < 4 && mode != ALONE; d++) {
        roots(dtypes[d], 19, 2, mode == OURS ? TCH_ROOT_NEWTON : TCH_ROOT_AUTO, 1, 1e-2);
    }
    if (mode != ALONE) {
        roots(TCH_FLOAT32, 100, 8, TCH_ROOT_NEWTON, 0, 1e-2);
        roots(TCH_FLOAT32, 290, 4, TCH_ROOT_NEWTON, 0, 1e-2);
        roots(TCH_FLOAT32, 290, 4, TCH_ROOT_NEWTON, 0, 1e-6);
    }
}

static void run_all(void)
{
    static const int64_t sizes[] = {1, 33, 130};
    for (int d = 0; d < 4; d++) {
        copies_and_fills(dtypes[d]);
        run_rows(rows, COUNT(rows), dtypes[d], 0);
        run_rows(products, COUNT(products), dtypes[d], 21);
        for (int i = 0; i < COUNT(layers); i++) {
            layer_gradients(&layers[i], dtypes[d], mode == ALONE || d % 2 ? TCH_INT64 : TCH_INT32);
        }
    }
    for (int s = 0; s < 3; s++) {
        run_rows(products, COUNT(products), TCH_FLOAT32, sizes[s]);
    }
    run_rows(many, small ? 3 : COUNT(many), TCH_BFLOAT16, 0);
    run_as_they_stand();
    optimizers();
    all_roots();
    if (mode != ALONE) {
        streamed();
        linear_norms(130, 100, 72, 0);
        linear_norms(70, 33, 50, 0);
        curvature();
    }
    if (small) {
        large_layers();
    }
}

/* The same on the CPU, whose results are stored. */
static void run_on_cpu(void)
{
    must(tch_context_create("cpu", &context));
    beside.stage = KEEPING;
    run_all();
    tch_context_destroy(context);
    beside.stage = COMPARING;
}

int main(int argc, char **argv)
{
    const char *device = argc > 1 ? argv[1] : "cuda";
    if (argc > 2) {
        mode = strcmp(argv[2], "alone") == 0 ? ALONE : strcmp(argv[2], "ours") == 0 ? OURS : WHOLE;
        small = strcmp(argv[2], "beside") == 0;
    }
    if (small) {
        run_on_cpu();
    }
    tch_status status = tch_context_create(device, &context);
    if (status != TCH_OK) {
        printf("%s cannot be used here: %s\n", device, tch_last_error());
        int required = status != TCH_ERR_UNAVAILABLE || getenv("TORCHIUM_TEST_REQUIRE_DEVICE") != NULL;
        return required ? EXIT_FAILURE : SKIPPED;
    }
    run_all();
    done(tch_context_synchronize(context), "the end");
    tch_context_destroy(context);
    printf("%s: %d failures\n", device, failures);
    free(beside.values);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
