/* Bringing an image into the process, and taking it out again. The object is opened from memory where the system allows
 * it, so that nobody can change a file between writing and opening it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel.h"

/* The loader trusts what it opens: at least it must be an object of this machine, and all there. */
static tch_status check_image(const tch_kernel_image *image, tchi_cpu_image_header *read)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_image_header header;
    Elf64_Ehdr elf;
    if (image->bytes < sizeof header + sizeof elf) {
        return host->fail(TCH_ERR_IO, "a compiled kernel is damaged: it has %zu bytes", image->bytes);
    }
    memcpy(&header, image->data, sizeof header);
    memcpy(&elf, (const char *)image->data + sizeof header, sizeof elf);
    *read = header;
    if (memcmp(header.magic, TCHI_CPU_KERNEL_MAGIC, sizeof header.magic) != 0 || header.bytes < sizeof elf ||
        header.bytes != image->bytes - sizeof header) {
        return host->fail(TCH_ERR_IO, "a compiled kernel is damaged: its header is not that of a kernel for the CPU");
    }
    if (memcmp(elf.e_ident, ELFMAG, SELFMAG) != 0 || elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_type != ET_DYN ||
        elf.e_shoff > header.bytes || (uint64_t)elf.e_shnum * elf.e_shentsize > header.bytes - elf.e_shoff ||
        elf.e_phoff > header.bytes || (uint64_t)elf.e_phnum * elf.e_phentsize > header.bytes - elf.e_phoff) {
        return host->fail(TCH_ERR_IO, "a compiled kernel is damaged: it is not a whole shared object");
    }
    return TCH_OK;
}

/* `path` may be shorter-lived than the object: the loader has it mapped. */
static void *open_file(int file, const char *path, const char *data, size_t bytes)
{
    return write(file, data, bytes) == (ssize_t)bytes ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

/* *held, where not negative, stays open as long as the object: the loader knows objects by their paths, and would give
 * the next one that comes with the same descriptor for this one. */
static void *open_object(const char *data, size_t bytes, int *held)
{
    char path[64];
    void *library = NULL;
    int file = memfd_create("torchium-kernel", MFD_CLOEXEC);
    *held = -1;
    if (file >= 0) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        library = open_file(file, path, data, bytes);
        if (library != NULL) {
            *held = file;
        } else {
            close(file);
        }
    }
    if (library == NULL) {
        snprintf(path, sizeof path, P_tmpdir "/torchium-kernel-XXXXXX");
        file = mkostemp(path, O_CLOEXEC);
        if (file >= 0) {
            library = open_file(file, path, data, bytes);
            close(file);
            unlink(path);
        }
    }
    return library;
}

static tch_status find_description(tchi_cpu_kernel *kernel)
{
    kernel->entry = dlsym(kernel->library, "tchi_kernel");
    kernel->signature = dlsym(kernel->library, "tchi_signature");
    if (kernel->entry == NULL || kernel->signature == NULL || kernel->entry->abi != TCHI_CPU_KERNEL_ABI) {
        return tchi_cpu_host()->fail(TCH_ERR_IO, "a compiled kernel is damaged: it lacks its description");
    }
    return TCH_OK;
}

/* On the CPU a thread of a block is a turn of a loop: how many there are hardly matters, and blocks are what is
 * divided. */
static void describe_kernel(const tchi_cpu_state *state, const tchi_cpu_kernel *k, tch_kernel_info *info, int32_t room,
                            tch_kernel_parameter *parameters)
{
    const int32_t *numbers = k->signature + 1;
    info->parameters = k->signature[0];
    info->registers = 0;
    info->shared_bytes = 0;
    info->local_bytes = 0;
    info->max_threads = TCHI_CPU_BLOCK_THREADS;
    info->suggested_threads = 256;
    info->suggested_blocks = 4 * state->threads;
    for (int32_t i = 0; i < room && i < info->parameters; i++, numbers += 6) {
        parameters[i] = (tch_kernel_parameter){.what = (tch_parameter_class)numbers[0],
                                               .size = numbers[1],
                                               .pointee = (tch_parameter_class)numbers[2],
                                               .pointee_size = numbers[3],
                                               .is_const = numbers[4],
                                               .is_brain = numbers[5]};
    }
}

tch_status tchi_cpu_kernel_load(void *state, const tch_kernel_image *image, void **kernel, tch_kernel_info *info,
                                int32_t room, tch_kernel_parameter *parameters)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_image_header header = {0};
    tch_status status = check_image(image, &header);
    if (status != TCH_OK) {
        return status;
    }
    tchi_cpu_kernel *k = host->allocate(sizeof *k, _Alignof(tchi_cpu_kernel));
    if (k == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for a kernel", sizeof *k);
    }
    memset(k, 0, sizeof *k);
    k->stack_bytes = (size_t)header.stack_bytes;
    k->library = open_object((const char *)image->data + sizeof header, (size_t)header.bytes, &k->file);
    if (k->library == NULL) {
        const char *why = dlerror();
        status =
            host->fail(TCH_ERR_IO, "a compiled kernel cannot be loaded: %.300s", why != NULL ? why : "not written");
    } else {
        status = find_description(k);
    }
    if (status != TCH_OK) {
        tchi_cpu_kernel_unload(state, k);
        return status;
    }
    describe_kernel(state, k, info, room, parameters);
    *kernel = k;
    return TCH_OK;
}

/* The file goes last: the loader knows the object by its path, which another file must not have meanwhile. */
void tchi_cpu_kernel_unload(void *state, void *kernel)
{
    tchi_cpu_kernel *k = kernel;
    if (k->library != NULL) {
        dlclose(k->library);
    }
    if (k->file >= 0) {
        close(k->file);
    }
    tchi_cpu_host()->release(k, sizeof *k);
}
