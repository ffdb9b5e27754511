/* The parts of `torchium bench`: cases are measured into rows, and rows are shown as tables or as JSON.
 *
 * cases.c         which operations are measured, at which sizes
 * operations.c    how each operation is set up, run, and its work counted
 * gradients.c     the same for per-sample gradients and curvature
 * inputs.c        what both of them begin with
 * limits.c        what this machine can do at best, measured in the same run
 * accuracy.c      errors of the inverse roots over condition numbers
 * text.c, json.c  the results for people and for programs */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include <stdbool.h>

#include <torchium/torchium.h>

#include "measure/machine.h"
#include "measure/root_trial.h"
#include "measure/timing.h"
#include "measure/workplace.h"

typedef struct bench_operation bench_operation;

/* One thing to measure. What m, n and k mean is said at each operation where it is written. */
typedef struct bench_case {
    const bench_operation *operation;
    tch_dtype dtype;
    int64_t batch, m, n, k;
    tch_root_method method; /* inverse roots only */
    double damping;         /* inverse roots only: relative */
    char size[32];          /* "64x256" is 64 matrices 256 by 256 */
    char name[96];          /* "inverse_root/newton/64x256/float32/1e-06" */
} bench_case;

/* Inputs and outputs of a case. */
typedef struct bench_data {
    const bench_case *c;
    tch_tensor *in[3];
    tch_tensor *out[2];
    root_trial trial; /* inverse roots only; its outputs are its own */
} bench_data;

struct bench_operation {
    const char *name;
    const char *formula; /* for the heading of its table */
    tch_status (*prepare)(const workplace *place, bench_data *data);
    tch_status (*run)(tch_context *context, void *data); /* a timed_call on a bench_data */
    double (*flops)(const bench_case *c);                /* arithmetic that cannot be avoided, or NULL */
    double (*bytes)(const bench_case *c);                /* memory written, for operations that only write, or NULL */
    double products; /* rough cost in products of n by n matrices, to foretell the time left */
};

/* Of gradients.c. */
extern const bench_operation bench_sample_gradients, bench_sample_norms, bench_weighted_sum, bench_factors;

/* Every operation, in the order in which they are measured; ends with NULL. */
extern const bench_operation *const bench_operations[];

tch_status bench_prepare(const workplace *place, const bench_case *c, bench_data *data);
void bench_release(bench_data *data);

/* Input `index` of a case: as many matrices as its batch, of random entries. */
tch_status bench_add_random(const workplace *place, bench_data *d, int index, int64_t rows, int64_t cols);

/* The same, symmetric and positive definite, n by n, with eigenvalues that fall from 1 to 1/condition. */
tch_status bench_add_symmetric(const workplace *place, bench_data *d, int index, int64_t n, double condition);

/* Sets *good to whether every output was written and is finite. */
tch_status bench_check(const workplace *place, const bench_data *data, bool *good);

typedef struct bench_limits {
    double flops_f32, flops_f64, flops_bf16; /* per second, of one large product */
    double copy_bytes;                       /* per second, read plus written */
} bench_limits;

/* The result of a case. */
typedef struct bench_row {
    const bench_case *c;
    tch_status status;
    char failure[256];
    timing time;
    tch_root_method used; /* inverse roots only */
    root_verdict verdict; /* inverse roots only */
    double rate;          /* flop or bytes per second; NaN where no count is given */
    double share;         /* of the limit; NaN with it */
    double products;      /* the time in products n by n by n at the limit; NaN where it means nothing */
} bench_row;

typedef struct bench_accuracy_row {
    double condition;
    int32_t root;
    tch_dtype dtype;
    tch_root_method method;
    bool offered; /* by the device's backend */
    root_verdict verdict;
} bench_accuracy_row;

enum { BENCH_CASES = 400, BENCH_ACCURACY_ROWS = 128 };

/* The accuracy table is n by n, this many matrices each. */
enum { BENCH_ACCURACY_N = 256, BENCH_ACCURACY_BATCH = 4 };

typedef struct bench_results {
    machine_facts machine; /* as it was before the first measurement */
    bool quick;
    bool large; /* the device is not the CPU: sizes that keep it busy are measured too */
    double seconds;
    bench_limits limits;
    bench_case cases[BENCH_CASES];
    bench_row rows[BENCH_CASES]; /* rows[i] is the result of cases[i] */
    int case_count;
    int row_count; /* measured so far */
    bench_accuracy_row accuracy[BENCH_ACCURACY_ROWS];
    int accuracy_count;
} bench_results;

/* Fills results->limits, spending about `seconds` on each. */
tch_status bench_limits_measure(const workplace *place, double seconds, bench_results *results);

/* Fills results->cases with those of `quick` and `large` whose name contains `only` (NULL: all). */
void bench_cases_fill(bench_results *results, const char *only);

/* Adds the rows of one condition number to results->accuracy. */
tch_status bench_accuracy_measure(const workplace *place, int32_t root, double condition, bench_results *results);

/* The row of the same inverse root by eigendecomposition, or NULL. */
const bench_row *bench_eigen_row(const bench_results *results, const bench_row *row);

/* A series shows how cost grows: rows that differ only in n (batch 1), or only in the batch. */
typedef struct bench_series {
    const char *title;
    const char *operation;
    tch_root_method method;
} bench_series;
extern const bench_series bench_all_series[];
extern const int bench_series_count;
enum { BENCH_SERIES_N = 128 }; /* the size at which the batch varies */
enum { BENCH_SERIES_MOST_N = 4096, BENCH_SERIES_MOST_BATCH = 1024 };

/* The row of a series at this size, or NULL. */
const bench_row *bench_series_row(const bench_results *results, const bench_series *series, int64_t batch, int64_t n);

void bench_text_limits(const bench_results *results);
/* Tables of rows [first, end), all of one operation. */
void bench_text_rows(const bench_results *results, int first, int end);
void bench_text_scaling(const bench_results *results);
void bench_text_accuracy(const bench_results *results);
void bench_json(const bench_results *results, const workplace *place);

#endif
