/* The guards of kernels before Linux 6.13, on whichever kernel runs the tests. */
#define TCHI_GUARD_ADVICE 9999
#include "test_fibers.c"
