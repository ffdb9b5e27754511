/* A profiler that logs: NVTX loads it from NVTX_INJECTION64_PATH, and it writes the ranges of all domains, one per
 * line, to the file TEST_NVTX_LOG. For tests of ranges.c, and to see a step's phases without a profiler. */
#include <stdio.h>
#include <stdlib.h>

#include <nvtx3/nvToolsExt.h>

static int depth;

static void write_line(const char *what, const char *name)
{
    const char *path = getenv("TEST_NVTX_LOG");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;
    if (file != NULL) {
        fprintf(file, "%*s%s%s\n", 2 * depth, "", what, name);
        fclose(file);
    }
}

static nvtxDomainHandle_t create(const char *name)
{
    write_line("domain ", name);
    return (nvtxDomainHandle_t)&depth;
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes)
{
    write_line("", attributes->message.ascii);
    return depth++;
}

static int pop(nvtxDomainHandle_t domain)
{
    return --depth;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table)
{
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;
    if (callbacks == NULL || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) ||
        size <= NVTX_CBID_CORE2_DomainCreateA) {
        return 0;
    }
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
