/* Which operations are measured at which sizes, and the series that show how cost grows. To measure another size, add
 * it to the operation's list; to measure another operation, write it in operations.c and give it a list here. */
#include "bench.h"

#include <stdio.h>
#include <string.h>

/* QUICK sizes are measured always, FULL ones without --quick, and LARGE ones without --quick where the device is not
 * the CPU: a GPU is not busy with less, and a CPU would be for too long. */
typedef enum size_when { QUICK, FULL, LARGE } size_when;

/* 0 where an operation has no such size. */
typedef struct size_entry {
    int64_t batch, m, n, k;
    size_when when;
} size_entry;

enum { SIZES = 20 };

typedef enum size_style { STYLE_SQUARE, STYLE_RECTANGLE, STYLE_PAIR, STYLE_LAYER } size_style;

typedef struct case_list {
    const char *operation;
    tch_dtype dtype;
    size_style style;
    size_entry sizes[SIZES]; /* ends with batch 0 */
} case_list;

#define F32                                                                                                            \
    {                                                                                                                  \
        TCH_FLOAT, 32, 1                                                                                               \
    }
#define F64                                                                                                            \
    {                                                                                                                  \
        TCH_FLOAT, 64, 1                                                                                               \
    }
#define BF16                                                                                                           \
    {                                                                                                                  \
        TCH_BFLOAT, 16, 1                                                                                              \
    }
#define ONE(n, when)                                                                                                   \
    {                                                                                                                  \
        1, n, n, n, when                                                                                               \
    }
#define BATCH(b, n, when)                                                                                              \
    {                                                                                                                  \
        b, n, n, n, when                                                                                               \
    }

/* 32 to 2048 in steps of two, the batches at which the cost per matrix is shown, and those that users of
 * preconditioners meet. */
#define SINGLE_SIZES                                                                                                   \
    ONE(32, FULL), ONE(64, QUICK), ONE(128, QUICK), ONE(256, QUICK), ONE(512, QUICK), ONE(1024, FULL), ONE(2048, FULL)
#define BATCH_SIZES                                                                                                    \
    BATCH(4, 128, FULL), BATCH(16, 128, QUICK), BATCH(64, 128, FULL), BATCH(256, 128, FULL), BATCH(64, 256, FULL),     \
        BATCH(16, 1024, FULL)
#define LARGE_SIZES BATCH(1024, 128, LARGE), BATCH(4, 2048, LARGE), ONE(4096, LARGE)

/* Samples, outputs, inputs, positions: two layers of a small language model. */
#define LAYER_SIZES                                                                                                    \
    {32, 768, 768, 64, FULL},                                                                                          \
    {                                                                                                                  \
        32, 3072, 768, 256, LARGE                                                                                      \
    }

static const case_list lists[] = {
    {"matmul", F32, STYLE_SQUARE, {SINGLE_SIZES, BATCH_SIZES, LARGE_SIZES}},
    {"matmul", F64, STYLE_SQUARE, {ONE(256, FULL), ONE(512, QUICK), ONE(1024, FULL), ONE(2048, FULL)}},
    {"symmetric_product",
     F32,
     STYLE_SQUARE,
     {SINGLE_SIZES, BATCH(64, 256, FULL), BATCH(16, 1024, FULL), BATCH(4, 2048, LARGE)}},
    {"symmetric_product", F64, STYLE_SQUARE, {ONE(512, QUICK), ONE(1024, FULL), ONE(2048, FULL)}},
    {"gram",
     F32,
     STYLE_RECTANGLE,
     {{1, 256, 0, 1024, QUICK}, {1, 768, 0, 3072, QUICK}, {1, 1024, 0, 4096, FULL}, {1, 4096, 0, 16384, LARGE}}},
    {"gram", F64, STYLE_RECTANGLE, {{1, 768, 0, 3072, QUICK}}},
    {"matmul_chunked", F32, STYLE_SQUARE, {ONE(512, QUICK), ONE(1024, FULL), ONE(4096, LARGE)}},
    {"matmul_chunked", BF16, STYLE_SQUARE, {ONE(512, QUICK), ONE(1024, FULL), ONE(4096, LARGE)}},
    {"eigh", F32, STYLE_SQUARE, {SINGLE_SIZES, BATCH_SIZES, LARGE_SIZES}},
    {"eigh", F64, STYLE_SQUARE, {ONE(256, QUICK), ONE(512, QUICK), ONE(1024, FULL)}},
    {"matrix_power",
     F32,
     STYLE_SQUARE,
     {SINGLE_SIZES, BATCH(64, 256, FULL), BATCH(16, 1024, FULL), BATCH(4, 2048, LARGE)}},
    {"matrix_power", F64, STYLE_SQUARE, {ONE(256, QUICK), ONE(512, QUICK), ONE(1024, FULL)}},
    {"inverse_root", F32, STYLE_SQUARE, {SINGLE_SIZES, BATCH_SIZES, LARGE_SIZES}},
    {"inverse_root", F64, STYLE_SQUARE, {ONE(256, QUICK), ONE(512, QUICK), ONE(1024, FULL)}},
    {"orthogonalize",
     F32,
     STYLE_RECTANGLE,
     {{1, 256, 256, 0, QUICK}, {1, 1024, 1024, 0, FULL}, {1, 768, 3072, 0, QUICK}, {1, 4096, 4096, 0, LARGE}}},
    {"kronecker_product", F32, STYLE_PAIR, {{1, 32, 64, 0, QUICK}, {1, 64, 128, 0, QUICK}}},
    {"kronecker_product", F64, STYLE_PAIR, {{1, 64, 128, 0, FULL}}},
    {"kronecker_matmul", F32, STYLE_PAIR, {{1, 64, 128, 16, QUICK}, {1, 256, 512, 16, FULL}}},
    {"kronecker_solve",
     F32,
     STYLE_PAIR,
     {{1, 64, 128, 0, QUICK}, {1, 256, 512, 0, QUICK}, {1, 768, 768, 0, FULL}, {1, 2048, 2048, 0, LARGE}}},
    {"kronecker_solve", F64, STYLE_PAIR, {{1, 256, 512, 0, QUICK}}},
    {"nearest_kronecker", F32, STYLE_PAIR, {{1, 16, 32, 0, QUICK}, {1, 32, 64, 0, FULL}}},
    {"sample_gradients",
     F32,
     STYLE_LAYER,
     {{64, 256, 256, 1, QUICK}, {16, 256, 256, 64, QUICK}, {256, 512, 512, 1, FULL}, {256, 1024, 1024, 1, LARGE}}},
    {"sample_norms", F32, STYLE_LAYER, {{16, 512, 256, 64, QUICK}, LAYER_SIZES}},
    {"sample_norms", BF16, STYLE_LAYER, {LAYER_SIZES}},
    {"weighted_sum", F32, STYLE_LAYER, {{16, 512, 256, 64, QUICK}, LAYER_SIZES}},
    {"weighted_sum", BF16, STYLE_LAYER, {LAYER_SIZES}},
    {"kfac_factors", F32, STYLE_LAYER, {{16, 512, 256, 64, QUICK}, LAYER_SIZES}},
    {"kfac_factors", BF16, STYLE_LAYER, {LAYER_SIZES}},
};
enum { LISTS = sizeof lists / sizeof lists[0] };

static const double dampings[] = {1e-6, 1e-4};
static const tch_root_method methods[] = {TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL, TCH_ROOT_AUTO};

const bench_series bench_all_series[] = {
    {"matmul", "matmul", TCH_ROOT_AUTO},
    {"eigh", "eigh", TCH_ROOT_AUTO},
    {"root, eigen", "inverse_root", TCH_ROOT_EIGEN},
    {"root, newton", "inverse_root", TCH_ROOT_NEWTON},
    {"root, rational", "inverse_root", TCH_ROOT_RATIONAL},
};
const int bench_series_count = sizeof bench_all_series / sizeof bench_all_series[0];

static const bench_operation *find_operation(const char *name)
{
    for (int i = 0; bench_operations[i] != NULL; i++) {
        if (strcmp(bench_operations[i]->name, name) == 0) {
            return bench_operations[i];
        }
    }
    return NULL;
}

static void write_size(const size_entry *size, size_style style, char *text, size_t length)
{
    long long batch = size->batch, m = size->m, n = size->n, k = size->k;
    if (style == STYLE_SQUARE && batch == 1) {
        snprintf(text, length, "%lld", n);
    } else if (style == STYLE_SQUARE) {
        snprintf(text, length, "%lldx%lld", batch, n);
    } else if (style == STYLE_RECTANGLE) {
        snprintf(text, length, "%lld-by-%lld", m, n > 0 ? n : k);
    } else if (style == STYLE_LAYER) {
        snprintf(text, length, "%lldx%lld-%lld-to-%lld", batch, k, n, m);
    } else if (k > 0) {
        snprintf(text, length, "%lld-kron-%lld-by-%lld", m, n, k);
    } else {
        snprintf(text, length, "%lld-kron-%lld", m, n);
    }
}

static void add(bench_results *results, const char *only, const case_list *list, const size_entry *size,
                tch_root_method method, double damping)
{
    bench_case c = {
        find_operation(list->operation), list->dtype, size->batch, size->m, size->n, size->k, method, damping, "", ""};
    write_size(size, list->style, c.size, sizeof c.size);
    if (damping > 0.0) {
        snprintf(c.name, sizeof c.name, "%s/%s/%s/%s/%.0e", list->operation, tch_root_method_name(method), c.size,
                 tch_dtype_name(c.dtype), damping);
    } else {
        snprintf(c.name, sizeof c.name, "%s/%s/%s", list->operation, c.size, tch_dtype_name(c.dtype));
    }
    if (size->when > (results->quick ? QUICK : results->large ? LARGE : FULL)) {
        return;
    }
    if ((only == NULL || strstr(c.name, only) != NULL) && results->case_count < BENCH_CASES) {
        results->cases[results->case_count++] = c;
    }
}

static void add_list(bench_results *results, const char *only, const case_list *list)
{
    bool roots = strcmp(list->operation, "inverse_root") == 0;
    for (size_t d = 0; d < (roots ? sizeof dampings / sizeof dampings[0] : 1); d++) {
        for (int i = 0; i < SIZES && list->sizes[i].batch > 0; i++) {
            for (size_t j = 0; j < (roots ? sizeof methods / sizeof methods[0] : 1); j++) {
                add(results, only, list, &list->sizes[i], roots ? methods[j] : TCH_ROOT_AUTO,
                    roots ? dampings[d] : 0.0);
            }
        }
    }
}

void bench_cases_fill(bench_results *results, const char *only)
{
    results->case_count = 0;
    for (int i = 0; i < LISTS; i++) {
        add_list(results, only, &lists[i]);
    }
}

const bench_row *bench_eigen_row(const bench_results *results, const bench_row *row)
{
    for (int i = 0; i < results->row_count; i++) {
        const bench_case *c = results->rows[i].c;
        if (c->operation == row->c->operation && c->method == TCH_ROOT_EIGEN && c->batch == row->c->batch &&
            c->n == row->c->n && c->damping == row->c->damping && tch_dtype_equal(c->dtype, row->c->dtype)) {
            return &results->rows[i];
        }
    }
    return NULL;
}

const bench_row *bench_series_row(const bench_results *results, const bench_series *series, int64_t batch, int64_t n)
{
    for (int i = 0; i < results->row_count; i++) {
        const bench_row *row = &results->rows[i];
        const bench_case *c = row->c;
        if (strcmp(c->operation->name, series->operation) == 0 && c->method == series->method && c->batch == batch &&
            c->n == n && tch_dtype_equal(c->dtype, TCH_FLOAT32) && row->status == TCH_OK &&
            (c->damping == 0.0 || c->damping == dampings[0])) {
            return row;
        }
    }
    return NULL;
}
