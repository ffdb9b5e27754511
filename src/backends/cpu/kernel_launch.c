/* Running a kernel: blocks are divided among the threads of the CPU. A kernel whose threads never wait runs in the loops
 * that were compiled into it; one whose threads do runs on fibers. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kernel.h"

typedef struct launch_job {
    tchi_cpu_kernel *kernel;
    tchi_cpu_launch launch;
    int next_slot;
    int failed; /* whoever sets it first writes the message */
    char message[512];
} launch_job;

/* Where a kernel without fibers goes when it gives up: an assertion, __trap(). */
typedef struct plain_runner {
    jmp_buf back;
    launch_job *job;
} plain_runner;

static void keep_message(launch_job *job, const char *message)
{
    if (!__atomic_exchange_n(&job->failed, 1, __ATOMIC_RELAXED)) {
        snprintf(job->message, sizeof job->message, "%s", message);
    }
}

static void fail_plain(void *runner, const char *message)
{
    plain_runner *r = runner;
    keep_message(r->job, message);
    longjmp(r->back, 1);
}

static void run_plain(launch_job *job, int64_t from, int64_t to)
{
    plain_runner runner = {.job = job};
    tchi_cpu_launch launch = job->launch;
    launch.runner = &runner;
    launch.fail = fail_plain;
    if (setjmp(runner.back) == 0) {
        job->kernel->entry->run(&launch, from, to);
    }
}

static void run_fibers(launch_job *job, int64_t from, int64_t to)
{
    int slot = __atomic_fetch_add(&job->next_slot, 1, __ATOMIC_RELAXED);
    const char *why = tchi_fibers_run(job->kernel->fibers[slot], job->kernel->entry, &job->launch, from, to);
    if (why != NULL) {
        keep_message(job, why);
    }
}

static void run_blocks(void *argument, int64_t from, int64_t to)
{
    launch_job *job = argument;
    if (from == to) {
        return;
    }
    if (job->kernel->entry->flags & TCHI_CPU_KERNEL_FIBERS) {
        run_fibers(job, from, to);
    } else {
        run_plain(job, from, to);
    }
}

static tch_status have_slots(tchi_cpu_kernel *kernel, int slots)
{
    const tch_backend_host *host = tchi_cpu_host();
    if (!(kernel->entry->flags & TCHI_CPU_KERNEL_FIBERS) || kernel->slots >= slots) {
        return TCH_OK;
    }
    tchi_fibers **more = host->allocate((size_t)slots * sizeof(tchi_fibers *), _Alignof(tchi_fibers *));
    int made = kernel->slots;
    if (more != NULL && made > 0) {
        memcpy(more, kernel->fibers, (size_t)made * sizeof(tchi_fibers *));
    }
    while (more != NULL && made < slots && (more[made] = tchi_fibers_create()) != NULL) {
        made++;
    }
    if (more == NULL || made < slots) {
        for (int i = kernel->slots; i < made; i++) {
            tchi_fibers_destroy(more[i]);
        }
        if (more != NULL) {
            host->release(more, (size_t)slots * sizeof(tchi_fibers *));
        }
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: stacks for the threads of %d blocks", slots);
    }
    if (kernel->fibers != NULL) {
        host->release(kernel->fibers, (size_t)kernel->slots * sizeof(tchi_fibers *));
    }
    kernel->fibers = more;
    kernel->slots = slots;
    return TCH_OK;
}

static tch_status check_run(const tch_kernel_run *run)
{
    const tch_backend_host *host = tchi_cpu_host();
    if (run->grid[0] > INT32_MAX / run->block[0]) {
        return host->fail(TCH_ERR_UNSUPPORTED,
                          "a grid of %lld blocks of %lld threads along x: the CPU runs fewer than 2^31 threads along x",
                          (long long)run->grid[0], (long long)run->block[0]);
    }
    if (run->block[0] * run->block[1] * run->block[2] > TCHI_CPU_BLOCK_THREADS) {
        return host->fail(TCH_ERR_INVALID_ARGUMENT, "a block has at most %d threads", TCHI_CPU_BLOCK_THREADS);
    }
    if (run->shared_bytes > TCHI_CPU_KERNEL_SHARED) {
        return host->fail(TCH_ERR_INVALID_ARGUMENT,
                          "shared_bytes is %lld, a block on the CPU has at most %d bytes of dynamic shared memory",
                          (long long)run->shared_bytes, TCHI_CPU_KERNEL_SHARED);
    }
    return TCH_OK;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What a thread of somebody else's kernel costs is not known before: the first launch is divided, later ones go by what a
 * block took the last time. Two threads are worth it from 8 microseconds on: a region is started in one or two. */
static double estimate_work(const tchi_cpu_kernel *kernel, int64_t blocks)
{
    return kernel->block_seconds > 0.0 ? 5e10 * kernel->block_seconds * (double)blocks : 1e12;
}

tch_status tchi_cpu_kernel_launch(void *state, void *kernel, const tch_kernel_run *run)
{
    const tchi_cpu_state *s = state;
    tchi_cpu_kernel *k = kernel;
    int64_t blocks = run->grid[0] * run->grid[1] * run->grid[2];
    launch_job job = {.kernel = k, .launch.arguments = run->arguments};
    if (blocks == 0) {
        return TCH_OK;
    }
    tch_status status = check_run(run);
    if (status == TCH_OK) {
        status = have_slots(k, s->threads);
    }
    if (status != TCH_OK) {
        return status;
    }
    for (int i = 0; i < 3; i++) {
        job.launch.grid[i] = (uint32_t)run->grid[i];
        job.launch.block[i] = (uint32_t)run->block[i];
    }
    double work = estimate_work(k, blocks), start = now();
    tchi_cpu_split(s, blocks, work, run_blocks, &job);
    k->block_seconds = (now() - start) / (double)blocks * (blocks < s->threads ? (double)blocks : (double)s->threads);
    if (job.failed) {
        return tchi_cpu_host()->fail(TCH_ERR_BACKEND, "the kernel stopped: %s", job.message);
    }
    return TCH_OK;
}
