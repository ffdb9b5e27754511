/* Shared by tests of the solvers: OpenBLAS, and scratch followed by guard bytes. */
#ifndef TORCHIUM_TESTS_SOLVER_TEST_H
#define TORCHIUM_TESTS_SOLVER_TEST_H

#include "backends/cpu/runtime/blas/blas.h"
#include "support/elements.h"
#include "support/testing.h"

enum { GUARD = 64 };

/* Exits if there is none. */
static inline const tchi_blas *open_blas(void)
{
    const char *reason = NULL;
    const tchi_blas *blas = tchi_blas_open(&reason);
    if (blas == NULL) {
        print_error("%s\n", reason);
        exit(1);
    }
    return blas;
}

/* Aligned to 64 bytes and poisoned with NaN. */
static inline void *make_poisoned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    CHECK(memory != NULL, "no memory for %zu bytes", bytes);
    test_own(memory, free);
    memset(memory, 0xff, bytes);
    return memory;
}

static inline void *make_scratch(size_t bytes)
{
    return make_poisoned(bytes + GUARD);
}

static inline void check_scratch(const void *scratch, size_t bytes)
{
    const unsigned char *guard = (const unsigned char *)scratch + bytes;
    for (int i = 0; i < GUARD; i++) {
        CHECK(guard[i] == 0xff, "byte %d behind the scratch was written", i);
    }
}

#endif
