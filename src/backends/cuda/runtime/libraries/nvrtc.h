/* The NVRTC functions in use, declared here: the library is opened at run time (see libraries.c) when a custom kernel
 * is compiled. Names must match the binary interface of NVRTC 12 and 13. */
#ifndef TCHI_CUDA_NVRTC_H
#define TCHI_CUDA_NVRTC_H

#include <stddef.h>

#include <torchium/export.h>

typedef struct tchi_nvrtc_program *tchi_nvrtc_handle;

typedef int tchi_nvrtc_status;
enum {
    TCHI_NVRTC_SUCCESS = 0,
    TCHI_NVRTC_OUT_OF_MEMORY = 1,
    TCHI_NVRTC_COMPILATION = 6 /* the source is wrong; the log says where */
};

/* Fields are NVRTC's names without the prefix. Every size counts the NUL of a text. */
typedef struct tchi_nvrtc {
    const char *(*get_error_string)(tchi_nvrtc_status status);
    /* The architectures it can compile for, ascending: 90 for compute capability 9.0. */
    tchi_nvrtc_status (*get_num_supported_archs)(int *count);
    tchi_nvrtc_status (*get_supported_archs)(int *architectures);
    /* `headers` are texts for #includes of `names`, found before any folder. */
    tchi_nvrtc_status (*create_program)(tchi_nvrtc_handle *program, const char *source, const char *file, int count,
                                        const char *const *headers, const char *const *names);
    tchi_nvrtc_status (*destroy_program)(tchi_nvrtc_handle *program);
    tchi_nvrtc_status (*add_name_expression)(tchi_nvrtc_handle program, const char *name);
    tchi_nvrtc_status (*compile_program)(tchi_nvrtc_handle program, int count, const char *const *options);
    /* The lowered name; valid as long as the program. */
    tchi_nvrtc_status (*get_lowered_name)(tchi_nvrtc_handle program, const char *name, const char **lowered);
    tchi_nvrtc_status (*get_program_log_size)(tchi_nvrtc_handle program, size_t *bytes);
    tchi_nvrtc_status (*get_program_log)(tchi_nvrtc_handle program, char *log);
    tchi_nvrtc_status (*get_cubin_size)(tchi_nvrtc_handle program, size_t *bytes);
    tchi_nvrtc_status (*get_cubin)(tchi_nvrtc_handle program, char *cubin);
    tchi_nvrtc_status (*get_ptx_size)(tchi_nvrtc_handle program, size_t *bytes);
    tchi_nvrtc_status (*get_ptx)(tchi_nvrtc_handle program, char *ptx);

    int major, minor;  /* of its version */
    void *builtins;    /* its second library, held open */
    char library[512]; /* the file it was found in */
    /* The folder of CUDA's headers such as cuda_fp16.h; empty if not found. */
    char headers[512];
} tchi_nvrtc;

/* NVRTC's files, known before it is opened. */
typedef struct tchi_nvrtc_files {
    char library[512];
    char headers[512];
} tchi_nvrtc_files;

TCH_BEGIN_DECLS

/* The files tchi_nvrtc_open would open, searched once per process without opening them if their folder is known:
 * opening takes longer than everything else about a cached kernel. NULL with a reason as below. */
const tchi_nvrtc_files *tchi_nvrtc_locate(const char **reason);

/* Searched once per process. NULL if unusable, with a sentence in *reason on where it was searched and what to
 * install. */
const tchi_nvrtc *tchi_nvrtc_open(const char **reason);

TCH_END_DECLS

#endif
