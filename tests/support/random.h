/* Random numbers that depend only on (seed, stream, counter): a case has its own stream, so it draws the same numbers
 * whether it runs alone or after others. TORCHIUM_TEST_SEED changes all of them. */
#ifndef TORCHIUM_TESTS_RANDOM_H
#define TORCHIUM_TESTS_RANDOM_H

#include <stdint.h>

typedef struct test_random {
    uint64_t key;
    uint64_t counter;
} test_random;

void test_random_set_seed(uint64_t value);
uint64_t test_random_seed(void);

/* A generator for one case; different streams are independent. */
test_random test_random_stream(uint64_t stream);

uint64_t test_random_bits(test_random *random);

/* Uniform in [0, 1). */
double test_random_uniform(test_random *random);

/* Standard normal. */
double test_random_normal(test_random *random);

void test_random_fill_normal(test_random *random, double *values, int64_t count);

/* Philox-4x32-10, the generator of the library's stochastic rounding. */
void test_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
