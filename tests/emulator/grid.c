/* Runs launches: clusters in sequence, the threads of a cluster in turns. It includes the fibers of custom kernels for
 * stacks, switches, and barriers of warps and blocks; it adds clusters, named barriers, mbarriers, and an order of
 * threads that changes between turns, so that a missing barrier is not hidden by a fixed order.
 *
 * TORCHIUM_EMULATOR_ORDER is forward, backward or, by default, mixed. TORCHIUM_EMULATOR_LOG is a file to which the name
 * of every kernel that ran is appended. */
#include "backends/cpu/user_kernel/kernel_fibers.c"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>

#include "inside.h"

enum { STACK_BYTES = 262144, WARPS = TCHI_CPU_BLOCK_THREADS / LANES };

/* --- required by kernel_fibers.c --------------------------------------------------------------------------------- */

static void *allocate(size_t bytes, size_t alignment)
{
    return calloc(1, bytes);
}

static void give_back(void *pointer, size_t bytes)
{
    free(pointer);
}

static const tch_backend_host fiber_host = {
    .struct_size = sizeof fiber_host, .allocate = allocate, .release = give_back};

const tch_backend_host *tchi_cpu_host(void)
{
    return &fiber_host;
}

/* --- one machine per CPU thread ---------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t machines;
static enum { MIXED, FORWARD, BACKWARD } order;

static void end_block(emulated_block *b)
{
    if (b->fibers != NULL) {
        tchi_fibers_destroy(b->fibers);
        for (int i = 0; i < TCHI_CPU_BLOCK_THREADS; i++) {
            free(b->work[i].copies.items);
            free(b->work[i].products.items);
            free(b->work[i].stores.items);
        }
        free(b->work);
        free(b->records);
    }
}

static void end_machine(void *ended)
{
    machine *m = ended;
    for (int i = 0; i < EMULATOR_CLUSTER_MOST; i++) {
        end_block(&m->blocks[i]);
    }
    free(m->loads.items);
    free(m);
}

static void prepare(void)
{
    const char *wanted = getenv("TORCHIUM_EMULATOR_ORDER");
    pthread_key_create(&machines, end_machine);
    if (wanted != NULL) {
        order = strcmp(wanted, "forward") == 0 ? FORWARD : strcmp(wanted, "backward") == 0 ? BACKWARD : MIXED;
    }
}

static void *memory(size_t count, size_t bytes)
{
    void *made = calloc(count, bytes);
    if (made == NULL) {
        fprintf(stderr, "emulator: out of memory\n");
        abort();
    }
    return made;
}

static _Thread_local machine *mine;

machine *emulator_machine(void)
{
    if (mine == NULL) {
        pthread_once(&once, prepare);
        mine = memory(1, sizeof *mine);
        mine->random = 1;
        pthread_setspecific(machines, mine);
    }
    return mine;
}

/* pthreads does not destroy the main thread's machine. */
__attribute__((destructor)) static void end_last_machine(void)
{
    if (mine != NULL) {
        pthread_setspecific(machines, NULL);
        end_machine(mine);
    }
}

static emulated_block *open_block(machine *m, int rank)
{
    emulated_block *b = &m->blocks[rank];
    if (b->fibers == NULL) {
        b->fibers = tchi_fibers_create();
        b->work = memory(TCHI_CPU_BLOCK_THREADS, sizeof *b->work);
        b->records = memory((size_t)WARPS * 2 * LANES, EMULATOR_RECORD);
    }
    return b;
}

void *list_add(list *l, size_t item_bytes)
{
    if (l->count == l->room) {
        l->room = l->room == 0 ? 16 : 2 * l->room;
        l->items = realloc(l->items, l->room * item_bytes);
        if (l->items == NULL) {
            fprintf(stderr, "emulator: out of memory\n");
            abort();
        }
    }
    return (char *)l->items + item_bytes * l->count++;
}

/* --- called by kernels ------------------------------------------------------------------------------------------- */

int emulator_thread(void)
{
    return emulator_machine()->now->fibers->current;
}

thread_work *emulator_work(void)
{
    return &emulator_machine()->now->work[emulator_thread()];
}

int emulator_cluster_rank(void)
{
    return emulator_machine()->now->rank;
}

int emulator_cluster_size(void)
{
    return emulator_machine()->count;
}

void emulator_fail(const char *format, ...)
{
    machine *m = emulator_machine();
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fail_on_fiber(m->now->fibers, text);
    abort(); /* a thread that has failed is never resumed */
}

const unsigned char *emulator_leave(const void *record, size_t bytes)
{
    emulated_block *b = emulator_machine()->now;
    int thread = b->fibers->current;
    int turn = b->work[thread].turn ^= 1;
    unsigned char *records = b->records + (size_t)(thread / LANES * 2 + turn) * LANES * EMULATOR_RECORD;
    memcpy(records + (size_t)(thread % LANES) * EMULATOR_RECORD, record, bytes);
    return records;
}

static void log_kernel(const char *name)
{
    const char *path = getenv("TORCHIUM_EMULATOR_LOG");
    char line[256];
    int length = snprintf(line, sizeof line, "%s\n", name);
    int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (file >= 0) {
        if (write(file, line, (size_t)length) != length) {
            fprintf(stderr, "emulator: cannot write to %s\n", path);
        }
        close(file);
    }
}

void emulator_enter_kernel(emulator_kernel_note *note, int most_threads)
{
    machine *m = emulator_machine();
    m->kernel = note->name;
    if (!__atomic_exchange_n(&note->seen, 1, __ATOMIC_RELAXED)) {
        log_kernel(note->name);
    }
    if (most_threads > 0 && m->now->fibers->count > most_threads) {
        emulator_fail("launched with blocks of %d threads, but its launch bounds are %d", m->now->fibers->count,
                      most_threads);
    }
}

/* --- ending waits ------------------------------------------------------------------------------------------------ */

static int waits_for(const fiber *one, int kind)
{
    return one->state == WAITING && one->wait.kind == kind;
}

static int is_warp_wait(const fiber *one)
{
    return waits_for(one, TCHI_WAIT_SHUFFLE) || waits_for(one, TCHI_WAIT_BALLOT) ||
           waits_for(one, EMULATOR_WAIT_EXCHANGE);
}

static int release_lanes(fiber *warp, int lanes)
{
    int released = 0;
    for (int lane = 0; lane < lanes; lane++) {
        if (is_warp_wait(&warp[lane])) {
            uint32_t come = gather_lanes(warp, lanes, lane);
            if (come >> lane & 1) {
                answer_lanes(warp, come);
                released = 1;
            }
        }
    }
    return released;
}

/* Where a thread waits for its block: the source file and line, whose address is part of the wait. */
static const char *place_of(const tchi_cpu_wait *wait)
{
    uintptr_t address = (uintptr_t)((uint64_t)wait->mask << 32 | wait->source);
    return address != 0 ? (const char *)address : "__syncthreads()";
}

/* All waiting threads of a block must be at the same barrier. */
static int at_one_barrier(emulated_block *b)
{
    tchi_fibers *f = b->fibers;
    const fiber *first = NULL;
    for (int i = 0; i < f->count; i++) {
        const fiber *one = &f->list[i];
        if (!waits_for(one, TCHI_WAIT_BLOCK)) {
            continue;
        }
        first = first == NULL ? one : first;
        if (strcmp(place_of(&one->wait), place_of(&first->wait)) != 0) {
            f->failed = 1;
            snprintf(f->message, sizeof f->message,
                     "thread %d waits for its block at %s, thread %d at %s: all must reach the same barrier",
                     (int)(first - f->list), place_of(&first->wait), i, place_of(&one->wait));
            return 0;
        }
    }
    return 1;
}

static int release_whole(emulated_block *b)
{
    tchi_fibers *f = b->fibers;
    int waiting = 0;
    for (int i = 0; i < f->count; i++) {
        waiting += waits_for(&f->list[i], TCHI_WAIT_BLOCK);
    }
    return waiting > 0 && waiting == f->alive && at_one_barrier(b) && release_block(f);
}

/* Barrier `number` of a block, once as many threads have arrived as each expects. */
static int release_named(emulated_block *b)
{
    tchi_fibers *f = b->fibers;
    int come[16] = {0};
    int released = 0;
    for (int i = 0; i < f->count; i++) {
        if (waits_for(&f->list[i], EMULATOR_WAIT_NAMED)) {
            come[f->list[i].wait.mask % 16]++;
        }
    }
    for (int i = 0; i < f->count; i++) {
        fiber *one = &f->list[i];
        if (waits_for(one, EMULATOR_WAIT_NAMED) && come[one->wait.mask % 16] == (int)one->wait.source) {
            one->state = READY;
            released = 1;
        }
    }
    return released;
}

static int release_phases(emulated_block *b)
{
    tchi_fibers *f = b->fibers;
    int released = 0;
    for (int i = 0; i < f->count; i++) {
        fiber *one = &f->list[i];
        if (waits_for(one, EMULATOR_WAIT_PHASE) &&
            emulator_barrier_has_ended((const uint64_t *)(uintptr_t)one->wait.value, (int)one->wait.source)) {
            one->state = READY;
            released = 1;
        }
    }
    return released;
}

static int release_cluster(machine *m)
{
    int waiting = 0;
    int alive = 0;
    for (int b = 0; b < m->count; b++) {
        tchi_fibers *f = m->blocks[b].fibers;
        alive += f->alive;
        for (int i = 0; i < f->count; i++) {
            waiting += waits_for(&f->list[i], EMULATOR_WAIT_CLUSTER);
        }
    }
    if (waiting == 0 || waiting < alive) {
        return 0;
    }
    for (int b = 0; b < m->count; b++) {
        tchi_fibers *f = m->blocks[b].fibers;
        for (int i = 0; i < f->count; i++) {
            if (waits_for(&f->list[i], EMULATOR_WAIT_CLUSTER)) {
                f->list[i].state = READY;
            }
        }
    }
    return 1;
}

/* --- turns ------------------------------------------------------------------------------------------------------- */

/* Whether the next turn is in reverse order. */
static int go_backward(machine *m)
{
    m->random = m->random * 6364136223846793005u + 1442695040888963407u;
    return order == BACKWARD || (order == MIXED && m->random >> 63);
}

static int run_lanes(emulated_block *b, int first, int lanes, int backward)
{
    tchi_fibers *f = b->fibers;
    int ran = 0;
    for (int n = 0; n < lanes && !f->failed; n++) {
        int i = first + (backward ? lanes - 1 - n : n);
        if (f->list[i].state == READY) {
            f->current = i;
            switch_fiber(&f->home, &f->list[i].place);
            ran = 1;
            if (f->list[i].state == DONE) {
                emulator_finish_stores(&b->work[i]);
            }
        }
    }
    return ran;
}

/* Runs a warp until none of its lanes can continue. */
static int run_warp(machine *m, emulated_block *b, int warp)
{
    tchi_fibers *f = b->fibers;
    int first = warp * LANES;
    int lanes = f->count - first < LANES ? f->count - first : LANES;
    int ran = 0;
    do {
        ran |= run_lanes(b, first, lanes, go_backward(m));
    } while (!f->failed && release_lanes(f->list + first, lanes));
    return ran;
}

static int run_warps(machine *m, emulated_block *b)
{
    tchi_fibers *f = b->fibers;
    int warps = (f->count + LANES - 1) / LANES;
    int backward = go_backward(m);
    int ran = 0;
    m->now = b;
    if (f->alive == 0) {
        return 0;
    }
    f->entry->enter(&f->launch, b->number);
    for (int n = 0; n < warps && !f->failed; n++) {
        ran |= run_warp(m, b, backward ? warps - 1 - n : n);
    }
    return ran;
}

static const char *name_of_wait(const tchi_cpu_wait *wait)
{
    switch (wait->kind) {
    case TCHI_WAIT_BLOCK:
        return place_of(wait);
    case EMULATOR_WAIT_EXCHANGE:
        return "an instruction of the whole warp (mma, ldmatrix)";
    case EMULATOR_WAIT_NAMED:
        return "a named barrier";
    case EMULATOR_WAIT_CLUSTER:
        return "the cluster's barrier";
    case EMULATOR_WAIT_PHASE:
        return "a barrier in shared memory";
    default:
        return "a shuffle, vote or __syncwarp()";
    }
}

/* Names one thread per kind of wait, since the missing one is usually at another. */
static void explain_deadlock(machine *m)
{
    const char *named = NULL;
    size_t used = (size_t)snprintf(m->message, sizeof m->message, "threads wait for others that never come:");
    for (int b = 0; b < m->count; b++) {
        tchi_fibers *f = m->blocks[b].fibers;
        for (int i = 0; i < f->count && used < sizeof m->message / 2; i++) {
            const char *at = f->list[i].state == WAITING ? name_of_wait(&f->list[i].wait) : named;
            if (at != named) {
                used += (size_t)snprintf(m->message + used, sizeof m->message - used, " thread %d of block %lld at %s;",
                                         i, (long long)m->blocks[b].number, at);
                named = at;
            }
        }
    }
}

/* --- clusters ---------------------------------------------------------------------------------------------------- */

static void begin_block(machine *m, int rank, int64_t number)
{
    emulated_block *b = open_block(m, rank);
    tchi_fibers *f = b->fibers;
    const emulator_launch *l = m->launch;
    b->number = number;
    b->rank = rank;
    memcpy(f->launch.grid, l->grid, sizeof l->grid);
    memcpy(f->launch.block, l->block, sizeof l->block);
    f->launch.arguments = (const void *const *)l->closure;
    f->launch.runner = f;
    f->launch.wait = wait_on_fiber;
    f->launch.fail = fail_on_fiber;
    f->entry = l->entry;
    f->count = (int)(l->block[0] * l->block[1] * l->block[2]);
    f->alive = f->count;
    f->failed = 0;
    emulator_shared_begin(b, (size_t)l->shared);
    for (int i = 0; i < f->count; i++) {
        f->list[i].state = READY;
        set_up_stack(f, i);
        emulator_forget_work(&b->work[i]);
    }
}

static int any_alive(const machine *m)
{
    int alive = 0;
    for (int b = 0; b < m->count; b++) {
        alive += m->blocks[b].fibers->alive;
    }
    return alive;
}

/* The first block that has failed, or NULL. */
static const emulated_block *failed_block(const machine *m)
{
    for (int b = 0; b < m->count; b++) {
        if (m->blocks[b].fibers->failed) {
            return &m->blocks[b];
        }
    }
    return NULL;
}

static int turn(machine *m)
{
    int moved = 0;
    for (int b = 0; b < m->count && failed_block(m) == NULL; b++) {
        emulated_block *block = &m->blocks[b];
        moved |= run_warps(m, block);
        moved |= release_whole(block) | release_named(block) | release_phases(block);
    }
    return moved | release_cluster(m) | emulator_deliver_loads(m);
}

static int end_blocks(machine *m)
{
    int good = 1;
    for (int b = 0; b < m->count; b++) {
        good &= emulator_shared_end(&m->blocks[b], m->message, sizeof m->message);
    }
    return good;
}

static int run_cluster(machine *m, int64_t first)
{
    for (int b = 0; b < m->count; b++) {
        begin_block(m, b, first + b);
    }
    while (any_alive(m) > 0) {
        int moved = turn(m);
        const emulated_block *failed = failed_block(m);
        if (failed != NULL) {
            snprintf(m->message, sizeof m->message, "block %lld, thread %d: %s", (long long)failed->number,
                     failed->fibers->current, failed->fibers->message);
            return -1;
        }
        if (!moved) {
            explain_deadlock(m);
            return -1;
        }
    }
    return end_blocks(m) ? 0 : -1;
}

static int reserve(machine *m)
{
    int threads = (int)(m->launch->block[0] * m->launch->block[1] * m->launch->block[2]);
    for (int b = 0; b < m->count; b++) {
        if (tchi_fibers_reserve(open_block(m, b)->fibers, threads, STACK_BYTES) != 0) {
            snprintf(m->message, sizeof m->message, "no memory for the stacks of %d threads", threads);
            return -1;
        }
    }
    return 0;
}

/* Launches that CUDA rejects. */
static int check_shape(machine *m)
{
    const emulator_launch *l = m->launch;
    uint64_t threads = (uint64_t)l->block[0] * l->block[1] * l->block[2];
    uint64_t blocks = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
    int good = threads > 0 && threads <= TCHI_CPU_BLOCK_THREADS && blocks > 0 && l->grid[0] <= INT_MAX &&
               l->grid[1] <= 65535 && l->grid[2] <= 65535 && l->block[2] <= 64 && l->shared <= EMULATOR_SHARED_MOST &&
               l->cluster >= 1 && l->cluster <= EMULATOR_CLUSTER_MOST && l->grid[0] % l->cluster == 0;
    if (!good) {
        snprintf(
            m->message, sizeof m->message,
            "a launch of %u x %u x %u blocks of %u x %u x %u threads with %llu bytes, in clusters of %u, cannot be",
            l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1], l->block[2], (unsigned long long)l->shared,
            l->cluster);
    }
    return good ? 0 : -1;
}

static int run_all(machine *m)
{
    const emulator_launch *l = m->launch;
    int64_t blocks = (int64_t)l->grid[0] * l->grid[1] * l->grid[2];
    if (check_shape(m) != 0 || reserve(m) != 0) {
        return -1;
    }
    for (int64_t first = 0; first < blocks; first += m->count) {
        if (run_cluster(m, first) != 0) {
            return -1;
        }
    }
    return 0;
}

static void say_why(machine *m)
{
    char why[sizeof m->message];
    snprintf(why, sizeof why, "%s", m->message);
    snprintf(m->message, sizeof m->message, "%s: %.600s", m->kernel != NULL ? m->kernel : m->launch->text, why);
    fprintf(stderr, "emulator: %s\n", m->message);
    for (int b = 0; b < m->count; b++) {
        if (m->blocks[b].fibers != NULL) {
            clear_marks(m->blocks[b].fibers);
        }
    }
}

int emulator_run(const emulator_launch *launch)
{
    machine *m = emulator_machine();
    m->launch = launch;
    m->count = launch->cluster <= EMULATOR_CLUSTER_MOST ? (int)launch->cluster : 1;
    m->kernel = NULL;
    m->loads.count = 0;
    int result = run_all(m);
    for (int b = 0; b < m->count; b++) {
        emulator_shared_release(&m->blocks[b]);
    }
    if (result != 0) {
        say_why(m);
    }
    return result;
}

const char *emulator_message(void)
{
    return emulator_machine()->message;
}
