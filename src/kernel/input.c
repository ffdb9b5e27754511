/* From a config to what is compiled. The folders of includes and of -I options become one list of absolute names, so
 * that none can be mistaken for an option and all mean the same whatever the current folder of a compiler is. */
#include "input.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/allocator.h"
#include "core/status.h"
#include "core/system.h"
#include "names.h"

#define LIST_MOST 256 /* options, and folders */
#define NO_FILE "kernel.cu"

static tch_status check_list(const char *name, int32_t count, const char *const *list)
{
    if (count < 0 || count > LIST_MOST || (count > 0 && list == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: %s_count is %d and %ss is %s, expected 0 to %d of them", name, count,
                         name, list == NULL ? "NULL" : "set", LIST_MOST);
    }
    return TCH_OK;
}

static tch_status check_source(const tch_kernel_config *config)
{
    if (config->source == NULL && config->path == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: source and path are NULL, expected one");
    }
    if (config->path != NULL &&
        (config->path[0] == '\0' || !tchi_is_printable(config->path) || strnlen(config->path, PATH_MAX) == PATH_MAX)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: path is empty, longer than %d bytes or has control characters",
                         PATH_MAX - 1);
    }
    if (config->source != NULL && strnlen(config->source, TCHI_SOURCE_MOST + 1) > TCHI_SOURCE_MOST) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: source has more than %zu bytes",
                         TCHI_SOURCE_MOST);
    }
    return TCH_OK;
}

static tch_status check_config(const tch_kernel_config *config)
{
    if (config == NULL || config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: config must point to a struct set to TCH_KERNEL_CONFIG_INIT");
    }
    TCHI_TRY(check_source(config));
    TCHI_TRY(tchi_check_kernel_name(config->name));
    TCHI_TRY(check_list("option", config->option_count, config->options));
    TCHI_TRY(check_list("include", config->include_count, config->includes));
    for (int32_t i = 0; i < config->option_count; i++) {
        TCHI_TRY(tchi_check_kernel_option(config->options[i], i));
    }
    if (config->use_cache != 0 && config->use_cache != 1) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: use_cache is %d, expected 0 or 1",
                         config->use_cache);
    }
    if ((config->log == NULL) != (config->log_size == 0)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: log is %s and log_size %zu, expected both or "
                         "neither",
                         config->log == NULL ? "NULL" : "set", config->log_size);
    }
    return TCH_OK;
}

/* "/current/folder" and "name" to one absolute name of `length` characters of `folder`. */
static tch_status make_absolute(const char *folder, size_t length, const char *what, char absolute[PATH_MAX])
{
    char here[PATH_MAX] = "", text[TCHI_ERRNO_SIZE];
    if (folder[0] != '/' && getcwd(here, sizeof here) == NULL) {
        return tchi_fail(TCH_ERR_IO, "tch_kernel_compile: %s is relative, and the current folder is not known: %s",
                         what, tchi_errno_text(errno, text));
    }
    int used = snprintf(absolute, PATH_MAX, "%s%s%.*s", here, folder[0] != '/' ? "/" : "", (int)length, folder);
    if (used >= PATH_MAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: %s is longer than %d bytes: %.200s", what,
                         PATH_MAX - 1, folder);
    }
    return TCH_OK;
}

static tch_status add_folder(tchi_kernel_input *input, const char *folder, size_t length, const char *what)
{
    char absolute[PATH_MAX];
    struct stat found;
    char *copy = NULL;
    TCHI_TRY(make_absolute(folder, length, what, absolute));
    if (stat(absolute, &found) != 0 || !S_ISDIR(found.st_mode)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: %s is \"%.600s\", expected a folder that exists", what, folder);
    }
    TCHI_TRY(tchi_list_reserve(&input->includes, input->includes.count + 1));
    TCHI_TRY(tchi_host_take(strlen(absolute) + 1, "the name of a folder", &copy));
    memcpy(copy, absolute, strlen(absolute) + 1);
    *(const char **)tchi_list_extend(&input->includes) = copy;
    return TCH_OK;
}

/* The file's own folder, the caller's, those of the options: the order in which they are searched. */
static tch_status add_folders(tchi_kernel_input *input, const tch_kernel_config *config)
{
    char what[64];
    if (config->source == NULL) {
        const char *slash = strrchr(config->path, '/');
        size_t length = slash != NULL ? (size_t)(slash - config->path) : 1;
        TCHI_TRY(add_folder(input,
                            slash == NULL ? "."
                            : length == 0 ? "/"
                                          : config->path,
                            length + (length == 0), "the folder of path"));
    }
    for (int32_t i = 0; i < config->include_count; i++) {
        const char *folder = config->includes[i];
        snprintf(what, sizeof what, "includes[%d]", i);
        if (folder == NULL || folder[0] == '\0' || !tchi_is_printable(folder)) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                             "tch_kernel_compile: %s is NULL, empty or has control characters, expected a folder",
                             what);
        }
        TCHI_TRY(add_folder(input, folder, strlen(folder), what));
    }
    for (int32_t i = 0; i < config->option_count; i++) {
        const char *option = config->options[i];
        if (strncmp(option, "-I", 2) == 0) {
            snprintf(what, sizeof what, "the folder of options[%d]", i);
            TCHI_TRY(add_folder(input, option + 2, strlen(option + 2), what));
        } else {
            TCHI_TRY(tchi_list_add(&input->options, &option));
        }
    }
    return TCH_OK;
}

tch_status tchi_kernel_input_make(tchi_kernel_input *input, const tch_kernel_config *config)
{
    *input = (tchi_kernel_input){.options = {.item_size = sizeof(char *)}, .includes = {.item_size = sizeof(char *)}};
    TCHI_TRY(check_config(config));
    if (config->source == NULL) {
        TCHI_TRY(tchi_file_read(config->path, &input->file));
    }
    TCHI_TRY(add_folders(input, config));
    input->text = (tch_kernel_text){
        .source = config->source != NULL ? config->source : input->file.text,
        .file = config->path != NULL ? config->path : NO_FILE,
        .name = config->name,
        .option_count = (int32_t)input->options.count,
        .options = input->options.items,
        .include_count = (int32_t)input->includes.count,
        .includes = input->includes.items,
    };
    return TCH_OK;
}

void tchi_kernel_input_release(tchi_kernel_input *input)
{
    char **folders = input->includes.items;
    for (int64_t i = 0; i < input->includes.count; i++) {
        tchi_host_release(folders[i], strlen(folders[i]) + 1);
    }
    tchi_list_release(&input->includes);
    tchi_list_release(&input->options);
    tchi_file_release(&input->file);
}
