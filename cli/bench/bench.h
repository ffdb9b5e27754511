/* The parts of `torchium bench`.
 *
 * bench.c       the command: times every case and prints a table for each operation
 * operations.c  the operations: operands, calls, operation counts, sizes
 * operands.c    random inputs, and checks of outputs */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include <stdbool.h>

#include <torchium/torchium.h>

#include "try.h"

typedef enum bench_kind {
    OP_MATMUL,
    OP_SYMMETRIC,
    OP_GRAM,
    OP_CHUNKED,
    OP_EIGH,
    OP_POWER,
    OP_ROOT,
    OP_ORTHOGONALIZE,
    OP_KRONECKER,
    OP_KRONECKER_MATMUL,
    OP_KRONECKER_SOLVE,
    OP_NEAREST,
    OP_SAMPLES,
    OP_NORMS,
    OP_WEIGHTED_SUM,
    OP_FACTORS
} bench_kind;

typedef struct bench_operation bench_operation;

/* One thing to measure. */
typedef struct bench_case {
    const bench_operation *operation;
    tch_dtype dtype;
    int64_t batch, m, n, k;
    tch_root_method method; /* inverse roots only */
    double damping;         /* inverse roots only: relative; otherwise 0 */
    char size[32];          /* "64x256" is 64 matrices 256 by 256 */
    char name[96];          /* "inverse_root/newton/64x256/float32/1e-06" */
} bench_case;

typedef struct bench_contexts {
    tch_context *device; /* where cases run */
    tch_context *host;   /* creates inputs and checks outputs */
} bench_contexts;

/* Inputs and outputs of a case. */
typedef struct bench_data {
    const bench_case *c;
    tch_tensor *in[3];
    tch_tensor *out[2];
    tch_tensor *report; /* inverse roots only; out[1] is then the residual */
} bench_data;

/* Shapes have a letter for each dimension: b is the batch, m, n and k are the case's, p is m n. Inputs have independent
 * random entries; after an s they are symmetric with eigenvalues from 1 to 1e-8, so that the damping decides the
 * condition number; after a w they are float64 weights of 0.5. */
struct bench_operation {
    bench_kind kind;
    const char *name;
    const char *formula; /* for the heading of its table */
    const char *in[3];   /* shapes */
    const char *out[2];
};

tch_status bench_run(tch_context *context, const bench_data *data);

/* Minimum number of operations; 0 where it depends on the method. */
double bench_flops(const bench_case *c);

/* Bytes written by an operation that only writes, or 0. */
double bench_bytes(const bench_case *c);

/* The sizes of an operation in one type. */
typedef struct bench_list {
    const char *operation;
    int bits;          /* 16: bfloat16, 32, 64 */
    const char *sizes; /* separated by spaces; "*": also with --quick, "+": only on a GPU */
} bench_list;
extern const bench_list bench_lists[];
extern const int bench_list_count;

/* A case of a list; its size begins at `size` and ends before a space. */
bench_case bench_case_of(const bench_list *list, const char *size, tch_root_method method, double damping);

/* Measured inverse roots are A^(-1/BENCH_ROOT). */
enum { BENCH_ROOT = 4 };
tch_root_config bench_root_config(const bench_case *c);

/* Creates the inputs, and outputs filled with NaN. */
tch_status bench_prepare(const bench_contexts *contexts, const bench_case *c, bench_data *data);
void bench_release(bench_data *data);

/* Outputs of a case: the number of matrices without a result, the report of the first of these, and the largest
 * residual of the others. Operations other than inverse roots fail with TCH_ERR_NUMERIC if an output is not finite. */
typedef struct bench_verdict {
    int64_t failed;
    tch_report reason;
    double residual;
} bench_verdict;
tch_status bench_judge(const bench_contexts *contexts, const bench_data *data, bench_verdict *verdict);

#endif
