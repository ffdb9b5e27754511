/* KFAC and a plain float64 reference with the same layers, batches and gradients. The reference computes factors,
 * averages and preconditioned gradients from their definitions. For EKFAC it uses the library's eigenvectors, after
 * checking them, since scales depend on the choice of eigenvectors for equal eigenvalues. */
#ifndef TORCHIUM_TESTS_KFAC_TRIAL_H
#define TORCHIUM_TESTS_KFAC_TRIAL_H

#include <torchium/torchium.h>

#include "layer_positions.h"

typedef struct test_kfac_layer {
    const test_layer_case *layer;
    int32_t bias;
} test_kfac_layer;

/* One layer of the reference; arrays are [groups, ., .], n = d + bias. */
typedef struct test_kfac_reference {
    int64_t groups, n, p, inputs;
    int32_t bias;
    double *factor[2];  /* of inputs and of output gradients */
    double *basis[2];   /* rows */
    double *values[2];  /* [groups, .] */
    double *scales;     /* [groups, p, n] */
    double *divisor[2]; /* INVERSE: [groups, ., .], the inverses */
    int64_t updates, pending, refreshes;
    double condition; /* of the latest refresh: condition number that magnifies rounding errors */
} test_kfac_reference;

typedef struct test_kfac_trial {
    tch_context *context;
    tch_kfac_config config;
    int32_t count;
    const test_kfac_layer *layers;
    tch_dtype dtype; /* of inputs and gradients */
    tch_kfac *kfac;
    test_kfac_reference *reference;
    test_tensor **gradients; /* weight and bias of each layer in turn; NULL for a missing bias */
    double **expected;       /* [p of all groups, n] of each layer: weight and bias as one matrix */
    uint64_t stream;         /* of the next random batch */
    bool little;             /* every call uses the least workspace that succeeds */
} test_kfac_trial;

test_kfac_trial *test_kfac_make(tch_context *context, const tch_kfac_config *config, int32_t count,
                                const test_kfac_layer *layers, tch_dtype dtype);

/* The public descriptions of the layers; `out` has room for `count`. */
void test_kfac_describe(int32_t count, const test_kfac_layer *layers, tch_kfac_layer *out);

/* Passes a random batch to tch_kfac_observe and to the reference. */
void test_kfac_observe(test_kfac_trial *trial, int32_t layer, double scale);
void test_kfac_refresh(test_kfac_trial *trial);

/* New random gradients in the given layout on the device, and in `expected`. */
void test_kfac_draw_gradients(test_kfac_trial *trial, test_layout layout);
/* tch_kfac_precondition, and the same in `expected`. */
void test_kfac_precondition(test_kfac_trial *trial, double lr);
/* Fails unless gradients agree with `expected`. */
void test_kfac_check_gradients(const test_kfac_trial *trial);

/* State of the library by name, e.g. "input_factor", as float64. NULL if there is none. */
double *test_kfac_state(const test_kfac_trial *trial, int32_t layer, const char *what, int64_t *count);
void test_kfac_put_state(const test_kfac_trial *trial, int32_t layer, const char *what, double *values);

#endif
