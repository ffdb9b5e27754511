/* Devices and backends.
 *
 * A backend is the code for one kind of device. The CPU's is part of the library; others are modules opened at run
 * time. The list of backends includes unusable ones, with the reason. */
#ifndef TORCHIUM_DEVICE_H
#define TORCHIUM_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/export.h>
#include <torchium/status.h>

/* The numbers are DLPack's. TCH_DEVICE_EXTENSION is the device of a third-party backend module. */
typedef enum tch_device_type {
    TCH_DEVICE_CPU = 1,
    TCH_DEVICE_CUDA = 2,
    TCH_DEVICE_CUDA_HOST = 3,
    TCH_DEVICE_EXTENSION = 12
} tch_device_type;

/* One device: laid out as DLPack's DLDevice. `type` holds a tch_device_type. */
typedef struct tch_device {
    int32_t type;
    int32_t index;
} tch_device;

typedef struct tch_device_info {
    size_t struct_size;    /* set by TCH_DEVICE_INFO_INIT */
    char name[128];        /* "Intel(R) Xeon(R) Processor", "NVIDIA H200" */
    char features[256];    /* "avx2 fma avx512", "sm_90, ..." with cache and shared memory */
    int64_t total_memory;  /* bytes */
    int64_t free_memory;   /* bytes now */
    int32_t compute_major; /* compute capability; 0 on the CPU */
    int32_t compute_minor;
    int32_t processors; /* cores this process may use, or multiprocessors */
} tch_device_info;
#define TCH_DEVICE_INFO_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_device_info), {0}, {0}, 0, 0, 0, 0, 0                                                               \
    }

typedef struct tch_backend_info {
    size_t struct_size; /* set by TCH_BACKEND_INFO_INIT */
    char name[32];      /* "cpu", "cuda" */
    int32_t available;  /* 1 when its devices can be used */
    int32_t devices;    /* how many */
    char library[512];  /* the module's file, or "built in" */
    char details[512];  /* the libraries it uses */
    char reason[1024];  /* if not available: why, and what to do */
} tch_backend_info;
#define TCH_BACKEND_INFO_INIT                                                                                          \
    {                                                                                                                  \
        sizeof(tch_backend_info), {0}, 0, 0, {0}, {0},                                                                 \
        {                                                                                                              \
            0                                                                                                          \
        }                                                                                                              \
    }

TCH_BEGIN_DECLS

/* Number of known backends, usable or not. The first call searches for modules; it never fails. */
TCH_API int32_t tch_backend_count(void);

/* Describes backend `index` of tch_backend_count(). */
TCH_API tch_status tch_backend_info_get(int32_t index, tch_backend_info *info);

/* Usable devices of a type; 0 without its backend. */
TCH_API int32_t tch_device_count(tch_device_type type);

/* Describes a device. TCH_ERR_UNAVAILABLE, with the reason, when it cannot be used. */
TCH_API tch_status tch_device_info_get(tch_device device, tch_device_info *info);

/* Parses "cpu", "cuda", "cuda:1", or the name of a backend module with or without an index, without checking that the
 * device exists; "auto" is the best usable device. */
TCH_API tch_status tch_device_parse(const char *text, tch_device *device);

/* Threads the CPU backend may use, for all contexts. The default is OMP_NUM_THREADS or every core this process may run
 * on. Takes effect at the next operation. */
TCH_API tch_status tch_set_num_threads(int32_t count);
TCH_API int32_t tch_get_num_threads(void);

/* The absolute path of an OpenBLAS to prefer over the system's, such as one installed by pip; TORCHIUM_BLAS takes
 * precedence. Call it before the first use of the CPU, since OpenBLAS is loaded once; an unusable file is ignored. */
TCH_API tch_status tch_set_openblas_file(const char *path);

TCH_END_DECLS

#endif
