/* Custom kernels on the CPU: what the files kernel*.c share. A kernel goes through kernel_source.c (the text),
 * kernel_build.c (compiling it by what kernel_compiler.c has found) and kernel_launch.c (loading and running it, with
 * kernel_fibers.c where threads wait for each other). */
#ifndef TCHI_CPU_KERNEL_H
#define TCHI_CPU_KERNEL_H

#include <torchium/backend.h>

#include "backends/cpu/cpu.h"
#include "kernel/prelude/cpu_launch.h"

#define TCHI_PATH_SIZE 1024

/* --- kernel_compiler.c ------------------------------------------------------------------------------------------- */

/* The C++ compiler's path; UNAVAILABLE, with what to install, where there is none. */
tch_status tchi_cpu_find_compiler(char path[TCHI_PATH_SIZE]);

/* Runs a program, with no shell between, until it ends or `seconds` have passed. What it prints goes to `file` and, cut
 * off at its end with a NUL, to `log`. Returns the exit status, 256 for a signal, TCHI_PROCESS_NOT_STARTED or
 * TCHI_PROCESS_TOO_LONG. */
enum { TCHI_PROCESS_NOT_STARTED = -1, TCHI_PROCESS_TOO_LONG = -2 };
int tchi_process_run(char *const *arguments, const char *file, int seconds, char *log, size_t log_size);

/* Of a clock that never goes back. */
double tchi_seconds_now(void);

/* Local variables of a thread, in bytes: twice what a GPU has for them. */
#define TCHI_CPU_LOCAL_MOST 1048576

/* What a thread's stack takes, by the lines of -fstack-usage. */
typedef struct tchi_stack_use {
    uint64_t largest;     /* the local variables of one function */
    uint64_t stack_bytes; /* enough for a thread */
} tchi_stack_use;

/* Of a text with an end; NULL where the compiler wrote none. */
tchi_stack_use tchi_stack_use_read(const char *lines);

/* --- kernel_source.c --------------------------------------------------------------------------------------------- */

/* What the compiler of the CPU is given in place of a user's source: the same text, line by line, but for what no macro
 * can change. */
typedef struct tchi_cpu_source {
    char *text; /* of host->allocate, `size` bytes */
    size_t size;
    int dynamic; /* it has "extern __shared__" arrays, which became pointers */
} tchi_cpu_source;

tch_status tchi_cpu_source_prepare(const tch_kernel_text *text, tchi_cpu_source *source);

/* --- kernel_build.c ---------------------------------------------------------------------------------------------- */

/* The texts around a source, in their order. */
typedef struct tchi_cpu_part {
    const char *name, *text;
} tchi_cpu_part;

#define TCHI_CPU_PARTS 10
extern const tchi_cpu_part tchi_cpu_parts[TCHI_CPU_PARTS];

/* --- kernel_fibers.c --------------------------------------------------------------------------------------------- */

/* Runs blocks whose threads wait for each other, on one thread of the CPU. */
typedef struct tchi_fibers tchi_fibers;

#define TCHI_CPU_BLOCK_THREADS 1024
#define TCHI_CPU_FIBER_SLOTS 1024 /* the most that tch_set_num_threads takes */

tchi_fibers *tchi_fibers_create(void); /* NULL where memory is short */
void tchi_fibers_destroy(tchi_fibers *fibers);

/* Stacks for blocks of so many threads: whether there are enough, and making them, nonzero where memory is short, and
 * then there are none. */
int tchi_fibers_fit(const tchi_fibers *fibers, int threads, size_t stack_bytes);
int tchi_fibers_reserve(tchi_fibers *fibers, int threads, size_t stack_bytes);

/* How many of them, for blocks of so many threads, leave enough of the system's tables to the rest of the process. */
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
    uint64_t stack_bytes; /* that a thread needs */
} tchi_cpu_image_header;

typedef struct tchi_cpu_kernel {
    void *library;
    int file; /* from which it was opened, or -1 */
    const tchi_cpu_kernel_entry *entry;
    const int32_t *signature; /* the number of parameters, then the six numbers of each */
    size_t stack_bytes;       /* of each thread of a block, where they wait for each other */
    double block_seconds;     /* what a block took last time; 0 before */
} tchi_cpu_kernel;

/* Releases the stacks that launches have left in the state. */
void tchi_cpu_kernel_leave(tchi_cpu_state *state);

/* --- the table's entries ----------------------------------------------------------------------------------------- */

tch_status tchi_cpu_kernel_compiler(void *state, char *text, size_t size);
tch_status tchi_cpu_kernel_build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                 size_t log_size);
tch_kernel_load_op tchi_cpu_kernel_load;
void tchi_cpu_kernel_unload(void *state, void *kernel);
tch_status tchi_cpu_kernel_launch(void *state, void *kernel, const tch_kernel_run *run);

#endif
