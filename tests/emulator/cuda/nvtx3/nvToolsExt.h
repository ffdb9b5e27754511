/* NVTX ranges without a profiler. */
#ifndef EMULATOR_NVTX_H
#define EMULATOR_NVTX_H

#include <stdint.h>

#define NVTX_VERSION 3
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE (uint16_t)(sizeof(nvtxEventAttributes_t))

enum { NVTX_MESSAGE_TYPE_ASCII = 1 };
typedef struct nvtxDomain *nvtxDomainHandle_t;
typedef struct nvtxEventAttributes_t {
    uint16_t version, size;
    int32_t messageType;
    union {
        const char *ascii;
    } message;
} nvtxEventAttributes_t;

static inline nvtxDomainHandle_t nvtxDomainCreateA(const char *name)
{
    (void)name;
    return 0;
}

static inline int nvtxDomainRangePushEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes)
{
    (void)domain, (void)attributes;
    return 0;
}

static inline int nvtxDomainRangePop(nvtxDomainHandle_t domain)
{
    (void)domain;
    return 0;
}

#endif
