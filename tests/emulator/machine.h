/* The emulated multiprocessor: what kernels that were compiled for the CPU call, in C so that one copy serves every
 * kernel. A launch runs one cluster after the other, and all threads of a cluster's blocks by turns, each on a stack of
 * its own: the fibers of custom kernels (src/backends/cpu/user_kernel/kernel_fibers.c).
 *
 * What the hardware does in the background is done as late as it may be: an asynchronous copy or a product of a
 * warpgroup happens when somebody waits for it, so that who does not wait finds garbage. */
#ifndef EMULATOR_MACHINE_H
#define EMULATOR_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#include "kernel/prelude/cpu_launch.h"

/* Whether this is built with AddressSanitizer, as gcc and as clang say it. */
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

#define EMULATOR_SHARED_MOST 232448 /* bytes of shared memory a block may have, on Hopper */
#define EMULATOR_CLUSTER_MOST 16
#define EMULATOR_RECORD 128 /* bytes of a lane's part in an exchange */

/* What threads wait for beyond the three things of cpu_launch.h. */
enum {
    EMULATOR_WAIT_EXCHANGE = 16, /* all lanes of the warp have left their records */
    EMULATOR_WAIT_NAMED = 17,    /* `source` threads have come to barrier `mask` of the block */
    EMULATOR_WAIT_CLUSTER = 18,  /* all threads of the cluster */
    EMULATOR_WAIT_PHASE = 19     /* the phase of parity `source` of the barrier at `value` has ended */
};

/* --- launches: grid.c -------------------------------------------------------------------------------------------- */

typedef struct emulator_launch {
    const char *text; /* what is launched, in the source's words */
    uint32_t grid[3], block[3];
    uint32_t cluster; /* neighbors along x that run together */
    uint64_t shared;  /* dynamic, in bytes */
    const tchi_cpu_kernel_entry *entry;
    const void *closure; /* what entry->thread calls */
} emulator_launch;

/* Runs it to its end. 0, or -1 with emulator_message saying why. */
int emulator_run(const emulator_launch *launch);
const char *emulator_message(void);

/* A kernel notes that it runs: by its name in the source, and the threads that its launch bounds allow. */
typedef struct emulator_kernel_note {
    const char *name;
    int seen;
} emulator_kernel_note;
void emulator_enter_kernel(emulator_kernel_note *note, int most_threads);

/* Ends the launch with a message; does not return. */
void emulator_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* --- warps and clusters: grid.c ---------------------------------------------------------------------------------- */

/* Leaves a record for the other lanes; after EMULATOR_WAIT_EXCHANGE record i is at + i EMULATOR_RECORD. */
const unsigned char *emulator_leave(const void *record, size_t bytes);

int emulator_cluster_rank(void);
int emulator_cluster_size(void);

/* --- shared memory: shared.c ------------------------------------------------------------------------------------- */

/* A static variable of the block that runs, made at its first use; `key` stands for the declaration. */
void *emulator_shared(const void *key, size_t bytes, size_t alignment, const char *name);
void *emulator_dynamic(void);
/* The same place in another block of the cluster. */
void *emulator_cluster_map(void *shared, int rank);
/* Dynamic shared memory as the 18 bits of a descriptor count it, and back: `bytes` from there must be inside. */
uint32_t emulator_shared_address(const void *shared);
char *emulator_shared_pointer(uint32_t address, size_t bytes);

/* --- what runs in the background: copies.c ----------------------------------------------------------------------- */

void emulator_copy_16(void *shared, const void *global, int bytes_valid);
void emulator_copy_commit(void);
void emulator_copy_wait(int pending);

/* Products of a warpgroup: operands by rows (A B'), by columns (A' B), or B alone by columns (A B). */
typedef enum emulator_operand { EMULATOR_BF16, EMULATOR_F16, EMULATOR_TF32 } emulator_operand;
typedef enum emulator_order { EMULATOR_BY_ROWS, EMULATOR_BY_COLUMNS, EMULATOR_B_BY_COLUMNS } emulator_order;
typedef struct emulator_wgmma {
    float *sums;
    uint64_t a, b;
    emulator_operand type;
    int32_t cols;
    emulator_order order;
    int32_t add;
    const float *rows; /* NULL, or this thread's two rows of A, 16 numbers each, which came from registers */
} emulator_wgmma;
void emulator_wgmma_start(const emulator_wgmma *product);
void emulator_wgmma_commit(void);
void emulator_wgmma_wait(int pending);

/* Barriers in shared memory, and the tensor memory accelerator. */
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
