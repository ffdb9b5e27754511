/* Up to SMALL all pairs of layouts are combined; beyond it the output's layout advances with the input's, which covers
 * every layout on either side. Each size beyond ONE_MATRIX has a third of the layouts. */
#include "cases.h"

#include "reference.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

#define SMALL 17
#define ONE_MATRIX 100 /* beyond it batches are of one, which keeps references affordable */

static const struct {
    int64_t n, k, m;
} sizes[] = {{1, 1, 1},    {2, 3, 1},    {3, 1, 5},    {5, 17, 2},    {17, 5, 31},  {31, 33, 17},   {32, 32, 32},
             {33, 64, 31}, {63, 32, 65}, {64, 63, 64}, {65, 129, 33}, {127, 64, 3}, {129, 17, 127}, {200, 65, 129}};

static const struct {
    int32_t rank;
    int64_t sizes[TEST_MAX_BATCH_RANK];
} batches[] = {{0, {0}}, {1, {3}}, {2, {2, 2}}, {1, {1}}, {3, {2, 1, 2}}, {1, {0}}, {2, {1, 3}}, {2, {2, 0}}};

static void set_batch(test_variation *v, size_t which)
{
    v->batch_rank = v->n <= ONE_MATRIX ? batches[which].rank : (int32_t)(which % 2);
    v->matrices = 1;
    for (int32_t d = 0; d < v->batch_rank; d++) {
        v->batch[d] = v->n <= ONE_MATRIX ? batches[which].sizes[d] : 1;
        v->matrices *= v->batch[d];
    }
}

static void name_case(const char *operation, tch_dtype dtype, const test_variation *v)
{
    char batch[64] = "";
    for (int32_t d = 0; d < v->batch_rank; d++) {
        size_t used = strlen(batch);
        snprintf(batch + used, sizeof batch - used, "%lld, ", (long long)v->batch[d]);
    }
    test_case("%s %s, batch [%s...], n = %lld, k = %lld, m = %lld, input %s, output %s", operation,
              tch_dtype_name(dtype), batch, (long long)v->n, (long long)v->k, (long long)v->m, test_layout_name(v->in),
              test_layout_name(v->out));
}

static void run_size(tch_context *context, const char *operation, tch_dtype dtype, size_t size, test_check check)
{
    int64_t n = sizes[size].n;
    size_t outs = n <= SMALL ? LAYOUT_COUNT : 1;
    size_t step = size;
    for (int in = n > ONE_MATRIX ? (int)size % 3 : 0; in <= LAYOUT_EXPANDED; in += n > ONE_MATRIX ? 3 : 1) {
        for (size_t out = 0; out < outs; out++, step++) {
            test_variation v = {.n = n, .k = sizes[size].k, .m = sizes[size].m, .in = (test_layout)in, .stream = size};
            v.out = (test_layout)(outs > 1 ? out : (size_t)(in + 1) % LAYOUT_COUNT);
            set_batch(&v, step % TEST_COUNT(batches));
            name_case(operation, dtype, &v);
            size_t mark = test_mark();
            check(context, &v, dtype);
            test_release_since(mark);
        }
    }
}

void test_for_each_case(tch_context *context, const char *operation, tch_dtype dtype, int64_t largest, test_check check)
{
    for (size_t size = 0; size < TEST_COUNT(sizes); size++) {
        if (sizes[size].n <= largest) {
            run_size(context, operation, dtype, size, check);
        }
    }
}

void test_for_each_dtype(tch_context *context, const char *operation, int64_t largest, int64_t largest_half,
                         test_check check)
{
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64, TCH_FLOAT16, TCH_BFLOAT16};
    for (int d = 0; d < 4; d++) {
        test_for_each_case(context, operation, dtypes[d], dtypes[d].bits == 16 ? largest_half : largest, check);
    }
}

void test_for_each_operation(tch_context *context, const test_conformance *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        test_for_each_dtype(context, rows[i].operation, rows[i].largest, rows[i].largest_half, rows[i].check);
    }
}

test_tensor *test_case_tensor(tch_context *context, const test_variation *v, tch_dtype dtype, int64_t rows,
                              int64_t cols, test_layout layout)
{
    int64_t shape[TCH_MAX_RANK];
    int32_t rank = v->batch_rank;
    memcpy(shape, v->batch, sizeof v->batch);
    if (rows >= 0) {
        shape[rank++] = rows;
    }
    if (cols >= 0) {
        shape[rank++] = cols;
    }
    return test_tensor_make(context, dtype, rank, shape, layout);
}

test_tensor *test_case_random(tch_context *context, const test_variation *v, tch_dtype dtype, int64_t rows,
                              int64_t cols, test_layout layout, uint64_t salt)
{
    test_tensor *t = test_case_tensor(context, v, dtype, rows, cols, layout);
    test_tensor_draw(t, 1000 * salt + v->stream);
    return t;
}

/* --- symmetric matrices ------------------------------------------------------------------------------------------- */

/* Cached references are a plain list of about a hundred. */
typedef struct entry {
    known_matrix matrix;
    int64_t index;
    double condition;
    tch_dtype dtype;
    struct entry *next;
} entry;

static entry *entries;

static void make_matrix(entry *e)
{
    int64_t n = e->matrix.n;
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    test_random random = test_random_stream((uint64_t)(n * 16 + e->index) + 5000);
    ref_spectrum(n, fabs(e->condition), spectrum);
    for (int64_t i = 0; i < n && e->condition < 0.0; i++) {
        spectrum[i] = i % 2 == 1 ? -spectrum[i] : spectrum[i];
    }
    ref_symmetric(&random, n, spectrum, e->matrix.a);
    for (int64_t i = 0; i < n * n; i++) {
        e->matrix.a[i] = test_round(e->dtype, e->matrix.a[i]);
    }
    ref_eigh(n, e->matrix.a, e->matrix.w, e->matrix.v);
    test_drop(spectrum);
}

/* Other tests of the program use the same matrices. */
static void *kept(size_t bytes)
{
    return test_keep(test_alloc(bytes));
}

const known_matrix *test_known(int64_t n, int64_t index, double condition, tch_dtype dtype)
{
    for (entry *e = entries; e != NULL; e = e->next) {
        if (e->matrix.n == n && e->index == index && e->condition == condition && tch_dtype_equal(e->dtype, dtype)) {
            return &e->matrix;
        }
    }
    entry *e = kept(sizeof *e);
    size_t bytes = (size_t)(n * n) * sizeof(double);
    *e = (entry){{n, kept(bytes), kept((size_t)n * sizeof(double)), kept(bytes)}, index, condition, dtype, entries};
    make_matrix(e);
    entries = e;
    return &e->matrix;
}

void test_known_release(void)
{
    while (entries != NULL) {
        entry *e = entries;
        entries = e->next;
        free(e->matrix.a);
        free(e->matrix.w);
        free(e->matrix.v);
        free(e);
    }
}

int test_close_known(void **state)
{
    test_known_release();
    return test_close_context(state);
}

static bool is_expanded(const test_variation *v)
{
    return v->in == LAYOUT_EXPANDED && v->batch_rank > 0;
}

const known_matrix *test_known_of(const test_variation *v, int64_t b, double condition, tch_dtype dtype)
{
    int64_t inner = is_expanded(v) ? v->matrices / v->batch[0] : 0;
    int64_t index = is_expanded(v) ? b % inner + (v->batch[0] - 1) * inner : b;
    return test_known(v->n, index, condition, dtype);
}

test_tensor *test_known_tensor(tch_context *context, const test_variation *v, double condition, tch_dtype dtype)
{
    bool single = v->in == LAYOUT_EXPANDED && !is_expanded(v);
    int64_t size = v->n * v->n;
    test_tensor *t = test_case_tensor(context, v, dtype, v->n, v->n, single ? LAYOUT_CONTIGUOUS : v->in);
    double *values = test_alloc((size_t)t->count * sizeof *values);
    for (int64_t b = 0; b < v->matrices; b++) {
        memcpy(values + b * size, test_known_of(v, b, condition, dtype)->a, (size_t)size * sizeof *values);
    }
    test_tensor_write(t, values);
    test_drop(values);
    return t;
}
