/* A host allocator that counts what is in use and fails when told to: the test's end of tch_set_host_allocator. Safe to
 * call from several threads. */
#ifndef TORCHIUM_TESTS_COUNTING_ALLOCATOR_H
#define TORCHIUM_TESTS_COUNTING_ALLOCATOR_H

#include <stdatomic.h>
#include <stdbool.h>

#include <torchium/memory.h>
#include <torchium/tensor.h>

typedef struct counting_allocator {
    atomic_llong bytes;    /* in use */
    atomic_llong blocks;   /* in use */
    atomic_llong calls;    /* allocations asked for since the start or the last arming */
    atomic_llong fail_at;  /* the number of the call that gets NULL; 0: none does */
    atomic_llong failures; /* calls that got NULL */
    atomic_llong mistakes; /* releases whose size is not the allocation's, and alignments that are no power of two */
} counting_allocator;

/* Counts an allocation, of whatever memory, and says whether it is the one that must fail. */
bool counting_allocator_refuses(counting_allocator *counting);

/* The struct to hand to tch_set_host_allocator. */
tch_host_allocator counting_allocator_interface(counting_allocator *counting);

/* One that cmocka's fixtures put in place, before anything is allocated, and take away again. */
extern counting_allocator test_counting;
int test_counting_install(void **state);
int test_counting_remove(void **state);

/* Fails the test if something that came from it was not given back, or not as it came. */
void test_counting_check_empty(void);

/* The call-th allocation from now on fails; 0 lets all succeed. */
void counting_allocator_arm(counting_allocator *counting, long long call);

/* Makes the call until none of its allocations fails, each time with the next one failing: then the call must fail, and
 * every time leave no block behind. `check`, or NULL, is called after each call. */
void test_fail_each_allocation(const char *what, tch_status (*call)(void *user),
                               void (*check)(void *user, bool through), void *user);

/* The user of a tch_state_allocator: memory of the context, full of noise. */
typedef struct test_caller_memory {
    tch_context *context;
    int64_t bytes, calls, fail_at;
    int64_t off; /* of what is given out, where it is not aligned: never used, nor given back */
} test_caller_memory;

tch_status test_caller_allocate(void *user, int64_t bytes, void **pointer);
void test_caller_release(void *user, void *pointer, int64_t bytes);

#endif
