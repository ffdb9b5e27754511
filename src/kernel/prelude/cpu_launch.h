/* The interface between the library and a compiled CPU kernel. The library includes this file, and its text precedes
 * every user source; changes require a new TCHI_CPU_KERNEL_ABI. */
#ifndef TCHI_CPU_LAUNCH_H
#define TCHI_CPU_LAUNCH_H

#include <stdint.h>

#define TCHI_CPU_KERNEL_ABI 1u
#define TCHI_CPU_KERNEL_SHARED 232448 /* dynamic shared memory of a block, as on the GPUs that have most */

enum { TCHI_CPU_KERNEL_FIBERS = 1 };

/* What a thread waits for: its block, or the lanes of a mask in its warp. */
enum { TCHI_WAIT_BLOCK = 0, TCHI_WAIT_SHUFFLE = 1, TCHI_WAIT_BALLOT = 2 };

typedef struct tchi_cpu_wait {
    int32_t kind;
    uint32_t mask;   /* of a warp */
    uint32_t source; /* of a shuffle: the lane whose value is wanted */
    uint64_t value;  /* of a shuffle; of the others a condition */
} tchi_cpu_wait;

typedef struct tchi_cpu_launch {
    uint32_t grid[3], block[3];
    const void *const *arguments;
    void *runner; /* the library's: who runs blocks on this thread of the CPU; the first argument of the two below */
    /* Returns when all have arrived, with the other lane's value, the lanes' votes, or the number of threads in the
     * block whose condition held. */
    uint64_t (*wait)(void *runner, const tchi_cpu_wait *wait);
    /* Ends the launch; does not return. */
    void (*fail)(void *runner, const char *message);
} tchi_cpu_launch;

/* The object a compiled kernel exports as "tchi_kernel". With barriers, `enter` prepares a block and `thread` runs one
 * of its threads; without, `run` runs whole blocks. */
typedef struct tchi_cpu_kernel_entry {
    uint32_t abi;
    uint32_t flags;
    void (*run)(const tchi_cpu_launch *launch, int64_t from, int64_t to);
    void (*enter)(const tchi_cpu_launch *launch, int64_t block);
    void (*thread)(const tchi_cpu_launch *launch, int32_t thread);
} tchi_cpu_kernel_entry;

#endif
