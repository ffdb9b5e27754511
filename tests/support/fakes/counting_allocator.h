/* A host allocator for tch_set_host_allocator that counts memory in use and fails on request. Thread-safe. */
#ifndef TORCHIUM_TESTS_COUNTING_ALLOCATOR_H
#define TORCHIUM_TESTS_COUNTING_ALLOCATOR_H

#include <stdatomic.h>
#include <stdbool.h>

#include <torchium/memory.h>
#include <torchium/tensor.h>

typedef struct counting_allocator {
    atomic_llong bytes;    /* in use */
    atomic_llong blocks;   /* in use */
    atomic_llong calls;    /* allocations since the start or the last arming */
    atomic_llong fail_at;  /* the number of the call that gets NULL; 0: none does */
    atomic_llong failures; /* calls that got NULL */
    atomic_llong mistakes; /* releases with a size other than the allocation's, and alignments that are not powers of
                              two */
} counting_allocator;

/* Counts an allocation of any memory; true if it must fail. */
bool counting_allocator_refuses(counting_allocator *counting);

/* The struct for tch_set_host_allocator. */
tch_host_allocator counting_allocator_interface(counting_allocator *counting);

/* Installed by cmocka fixtures before anything is allocated, and removed by them. */
extern counting_allocator test_counting;
int test_counting_install(void **state);
int test_counting_remove(void **state);

/* Fails the test if an allocation was not released, or with another size. */
void test_counting_check_empty(void);

/* The call-th allocation from now on fails; 0 lets all succeed. */
void counting_allocator_arm(counting_allocator *counting, long long call);

/* Repeats the call with its first, second, ... allocation failing until it succeeds. Each failing call must return an
 * error and leak nothing. `check`, or NULL, runs after each call. */
void test_fail_each_allocation(const char *what, tch_status (*call)(void *user),
                               void (*check)(void *user, bool through), void *user);

/* The user of a tch_state_allocator: the context's memory, filled with noise. */
typedef struct test_caller_memory {
    tch_context *context;
    int64_t bytes, calls, fail_at;
    int64_t off; /* of allocations; if not aligned, they are never used or released */
} test_caller_memory;

tch_status test_caller_allocate(void *user, int64_t bytes, void **pointer);
void test_caller_release(void *user, void *pointer, int64_t bytes);

#endif
