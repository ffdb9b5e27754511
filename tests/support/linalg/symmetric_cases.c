/* The kept references are a plain list: there are some hundred of them. */
#include "symmetric_cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

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

/* Other tests of the program want the same matrices. */
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
