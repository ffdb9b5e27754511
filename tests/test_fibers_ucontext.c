/* The switch for processors that have none of their own in kernel_fibers.c, on whichever processor runs the tests. */
#define TCHI_FIBERS_UCONTEXT
#include "test_fibers.c"
