/* The emulated multiprocessor: functions called by kernels compiled for the CPU, in C so that one copy serves every
 * kernel. A launch runs clusters in sequence, and the threads of a cluster in turns, each on its own stack: the fibers
 * of custom kernels (src/backends/cpu/user_kernel/kernel_fibers.c).
 *
 * Asynchronous work is done as late as possible: a copy or a product of a warpgroup runs when a thread waits for it, so
 * that a missing wait yields garbage. */
#ifndef EMULATOR_MACHINE_H
#define EMULATOR_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#include "kernel/prelude/cpu_launch.h"

/* Whether AddressSanitizer is on, for gcc and clang. */
#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATOR_SANITIZED 1
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EMULATOR_SHARED_MOST 232448 /* Hopper's limit of shared memory per block, in bytes */
#define EMULATOR_CLUSTER_MOST 16
#define EMULATOR_RECORD 128 /* bytes per lane in an exchange */

/* Waits beyond the three kinds of cpu_launch.h. */
enum {
    EMULATOR_WAIT_EXCHANGE = 16, /* all lanes of the warp have published their records */
    EMULATOR_WAIT_NAMED = 17,    /* `source` threads have arrived at barrier `mask` of the block */
    EMULATOR_WAIT_CLUSTER = 18,  /* all threads of the cluster */
    EMULATOR_WAIT_PHASE = 19     /* the phase of parity `source` of the barrier at `value` has ended */
};

/* --- launches: grid.c -------------------------------------------------------------------------------------------- */

typedef struct emulator_launch {
    const char *text; /* the kernel as written in the source */
    uint32_t grid[3], block[3];
    uint32_t cluster; /* adjacent along x */
    uint64_t shared;  /* dynamic, in bytes */
    const tchi_cpu_kernel_entry *entry;
    const void *closure; /* argument of entry->thread */
} emulator_launch;

/* Runs to completion. 0, or -1 with the reason in emulator_message. */
int emulator_run(const emulator_launch *launch);
const char *emulator_message(void);

/* Called by every kernel: its name in the source, and the threads that its launch bounds allow. */
typedef struct emulator_kernel_note {
    const char *name;
    int seen;
} emulator_kernel_note;
void emulator_enter_kernel(emulator_kernel_note *note, int most_threads);

/* Ends the launch with a message; does not return. */
void emulator_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* --- warps and clusters: grid.c ---------------------------------------------------------------------------------- */

/* Publishes a record for the other lanes; after EMULATOR_WAIT_EXCHANGE record i is at + i EMULATOR_RECORD. */
const unsigned char *emulator_leave(const void *record, size_t bytes);

int emulator_cluster_rank(void);
int emulator_cluster_size(void);

/* --- shared memory: shared.c ------------------------------------------------------------------------------------- */

/* A static variable of the running block, created on first use; `key` identifies the declaration. */
void *emulator_shared(const void *key, size_t bytes, size_t alignment, const char *name);
void *emulator_dynamic(void);
/* The same address in another block of the cluster. */
void *emulator_cluster_map(void *shared, int rank);
/* Dynamic shared memory as an 18-bit descriptor address, and back: `bytes` from there must be in bounds. */
uint32_t emulator_shared_address(const void *shared);
char *emulator_shared_pointer(uint32_t address, size_t bytes);

/* --- asynchronous work: copies.c --------------------------------------------------------------------------------- */

void emulator_copy_16(void *shared, const void *global, int bytes_valid);
void emulator_copy_commit(void);
void emulator_copy_wait(int pending);

/* wgmma products: operands by rows (A B'), by columns (A' B), or only B by columns (A B). */
typedef enum emulator_operand { EMULATOR_BF16, EMULATOR_F16, EMULATOR_TF32 } emulator_operand;
typedef enum emulator_order { EMULATOR_BY_ROWS, EMULATOR_BY_COLUMNS, EMULATOR_B_BY_COLUMNS } emulator_order;
typedef struct emulator_wgmma {
    float *sums;
    uint64_t a, b;
    emulator_operand type;
    int32_t cols;
    emulator_order order;
    int32_t add;
    const float *rows; /* NULL, or this thread's two rows of A from registers, 16 numbers each */
} emulator_wgmma;
void emulator_wgmma_start(const emulator_wgmma *product);
void emulator_wgmma_commit(void);
void emulator_wgmma_wait(int pending);

/* mbarriers and TMA. */
void emulator_barrier_create(uint64_t *barrier, int arrivals);
void emulator_barrier_arrive(uint64_t *barrier, int bytes);
int emulator_barrier_has_ended(const uint64_t *barrier, int parity);
void emulator_tma_load(uint32_t blocks, void *shared, const void *map, const int at[3], uint64_t *barrier);
void emulator_tma_store(const void *map, const int at[3], const void *shared);
void emulator_tma_wait_read(void);

#ifdef __cplusplus
}
#endif

#endif
