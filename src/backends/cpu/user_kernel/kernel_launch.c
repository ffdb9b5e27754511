/* Running a kernel: blocks are divided among the threads of the CPU. A kernel whose threads never wait runs in the
 * loops that were compiled into it; one whose threads do runs on fibers. */
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include "kernel.h"

typedef struct launch_ctx {
    const tchi_cpu_kernel *kernel;
    tchi_cpu_launch launch;
    struct tchi_fibers **fibers;
    int next_slot;
    int failed; /* whoever sets it first writes the message */
    char message[512];
} launch_ctx;

/* Where a kernel without fibers goes when it gives up: an assertion, __trap(). */
typedef struct plain_runner {
    jmp_buf back;
    launch_ctx *ctx;
} plain_runner;

static void keep_message(launch_ctx *ctx, const char *message)
{
    if (!__atomic_exchange_n(&ctx->failed, 1, __ATOMIC_RELAXED)) {
        snprintf(ctx->message, sizeof ctx->message, "%s", message);
    }
}

static void fail_plain(void *runner, const char *message)
{
    plain_runner *r = runner;
    keep_message(r->ctx, message);
    longjmp(r->back, 1);
}

static void run_plain_blocks(launch_ctx *ctx, int64_t from, int64_t to)
{
    plain_runner runner = {.ctx = ctx};
    tchi_cpu_launch launch = ctx->launch;
    launch.runner = &runner;
    launch.fail = fail_plain;
    if (setjmp(runner.back) == 0) {
        ctx->kernel->entry->run(&launch, from, to);
    }
}

static void run_fiber_blocks(launch_ctx *ctx, int64_t from, int64_t to)
{
    int slot = __atomic_fetch_add(&ctx->next_slot, 1, __ATOMIC_RELAXED);
    const char *why = tchi_fibers_run(ctx->fibers[slot], ctx->kernel->entry, &ctx->launch, from, to);
    if (why != NULL) {
        keep_message(ctx, why);
    }
}

static void run_blocks(void *argument, int64_t from, int64_t to)
{
    launch_ctx *ctx = argument;
    if (from == to) {
        return;
    }
    if (ctx->kernel->entry->flags & TCHI_CPU_KERNEL_FIBERS) {
        run_fiber_blocks(ctx, from, to);
    } else {
        run_plain_blocks(ctx, from, to);
    }
}

/* --- stacks ------------------------------------------------------------------------------------------------------ */

/* Stacks for the threads of a block, in a slot of the state. Nonzero where memory is short. */
static int reserve_slot(tchi_cpu_state *s, int slot, int threads, size_t stack_bytes)
{
    if (slot >= TCHI_CPU_FIBER_SLOTS || slot >= tchi_fibers_most(threads)) {
        return -1;
    }
    if (s->fibers[slot] == NULL) {
        s->fibers[slot] = tchi_fibers_create();
    }
    return s->fibers[slot] != NULL ? tchi_fibers_reserve(s->fibers[slot], threads, stack_bytes) : -1;
}

/* How many threads of the CPU have stacks for the threads of a block each: as many as asked for, or as there is memory
 * for. */
static int reserve_slots(tchi_cpu_state *s, int slots, int threads, size_t stack_bytes)
{
    const tch_backend_host *host = tchi_cpu_host();
    int ready = 0;
    if (s->fibers == NULL) {
        s->fibers = host->allocate(TCHI_CPU_FIBER_SLOTS * sizeof(tchi_fibers *), _Alignof(tchi_fibers *));
        if (s->fibers == NULL) {
            return 0;
        }
        memset(s->fibers, 0, TCHI_CPU_FIBER_SLOTS * sizeof(tchi_fibers *));
    }
    while (ready < slots && ((s->fibers[ready] != NULL && tchi_fibers_fit(s->fibers[ready], threads, stack_bytes)) ||
                             reserve_slot(s, ready, threads, stack_bytes) == 0)) {
        ready++;
    }
    return ready;
}

/* The threads of the CPU that take part in a launch. */
static tch_status count_slots(tchi_cpu_state *s, const tchi_cpu_kernel *kernel, const tch_kernel_run *run, int *slots)
{
    int64_t blocks = run->grid[0] * run->grid[1] * run->grid[2];
    int threads = (int)(run->block[0] * run->block[1] * run->block[2]);
    *slots = s->threads;
    if (!(kernel->entry->flags & TCHI_CPU_KERNEL_FIBERS)) {
        return TCH_OK;
    }
    *slots = reserve_slots(s, blocks < s->threads ? (int)blocks : s->threads, threads, kernel->stack_bytes);
    if (*slots == 0) {
        return tchi_cpu_host()->fail(TCH_ERR_OUT_OF_MEMORY,
                                     "out of host memory: stacks of %zu bytes for the %d threads of a block",
                                     kernel->stack_bytes, threads);
    }
    return TCH_OK;
}

void tchi_cpu_kernel_leave(tchi_cpu_state *s)
{
    for (int i = 0; s->fibers != NULL && i < TCHI_CPU_FIBER_SLOTS; i++) {
        if (s->fibers[i] != NULL) {
            tchi_fibers_destroy(s->fibers[i]);
        }
    }
    if (s->fibers != NULL) {
        tchi_cpu_host()->release(s->fibers, TCHI_CPU_FIBER_SLOTS * sizeof(tchi_fibers *));
    }
}

/* --- the launch -------------------------------------------------------------------------------------------------- */

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

/* What a thread of somebody else's kernel costs is not known before: the first launch is divided, later ones go by what
 * a block took the last time. Two threads are worth it from 8 microseconds on: a region is started in one or two. */
static double estimate_work(const tchi_cpu_kernel *kernel, int64_t blocks)
{
    return kernel->block_seconds > 0.0 ? 5e10 * kernel->block_seconds * (double)blocks : 1e12;
}

tch_status tchi_cpu_kernel_launch(void *state, void *kernel, const tch_kernel_run *run)
{
    tchi_cpu_state part = *(tchi_cpu_state *)state; /* with as many threads as take part */
    tchi_cpu_kernel *k = kernel;
    int64_t blocks = run->grid[0] * run->grid[1] * run->grid[2];
    launch_ctx ctx = {.kernel = k, .launch.arguments = run->arguments};
    if (blocks == 0) {
        return TCH_OK;
    }
    tch_status status = check_run(run);
    if (status == TCH_OK) {
        status = count_slots(state, k, run, &part.threads);
    }
    if (status != TCH_OK) {
        return status;
    }
    ctx.fibers = ((tchi_cpu_state *)state)->fibers;
    for (int i = 0; i < 3; i++) {
        ctx.launch.grid[i] = (uint32_t)run->grid[i];
        ctx.launch.block[i] = (uint32_t)run->block[i];
    }
    double work = estimate_work(k, blocks), start = tchi_seconds_now();
    tchi_cpu_split(&part, blocks, work, run_blocks, &ctx);
    k->block_seconds =
        (tchi_seconds_now() - start) / (double)blocks * (double)(blocks < part.threads ? blocks : part.threads);
    if (ctx.failed) {
        return tchi_cpu_host()->fail(TCH_ERR_BACKEND, "the kernel stopped: %s", ctx.message);
    }
    return TCH_OK;
}
