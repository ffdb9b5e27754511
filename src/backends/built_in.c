/* The backends that are part of the library. */
#include "core/registry.h"

#include "backends/cpu/cpu.h"

const tch_backend *tchi_add_built_in(const tch_backend_host *host)
{
    char reason[1024] = "";
    const tch_backend *cpu = tchi_cpu_backend(TCH_BACKEND_ABI, host, reason, sizeof reason);
    tchi_registry_add(cpu, "cpu", "built in", reason);
    return cpu;
}
