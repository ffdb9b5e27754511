/* The switch for processors that have none of their own in kernel_fibers.c, on whichever processor runs the tests, and
 * the guards of kernels before Linux 6.13. */
#define TCHI_FIBERS_UCONTEXT
#define TCHI_GUARD_ADVICE 9999
#include "test_fibers.c"
