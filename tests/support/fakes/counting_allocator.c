/* Each block is preceded by a record of its size and start, to detect a release with another size. */
#include "counting_allocator.h"

#include <stdint.h>

#include "support/testing.h"

typedef struct record {
    void *start;
    size_t bytes;
} record;

bool counting_allocator_refuses(counting_allocator *counting)
{
    long long call = atomic_fetch_add(&counting->calls, 1) + 1;
    bool refused = call == atomic_load(&counting->fail_at);
    atomic_fetch_add(&counting->failures, refused);
    return refused;
}

static void *counted_allocate(void *user, size_t bytes, size_t alignment)
{
    counting_allocator *counting = user;
    bool refused = counting_allocator_refuses(counting);
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        atomic_fetch_add(&counting->mistakes, 1);
        return NULL;
    }
    if (refused) {
        return NULL;
    }
    if (bytes > SIZE_MAX / 2) {
        return NULL;
    }
    char *start = malloc(sizeof(record) + alignment + bytes);
    if (start == NULL) {
        return NULL;
    }
    uintptr_t first = ((uintptr_t)start + sizeof(record) + alignment - 1) & ~(uintptr_t)(alignment - 1);
    record mine = {start, bytes};
    memcpy((char *)first - sizeof mine, &mine, sizeof mine);
    atomic_fetch_add(&counting->bytes, (long long)bytes);
    atomic_fetch_add(&counting->blocks, 1);
    return (char *)first;
}

static void counted_release(void *user, void *pointer, size_t bytes)
{
    counting_allocator *counting = user;
    record mine;
    memcpy(&mine, (char *)pointer - sizeof mine, sizeof mine);
    if (mine.bytes != bytes) {
        atomic_fetch_add(&counting->mistakes, 1);
    }
    atomic_fetch_sub(&counting->bytes, (long long)mine.bytes);
    atomic_fetch_sub(&counting->blocks, 1);
    free(mine.start);
}

tch_host_allocator counting_allocator_interface(counting_allocator *counting)
{
    return (tch_host_allocator){sizeof(tch_host_allocator), counted_allocate, counted_release, counting};
}

void counting_allocator_arm(counting_allocator *counting, long long call)
{
    atomic_store(&counting->calls, 0);
    atomic_store(&counting->fail_at, call);
}

counting_allocator test_counting;

/* Finds backends first: the registry's memory is not a leak. */
int test_counting_install(void **state)
{
    tch_host_allocator allocator = counting_allocator_interface(&test_counting);
    (void)tch_backend_count();
    return tch_set_host_allocator(&allocator) == TCH_OK ? 0 : -1;
}

int test_counting_remove(void **state)
{
    return tch_set_host_allocator(NULL) == TCH_OK ? 0 : -1;
}

void test_counting_check_empty(void)
{
    CHECK(atomic_load(&test_counting.bytes) == 0 && atomic_load(&test_counting.blocks) == 0,
          "%lld bytes in %lld blocks leaked", atomic_load(&test_counting.bytes), atomic_load(&test_counting.blocks));
    CHECK(atomic_load(&test_counting.mistakes) == 0, "%lld releases do not match their allocation",
          atomic_load(&test_counting.mistakes));
}

void test_fail_each_allocation(const char *what, tch_status (*call)(void *user),
                               void (*check)(void *user, bool through), void *user)
{
    long long blocks = atomic_load(&test_counting.blocks);
    bool through = false;
    for (long long k = 1; !through; k++) {
        test_case("%s, allocation %lld", what, k);
        CHECK(k < 20000, "it never gets by");
        counting_allocator_arm(&test_counting, k);
        tch_status status = call(user);
        through = atomic_load(&test_counting.calls) < k;
        counting_allocator_arm(&test_counting, 0);
        CHECK((status == TCH_OK) == through, "gave %s: %s", tch_status_name(status), tch_last_error());
        CHECK(atomic_load(&test_counting.blocks) == blocks, "%lld blocks leaked",
              atomic_load(&test_counting.blocks) - blocks);
        CHECK(atomic_load(&test_counting.mistakes) == 0, "a release does not match its allocation");
        if (check != NULL) {
            check(user, through);
        }
    }
}

/* State is zeroed, whatever its memory contained. */
static tch_status fill_with_noise(tch_context *context, void *pointer, int64_t bytes)
{
    static const unsigned char noise[4096] = {0xA5, 0xFF, 0x7F};
    tch_status status = TCH_OK;
    for (int64_t at = 0; status == TCH_OK && at < bytes; at += (int64_t)sizeof noise) {
        int64_t size = bytes - at < (int64_t)sizeof noise ? bytes - at : (int64_t)sizeof noise;
        tch_tensor from = tch_tensor_view((void *)noise, TCH_INT32, 1, (int64_t[]){size / 4});
        tch_tensor to = from;
        to.data = (char *)pointer + at;
        to.device = tch_context_device(context);
        status = tch_tensor_copy(context, &to, &from);
    }
    return status;
}

tch_status test_caller_allocate(void *user, int64_t bytes, void **pointer)
{
    test_caller_memory *m = user;
    if (++m->calls == m->fail_at) {
        return TCH_ERR_OUT_OF_MEMORY;
    }
    tch_status status = tch_memory_alloc(m->context, bytes, pointer);
    if (m->off != 0) {
        (void)tch_memory_free(m->context, *pointer);
        *pointer = (char *)*pointer + m->off;
        return status;
    }
    m->bytes += status == TCH_OK ? bytes : 0;
    return status == TCH_OK ? fill_with_noise(m->context, *pointer, bytes) : status;
}

void test_caller_release(void *user, void *pointer, int64_t bytes)
{
    test_caller_memory *m = user;
    m->bytes -= bytes;
    CHECK_OK(tch_memory_free(m->context, pointer));
}
