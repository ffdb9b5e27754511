/* A network with a batch, and a float64 reference. */
#ifndef TORCHIUM_TESTS_NETWORK_TRIAL_H
#define TORCHIUM_TESTS_NETWORK_TRIAL_H

#include <torchium/network.h>

#include "support/random.h"
#include "support/tensors.h"

enum { REFERENCE_MOST_LAYERS = 6 };

/* A multilayer network in plain float64 loops: the reference of tch_network. */
typedef struct reference_network {
    int layers;
    int64_t width[REFERENCE_MOST_LAYERS + 1]; /* inputs, hidden, outputs */
    tch_activation activation;
    tch_loss loss;
    double *parameter[2 * REFERENCE_MOST_LAYERS]; /* weight [out, in], bias [out], and so on */
    double *gradient[2 * REFERENCE_MOST_LAYERS];
} reference_network;

/* Elements of parameter `index`. */
int64_t reference_network_count(const reference_network *net, int index);

/* outputs [rows, outputs] */
double *reference_network_forward(const reference_network *net, int64_t rows, const double *inputs);

/* Sets totals; gradients are written if `with_gradients`. `targets` are labels, or values, as doubles. */
void reference_network_loss(reference_network *net, int64_t rows, const double *inputs, const double *targets,
                            int with_gradients, double *totals);

/* --- the network and its reference -------------------------------------------------------------------------------- */

typedef struct network_trial {
    tch_context *context;
    tch_network_config config;
    tch_network *net;
    reference_network reference;
    int64_t rows;
    test_tensor *inputs, *targets, *totals;
    double *x, *t; /* inputs and targets, as rounded */
} network_trial;

/* 7 inputs, 3 outputs and one hidden layer; there are widths for up to five. Seed 42. */
tch_network_config network_trial_small_config(void);

/* A network with random weights and biases, and totals of 0. */
void network_trial_make(network_trial *s, tch_context *context, const tch_network_config *config, test_random *random);

/* Both from one stream of random numbers: the network and a contiguous batch. */
void network_trial_open(network_trial *s, tch_context *context, const tch_network_config *config, uint64_t stream,
                        int64_t rows);

void network_trial_batch(network_trial *s, test_random *random, int64_t rows, test_layout layout);

void network_trial_clear(network_trial *s);      /* totals = 0 */
tch_status network_trial_loss(network_trial *s); /* loss and gradients */

void network_trial_poison(network_trial *s); /* gradients = NaN */

/* The number of allocations from the pool. */
int64_t network_trial_requests(tch_context *context);

/* The elements of a float32 tensor. */
double *network_trial_read(tch_context *context, const tch_tensor *tensor);

/* Tests failed allocations: `call` runs with the k-th allocation failing, for k = 1, 2, ... until it reports that the
 * k-th was never reached; it releases what it allocated. In `call`, network_trial_disarm follows the call under test,
 * which must have failed with out of memory, or succeeded, which is returned. */
void network_trial_each_allocation(bool (*call)(long long allocation));
bool network_trial_disarm(long long allocation, tch_status status);

/* The largest absolute value. */
double network_trial_largest(int64_t count, const double *values);

/* Every element within `tolerance` times the largest expected one. */
void network_trial_close(const char *name, int64_t count, const double *got, const double *wanted, double tolerance);

#endif
