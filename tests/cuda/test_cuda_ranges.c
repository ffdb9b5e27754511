/* Profiler ranges, with a logging profiler (support/cuda/nvtx_listener.c): whether one is attached, what it records,
 * and that a recording is notified of every range within it. */
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cuda/cuda.h"

#include "support/files.h"
#include "support/testing.h"

static char told[64]; /* recording.c's */

void tchi_cuda_recording_range(tchi_cuda_state *s, const char *name)
{
    snprintf(told + strlen(told), sizeof told - strlen(told), "%s, ", name != NULL ? name : "end");
}

/* NVTX looks for profilers once, at a process's first call. */
TEST(without_a_profiler_no_one_listens)
{
    pid_t child = fork();
    if (child == 0) {
        unsetenv("NVTX_INJECTION64_PATH");
        bool attached = tchi_cuda_profiler_attached();
        tchi_cuda_range(NULL, "nothing");
        tchi_cuda_range(NULL, NULL);
        _exit(attached ? 1 : 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
}

TEST_IN_FOLDER(with_one_all_is_heard)
{
    char heard[256] = "";
    setenv("TEST_NVTX_LOG", test_path("heard"), 1);
    setenv("NVTX_INJECTION64_PATH", NVTX_LISTENER, 1);
    assert_true(tchi_cuda_profiler_attached());
    tchi_cuda_range(NULL, "step");
    tchi_cuda_range_open("factors");
    tchi_cuda_range_close();
    tchi_cuda_range(NULL, NULL);
    tchi_cuda_range(NULL, "another");
    tchi_cuda_range(NULL, NULL);
    FILE *file = fopen(test_path("heard"), "r");
    assert_non_null(file);
    size_t length = fread(heard, 1, sizeof heard - 1, file);
    fclose(file);
    heard[length] = '\0';
    assert_string_equal(heard, "domain torchium\nstep\n  factors\nanother\n");
    assert_string_equal(told, "step, end, another, end, ");
}

int main(void)
{
    return test_run(__FILE__, NULL, NULL);
}
