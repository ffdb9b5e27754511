/* Seeded random inputs: the same seed gives the same numbers on every machine and device. */
#ifndef CLI_RANDOM_MATRICES_H
#define CLI_RANDOM_MATRICES_H

#include <torchium/torchium.h>

#include "workplace.h"

/* Independent entries, uniform with mean 0 and variance 1. */
tch_status random_entries(const workplace *place, uint64_t seed, tch_tensor *out);

/* Symmetric matrices Q diag(eigenvalues) Q' for a batch [batch, n, n], each with a random orthogonal Q of its own;
 * computed in float64 on the host and rounded once. The same seed gives the same Q for any eigenvalues. */
tch_status random_symmetric(const workplace *place, uint64_t seed, const double *eigenvalues, tch_tensor *out);

/* Eigenvalues 1, 2^-a, 3^-a, ... n^-a, falling as a power to 1/condition: what factors of trained networks look
 * like. */
void random_power_law(int64_t n, double condition, double *eigenvalues);

#endif
