/* What `torchium info` says of the processor: see processor.c. */
#ifndef TCHI_CPU_PROCESSOR_H
#define TCHI_CPU_PROCESSOR_H

#include <stddef.h>

/* The name of the processor that /proc/cpuinfo, or as much of it as `cpuinfo` holds, tells of. */
void tchi_cpu_name_processor(const char *cpuinfo, char *name, size_t size);

/* Of the processor that this runs on. The features that matter here, such as "avx2 fma avx512", may be none. */
void tchi_cpu_processor_name(char *name, size_t size);
void tchi_cpu_processor_features(char *features, size_t size);

#endif
