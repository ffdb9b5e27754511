/* The parts of `torchium bench`.
 *
 * bench.c       the command: goes over the cases, times each, prints a table for each operation
 * operations.c  the operations: their operands, how each is run, its work counted, the sizes it is measured at */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include <stdbool.h>

#include <torchium/torchium.h>

#include "measure/root_trial.h"
#include "measure/workplace.h"

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

/* Inputs and outputs of a case. */
typedef struct bench_data {
    const bench_case *c;
    tch_tensor *in[3];
    tch_tensor *out[2];
    root_trial trial; /* inverse roots only; its outputs are its own */
} bench_data;

/* A shape has a letter for each dimension: b is the batch, m, n and k are the case's, p is m n. Inputs have independent
 * random entries; after an s they are symmetric, with eigenvalues that fall from 1 to 1e-8, so that the damping decides
 * the conditioning; after a w they are weights of a half each, in float64. */
struct bench_operation {
    const char *name;
    const char *formula; /* for the heading of its table */
    const char *in[3];   /* shapes */
    const char *out[2];
    tch_status (*run)(tch_context *context, const bench_data *data);
    double (*flops)(const bench_case *c); /* arithmetic that cannot be avoided, or NULL */
    double (*bytes)(const bench_case *c); /* memory written, for operations that only write, or NULL */
};

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

tch_status bench_prepare(const workplace *place, const bench_case *c, bench_data *data);
void bench_release(bench_data *data);

/* Runs the case of a bench_data: a timed_call. */
tch_status bench_run(tch_context *context, void *data);

/* Sets *good to whether every output was written and is finite. */
tch_status bench_check(const workplace *place, const bench_data *data, bool *good);

#endif
