/* Loads an image, runs its kernel and unloads it. Blocks are divided among CPU threads: kernels without synchronization
 * run as compiled loops, others on fibers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel.h"

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* dlopen trusts its input, so check that it is a complete object of this machine. */
static tch_status check_image(const tch_kernel_image *image, tchi_cpu_image_header *read)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_image_header header;
    Elf64_Ehdr elf;
    if (image->bytes < sizeof header + sizeof elf) {
        return host->fail(TCH_ERR_IO, "a compiled kernel is damaged: it has %zu bytes", image->bytes);
    }
    memcpy(&header, image->data, sizeof header);
    memcpy(&elf, (const char *)image->data + sizeof header, sizeof elf);
    *read = header;
    if (memcmp(header.magic, TCHI_CPU_KERNEL_MAGIC, sizeof header.magic) != 0 || header.bytes < sizeof elf ||
        header.bytes != image->bytes - sizeof header) {
        return host->fail(TCH_ERR_IO, "a compiled kernel is damaged: its header is not that of a kernel for the CPU");
    }
    if (memcmp(elf.e_ident, ELFMAG, SELFMAG) != 0 || elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_type != ET_DYN ||
        elf.e_shoff > header.bytes || (uint64_t)elf.e_shnum * elf.e_shentsize > header.bytes - elf.e_shoff ||
        elf.e_phoff > header.bytes || (uint64_t)elf.e_phnum * elf.e_phentsize > header.bytes - elf.e_phoff) {
        return host->fail(TCH_ERR_IO, "a compiled kernel is damaged: it is not a whole shared object");
    }
    return TCH_OK;
}

static void *open_file(int file, const char *path, const char *data, size_t bytes)
{
    return write(file, data, bytes) == (ssize_t)bytes ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

/* *held, if not negative, stays open while the object is loaded: the loader identifies objects by path and would
 * mistake the next one with the same descriptor for this one. */
static void *open_object(const char *data, size_t bytes, int *held)
{
    char path[64];
    void *library = NULL;
    int file = memfd_create("torchium-kernel", MFD_CLOEXEC);
    *held = -1;
    if (file >= 0) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        library = open_file(file, path, data, bytes);
        if (library != NULL) {
            *held = file;
        } else {
            close(file);
        }
    }
    if (library == NULL) {
        snprintf(path, sizeof path, P_tmpdir "/torchium-kernel-XXXXXX");
        file = mkostemp(path, O_CLOEXEC);
        if (file >= 0) {
            library = open_file(file, path, data, bytes);
            close(file);
            unlink(path);
        }
    }
    return library;
}

static tch_status find_description(tchi_cpu_kernel *kernel)
{
    kernel->entry = dlsym(kernel->library, "tchi_kernel");
    kernel->signature = dlsym(kernel->library, "tchi_signature");
    if (kernel->entry == NULL || kernel->signature == NULL || kernel->entry->abi != TCHI_CPU_KERNEL_ABI) {
        return tchi_cpu_host()->fail(TCH_ERR_IO, "a compiled kernel is damaged: it lacks its description");
    }
    return TCH_OK;
}

/* On the CPU a thread of a block is a loop iteration: block size hardly matters, and blocks are divided among
 * threads. */
static void describe_kernel(const tchi_cpu_state *state, const tchi_cpu_kernel *k, tch_kernel_info *info, int32_t room,
                            tch_kernel_parameter *parameters)
{
    const int32_t *numbers = k->signature + 1;
    info->parameters = k->signature[0];
    info->registers = 0;
    info->shared_bytes = 0;
    info->local_bytes = 0;
    info->max_threads = TCHI_CPU_BLOCK_THREADS;
    info->suggested_threads = 256;
    info->suggested_blocks = 4 * state->threads;
    for (int32_t i = 0; i < room && i < info->parameters; i++, numbers += 6) {
        parameters[i] = (tch_kernel_parameter){.what = (tch_parameter_class)numbers[0],
                                               .size = numbers[1],
                                               .pointee = (tch_parameter_class)numbers[2],
                                               .pointee_size = numbers[3],
                                               .is_const = numbers[4],
                                               .is_brain = numbers[5]};
    }
}

tch_status tchi_cpu_kernel_load(void *state, const tch_kernel_image *image, void **kernel, tch_kernel_info *info,
                                int32_t room, tch_kernel_parameter *parameters)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_image_header header = {0};
    tchi_cpu_kernel *k;
    TCHI_TRY(check_image(image, &header));
    TCHI_TRY(tchi_backend_take(host, sizeof *k, "a kernel", &k));
    tch_status status = TCH_OK;
    k->stack_bytes = (size_t)header.stack_bytes;
    k->library = open_object((const char *)image->data + sizeof header, (size_t)header.bytes, &k->file);
    if (k->library == NULL) {
        const char *why = dlerror();
        status =
            host->fail(TCH_ERR_IO, "a compiled kernel cannot be loaded: %.300s", why != NULL ? why : "not written");
    } else {
        status = find_description(k);
    }
    if (status != TCH_OK) {
        tchi_cpu_kernel_unload(state, k);
        return status;
    }
    describe_kernel(state, k, info, room, parameters);
    *kernel = k;
    return TCH_OK;
}

/* The file is closed last, so that no other file can get its path. */
void tchi_cpu_kernel_unload(void *state, void *kernel)
{
    tchi_cpu_kernel *k = kernel;
    if (k->library != NULL) {
        dlclose(k->library);
    }
    if (k->file >= 0) {
        close(k->file);
    }
    tchi_cpu_host()->release(k, sizeof *k);
}

/* --- running ----------------------------------------------------------------------------------------------------- */

typedef struct launch_ctx {
    const tchi_cpu_kernel *kernel;
    tchi_cpu_launch launch;
    struct tchi_fibers **fibers;
    int next_slot;
    int failed; /* the thread that sets it first writes the message */
    char message[512];
} launch_ctx;

/* The return point of a kernel without fibers on an assertion or __trap(). */
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

/* Reserves stacks for a block in a slot of the state; nonzero if memory is short. */
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

/* The number of CPU threads with stacks for a block each: as requested, or as memory allows. */
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

/* The number of CPU threads for a launch. */
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

/* The cost of a kernel is unknown at first: the first launch is divided, later ones use the last time per block. Two
 * threads pay from 8 microseconds on: starting a region takes one or two. */
tch_status tchi_cpu_kernel_launch(void *state, void *kernel, const tch_kernel_run *run)
{
    tchi_cpu_state part = *(tchi_cpu_state *)state; /* with as many threads as take part */
    tchi_cpu_kernel *k = kernel;
    int64_t blocks = run->grid[0] * run->grid[1] * run->grid[2];
    launch_ctx ctx = {.kernel = k, .launch.arguments = run->arguments};
    if (blocks == 0) {
        return TCH_OK;
    }
    TCHI_TRY(check_run(run));
    TCHI_TRY(count_slots(state, k, run, &part.threads));
    ctx.fibers = ((tchi_cpu_state *)state)->fibers;
    for (int i = 0; i < 3; i++) {
        ctx.launch.grid[i] = (uint32_t)run->grid[i];
        ctx.launch.block[i] = (uint32_t)run->block[i];
    }
    double work = k->block_seconds > 0.0 ? 5e10 * k->block_seconds * (double)blocks : 1e12, start = tchi_seconds_now();
    tchi_cpu_split(&part, blocks, work, run_blocks, &ctx);
    k->block_seconds =
        (tchi_seconds_now() - start) / (double)blocks * (double)(blocks < part.threads ? blocks : part.threads);
    if (ctx.failed) {
        return tchi_cpu_host()->fail(TCH_ERR_BACKEND, "the kernel stopped: %s", ctx.message);
    }
    return TCH_OK;
}
