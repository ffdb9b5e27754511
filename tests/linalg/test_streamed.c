/* Chunked products with any operands in host memory vs plain float64 sums. On the CPU host memory is device memory and
 * these are plain chunked products; on a GPU they are streamed. Rounding errors are bounded as in
 * test_conformance_products.c: gamma(k) |A||B|, and one rounding of the result to its type. */
#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};

/* A host context in addition to the one under test, for host tensors. */
static tch_context *host;

static int open_contexts(void **state)
{
    return test_open_context(state) != 0 || tch_context_create("cpu", &host) != TCH_OK;
}

static int close_contexts(void **state)
{
    tch_context_destroy(host);
    return test_close_context(state);
}

/* --- one product ------------------------------------------------------------------------------------------------- */

typedef struct streamed_case {
    tch_dtype dtype;
    int64_t m, k, n;
    int places; /* bits 0, 1, 2: a, b, out are in host memory */
    test_layout a, b, out;
    int64_t budget;
} streamed_case;

typedef struct operands {
    test_tensor *a, *b, *out;
} operands;

static test_tensor *make(tch_context *context, const streamed_case *c, int which, int64_t rows, int64_t cols,
                         test_layout layout)
{
    const int64_t shape[2] = {rows, cols};
    return test_tensor_make(c->places >> which & 1 ? host : context, c->dtype, 2, shape, layout);
}

static operands make_operands(tch_context *context, const streamed_case *c)
{
    operands o = {make(context, c, 0, c->m, c->k, c->a), make(context, c, 1, c->k, c->n, c->b),
                  make(context, c, 2, c->m, c->n, c->out)};
    test_tensor_draw(o.a, 1);
    test_tensor_draw(o.b, 2);
    return o;
}

/* Row-major a (m by k), b (k by n) and their computed product. */
static void check_product(const streamed_case *c, const double *a, const double *b, const double *got)
{
    int64_t count = c->m * c->n;
    double *expected = test_alloc((size_t)(count + 1) * sizeof *expected);
    double *magnitude = test_alloc((size_t)(count + 1) * sizeof *magnitude);
    ref_matmul(c->m, c->k, c->n, a, b, expected);
    ref_matmul_abs(c->m, c->k, c->n, a, b, magnitude);
    ref_check_sums(got, expected, magnitude, count, c->k + 4, c->dtype);
}

static void check_case(tch_context *context, const streamed_case *c)
{
    test_case("%s %lldx%lldx%lld, places %d, layouts %s, %s, %s, budget %lld", tch_dtype_name(c->dtype),
              (long long)c->m, (long long)c->k, (long long)c->n, c->places, test_layout_name(c->a),
              test_layout_name(c->b), test_layout_name(c->out), (long long)c->budget);
    operands o = make_operands(context, c);
    CHECK_OK(tch_matmul_chunked(context, &o.a->tensor, &o.b->tensor, c->budget, &o.out->tensor));
    CHECK_OK(tch_context_synchronize(context));
    double *a = test_tensor_read_unchanged(o.a, "a");
    double *b = test_tensor_read_unchanged(o.b, "b");
    double *out = test_tensor_read_written(o.out, "out");
    check_product(c, a, b, out);
}

/* --- every combination of memories, and tiles in every dimension ------------------------------------------------- */

/* The smallest budget splits m, n and k; the largest fits everything; 0 is the library's default. */
static const int64_t budgets[] = {4096, 20000, 1 << 22, 0};

TEST(every_mix_of_places)
{
    static const int64_t sizes[][3] = {{37, 53, 41}, {1, 130, 5}, {129, 1, 67}, {64, 64, 64}};
    for (int d = 0; d < 4; d++) {
        for (int places = 0; places < 8; places++) {
            for (int s = 0; s < 4; s++) {
                for (int g = 0; g < 4; g++) {
                    streamed_case c = {dtypes[d], sizes[s][0], sizes[s][1], sizes[s][2], places, 0, 0, 0, budgets[g]};
                    check_case(*state, &c);
                }
            }
        }
    }
}

/* Rows, columns and gaps in each operand; a result by columns is the transposed product. */
TEST(every_layout_of_lines)
{
    static const test_layout layouts[] = {LAYOUT_CONTIGUOUS, LAYOUT_TRANSPOSED, LAYOUT_ROW_GAPS, LAYOUT_OFFSET};
    for (int i = 0; i < 4 * 4 * 4; i++) {
        streamed_case c = {dtypes[i % 4], 31, 45, 22, 7, layouts[i % 4], layouts[i / 4 % 4], layouts[i / 16], 0};
        for (int g = 0; g < 2; g++) {
            for (int d = 0; d < 2; d++) {
                c.budget = budgets[g];
                c.dtype = dtypes[(i + d) % 4];
                check_case(*state, &c);
            }
        }
    }
}

/* Operands without contiguous rows or columns are rejected if they have to be streamed, and computed otherwise. */
TEST(layouts_without_lines)
{
    static const test_layout layouts[] = {LAYOUT_STEPPED, LAYOUT_REVERSED};
    static const char *const names[] = {"a", "b", "out"};
    for (int i = 0; i < 2 * 3; i++) {
        test_layout odd = layouts[i / 3];
        streamed_case c = {TCH_FLOAT32, 9, 8, 7, 7, 0, 0, 0, 1 << 20};
        *(test_layout *[]){&c.a, &c.b, &c.out}[i % 3] = odd;
        if (test_on_cpu()) {
            check_case(*state, &c);
            continue;
        }
        test_case("%s of %s", test_layout_name(odd), names[i % 3]);
        operands o = make_operands(*state, &c);
        test_check_refused(tch_matmul_chunked(*state, &o.a->tensor, &o.b->tensor, c.budget, &o.out->tensor),
                           TCH_ERR_LAYOUT, names[i % 3]);
        test_tensor_check_unchanged(o.out, "out");
    }
}

/* --- batches and empty products ---------------------------------------------------------------------------------- */

/* [3, 1, 5, 6] times [2, 6, 7]: every pair of the two. */
TEST(batches_broadcast)
{
    const int64_t shape_a[4] = {3, 1, 5, 6};
    const int64_t shape_b[3] = {2, 6, 7};
    const int64_t shape_out[4] = {3, 2, 5, 7};
    for (int places = 0; places < 8; places++) {
        streamed_case c = {TCH_FLOAT32, 5, 6, 7, places, 0, 0, 0, 4096};
        test_case("batches, places %d", places);
        test_tensor *a = test_tensor_make(places & 1 ? host : *state, c.dtype, 4, shape_a, LAYOUT_BATCH_GAPS);
        test_tensor *b = test_tensor_make(places & 2 ? host : *state, c.dtype, 3, shape_b, LAYOUT_TRANSPOSED);
        test_tensor *out = test_tensor_make(places & 4 ? host : *state, c.dtype, 4, shape_out, LAYOUT_BATCH_GAPS);
        test_tensor_draw(a, 3);
        test_tensor_draw(b, 4);
        CHECK_OK(tch_matmul_chunked(*state, &a->tensor, &b->tensor, c.budget, &out->tensor));
        CHECK_OK(tch_context_synchronize(*state));
        double *x = test_tensor_read(a);
        double *y = test_tensor_read(b);
        double *z = test_tensor_read_written(out, "out");
        for (int i = 0; i < 6; i++) {
            check_product(&c, x + i / 2 * 30, y + i % 2 * 42, z + (ptrdiff_t)i * 35);
        }
    }
}

TEST(sums_of_nothing)
{
    static const int64_t sizes[][3] = {{4, 0, 3}, {0, 5, 3}, {4, 5, 0}, {0, 0, 0}};
    for (int s = 0; s < 4; s++) {
        for (int places = 0; places < 8; places++) {
            streamed_case c = {TCH_BFLOAT16, sizes[s][0], sizes[s][1], sizes[s][2], places, 0, 0, 0, 4096};
            check_case(*state, &c);
        }
    }
}

/* --- larger than the staging buffers ----------------------------------------------------------------------------- */

/* a(i, l) = row(i) + l % 3 and b(l, j) = 1 + (l + j) % 2 are small integers, and so is every sum: exact in float32. */
static double row_of(int64_t i)
{
    return (double)(i % 251);
}

static float *tall_input(int64_t m, int64_t k)
{
    float *a = test_alloc((size_t)(m * k) * sizeof *a);
    for (int64_t i = 0; i < m * k; i++) {
        a[i] = (float)(row_of(i / k) + (double)(i % k % 3));
    }
    return a;
}

static tch_tensor plain(float *data, int64_t *shape)
{
    return (tch_tensor){.data = data, .device = {TCH_DEVICE_CPU, 0}, .ndim = 2, .dtype = TCH_FLOAT32, .shape = shape};
}

/* Sums over l for even and odd j: 32 times 1 and 32 times 2, at the positions given by the parity of l + j. */
static double tall_expected(int64_t i, int64_t j, int64_t k)
{
    double sum = 0.0;
    for (int64_t l = 0; l < k; l++) {
        sum += (row_of(i) + (double)(l % 3)) * (double)(1 + (l + j) % 2);
    }
    return sum;
}

TEST(larger_than_the_buffers)
{
    enum { m = 330001, k = 64, n = 64 };
    int64_t shape_a[2] = {m, k};
    int64_t shape_b[2] = {k, n};
    int64_t shape_out[2] = {m, n};
    float *a = tall_input(m, k);
    float b[k * n];
    float *out = test_alloc(sizeof *out * m * n);
    for (int64_t i = 0; i < k * n; i++) {
        b[i] = (float)(1 + (i / n + i % n) % 2);
    }
    memset(out, 0xff, sizeof *out * m * n);
    test_case("%d x %d x %d", m, k, n);
    tch_tensor ta = plain(a, shape_a);
    tch_tensor tb = plain(b, shape_b);
    tch_tensor tout = plain(out, shape_out);
    CHECK_OK(tch_matmul_chunked(*state, &ta, &tb, 70 << 20, &tout));
    for (int64_t i = 0; i < m; i++) {
        double expected[2] = {tall_expected(i, 0, k), tall_expected(i, 1, k)};
        for (int64_t j = 0; j < n; j++) {
            CHECK(out[i * n + j] == (float)expected[j % 2], "(%lld, %lld) is %g, expected %g", (long long)i,
                  (long long)j, (double)out[i * n + j], expected[j % 2]);
        }
    }
}

/* --- budgets and errors ------------------------------------------------------------------------------------------ */

/* In host memory, and on the device where operands must be converted. */
TEST(memory_stays_inside_the_budget)
{
    for (int i = 0; i < 2 * 4; i++) {
        streamed_case c = {dtypes[i % 4], 300, 310, 320, i < 4 ? 7 : 0, 0, 0, 0, 1 << 18};
        c.a = c.b = c.out = i < 4 ? LAYOUT_CONTIGUOUS : LAYOUT_STEPPED;
        test_case("budget, %s, places %d", tch_dtype_name(c.dtype), c.places);
        operands o = make_operands(*state, &c);
        tch_memory_info before = TCH_MEMORY_INFO_INIT;
        tch_memory_info after = TCH_MEMORY_INFO_INIT;
        CHECK_OK(tch_memory_trim(*state, 0));
        CHECK_OK(tch_memory_reset_peak(*state));
        CHECK_OK(tch_memory_get_info(*state, &before));
        CHECK_OK(tch_matmul_chunked(*state, &o.a->tensor, &o.b->tensor, c.budget, &o.out->tensor));
        CHECK_OK(tch_memory_get_info(*state, &after));
        CHECK(after.peak - before.allocated <= c.budget, "%lld bytes with a budget of %lld",
              (long long)(after.peak - before.allocated), (long long)c.budget);
    }
}

/* If nothing is streamed an in-place product needs no memory at all. */
TEST(budgets_that_are_too_small)
{
    static const int64_t small[] = {1, 8, 100, 1000};
    streamed_case c = {TCH_FLOAT32, 20, 20, 20, 7, 0, 0, 0, 0};
    for (int i = 0; i < 4 && !test_on_cpu(); i++) {
        test_case("a budget of %lld", (long long)small[i]);
        operands o = make_operands(*state, &c);
        tch_status status = tch_matmul_chunked(*state, &o.a->tensor, &o.b->tensor, small[i], &o.out->tensor);
        CHECK(status == TCH_ERR_OUT_OF_MEMORY, "%s", tch_status_name(status));
        CHECK(strstr(tch_last_error(), "at least") != NULL, "the message is: %s", tch_last_error());
        test_tensor_check_unchanged(o.out, "out");
    }
}

/* Only the chunked product accesses host memory; and tensors of another device are rejected. */
TEST(other_places_are_refused)
{
    streamed_case c = {TCH_FLOAT32, 6, 6, 6, 1, 0, 0, 0, 0};
    test_case("other places");
    operands o = make_operands(*state, &c);
    if (!test_on_cpu()) {
        test_check_refused(tch_matmul(*state, &o.a->tensor, &o.b->tensor, &o.out->tensor), TCH_ERR_DEVICE, "a");
        o.a->tensor.device.type = TCH_DEVICE_CUDA_HOST;
        CHECK_OK(tch_matmul_chunked(*state, &o.a->tensor, &o.b->tensor, 0, &o.out->tensor));
    }
    o.a->tensor.device = (tch_device){TCH_DEVICE_CUDA, 77};
    test_check_refused(tch_matmul_chunked(*state, &o.a->tensor, &o.b->tensor, 0, &o.out->tensor), TCH_ERR_DEVICE, "a");
    o.a->tensor.device = (tch_device){TCH_DEVICE_CPU, 0};
    o.b->tensor.device = (tch_device){99, 0};
    test_check_refused(tch_matmul_chunked(*state, &o.a->tensor, &o.b->tensor, 0, &o.out->tensor), TCH_ERR_DEVICE, "b");
}

TEST_MAIN(open_contexts, close_contexts)
