/* Elements of every dtype as doubles: encoding rounds to nearest even, decoding is exact. Written from the formats'
 * definitions and independent of the library's conversions, which are checked against these. */
#ifndef TORCHIUM_TESTS_ELEMENTS_H
#define TORCHIUM_TESTS_ELEMENTS_H

#include <torchium/tensor.h>

double test_decode(tch_dtype dtype, const void *element);
void test_encode(tch_dtype dtype, double value, void *element);

/* Rounds to this dtype. */
double test_round(tch_dtype dtype, double value);

/* Unit roundoff: half the distance from 1 to the next larger number. */
double test_unit_roundoff(tch_dtype dtype);

/* Unit roundoff of the compute type: float32's for half types, the dtype's own otherwise. */
double test_arithmetic_roundoff(tch_dtype dtype);

/* Of storing a result: one more rounding for half types, 0 for compute types. */
double test_storage_roundoff(tch_dtype dtype);

/* Half of the smallest positive number: the absolute error of rounding near zero. */
double test_underflow(tch_dtype dtype);

#endif
