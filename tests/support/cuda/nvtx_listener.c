/* A profiler that only listens: NVTX loads it where NVTX_INJECTION64_PATH names it, and it writes down the ranges of
 * every domain, a line for each, into the file of TEST_NVTX_LOG. For tests of ranges.c, and for looking at the phases
 * of a step where there is no profiler. */
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
