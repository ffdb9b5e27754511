/* Tests of the emulated multiprocessor by tiny kernels (planted.cu): correct ones give correct results, and each
 * planted fault is detected by a wrong result, a failed launch, or AddressSanitizer. */
#include <sys/wait.h>
#include <unistd.h>

#include "emulator/machine.h"
#include "emulator/planted.h"
#include "support/testing.h"

#if defined(EMULATOR_SANITIZED)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

enum { COUNT = PLANTED_THREADS, LAUNCHES = 16 };

static float *numbers(float first)
{
    float *made = test_alloc((size_t)COUNT * sizeof *made);
    for (int i = 0; i < COUNT; i++) {
        made[i] = first + (float)i;
    }
    return made;
}

static int same(const float *x, const float *y)
{
    return memcmp(x, y, (size_t)COUNT * sizeof *x) == 0;
}

static void expect_message(cudaError_t error, const char *words)
{
    assert_int_equal(error, cudaErrorLaunchFailure);
    if (strstr(emulator_message(), words) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", emulator_message(), words);
    }
}

/* --- missing barriers -------------------------------------------------------------------------------------------- */

static void expected_of(const float *in, float *wanted, int reversed)
{
    for (int i = 0; i < COUNT; i++) {
        wanted[i] = reversed ? in[COUNT - 1 - i] : i > 0 ? in[i - 1] : 0.0f;
    }
}

static int launches_wrong(int reversed, int barrier)
{
    float *in = numbers(1.0f);
    float *out = numbers(0.0f);
    float *wanted = numbers(0.0f);
    int wrong = 0;
    expected_of(in, wanted, reversed);
    for (int i = 0; i < LAUNCHES; i++) {
        cudaError_t error = reversed ? planted_reverse(in, out, barrier) : planted_shift(in, out, barrier);
        assert_int_equal(error, cudaSuccess);
        wrong += !same(out, wanted);
    }
    return wrong;
}

TEST(a_missing_barrier_is_seen)
{
    assert_int_equal(launches_wrong(1, 1), 0);
    assert_int_equal(launches_wrong(1, 0), LAUNCHES);
}

/* Only in some orders of threads, all of which occur in the mixed one. */
TEST(a_missing_barrier_is_seen_that_one_order_hides)
{
    assert_int_equal(launches_wrong(0, 1), 0);
    assert_true(launches_wrong(0, 0) > 0);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Whether a process that calls it fails: AddressSanitizer aborts it at the fault. */
static int dies(cudaError_t (*run)(void))
{
    int status = 0;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(STDERR_FILENO);
        _exit(run() == cudaSuccess ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

static cudaError_t overrun_static(void)
{
    return planted_overrun(1, 0);
}

static cudaError_t overrun_dynamic(void)
{
    return planted_overrun(1, 1);
}

static cudaError_t underrun(void)
{
    return planted_overrun(-1, 0);
}

static cudaError_t read_beyond(void)
{
    void *in = NULL;
    void *out = NULL;
    cudaMalloc(&in, COUNT * sizeof(float));
    cudaMalloc(&out, COUNT * sizeof(float));
    return planted_read(in, out, 1);
}

TEST(writes_beside_shared_memory_are_seen)
{
    assert_int_equal(planted_overrun(0, 0), cudaSuccess);
    assert_int_equal(planted_overrun(0, 1), cudaSuccess);
    assert_true(dies(overrun_static));
    assert_true(dies(overrun_dynamic));
    assert_true(dies(underrun));
    if (!SANITIZED) {
        expect_message(planted_overrun(1, 0), "overrun_kernel: block 0 wrote behind the 256 bytes of values");
        expect_message(planted_overrun(-1, 0), "before the 256 bytes of values");
    }
}

TEST(reads_beyond_device_memory_are_seen)
{
    if (SANITIZED) {
        assert_true(dies(read_beyond));
    } else {
        skip(); /* no write: only AddressSanitizer detects it */
    }
}

/* --- tensor cores ------------------------------------------------------------------------------------------------ */

static uint16_t brain(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Small integers, so that sums are exact in any order. */
static int mma_is_right(int swapped)
{
    uint16_t a[16 * 16];
    uint16_t b[16 * 8];
    float c[16 * 8];
    int right = 1;
    for (int i = 0; i < 16 * 16; i++) {
        a[i] = brain((float)(i * 7 % 13 - 6));
        b[i % 128] = brain((float)(i % 128 * 5 % 11 - 5));
    }
    assert_int_equal(planted_mma(a, b, c, swapped), cudaSuccess);
    for (int i = 0; i < 16 * 8; i++) {
        int sum = 0;
        for (int k = 0; k < 16; k++) {
            sum += ((i / 8 * 16 + k) * 7 % 13 - 6) * ((k * 8 + i % 8) * 5 % 11 - 5);
        }
        right = right && c[i] == (float)sum;
    }
    return right;
}

TEST(a_wrong_fragment_is_seen)
{
    assert_true(mma_is_right(0));
    assert_false(mma_is_right(1));
}

/* --- barriers that only some threads reach ----------------------------------------------------------------------- */

TEST(barriers_that_not_all_reach_are_errors)
{
    expect_message(planted_barriers(TWO_PLACES), "all must reach the same barrier");
    expect_message(planted_barriers(BEHIND_SHUFFLE), "threads wait for others that never come");
    expect_message(planted_barriers(HALF_A_NAMED_ONE), "a named barrier");
    expect_message(planted_barriers(NO_ARRIVAL), "a barrier in shared memory");
    expect_message(planted_barriers(NEVER_CREATED), "that was not created");
}

/* --- copies, clusters, bounds ------------------------------------------------------------------------------------ */

TEST(copies_come_when_they_are_waited_for)
{
    float *in = numbers(1.0f);
    float *out = numbers(0.0f);
    assert_int_equal(planted_copy(in, out, 1), cudaSuccess);
    assert_true(same(out, in));
    assert_int_equal(planted_copy(in, out, 0), cudaSuccess);
    assert_true(isnan(out[0]));
}

TEST(clusters_see_each_other)
{
    int out[8];
    assert_int_equal(planted_cluster(out), cudaSuccess);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(out[i], i / 4 * 4 + (i + 1) % 4);
    }
}

TEST(launch_bounds_hold)
{
    assert_int_equal(planted_bounds(32), cudaSuccess);
    expect_message(planted_bounds(64), "its launch bounds are 32");
    expect_message(planted_bounds(2048), "cannot be");
}

TEST_MAIN(NULL, NULL)
