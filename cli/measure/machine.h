/* What is known about this machine and this build, as facts to print. */
#ifndef CLI_MACHINE_H
#define CLI_MACHINE_H

#include <torchium/torchium.h>

typedef struct machine_facts {
    char system[256];   /* "Linux 6.1.0 x86_64" */
    char compiler[128]; /* "GCC 12.2.0, C17, optimized" */
    int32_t threads;
    double load; /* programs wanting to run, averaged over the last minute; NaN if the system does not say */
} machine_facts;

void machine_facts_get(machine_facts *facts);

/* The name the library knows a backend's device by: "cpu", "cuda", "cuda:1". Returns `name`. */
const char *machine_device_name(const char *backend, int32_t index, char name[64]);

/* Where a context computes, on a line: "Intel(R) Xeon(R) Processor, 2 threads". Returns `text`. */
const char *machine_context_line(const tch_context *context, char text[192]);

#endif
