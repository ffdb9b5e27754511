/* The threads of a block on one CPU thread: registers survive waits, and barriers, shuffles and votes follow CUDA;
 * test_kernel_sources.c has deadlocks. The file under test is included, so that test_fibers_guards.c can give it the
 * guards of older kernels. */
#include "backends/cpu/user_kernel/kernel_fibers.c"

#include "support/testing.h"

enum { THREADS = 75, ROUNDS = 5, NUMBERS = 12 }; /* two warps and a partial one */

static const tchi_cpu_launch launch = {.grid = {4, 1, 1}, .block = {THREADS, 1, 1}};
static double sums[THREADS];
static int64_t last_block;
static int wrong;

/* --- required by kernel_fibers.c --------------------------------------------------------------------------------- */

static void *allocate(size_t bytes, size_t alignment)
{
    return calloc(1, bytes);
}

static void give_back(void *pointer, size_t bytes)
{
    free(pointer);
}

static const tch_backend_host host = {.struct_size = sizeof host, .allocate = allocate, .release = give_back};

const tch_backend_host *tchi_cpu_host(void)
{
    return &host;
}

/* --- kernels ----------------------------------------------------------------------------------------------------- */

static void enter_block(const tchi_cpu_launch *l, int64_t block)
{
    last_block = block;
}

static uint64_t wait_for(const tchi_cpu_launch *l, int32_t kind, uint32_t mask, uint32_t source, uint64_t value)
{
    const tchi_cpu_wait wait = {.kind = kind, .mask = mask, .source = source, .value = value};
    return l->wait(l->runner, &wait);
}

/* Integers and fractions that are live across every wait, more than there are callee-saved registers; failures are
 * counted, since cmocka cannot unwind another stack. */
static void keep_numbers(const tchi_cpu_launch *l, int32_t thread)
{
    double x[NUMBERS];
    int64_t n[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) {
        x[i] = thread + 0.5 * i;
        n[i] = 1000 * thread + i;
    }
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < NUMBERS; i++) {
            x[i] += 1.0;
            n[i] += 1;
        }
        uint64_t odd = wait_for(l, TCHI_WAIT_BLOCK, 0, 0, (uint64_t)(thread % 2));
        wrong += odd != THREADS / 2;
    }
    double sum = 0;
    for (int i = 0; i < NUMBERS; i++) {
        wrong += x[i] != thread + 0.5 * i + ROUNDS || n[i] != 1000 * thread + i + ROUNDS;
        sum += x[i];
    }
    sums[thread] = sum;
}

/* Missing lanes of the last warp count as arrived, and a shuffle from one returns the thread's own value. */
static void shuffle_and_vote(const tchi_cpu_launch *l, int32_t thread)
{
    const int first = thread / LANES * LANES;
    const int lane = thread - first;
    const int lanes = THREADS - first < LANES ? THREADS - first : LANES;
    const int from = lane ^ 1;
    uint64_t got = wait_for(l, TCHI_WAIT_SHUFFLE, 0xffffffff, (uint32_t)from, (uint64_t)thread);
    wrong += got != (uint64_t)(from < lanes ? first + from : thread);
    uint32_t all = lanes == LANES ? 0xffffffff : ((uint32_t)1 << lanes) - 1;
    uint64_t votes = wait_for(l, TCHI_WAIT_BALLOT, all, 0, (uint64_t)(lane % 3 == 0));
    wrong += votes != (0x49249249u & all);
}

/* --- tests ------------------------------------------------------------------------------------------------------- */

static const char *run_blocks(tchi_fibers *fibers, void (*thread)(const tchi_cpu_launch *, int32_t))
{
    const tchi_cpu_kernel_entry entry = {.enter = enter_block, .thread = thread};
    wrong = 0;
    return tchi_fibers_run(fibers, &entry, &launch, 0, 4);
}

enum { STACK = 65536 };

static tchi_fibers *make_fibers(int threads, size_t stack_bytes)
{
    tchi_fibers *fibers = tchi_fibers_create();
    assert_non_null(fibers);
    assert_int_equal(tchi_fibers_reserve(fibers, threads, stack_bytes), 0);
    return fibers;
}

TEST(everything)
{
    tchi_fibers *fibers = make_fibers(THREADS, STACK);
    for (int again = 0; again < 2; again++) { /* stacks are reused between launches */
        assert_null(run_blocks(fibers, keep_numbers));
        CHECK(wrong == 0 && last_block == 3, "%d numbers changed, the last block is %d", wrong, (int)last_block);
        for (int thread = 0; thread < THREADS; thread++) {
            assert_true(sums[thread] == NUMBERS * (thread + ROUNDS) + 0.25 * NUMBERS * (NUMBERS - 1));
        }
        assert_null(run_blocks(fibers, shuffle_and_vote));
        CHECK(wrong == 0, "%d wrong answers", wrong);
    }
    tchi_fibers_destroy(fibers);
}

/* --- stacks ------------------------------------------------------------------------------------------------------ */

/* Every guard begins and ends with a page, is at least as large as the stack steps that compilers probe, and leaves the
 * requested stack size, for any page size. */
TEST(pages_of_any_size)
{
    static const size_t pages[] = {4096, 16384, 65536, 262144}, stacks[] = {1, STACK - 1, STACK, STACK + 1, 1081344};
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
        for (size_t k = 0; k < sizeof stacks / sizeof *stacks; k++) {
            stack_layout l = lay_out_stack(pages[i], stacks[k]);
            test_case("pages of %zu bytes, stacks of %zu", pages[i], stacks[k]);
            CHECK(l.guard % pages[i] == 0 && l.stride % pages[i] == 0, "guard %zu, stride %zu", l.guard, l.stride);
            CHECK(l.guard >= GUARD_BYTES && l.stride - l.guard >= stacks[k], "guard %zu, stride %zu", l.guard,
                  l.stride);
            CHECK(l.stride - l.guard < stacks[k] + pages[i], "a stack of %zu bytes", l.stride - l.guard);
        }
    }
    tchi_fibers *fibers = make_fibers(1, 1);
    unmap_stacks(fibers);
    assert_int_equal(map_stacks(fibers, 65536, THREADS, STACK), 0); /* with pages of 64 KiB */
    assert_null(run_blocks(fibers, keep_numbers));
    assert_int_equal(wrong, 0);
    tchi_fibers_destroy(fibers);
}

/* All of a stack belongs to one thread: its far end is unchanged while the others fill theirs. */
static void use_all(const tchi_cpu_launch *l, int32_t thread)
{
    volatile unsigned char local[STACK];
    for (size_t i = 0; i < sizeof local; i++) {
        local[i] = (unsigned char)(i * 31 + (size_t)thread);
    }
    wait_for(l, TCHI_WAIT_BLOCK, 0, 0, 0);
    for (size_t i = 0; i < sizeof local; i++) {
        wrong += local[i] != (unsigned char)(i * 31 + (size_t)thread);
    }
}

/* Stacks grow if a kernel needs larger ones, or has larger blocks, and then stay. */
TEST(stacks_grow)
{
    tchi_fibers *fibers = make_fibers(2, 4096);
    assert_false(tchi_fibers_fit(fibers, 2, 4097));
    assert_false(tchi_fibers_fit(fibers, 3, 4096));
    assert_int_equal(tchi_fibers_reserve(fibers, THREADS, 4096), 0);
    assert_int_equal(tchi_fibers_reserve(fibers, 1, 2 * STACK), 0);
    assert_true(tchi_fibers_fit(fibers, THREADS, 2 * STACK));
    const char *before = fibers->stacks;
    assert_int_equal(tchi_fibers_reserve(fibers, THREADS, STACK), 0);
    assert_true(fibers->stacks == before);
    assert_null(run_blocks(fibers, use_all));
    CHECK(wrong == 0, "%d bytes changed", wrong);
    tchi_fibers_destroy(fibers);
}

/* A machine of 72 cores, each with the largest block: the maximum number can be allocated, and the process has mappings
 * left. */
TEST(many_cores)
{
    enum { CORES = 72 };
    tchi_fibers *all[CORES];
    int count = tchi_fibers_most(TCHI_CPU_BLOCK_THREADS) < CORES ? tchi_fibers_most(TCHI_CPU_BLOCK_THREADS) : CORES;
    assert_true(count >= 1);
    for (int i = 0; i < count; i++) {
        test_case("core %d of %d", i, count);
        all[i] = make_fibers(TCHI_CPU_BLOCK_THREADS, STACK);
    }
    for (int i = count; i < CORES; i++) {
        test_case("core %d, small blocks", i);
        all[i] = make_fibers(32, STACK);
    }
    for (int i = 0; i < CORES; i++) {
        tchi_fibers_destroy(all[i]);
    }
}

int main(void)
{
    return test_run(__FILE__, NULL, NULL);
}
