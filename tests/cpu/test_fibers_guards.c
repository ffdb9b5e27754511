/* The guards for Linux before 6.13, on any version. */
#define TCHI_GUARD_ADVICE 9999
#include "test_fibers.c"
