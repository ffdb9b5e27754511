/* The parts of `torchium bench`.
 *
 * bench.c       the command: times every case and prints a table for each operation
 * operations.c  the operations: their operands, how each is run, its work counted, the sizes it is measured at
 * operands.c    inputs from a seed, and what a case left in its outputs */
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
    double damping;         /* inverse roots only: relative; 0 for the others */
    char size[32];          /* "64x256" is 64 matrices 256 by 256 */
    char name[96];          /* "inverse_root/newton/64x256/float32/1e-06" */
} bench_case;

typedef struct bench_contexts {
    tch_context *device; /* what is measured runs here */
    tch_context *host;   /* inputs are made and outputs checked here */
} bench_contexts;

/* Inputs and outputs of a case. */
typedef struct bench_data {
    const bench_case *c;
    tch_tensor *in[3];
    tch_tensor *out[2];
    tch_tensor *report; /* inverse roots only; out[1] is then the residual */
} bench_data;

/* A shape has a letter for each dimension: b is the batch, m, n and k are the case's, p is m n. Inputs have independent
 * random entries; after an s they are symmetric, with eigenvalues that fall from 1 to 1e-8, so that the damping decides
 * the conditioning; after a w they are weights of a half each, in float64. */
struct bench_operation {
    bench_kind kind;
    const char *name;
    const char *formula; /* for the heading of its table */
    const char *in[3];   /* shapes */
    const char *out[2];
};

tch_status bench_run(tch_context *context, const bench_data *data);

/* Arithmetic that cannot be avoided; 0 where it depends on the method. */
double bench_flops(const bench_case *c);

/* Memory written by an operation that only writes, or 0. */
double bench_bytes(const bench_case *c);

/* The sizes of one operation in one type. */
typedef struct bench_list {
    const char *operation;
    int bits;          /* 16: bfloat16, 32, 64 */
    const char *sizes; /* separated by spaces; "*": also with --quick, "+": only where the device is not the CPU */
} bench_list;
extern const bench_list bench_lists[];
extern const int bench_list_count;

/* A case of a list at the size that begins at `size` and ends before a space. */
bench_case bench_case_of(const bench_list *list, const char *size, tch_root_method method, double damping);

/* The inverse root that is measured is A^(-1/BENCH_ROOT). */
enum { BENCH_ROOT = 4 };
tch_root_config bench_root_config(const bench_case *c);

/* Creates the inputs, and outputs full of NaN. */
tch_status bench_prepare(const bench_contexts *contexts, const bench_case *c, bench_data *data);
void bench_release(bench_data *data);

/* The outputs of a case: how many matrices have no result, the report of the first of these, and the largest residual
 * of the others. Operations other than inverse roots fail with TCH_ERR_NUMERIC where an output is not finite. */
typedef struct bench_verdict {
    int64_t failed;
    tch_report reason;
    double residual;
} bench_verdict;
tch_status bench_judge(const bench_contexts *contexts, const bench_data *data, bench_verdict *verdict);

#endif
