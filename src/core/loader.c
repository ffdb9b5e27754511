/* Finds, opens and checks backend modules. A module is a file libtorchium_NAME.so in a folder of TORCHIUM_BACKEND_PATH
 * (absolute folders, separated by colons) or in the library's own folder; never in the current folder, which others may
 * be able to write to. Each failure has its own message, kept in the registry. */
#define _GNU_SOURCE
#include "registry.h"

#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PREFIX "libtorchium_"
#define SUFFIX ".so"

/* The NAME of libtorchium_NAME.so, or 0. */
static int module_name(const char *file, char *name, size_t size)
{
    size_t length = strlen(file);
    size_t prefix = strlen(PREFIX);
    size_t suffix = strlen(SUFFIX);
    if (length <= prefix + suffix || strncmp(file, PREFIX, prefix) != 0 ||
        strcmp(file + length - suffix, SUFFIX) != 0) {
        return 0;
    }
    int written = snprintf(name, size, "%.*s", (int)(length - prefix - suffix), file + prefix);
    return written > 0 && (size_t)written < size;
}

/* The slots marked REQUIRED, with their names and offsets. */
#define SLOT(chapter, field)                                                                                           \
    {                                                                                                                  \
#field, offsetof(tch_##chapter##_ops, field)                                                                   \
    }
typedef struct slot {
    const char *name;
    size_t offset;
} slot;
static const slot device_slots[] = {
    SLOT(device, count),         SLOT(device, info),        SLOT(device, state_create), SLOT(device, state_destroy),
    SLOT(device, begin),         SLOT(device, stream),      SLOT(device, synchronize),  SLOT(device, allocate),
    SLOT(device, release),       SLOT(device, memory_info), SLOT(device, copy_bytes),   SLOT(device, zero_bytes),
    SLOT(device, scratch_bytes),
};
static const slot matrix_slots[] = {
    SLOT(matrix, copy),           SLOT(matrix, fill),          SLOT(matrix, combine),
    SLOT(matrix, shift_scale),    SLOT(matrix, scale_rows),    SLOT(matrix, random_signs),
    SLOT(matrix, select),         SLOT(matrix, kronecker),     SLOT(matrix, reduce),
    SLOT(matrix, normalize),      SLOT(matrix, flag_overflow), SLOT(matrix, largest_eigenvalue),
    SLOT(matrix, root_setup),     SLOT(matrix, root_residual), SLOT(matrix, factored_damping),
    SLOT(matrix, gemm),           SLOT(matrix, eigh),          SLOT(matrix, divided_differences),
    SLOT(matrix, spectrum_power), SLOT(matrix, spd_solve),     SLOT(matrix, cholesky),
    SLOT(matrix, row_dots),       SLOT(matrix, descending),    SLOT(matrix, permute),
};
static const slot update_slots[] = {
    SLOT(update, inspect_gradients), SLOT(update, decide_skip),  SLOT(update, advance),
    SLOT(update, elementwise),       SLOT(update, gather),       SLOT(update, update_factors),
    SLOT(update, precondition),      SLOT(update, rotated_adam), SLOT(update, apply),
    SLOT(update, apply_rows),        SLOT(update, update_scale),
};
static const slot sample_slots[] = {
    SLOT(sample, sample_norms),    SLOT(sample, sample_squares), SLOT(sample, sample_sums),
    SLOT(sample, im2col),          SLOT(sample, token_dots),     SLOT(sample, token_sums),
    SLOT(sample, normalized_sums), SLOT(sample, block_dots),     SLOT(sample, pair_dots),
    SLOT(sample, clip_weights),    SLOT(sample, weigh_samples),  SLOT(sample, damped_divide),
};
static const slot network_slots[] = {
    SLOT(network, bias_activation),
    SLOT(network, bias_activation_backward),
    SLOT(network, loss),
    SLOT(network, sample_labels),
};
static const slot recording_slots[] = {
    SLOT(recording, bytes),
    SLOT(recording, record),
    SLOT(recording, replay),
    SLOT(recording, release),
};
static const slot kernel_slots[] = {
    SLOT(kernel, compiler), SLOT(kernel, build), SLOT(kernel, load), SLOT(kernel, unload), SLOT(kernel, launch),
};

#define CHAPTER(chapter, required)                                                                                     \
    {                                                                                                                  \
#chapter, offsetof(tch_backend, chapter), required, chapter##_slots,                                           \
            sizeof chapter##_slots / sizeof chapter##_slots[0]                                                         \
    }
static const struct chapter {
    const char *name;
    size_t offset;
    int required; /* the whole chapter; others may be NULL */
    const slot *slots;
    size_t count;
} chapters[] = {
    CHAPTER(device, 1),  CHAPTER(matrix, 1),    CHAPTER(update, 0), CHAPTER(sample, 0),
    CHAPTER(network, 0), CHAPTER(recording, 0), CHAPTER(kernel, 0),
};

typedef void (*any_function)(void);

static int is_empty(const void *chapter, const slot *s)
{
    any_function entry;
    memcpy(&entry, (const char *)chapter + s->offset, sizeof entry);
    return entry == NULL;
}

/* Writes the first missing "chapter" or "chapter->operation" to `text`; returns whether there is one. */
static int find_missing(const tch_backend *t, char *text, size_t size)
{
    for (size_t i = 0; i < sizeof chapters / sizeof chapters[0]; i++) {
        const struct chapter *c = &chapters[i];
        const void *operations;
        memcpy(&operations, (const char *)t + c->offset, sizeof operations);
        if (operations == NULL && c->required) {
            snprintf(text, size, "chapter %s", c->name);
            return 1;
        }
        for (size_t k = 0; operations != NULL && k < c->count; k++) {
            if (is_empty(operations, &c->slots[k])) {
                snprintf(text, size, "operation %s->%s", c->name, c->slots[k].name);
                return 1;
            }
        }
    }
    return 0;
}

/* End of the last segment of an ELF file; 0 if it is not an ELF file for this machine. */
static uint64_t last_segment_end(FILE *file)
{
    ElfW(Ehdr) header;
    ElfW(Phdr) segment;
    uint64_t end = 0;
    if (fread(&header, sizeof header, 1, file) != 1 || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_phentsize != sizeof segment) {
        return 0;
    }
    for (int i = 0; i < header.e_phnum; i++) {
        long place = (long)(header.e_phoff + (uint64_t)i * sizeof segment);
        if (fseek(file, place, SEEK_SET) != 0 || fread(&segment, sizeof segment, 1, file) != 1) {
            return UINT64_MAX;
        }
        uint64_t segment_end = (uint64_t)segment.p_offset + segment.p_filesz;
        end = segment_end > end ? segment_end : end;
    }
    return end;
}

/* An interrupted copy leaves a file that dlopen would map, and the process would crash at the first missing page.
 * dlopen reports every other defect. */
static int is_cut_short(const char *path)
{
    struct stat facts;
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return 0;
    }
    int known = fstat(fileno(file), &facts) == 0;
    uint64_t end = last_segment_end(file);
    fclose(file);
    return known && (uint64_t)facts.st_size < end;
}

/* Opens a module; NULL with a reason if it cannot be used. A module stays open until the process ends: its functions
 * are used from anywhere. */
static const tch_backend *open_module(const char *path, char *reason, size_t size)
{
    if (is_cut_short(path)) {
        snprintf(reason, size, "%s is cut short, as by an interrupted copy; install it again", path);
        return NULL;
    }
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (module == NULL) {
        snprintf(reason, size, "the module cannot be opened: %s", dlerror());
        return NULL;
    }
    tch_backend_entry *enter = NULL;
    void *address = dlsym(module, TCH_BACKEND_ENTRY);
    if (address == NULL) {
        snprintf(reason, size, "%s has no function " TCH_BACKEND_ENTRY ": it is not a Torchium module", path);
        dlclose(module);
        return NULL;
    }
    memcpy(&enter, &address, sizeof enter);
    char why[512] = "it gave no reason";
    const tch_backend *table = enter(TCH_BACKEND_ABI, tchi_registry_host(), why, sizeof why);
    if (table == NULL) {
        snprintf(reason, size, "%s cannot work here: %s", path, why);
    } else if (table->abi != TCH_BACKEND_ABI || table->table_size != sizeof(tch_backend)) {
        snprintf(reason, size, "%s was built for backend interface %u, this library has %u; build both from one source",
                 path, table->abi, TCH_BACKEND_ABI);
        table = NULL;
    } else if (find_missing(table, why, sizeof why)) {
        snprintf(reason, size, "%s lacks the required %s", path, why);
        table = NULL;
    }
    if (table == NULL) {
        dlclose(module);
    }
    return table;
}

static void load_folder(const char *folder)
{
    DIR *listing = opendir(folder);
    if (listing == NULL) {
        return;
    }
    for (struct dirent *item = readdir(listing); item != NULL; item = readdir(listing)) {
        char name[32], path[PATH_MAX], reason[1024] = "";
        if (!module_name(item->d_name, name, sizeof name) || tchi_registry_has(name)) {
            continue;
        }
        int length = snprintf(path, sizeof path, "%s/%s", folder, item->d_name);
        if (length > 0 && (size_t)length < sizeof path) {
            const tch_backend *table = open_module(path, reason, sizeof reason);
            tchi_registry_add(table, name, path, reason);
        }
    }
    closedir(listing);
}

/* Relative folders are ignored: they depend on the current folder. */
static void load_search_path(const char *search_path)
{
    while (search_path != NULL && *search_path != '\0') {
        size_t length = strcspn(search_path, ":");
        char folder[PATH_MAX];
        if (search_path[0] == '/' && length < sizeof folder) {
            snprintf(folder, sizeof folder, "%.*s", (int)length, search_path);
            load_folder(folder);
        }
        search_path += length + (search_path[length] == ':');
    }
}

/* Parses a line "from-to rights offset device number   /the/file" of /proc/self/maps; 1 if it contains `address`, with
 * the file. */
static int mapped_file(const char *line, uintptr_t address, char *file)
{
    unsigned long from, to;
    int place = 0;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %n", &from, &to, &place) != 2 || address < from || address >= to ||
        place == 0 || line[place] != '/') {
        return 0;
    }
    snprintf(file, PATH_MAX, "%.*s", (int)strcspn(line + place, "\n"), line + place);
    return 1;
}

/* The folder of the shared object or program this file is linked into, from /proc/self/maps. The dynamic linker's names
 * may be relative to a folder that was current at another time or never. None if /proc is unavailable. */
static int own_folder(char *folder)
{
    static const char anchor = 0;
    char line[PATH_MAX + 256];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps != NULL && !found && fgets(line, sizeof line, maps) != NULL) {
        found = mapped_file(line, (uintptr_t)&anchor, folder);
    }
    if (maps != NULL) {
        fclose(maps);
    }
    char *slash = found ? strrchr(folder, '/') : NULL;
    if (slash == NULL) {
        folder[0] = '\0';
        return 0;
    }
    slash[slash == folder] = '\0';
    return 1;
}

void tchi_load_modules(void)
{
    char folder[PATH_MAX] = "";
    load_search_path(
        secure_getenv("TORCHIUM_BACKEND_PATH")); /* not for a program that has more rights than its caller */
    if (own_folder(folder)) {
        load_folder(folder);
    }
    if (!tchi_registry_has("cuda")) {
        char reason[1024];
        snprintf(reason, sizeof reason,
                 "no module " PREFIX "cuda" SUFFIX " next to the library (%.400s) or under TORCHIUM_BACKEND_PATH; this "
                 "build runs on the CPU",
                 folder[0] != '\0' ? folder : "whose place is not known");
        tchi_registry_add(NULL, "cuda", "", reason);
    }
}
