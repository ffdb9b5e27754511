/* Texts around a user's source, compiled into the library: the files of src/kernel/prelude as NUL-terminated arrays.
 * signature.h serves both devices, the others the CPU. */
#ifndef TCHI_KERNEL_PRELUDE_H
#define TCHI_KERNEL_PRELUDE_H

#include <stddef.h>

#define TCHI_PRELUDE(name)                                                                                             \
    extern const char tchi_prelude_##name[];                                                                           \
    extern const size_t tchi_prelude_##name##_size

TCHI_PRELUDE(signature);
TCHI_PRELUDE(cpu_launch);
TCHI_PRELUDE(cpu_types);
TCHI_PRELUDE(cpu_threads);
TCHI_PRELUDE(cpu_math);
TCHI_PRELUDE(cpu_half);
TCHI_PRELUDE(cpu_atomics);
TCHI_PRELUDE(cpu_runner);
TCHI_PRELUDE(cpu_refused);
TCHI_PRELUDE(cpu_entry);

#endif
