/* Elements of every dtype as doubles: encoding rounds to nearest even, decoding is exact. Written from the formats'
 * definitions and independent of the library's own conversions, which are checked against these. */
#ifndef TORCHIUM_TESTS_ELEMENTS_H
#define TORCHIUM_TESTS_ELEMENTS_H

#include <torchium/tensor.h>

double test_decode(tch_dtype dtype, const void *element);
void test_encode(tch_dtype dtype, double value, void *element);

/* The value that remains after storing it as this dtype. */
double test_round(tch_dtype dtype, double value);

/* Unit round-off: half the distance from 1 to the next larger number. */
double test_unit_roundoff(tch_dtype dtype);

/* Round-off of the arithmetic the library promises for this dtype: float32's for the half types, which are computed
 * wider, and the dtype's own otherwise. */
double test_arithmetic_roundoff(tch_dtype dtype);

/* Of storing a result: a rounding more for half types, none for those that are computed in. */
double test_storage_roundoff(tch_dtype dtype);

/* Half of the smallest positive number: the absolute error of rounding near zero. */
double test_underflow(tch_dtype dtype);

#endif
