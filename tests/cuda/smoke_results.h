/* Creates cuda_smoke's tensors, and checks results: finite, of plausible size and, with `beside`, equal to the CPU's.
 * Static: included by cuda_smoke.c only. */
#ifndef TORCHIUM_TESTS_SMOKE_RESULTS_H
#define TORCHIUM_TESTS_SMOKE_RESULTS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/torchium.h>

#define MOST_TENSORS 16
#define MOST_MATRICES 6 /* of a batch with a report */

static tch_context *context;
static tch_tensor *taken[MOST_TENSORS]; /* of the running case; destroyed after it */
static int taken_count;
static int failures;

/* The arguments, and the modes of a row. */
enum { WHOLE = 1, OURS = 2, ALONE = 4, MOST = WHOLE | OURS, EVERY = MOST | ALONE };
static int mode = WHOLE;
static int small;           /* `beside`: WHOLE with fewer cases */
static int least_bits = 64; /* of the floating-point types of the running case */
static const tch_dtype dtypes[] = {{TCH_FLOAT, 32, 1}, {TCH_FLOAT, 64, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};

static void expect(int good, const char *what, const char *detail)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, detail);
        failures++;
    }
}

static void done(tch_status status, const char *what)
{
    expect(status == TCH_OK, what, tch_last_error());
}

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "cannot go on: %s\n", tch_last_error());
        exit(EXIT_FAILURE);
    }
}

static tch_tensor *make(tch_dtype dtype, int32_t ndim, const int64_t *shape)
{
    tch_tensor *t = NULL;
    must(tch_tensor_create_uninitialized(context, dtype, ndim, shape, TCH_CONTIGUOUS, &t));
    taken[taken_count++] = t;
    least_bits =
        (dtype.code == TCH_FLOAT || dtype.code == TCH_BFLOAT) && dtype.bits < least_bits ? dtype.bits : least_bits;
    return t;
}

static tch_tensor *per_matrix(tch_dtype dtype, int64_t batch)
{
    return make(dtype, 1, (const int64_t[]){batch});
}

static void end_case(void)
{
    while (taken_count > 0) {
        tch_tensor_destroy(taken[--taken_count]);
    }
    least_bits = 64;
}

/* Copies between host and device do not convert: floats are copied as float64, integers unchanged. */
static tch_tensor flat(const tch_tensor *t, int64_t *count)
{
    tch_tensor row = *t;
    *count = tch_tensor_numel(t);
    row.ndim = 1;
    row.shape = count;
    row.strides = NULL;
    return row;
}

/* Elements of a tensor to or from float64 on the host. */
static void carry(const tch_tensor *t, double *values, int write)
{
    int64_t count;
    tch_tensor row = flat(t, &count);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, 1, &count);
    tch_tensor *wide = NULL;
    must(tch_tensor_create_uninitialized(context, TCH_FLOAT64, 1, &count, TCH_CONTIGUOUS, &wide));
    must(tch_tensor_copy(context, wide, write ? &host : &row));
    must(tch_tensor_copy(context, write ? &row : &host, wide));
    must(tch_context_synchronize(context));
    tch_tensor_destroy(wide);
}

static double *numbers_for(const tch_tensor *t)
{
    double *values = calloc((size_t)tch_tensor_numel(t) + 1, sizeof *values);
    must(values == NULL ? TCH_ERR_OUT_OF_MEMORY : TCH_OK);
    return values;
}

static double wave(int64_t i, int64_t n)
{
    uint64_t mixed = ((uint64_t)i + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9u;
    /* Matrices of waves have rank 3, whose orthogonalization is noise that differs between devices. */
    return small ? (double)(mixed >> 32) * 0x1p-31 - 0.9 : sin(1.7 * (double)i) + 0.1;
}

/* Positive definite, condition about 20: second differences plus a multiple of the identity. */
static double positive(int64_t i, int64_t n)
{
    int64_t gap = llabs(i % (n * n) / n - i % n);
    return gap == 0 ? 2.2 + 0.1 * (double)(i / (n * n) % MOST_MATRICES) : gap == 1 ? -1.0 : 0.0;
}

static tch_tensor *fill(tch_tensor *t, double (*value)(int64_t i, int64_t n))
{
    double *values = numbers_for(t);
    for (int64_t i = 0; i < tch_tensor_numel(t); i++) {
        values[i] = value(i, t->shape[t->ndim - 1]);
    }
    carry(t, values, 1);
    free(values);
    return t;
}

static tch_tensor *waves(tch_dtype dtype, int32_t ndim, const int64_t *shape)
{
    return fill(make(dtype, ndim, shape), wave);
}

/* The CPU's results in order, and the device's position among them. */
static struct {
    enum { ALL_ALONE, KEEPING, COMPARING } stage;
    int paused; /* undetermined by its inputs */
    int rough;  /* and inexact */
    double *values;
    int64_t count, room, next;
} beside;

static void keep(const double *values, int64_t count)
{
    if (beside.count + count > beside.room) {
        beside.room = 2 * (beside.count + count);
        beside.values = realloc(beside.values, (size_t)beside.room * sizeof *values);
        must(beside.values == NULL ? TCH_ERR_OUT_OF_MEMORY : TCH_OK);
    }
    memcpy(beside.values + beside.count, values, (size_t)count * sizeof *values);
    beside.count += count;
}

/* Relative to the largest element. Products of float32 may use operands in two parts of eight bits each, and half types
 * may round a midpoint either way, several times. Orthogonal factors are computed in bfloat16 on devices that are
 * faster at it. */
static double tolerance(void)
{
    return beside.rough ? 0.1 : least_bits == 64 ? 1e-6 : least_bits == 32 ? 1e-3 : 4e-2;
}

static void compare(const double *values, int64_t count, double largest, const char *what)
{
    const double *wanted = beside.values + beside.next;
    double off = 0.0;
    char text[64];
    if (beside.next + count > beside.count) {
        expect(0, what, "the CPU has given nothing to compare with");
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        off = fmax(off, fabs(values[i] - wanted[i]));
    }
    snprintf(text, sizeof text, "%g of its largest element away from the CPU's", off / largest);
    expect(off <= tolerance() * largest, what, text);
    beside.next += count;
}

static void expect_finite(const tch_tensor *t, const char *what)
{
    int64_t count = tch_tensor_numel(t);
    double *values = numbers_for(t);
    double largest = 0.0;
    int bad = 0;
    carry(t, values, 0);
    for (int64_t i = 0; i < count; i++) {
        bad += !isfinite(values[i]);
        largest = fmax(largest, fabs(values[i]));
    }
    expect(bad == 0, what, "an element is not finite");
    expect(count == 0 || (largest > 0.0 && largest < (small ? 1e12 : 1e6)), what, "the result has no sensible size");
    if (beside.stage == KEEPING && !beside.paused) {
        keep(values, count);
    } else if (beside.stage == COMPARING && !beside.paused) {
        compare(values, count, largest, what);
    }
    free(values);
}

static void expect_at_most(const tch_tensor *t, double limit, const char *what)
{
    double *values = numbers_for(t);
    carry(t, values, 0);
    for (int64_t i = 0; i < tch_tensor_numel(t); i++) {
        char text[64];
        snprintf(text, sizeof text, "matrix %lld has %g", (long long)i, values[i]);
        expect(values[i] <= limit, what, text);
    }
    free(values);
}

static void expect_good(const tch_tensor *report, const char *what)
{
    int32_t codes[MOST_MATRICES] = {0};
    int64_t count;
    tch_tensor row = flat(report, &count);
    tch_tensor host = tch_tensor_view(codes, TCH_INT32, 1, &count);
    must(tch_tensor_copy(context, &host, &row));
    must(tch_context_synchronize(context));
    for (int64_t i = 0; i < count; i++) {
        char text[64];
        snprintf(text, sizeof text, "matrix %lld is reported as %d", (long long)i, codes[i]);
        expect(codes[i] == TCH_REPORT_OK, what, text);
    }
}

#endif
