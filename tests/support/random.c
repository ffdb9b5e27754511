/* Hashes a counter with a key: the finalizer of splitmix64 applied to a Weyl sequence. */
#include "random.h"

#include <math.h>
#include <string.h>

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

void test_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t k0 = key[0];
    uint32_t k1 = key[1];
    memcpy(out, counter, 4 * sizeof *out);
    for (int round = 0; round < 10; round++) {
        uint64_t a = 0xD2511F53ull * out[0];
        uint64_t b = 0xCD9E8D57ull * out[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ out[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ out[3] ^ k1,
                            (uint32_t)a};
        memcpy(out, next, sizeof next);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}
