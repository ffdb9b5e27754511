/* Custom kernels on the CPU: kernel_source.c prepares the source, kernel_build.c compiles it with the compiler from
 * kernel_compiler.c, and kernel_launch.c loads and runs it, on kernel_fibers.c if threads synchronize. */
#ifndef TCHI_CPU_KERNEL_H
#define TCHI_CPU_KERNEL_H

#include <torchium/backend.h>

#include "backends/cpu/cpu.h"
#include "backends/host_memory.h"
#include "core/status.h"
#include "kernel/prelude/cpu_launch.h"

#define TCHI_PATH_SIZE 1024

/* --- kernel_compiler.c ------------------------------------------------------------------------------------------- */

/* The path of the C++ compiler; TCH_ERR_UNAVAILABLE, with what to install, if there is none. */
tch_status tchi_cpu_find_compiler(char path[TCHI_PATH_SIZE]);

/* Runs a program, without a shell, for at most `seconds`. Its output goes to `file` and, truncated, to `log`. Returns
 * the exit status, 256 for a signal, TCHI_PROCESS_NOT_STARTED or TCHI_PROCESS_TOO_LONG. */
enum { TCHI_PROCESS_NOT_STARTED = -1, TCHI_PROCESS_TOO_LONG = -2 };
int tchi_process_run(char *const *arguments, const char *file, int seconds, char *log, size_t log_size);

/* Monotonic clock. */
double tchi_seconds_now(void);

/* Limit of a thread's local variables in bytes: twice a GPU's. */
#define TCHI_CPU_LOCAL_MOST 1048576

/* Stack usage of a thread as reported by -fstack-usage. */
typedef struct tchi_stack_use {
    uint64_t largest;     /* the local variables of one function */
    uint64_t stack_bytes; /* enough for a thread */
} tchi_stack_use;

/* From a NUL-terminated report; NULL if the compiler wrote none. */
tchi_stack_use tchi_stack_use_read(const char *lines);

/* --- kernel_source.c --------------------------------------------------------------------------------------------- */

/* The user's source as passed to the CPU's compiler: the same text, line by line, except for what macros cannot
 * change. */
typedef struct tchi_cpu_source {
    char *text; /* of host->allocate, `size` bytes */
    size_t size;
    int dynamic; /* it has "extern __shared__" arrays, which became pointers */
} tchi_cpu_source;

tch_status tchi_cpu_source_prepare(const tch_kernel_text *text, tchi_cpu_source *source);

/* --- kernel_build.c ---------------------------------------------------------------------------------------------- */

typedef struct tchi_cpu_part {
    const char *name, *text;
} tchi_cpu_part;

#define TCHI_CPU_PARTS 10
extern const tchi_cpu_part tchi_cpu_parts[TCHI_CPU_PARTS];

/* --- kernel_fibers.c --------------------------------------------------------------------------------------------- */

/* Runs blocks whose threads synchronize, on one CPU thread. */
typedef struct tchi_fibers tchi_fibers;

#define TCHI_CPU_BLOCK_THREADS 1024
#define TCHI_CPU_FIBER_SLOTS 1024 /* the most that tch_set_num_threads takes */

tchi_fibers *tchi_fibers_create(void); /* NULL if memory is short */
void tchi_fibers_destroy(tchi_fibers *fibers);

/* Stacks for blocks of `threads`: whether there are enough, and allocation, which returns nonzero and leaves none if
 * memory is short. */
int tchi_fibers_fit(const tchi_fibers *fibers, int threads, size_t stack_bytes);
int tchi_fibers_reserve(tchi_fibers *fibers, int threads, size_t stack_bytes);

/* The most tchi_fibers, for blocks of `threads`, that leave enough memory mappings to the rest of the process. */
int tchi_fibers_most(int threads);

/* Blocks [from, to) of a launch. NULL, or why it ended early. */
const char *tchi_fibers_run(tchi_fibers *fibers, const tchi_cpu_kernel_entry *entry, const tchi_cpu_launch *launch,
                            int64_t from, int64_t to);

/* --- kernel_launch.c --------------------------------------------------------------------------------------------- */

#define TCHI_CPU_KERNEL_MAGIC "TCHCPU3"

/* At the front of an image; the shared object follows. */
typedef struct tchi_cpu_image_header {
    char magic[8];
    uint64_t bytes;       /* of the shared object */
    uint64_t stack_bytes; /* per thread */
} tchi_cpu_image_header;

typedef struct tchi_cpu_kernel {
    void *library;
    int file; /* the file it was opened from, or -1 */
    const tchi_cpu_kernel_entry *entry;
    const int32_t *signature; /* the number of parameters, then six numbers per parameter */
    size_t stack_bytes;       /* of each thread of a block, if they synchronize */
    double block_seconds;     /* duration of the last block; 0 before */
} tchi_cpu_kernel;

/* Releases the stacks kept in the state. */
void tchi_cpu_kernel_leave(tchi_cpu_state *state);

/* --- the table's entries ----------------------------------------------------------------------------------------- */

tch_status tchi_cpu_kernel_compiler(void *state, char *text, size_t size);
tch_status tchi_cpu_kernel_build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                 size_t log_size);
tch_kernel_load_op tchi_cpu_kernel_load;
void tchi_cpu_kernel_unload(void *state, void *kernel);
tch_status tchi_cpu_kernel_launch(void *state, void *kernel, const tch_kernel_run *run);

#endif
