/* A multilayer network in plain float64 loops: what tch_network must agree with. */
#ifndef TORCHIUM_TESTS_REFERENCE_NETWORK_H
#define TORCHIUM_TESTS_REFERENCE_NETWORK_H

#include <torchium/network.h>

enum { REFERENCE_MOST_LAYERS = 6 };

typedef struct reference_network {
    int layers;
    int64_t width[REFERENCE_MOST_LAYERS + 1]; /* inputs, hidden, outputs */
    tch_activation activation;
    tch_loss loss;
    double *parameter[2 * REFERENCE_MOST_LAYERS]; /* weight [out, in], bias [out], and so on */
    double *gradient[2 * REFERENCE_MOST_LAYERS];
} reference_network;

/* Parameters and gradients of the config's shapes, all 0. */
reference_network reference_network_make(const tch_network_config *config);

/* Elements of parameter `index`. */
int64_t reference_network_count(const reference_network *net, int index);

/* outputs [rows, outputs] */
double *reference_network_forward(const reference_network *net, int64_t rows, const double *inputs);

/* Sets totals; gradients are written where `with_gradients`. `targets` are labels, or numbers, as doubles. */
void reference_network_loss(reference_network *net, int64_t rows, const double *inputs, const double *targets,
                            int with_gradients, double *totals);

#endif
