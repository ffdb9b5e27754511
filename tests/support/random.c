/* A counter hashed with a key: the finalizer of splitmix64 applied to a Weyl sequence. Good enough for test data, and
 * twenty lines. */
#include "random.h"

#include <math.h>

static uint64_t seed = 20260101u;

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void test_random_set_seed(uint64_t value)
{
    seed = value;
}

uint64_t test_random_seed(void)
{
    return seed;
}

test_random test_random_stream(uint64_t stream)
{
    test_random random = {mix(mix(seed + 0x9e3779b97f4a7c15u) + stream), 0};
    return random;
}

uint64_t test_random_bits(test_random *random)
{
    random->counter += 0x9e3779b97f4a7c15u;
    return mix(random->key + random->counter);
}

double test_random_uniform(test_random *random)
{
    return (double)(test_random_bits(random) >> 11) * 0x1p-53;
}

double test_random_normal(test_random *random)
{
    const double two_pi = 6.283185307179586;
    double radius = sqrt(-2.0 * log(1.0 - test_random_uniform(random)));
    return radius * cos(two_pi * test_random_uniform(random));
}

void test_random_fill_normal(test_random *random, double *values, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        values[i] = test_random_normal(random);
    }
}
