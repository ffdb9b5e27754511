/* The processor as printed by `torchium info`: see processor.c. */
#ifndef TCHI_CPU_PROCESSOR_H
#define TCHI_CPU_PROCESSOR_H

#include <stddef.h>

/* The processor's name from the contents of /proc/cpuinfo, which may be truncated. */
void tchi_cpu_name_processor(const char *cpuinfo, char *name, size_t size);

/* Of the current processor. Features such as "avx2 fma avx512"; may be empty. */
void tchi_cpu_processor_name(char *name, size_t size);
void tchi_cpu_processor_features(char *features, size_t size);

#endif
