/* Runs blocks whose threads synchronize. Each thread runs on its own stack until it waits; when none can run, completed
 * waits are released with CUDA's rules: a returned thread counts as arrived. A wait that can never complete is an
 * error. A tchi_fibers serves one CPU thread and keeps its stacks from block to block.
 *
 * Stacks are not from the library's allocator: they need guard pages.
 *
 * Switching is a few instructions per architecture. An unknown TCHI_GUARD_ADVICE falls back to the guards of older
 * kernels. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER
#endif
#endif
#if defined(ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

#include "kernel.h"

#define LANES 32

/* Three quarters of Linux's 65530 mappings per process. */
#define MAPPINGS_MOST 49152

/* The largest step that -fstack-clash-protection takes without probing, on any processor. */
#define GUARD_BYTES 65536

#ifndef TCHI_GUARD_ADVICE
#define TCHI_GUARD_ADVICE 102 /* MADV_GUARD_INSTALL of Linux 6.13: memory inside a mapping that must not be touched */
#endif

typedef enum fiber_state { READY, WAITING, DONE } fiber_state;

typedef void *fiber_place; /* the stack pointer */

typedef struct fiber {
    fiber_state state;
    fiber_place place;
    tchi_cpu_wait wait;
    uint64_t answer;
} fiber;

/* Guard size and distance between stacks, in bytes. */
typedef struct stack_layout {
    size_t guard, stride;
} stack_layout;

struct tchi_fibers {
    tchi_cpu_launch launch;
    const tchi_cpu_kernel_entry *entry;
    char *stacks; /* `room` of them; NULL if there are none */
    int room;
    size_t stack_bytes; /* requested */
    stack_layout layout;
    int count;   /* threads of the block */
    int current; /* the running thread */
    int alive;
    int failed;
    fiber_place home;
    char message[256];
    fiber list[TCHI_CPU_BLOCK_THREADS];
};

/* --- switching -------------------------------------------------------------------------------------------------- */

static void run_thread(tchi_fibers *f);

/* Saves the stack pointer in *from and switches to `to`: the compiler handles caller-saved registers, the rest is on
 * the stack. A new stack starts in tchi_fiber_begin with its argument in r12 or x19, restored from the stack. */
void tchi_fiber_switch(void **from, void *to);
void tchi_fiber_begin(void);
void tchi_fiber_main(tchi_fibers *f);

__attribute__((visibility("hidden"), used)) void tchi_fiber_main(tchi_fibers *f)
{
    run_thread(f);
}

static void switch_fiber(fiber_place *from, fiber_place *to)
{
    tchi_fiber_switch(from, *to);
}

/* Stacks start at different cache lines of their pages: lines a page apart evict each other. */
static uintptr_t *top_of(const tchi_fibers *f, int number)
{
    return (uintptr_t *)(f->stacks + (size_t)(number + 1) * f->layout.stride - (size_t)(number % 64) * 64);
}

#if defined(__x86_64__)

/* The bytes are "endbr64", a valid target of indirect calls under CET; a no-op on older processors. */
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden tchi_fiber_switch\n"
        ".globl tchi_fiber_switch\n"
        ".type tchi_fiber_switch, @function\n"
        "tchi_fiber_switch:\n"
        "    .byte 0xf3, 0x0f, 0x1e, 0xfa\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size tchi_fiber_switch, . - tchi_fiber_switch\n"
        ".hidden tchi_fiber_begin\n"
        ".globl tchi_fiber_begin\n"
        ".type tchi_fiber_begin, @function\n"
        "tchi_fiber_begin:\n"
        "    movq %r12, %rdi\n"
        "    call tchi_fiber_main\n"
        "    hlt\n"
        ".size tchi_fiber_begin, . - tchi_fiber_begin\n");

/* From low to high: six registers in pop order, the return address, and two words that align the stack as the ABI
 * requires. */
static void set_up_stack(tchi_fibers *f, int number)
{
    uintptr_t *sp = top_of(f, number) - 9;
    memset(sp, 0, 9 * sizeof *sp);
    sp[3] = (uintptr_t)f; /* r12 */
    sp[6] = (uintptr_t)tchi_fiber_begin;
    f->list[number].place = sp;
}

#elif defined(__aarch64__)

/* Saves x19 to x28, the frame pointer x29, the return address x30 and the lower halves of v8 to v15. "hint #34" is "bti
 * c", a valid target of indirect calls; a no-op on older processors. The return address is stored as is: each function
 * has signed its own. */
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden tchi_fiber_switch\n"
        ".globl tchi_fiber_switch\n"
        ".type tchi_fiber_switch, %function\n"
        "tchi_fiber_switch:\n"
        "    hint #34\n"
        "    stp x19, x20, [sp, #-160]!\n"
        "    stp x21, x22, [sp, #16]\n"
        "    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n"
        "    stp x27, x28, [sp, #64]\n"
        "    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n"
        "    stp d10, d11, [sp, #112]\n"
        "    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n"
        "    str x9, [x0]\n"
        "    mov sp, x1\n"
        "    ldp x21, x22, [sp, #16]\n"
        "    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n"
        "    ldp x27, x28, [sp, #64]\n"
        "    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n"
        "    ldp d10, d11, [sp, #112]\n"
        "    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    ldp x19, x20, [sp], #160\n"
        "    ret\n"
        ".size tchi_fiber_switch, . - tchi_fiber_switch\n"
        ".hidden tchi_fiber_begin\n"
        ".globl tchi_fiber_begin\n"
        ".type tchi_fiber_begin, %function\n"
        "tchi_fiber_begin:\n"
        "    hint #34\n"
        "    mov x0, x19\n"
        "    bl tchi_fiber_main\n"
        "    brk #1\n"
        ".size tchi_fiber_begin, . - tchi_fiber_begin\n");

/* From low to high: the twenty words in store order. A frame pointer of 0 ends the backtrace. */
static void set_up_stack(tchi_fibers *f, int number)
{
    uintptr_t *sp = top_of(f, number) - 20;
    memset(sp, 0, 20 * sizeof *sp);
    sp[0] = (uintptr_t)f; /* x19 */
    sp[11] = (uintptr_t)tchi_fiber_begin;
    f->list[number].place = sp;
}

#else
#error "custom kernels need x86-64 or aarch64"
#endif

static void switch_home(tchi_fibers *f)
{
    switch_fiber(&f->list[f->current].place, &f->home);
}

static void run_thread(tchi_fibers *f)
{
    f->entry->thread(&f->launch, f->current);
    f->list[f->current].state = DONE;
    f->alive--;
    switch_home(f);
}

/* --- called by kernels ------------------------------------------------------------------------------------------- */

static uint64_t wait_on_fiber(void *runner, const tchi_cpu_wait *wait)
{
    tchi_fibers *f = runner;
    fiber *self = &f->list[f->current];
    self->wait = *wait;
    self->state = WAITING;
    switch_home(f);
    return self->answer;
}

static void fail_on_fiber(void *runner, const char *message)
{
    tchi_fibers *f = runner;
    f->failed = 1;
    snprintf(f->message, sizeof f->message, "%s", message);
    switch_home(f);
}

/* --- ending waits ------------------------------------------------------------------------------------------------ */

static int release_block(tchi_fibers *f)
{
    uint64_t held = 0;
    int waiting = 0;
    for (int i = 0; i < f->count; i++) {
        const fiber *one = &f->list[i];
        if (one->state == WAITING && one->wait.kind == TCHI_WAIT_BLOCK) {
            waiting++;
            held += one->wait.value;
        }
    }
    if (waiting == 0 || waiting < f->alive) {
        return 0;
    }
    for (int i = 0; i < f->count; i++) {
        if (f->list[i].state == WAITING) {
            f->list[i].answer = held;
            f->list[i].state = READY;
        }
    }
    return 1;
}

/* The lanes of `warp` with the same wait as lane `first`, or 0 while any is missing. */
static uint32_t gather_lanes(const fiber *warp, int lanes, int first)
{
    const tchi_cpu_wait *awaited = &warp[first].wait;
    uint32_t arrived = 0;
    for (int lane = 0; lane < lanes; lane++) {
        if (!(awaited->mask >> lane & 1) || warp[lane].state == DONE) {
            continue;
        }
        if (warp[lane].state != WAITING || warp[lane].wait.kind != awaited->kind ||
            warp[lane].wait.mask != awaited->mask) {
            return 0;
        }
        arrived |= (uint32_t)1 << lane;
    }
    return arrived;
}

/* Shuffling from an absent lane returns the caller's own value. */
static void answer_lanes(fiber *warp, uint32_t arrived)
{
    uint64_t votes = 0;
    for (int lane = 0; lane < LANES; lane++) {
        if (arrived >> lane & 1 && warp[lane].wait.kind == TCHI_WAIT_BALLOT && warp[lane].wait.value) {
            votes |= (uint64_t)1 << lane;
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (arrived >> lane & 1) {
            const tchi_cpu_wait *wait = &warp[lane].wait;
            int there = wait->source < LANES && (arrived >> wait->source & 1);
            warp[lane].answer = wait->kind == TCHI_WAIT_BALLOT ? votes
                                : there                        ? warp[wait->source].wait.value
                                                               : wait->value;
            warp[lane].state = READY;
        }
    }
}

static int release_warp(fiber *warp, int lanes)
{
    int released = 0;
    for (int lane = 0; lane < lanes; lane++) {
        if (warp[lane].state == WAITING && warp[lane].wait.kind != TCHI_WAIT_BLOCK) {
            uint32_t arrived = gather_lanes(warp, lanes, lane);
            /* A lane must be in its own mask, or it would never resume. */
            if (arrived >> lane & 1) {
                answer_lanes(warp, arrived);
                released = 1;
            }
        }
    }
    return released;
}

static int release_waiting(tchi_fibers *f)
{
    int released = release_block(f);
    for (int first = 0; !released && first < f->count; first += LANES) {
        int lanes = f->count - first < LANES ? f->count - first : LANES;
        released |= release_warp(f->list + first, lanes);
    }
    return released;
}

/* --- blocks ----------------------------------------------------------------------------------------------------- */

static void resume_all(tchi_fibers *f)
{
    for (int i = 0; i < f->count && !f->failed; i++) {
        if (f->list[i].state == READY) {
            f->current = i;
            switch_fiber(&f->home, &f->list[i].place);
        }
    }
}

static void report_deadlock(tchi_fibers *f, int64_t block)
{
    int number = 0;
    while (f->list[number].state != WAITING) {
        number++;
    }
    f->failed = 1;
    snprintf(
        f->message, sizeof f->message,
        "thread %d of block %lld waits at %s for threads that never come there: all of them must reach the same one",
        number, (long long)block,
        f->list[number].wait.kind == TCHI_WAIT_BLOCK ? "__syncthreads()" : "a shuffle, vote or __syncwarp()");
}

/* AddressSanitizer poisons the surroundings of a frame until the function returns, which threads of a failed launch
 * never do. */
static void clear_marks(const tchi_fibers *f)
{
#if defined(ADDRESS_SANITIZER)
    ASAN_UNPOISON_MEMORY_REGION(f->stacks, (size_t)f->room * f->layout.stride);
#endif
}

static void run_block(tchi_fibers *f, int64_t block)
{
    f->entry->enter(&f->launch, block);
    f->alive = f->count;
    for (int i = 0; i < f->count; i++) {
        f->list[i].state = READY;
        set_up_stack(f, i);
    }
    while (f->alive > 0 && !f->failed) {
        resume_all(f);
        if (f->alive > 0 && !f->failed && !release_waiting(f)) {
            report_deadlock(f, block);
        }
    }
}

const char *tchi_fibers_run(tchi_fibers *f, const tchi_cpu_kernel_entry *entry, const tchi_cpu_launch *launch,
                            int64_t from, int64_t to)
{
    f->launch = *launch;
    f->launch.runner = f;
    f->launch.wait = wait_on_fiber;
    f->launch.fail = fail_on_fiber;
    f->entry = entry;
    f->count = (int)(launch->block[0] * launch->block[1] * launch->block[2]);
    f->failed = 0;
    for (int64_t block = from; block < to && !f->failed; block++) {
        run_block(f, block);
    }
    if (f->failed) {
        clear_marks(f);
    }
    return f->failed ? f->message : NULL;
}

/* --- memory ----------------------------------------------------------------------------------------------------- */

static size_t whole_pages(size_t bytes, size_t page)
{
    return (bytes + page - 1) / page * page;
}

/* Pages are 4 KiB, 16 or 64 on some ARM kernels; only whole pages can be protected. */
static stack_layout lay_out_stack(size_t page, size_t stack_bytes)
{
    size_t guard = whole_pages(GUARD_BYTES, page);
    return (stack_layout){guard, guard + whole_pages(stack_bytes, page)};
}

static char *map_memory(size_t bytes)
{
    /* cppcheck-suppress invalidFunctionArg ; memory without a file is asked for with -1 */
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    /* cppcheck-suppress memleak ; it is the caller's */
    return at == MAP_FAILED ? NULL : at;
}

/* Without guard pages each guard splits one mapping into three. */
static int set_guards(char *stacks, int count, const stack_layout *layout)
{
    for (int i = 0; i < count; i++) {
        char *at = stacks + (size_t)i * layout->stride;
        if (madvise(at, layout->guard, TCHI_GUARD_ADVICE) != 0 && mprotect(at, layout->guard, PROT_NONE) != 0) {
            return -1;
        }
    }
    return 0;
}

/* Untouched pages cost only address space. */
static int map_stacks(tchi_fibers *f, size_t page, int count, size_t stack_bytes)
{
    stack_layout layout = lay_out_stack(page, stack_bytes);
    size_t bytes = (size_t)count * layout.stride;
    char *stacks = map_memory(bytes);
    if (stacks == NULL) {
        return -1;
    }
    if (set_guards(stacks, count, &layout) != 0) {
        munmap(stacks, bytes);
        return -1;
    }
    f->stacks = stacks, f->room = count, f->stack_bytes = stack_bytes, f->layout = layout;
    return 0;
}

static void unmap_stacks(tchi_fibers *f)
{
    if (f->stacks != NULL) {
        munmap(f->stacks, (size_t)f->room * f->layout.stride);
    }
    f->stacks = NULL, f->room = 0, f->stack_bytes = 0;
}

tchi_fibers *tchi_fibers_create(void)
{
    tchi_fibers *f = tchi_cpu_host()->allocate(sizeof *f, _Alignof(tchi_fibers));
    if (f != NULL) {
        f->stacks = NULL, f->room = 0, f->stack_bytes = 0;
    }
    return f;
}

int tchi_fibers_fit(const tchi_fibers *f, int threads, size_t stack_bytes)
{
    return threads <= f->room && stack_bytes <= f->stack_bytes;
}

/* Grows to the maximum of both sizes, so that two alternating kernels do not remap each time; if that is too much, only
 * what is needed now. */
int tchi_fibers_reserve(tchi_fibers *f, int threads, size_t stack_bytes)
{
    if (tchi_fibers_fit(f, threads, stack_bytes)) {
        return 0;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int most_threads = threads > f->room ? threads : f->room;
    size_t most_bytes = stack_bytes > f->stack_bytes ? stack_bytes : f->stack_bytes;
    unmap_stacks(f);
    int failed = map_stacks(f, page, most_threads, most_bytes) != 0 && map_stacks(f, page, threads, stack_bytes) != 0;
    return failed ? -1 : 0;
}

static int guards_are_mappings(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *trial = map_memory(page);
    int are = trial == NULL || madvise(trial, page, TCHI_GUARD_ADVICE) != 0;
    if (trial != NULL) {
        munmap(trial, page);
    }
    return are;
}

int tchi_fibers_most(int threads)
{
    if (!guards_are_mappings()) {
        return INT_MAX;
    }
    return MAPPINGS_MOST / (2 * threads);
}

void tchi_fibers_destroy(tchi_fibers *f)
{
    unmap_stacks(f);
    tchi_cpu_host()->release(f, sizeof *f);
}
