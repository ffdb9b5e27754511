/* Errors specific to GPUs: tensors of another device, batches with more than 2^31 elements, and a scratch limit for
 * large matrices. */
#include "support/linalg/operations.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
#include "support/random.h"
#include "support/testing.h"

/* --- the wrong device -------------------------------------------------------------------------------------------- */

/* Calls with one operand from another context, and that context's device. */
static void refuse_foreign(tch_context *context, tch_context *other, const test_operation *operation)
{
    test_call call;
    test_call foreign;
    test_call_make(&call, context, operation, TCH_FLOAT32);
    test_call_make(&foreign, other, operation, TCH_FLOAT32);
    for (int32_t i = 0; i < operation->count; i++) {
        test_case("%s %s: %s on device %d in a context on device %d", operation->name, operation->variant,
                  operation->operands[i].name, tch_context_device(other).type, tch_context_device(context).type);
        call.arguments[i] = foreign.arguments[i];
        test_check_refused(test_call_run(&call, context), TCH_ERR_DEVICE, operation->operands[i].name);
        call.arguments[i] = &call.tensors[i]->tensor;
        test_call_check_unchanged(&call);
        test_call_check_unchanged(&foreign);
    }
    test_call_free(&call);
    test_call_free(&foreign);
}

/* Copies between devices, and chunked products with host memory, are allowed. */
TEST(tensors_of_the_other_device)
{
    tch_context *cpu = NULL;
    CHECK_OK(tch_context_create("cpu", &cpu));
    for (int32_t i = 0; i < test_operation_count(); i++) {
        const char *name = test_operations[i].name;
        if (strcmp(name, "tch_tensor_copy") != 0) {
            refuse_foreign(cpu, *state, &test_operations[i]);
        }
        if (strcmp(name, "tch_tensor_copy") != 0 && strcmp(name, "tch_matmul_chunked") != 0) {
            refuse_foreign(*state, cpu, &test_operations[i]);
        }
    }
    tch_context_destroy(cpu);
}

/* --- a budget ---------------------------------------------------------------------------------------------------- */

typedef struct root_case {
    tch_root_config config;
    test_tensor *a, *out, *residual, *report;
} root_case;

static root_case make_roots(tch_context *context, int64_t batch, int64_t n)
{
    const int64_t shape[] = {batch, n, n};
    double *values = test_alloc((size_t)(batch * n * n) * sizeof *values);
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    test_random random = test_random_stream((uint64_t)n);
    root_case c = {.config = TCH_ROOT_CONFIG_INIT};
    c.config.relative_eps = 1e-4;
    c.config.method = TCH_ROOT_NEWTON;
    c.a = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    c.out = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    c.residual = test_tensor_make(context, TCH_FLOAT64, 1, shape, LAYOUT_CONTIGUOUS);
    c.report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    ref_spectrum(n, 1e4, spectrum);
    ref_symmetric(&random, n, spectrum, values);
    for (int64_t i = n * n; i < batch * n * n; i++) { /* creation takes longer than the root */
        values[i] = (double)(i / (n * n) + 1) * values[i % (n * n)];
    }
    test_tensor_write(c.a, values);
    return c;
}

/* Bytes allocated at most during the call, beyond those in use before. */
static int64_t scratch_of(tch_context *context, const root_case *c)
{
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_trim(context, 0));
    CHECK_OK(tch_memory_get_info(context, &before));
    CHECK_OK(tch_memory_reset_peak(context));
    CHECK_OK(tch_inverse_root(context, &c->a->tensor, 4, &c->config, &c->out->tensor, &c->residual->tensor,
                              &c->report->tensor));
    CHECK_OK(tch_memory_get_info(context, &after));
    return after.peak - before.allocated;
}

/* A batch is processed in parts that keep scratch within the limit, with the same result up to rounding: the kernel,
 * and so the order of its sums, depends on the number of matrices at once. Both results are within the root's
 * tolerance; they must agree within a tenth of it. */
static void check_budget(tch_context *context, int64_t batch, int64_t n)
{
    root_case c = make_roots(context, batch, n);
    test_case("%d roots of n = %d within a budget", (int)batch, (int)n);
    int64_t whole = scratch_of(context, &c);
    double *expected = test_tensor_read(c.out);
    for (int64_t chunks = 2; chunks <= batch / 2; chunks *= 2) {
        CHECK_OK(tch_context_set_workspace_limit(context, whole / chunks));
        test_tensor_poison(c.out);
        int64_t used = scratch_of(context, &c);
        CHECK(used <= whole / chunks, "%lld bytes of scratch with a limit of %lld", (long long)used,
              (long long)(whole / chunks));
        double *got = test_tensor_read(c.out);
        double moved = ref_distance(c.out->count, got, expected) / ref_norm(c.out->count, expected);
        CHECK(moved <= 1e-4, "a limit of %lld bytes moved the result by %.3g of its norm", (long long)(whole / chunks),
              moved);
    }
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
    test_tensor_free(c.a);
    test_tensor_free(c.out);
    test_tensor_free(c.residual);
    test_tensor_free(c.report);
}

TEST(a_budget_bounds_the_scratch)
{
    check_budget(*state, 32, 100);
    check_budget(*state, 16, 512);
}

/* --- more than 2^31 elements ------------------------------------------------------------------------------------- */

enum { PATTERN = 7 }; /* distinct matrices, repeated along the batch */

/* Memory needed, or the reason to skip the case. */
static void need_memory(tch_context *context, int64_t gigabytes)
{
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_get_info(context, &info));
    if (info.free / 1000000000 < gigabytes) {
        print_message("skipped: %lld GB of device memory are free, %lld are needed\n",
                      (long long)(info.free / 1000000000), (long long)gigabytes);
        skip();
    }
}

/* Copies `small` [PATTERN, n, n] to every repetition of `big` [repeats, PATTERN, n, n]. */
static tch_tensor *repeat(tch_context *context, const test_tensor *small, int64_t repeats)
{
    int64_t n = small->shape[1];
    int64_t shape[] = {repeats, PATTERN, n, n};
    int64_t strides[] = {0, n * n, n, 1};
    tch_tensor *big = NULL;
    CHECK_OK(tch_tensor_create_uninitialized(context, small->tensor.dtype, 4, shape, TCH_CONTIGUOUS, &big));
    tch_tensor expanded = small->tensor;
    expanded.ndim = 4;
    expanded.shape = shape;
    expanded.strides = strides;
    CHECK_OK(tch_tensor_copy(context, big, &expanded));
    return big;
}

/* Compares repetition `which` of `big` with `expected`. */
static void check_repetition(tch_context *context, const tch_tensor *big, int64_t which, const double *expected,
                             double freedom)
{
    int64_t n = big->shape[2];
    int64_t count = PATTERN * n * n;
    double *got = test_alloc((size_t)count * sizeof *got);
    tch_tensor host = tch_tensor_view(got, TCH_FLOAT64, 1, &count);
    tch_tensor *wide = NULL; /* copies to the host do not convert */
    CHECK_OK(tch_tensor_create_uninitialized(context, TCH_FLOAT64, 1, &count, TCH_CONTIGUOUS, &wide));
    tch_tensor part = *big;
    part.ndim = 1;
    part.shape = &count;
    part.strides = NULL;
    part.byte_offset += (uint64_t)(which * count) * tch_dtype_size(big->dtype);
    CHECK_OK(tch_tensor_copy(context, wide, &part));
    CHECK_OK(tch_tensor_copy(context, &host, wide));
    CHECK_OK(tch_context_synchronize(context));
    tch_tensor_destroy(wide);
    for (int64_t i = 0; i < count; i++) {
        CHECK(fabs(got[i] - expected[i]) <= freedom, "repetition %lld, element %lld is %.9g, expected %.9g",
              (long long)which, (long long)i, got[i], expected[i]);
    }
}

/* The ends, both sides of element 2^31 and of matrix 65536, and some between. */
static void check_repetitions(tch_context *context, const tch_tensor *big, const double *expected, double freedom)
{
    int64_t repeats = big->shape[0];
    int64_t boundary = ((int64_t)1 << 31) / (PATTERN * big->shape[2] * big->shape[3]);
    int64_t many = 65536 / PATTERN;
    const int64_t which[] = {0, 1, many - 1, many, many + 1, boundary - 1, boundary, boundary + 1, repeats - 1};
    for (size_t i = 0; i < sizeof which / sizeof which[0]; i++) {
        if (which[i] < repeats) {
            check_repetition(context, big, which[i], expected, freedom);
        }
    }
    for (int64_t r = 0; r < repeats; r += repeats / 13 + 1) {
        check_repetition(context, big, r, expected, freedom);
    }
}

/* Symmetric matrices of small integers, so that sums of products are exact in any order, or, for roots, matrices of
 * condition 50. */
static test_tensor *make_pattern(tch_context *context, int64_t n, tch_dtype dtype, bool integers)
{
    const int64_t shape[] = {PATTERN, n, n};
    double *values = test_alloc((size_t)(PATTERN * n * n) * sizeof *values);
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    test_random random = test_random_stream(9);
    test_tensor *t = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    ref_spectrum(n, 50.0, spectrum);
    for (int64_t b = 0; b < PATTERN; b++) {
        ref_symmetric(&random, n, spectrum, values + b * n * n);
    }
    for (int64_t i = 0; i < PATTERN * n * n && integers; i++) {
        values[i] = (double)(i / (n * n) + (i / n % n) * (i % n) % 5);
    }
    test_tensor_write(t, values);
    return t;
}

typedef tch_status (*batch_call)(tch_context *context, tch_tensor *a, tch_tensor *out);

typedef struct huge_case {
    const char *name;
    batch_call call;
    int64_t n;
    tch_dtype dtype;
    double freedom; /* 0: integer input and exact results */
} huge_case;

static tch_status call_root(tch_context *context, tch_tensor *a, tch_tensor *out)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = 1e-2;
    config.method = TCH_ROOT_NEWTON;
    return tch_inverse_root(context, a, 4, &config, out, NULL, NULL);
}

static tch_status call_gram(tch_context *context, tch_tensor *a, tch_tensor *out)
{
    return tch_gram(context, 1.0, a, 0, 0.0, out);
}

static tch_status call_copy(tch_context *context, tch_tensor *a, tch_tensor *out)
{
    return tch_tensor_copy(context, out, a);
}

/* Every repetition equals the result for the pattern alone. */
static void check_huge(tch_context *context, const huge_case *c)
{
    int64_t repeats = ((int64_t)1 << 31) / (PATTERN * c->n * c->n) + 3;
    test_case("%s of %lld matrices, n = %lld, %s", c->name, (long long)(repeats * PATTERN), (long long)c->n,
              tch_dtype_name(c->dtype));
    test_tensor *pattern = make_pattern(context, c->n, c->dtype, c->freedom == 0.0);
    test_tensor *once = test_tensor_make(context, c->dtype, 3, pattern->shape, LAYOUT_CONTIGUOUS);
    CHECK_OK(c->call(context, &pattern->tensor, &once->tensor));
    double *expected = test_tensor_read(once);
    tch_tensor *a = repeat(context, pattern, repeats);
    tch_tensor *out = NULL;
    CHECK_OK(tch_tensor_create_uninitialized(context, c->dtype, 4, a->shape, TCH_CONTIGUOUS, &out));
    CHECK_OK(tch_tensor_fill(context, out, NAN));
    CHECK_OK(c->call(context, a, out));
    check_repetitions(context, out, expected, c->freedom * ref_largest(once->count, expected));
    tch_tensor_destroy(a);
    tch_tensor_destroy(out);
    test_tensor_free(once);
    test_tensor_free(pattern);
    CHECK_OK(tch_memory_trim(context, 0));
}

TEST(more_elements_than_32_bits_count)
{
    tch_context *context = *state;
    need_memory(context, 40);
    CHECK_OK(tch_context_set_workspace_limit(context, (int64_t)8 << 30));
    /* Roots are within 1e-3; results that differ only in the order of sums differ by far less, even in bf16x2. */
    const huge_case cases[] = {
        {"copies", call_copy, 64, TCH_FLOAT16, 0.0},
        {"Gram matrices", call_gram, 64, TCH_FLOAT32, 0.0},
        {"roots", call_root, 64, TCH_FLOAT32, 1e-5},
        {"roots", call_root, 256, TCH_FLOAT32, 1e-4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_huge(context, &cases[i]);
    }
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
}

TEST_MAIN(test_open_context, test_close_context)
