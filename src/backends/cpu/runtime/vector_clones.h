/* Marks a function to compile for wider vectors than the rest of the library: the compiler makes one copy per
 * instruction set and the loader picks. Empty where unsupported, and under sanitizers, which are not initialized when
 * the loader asks. */
#ifndef TCHI_CPU_VECTOR_CLONES_H
#define TCHI_CPU_VECTOR_CLONES_H

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 &&         \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTOR_CLONES
#endif

/* Marks a helper of such a function, which must be inlined into every copy. */
#define VECTOR_INLINE static inline __attribute__((always_inline))

#endif
