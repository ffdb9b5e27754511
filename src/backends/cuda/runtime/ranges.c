/* NVTX ranges in the domain "torchium". NVTX is header-only: without a profiler a range costs a pointer test. */
#include "backends/cuda/cuda.h"

#include <nvtx3/nvToolsExt.h>
#include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nvtxDomainHandle_t domain;

static void create_domain(void)
{
    domain = nvtxDomainCreateA("torchium");
}

/* NVTX creates no domain without a profiler. */
bool tchi_cuda_profiler_attached(void)
{
    pthread_once(&once, create_domain);
    return domain != NULL;
}

void tchi_cuda_range_open(const char *name)
{
    nvtxEventAttributes_t attributes = {.version = NVTX_VERSION,
                                        .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                        .messageType = NVTX_MESSAGE_TYPE_ASCII,
                                        .message.ascii = name};
    pthread_once(&once, create_domain);
    nvtxDomainRangePushEx(domain, &attributes);
}

void tchi_cuda_range_close(void)
{
    nvtxDomainRangePop(domain);
}

void tchi_cuda_range(void *state, const char *name)
{
    if (name != NULL) {
        tchi_cuda_range_open(name);
    }
    tchi_cuda_recording_range(state, name);
    if (name == NULL) {
        tchi_cuda_range_close();
    }
}
