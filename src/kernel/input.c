/* Converts a config to compiler input. Include folders and -I options become one list of absolute paths, which cannot
 * be mistaken for options and do not depend on the compiler's current folder. */
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

/* --- names and options: parts of the text that is compiled, and arguments of a compiler -------------------------- */

#define NAME_MOST 1024
#define OPTION_MOST 4096
#define DEPTH_MOST 16 /* of template arguments in each other */

/* ctype.h depends on the locale. */
static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool starts_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static const char *skip_word(const char *at)
{
    while (starts_word(*at) || is_digit(*at)) {
        at++;
    }
    return at;
}

static const char *skip_spaces(const char *at)
{
    while (*at == ' ') {
        at++;
    }
    return at;
}

/* 4, -1, 0x10u, 1.5f */
static const char *skip_number(const char *at)
{
    at += *at == '-';
    if (!is_digit(*at)) {
        return NULL;
    }
    while (starts_word(*at) || is_digit(*at) || *at == '.') {
        at++;
    }
    return at;
}

/* The functions below return where their part of the grammar ends, or NULL where the text is something else. */
static const char *skip_arguments(const char *at, int depth);

/* word [<arguments>] */
static const char *skip_part(const char *at, int depth)
{
    if (!starts_word(*at)) {
        return NULL;
    }
    at = skip_word(at);
    const char *next = skip_spaces(at);
    return *next == '<' ? skip_arguments(next + 1, depth + 1) : at;
}

/* [::] part {:: part} */
static const char *skip_name(const char *at, int depth)
{
    at += strncmp(at, "::", 2) == 0 ? 2 : 0;
    at = skip_part(at, depth);
    while (at != NULL && strncmp(at, "::", 2) == 0) {
        at = skip_part(at + 2, depth);
    }
    return at;
}

/* number | name {name}, the second for types of several words */
static const char *skip_argument(const char *at, int depth)
{
    at = skip_spaces(at);
    if (is_digit(*at) || *at == '-') {
        at = skip_number(at);
        return at != NULL ? skip_spaces(at) : NULL;
    }
    do {
        at = skip_name(at, depth);
        at = at != NULL ? skip_spaces(at) : NULL;
    } while (at != NULL && starts_word(*at));
    return at;
}

/* [argument {, argument}] > */
static const char *skip_arguments(const char *at, int depth)
{
    if (depth > DEPTH_MOST) {
        return NULL;
    }
    if (*skip_spaces(at) == '>') {
        return skip_spaces(at) + 1;
    }
    do {
        at = skip_argument(at, depth);
    } while (at != NULL && *at++ == ',');
    return at != NULL && at[-1] == '>' ? at : NULL;
}

bool tchi_is_printable(const char *text)
{
    for (const char *at = text; *at != '\0'; at++) {
        if ((unsigned char)*at < ' ' || *at == 0x7f) {
            return false;
        }
    }
    return true;
}

tch_status tchi_check_kernel_name(const char *name)
{
    if (name == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: name is NULL, expected that of a kernel");
    }
    if (strnlen(name, NAME_MOST + 1) > NAME_MOST) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: name has more than %d characters; it begins with %.40s", NAME_MOST, name);
    }
    const char *end = skip_name(name, 0);
    if (end == NULL || *end != '\0') {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: name is \"%.200s\", expected a kernel like halve, space::halve or "
                         "scale<float, 4>",
                         tchi_is_printable(name) ? name : "(has control characters)");
    }
    return TCH_OK;
}

static bool starts_with(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

static bool is_ascii(const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text < ' ' || *text > '~') {
            return false;
        }
    }
    return true;
}

/* -DNAME, -DNAME=VALUE, -UNAME */
static bool is_macro(const char *option)
{
    const char *word = option + 2;
    if (!starts_word(*word)) {
        return false;
    }
    const char *end = skip_word(word);
    return *end == '\0' || (option[1] == 'D' && *end == '=' && is_ascii(end + 1));
}

static bool is_listed(const char *option)
{
    static const char *const whole[] = {"-std=c++14", "-std=c++17", "-std=c++20", "--use_fast_math",
                                        "-O0",        "-O1",        "-O2",        "-O3"};
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        if (strcmp(option, whole[i]) == 0) {
            return true;
        }
    }
    return false;
}

tch_status tchi_check_kernel_option(const char *option, int index)
{
    if (option == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: options[%d] is NULL", index);
    }
    bool short_enough = strnlen(option, OPTION_MOST + 1) <= OPTION_MOST;
    bool macro = starts_with(option, "-D") || starts_with(option, "-U");
    bool folder = starts_with(option, "-I") && option[2] != '\0' && tchi_is_printable(option);
    if (short_enough && (macro ? is_macro(option) : folder || is_listed(option))) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                     "tch_kernel_compile: options[%d] is \"%.200s\", expected one of -DNAME, -DNAME=VALUE, -UNAME, "
                     "-IFOLDER, -std=c++14, -std=c++17, -std=c++20, --use_fast_math, -O0 to -O3, of at most %d "
                     "characters",
                     index, tchi_is_printable(option) ? option : "(has control characters)", OPTION_MOST);
}

/* --- the config -------------------------------------------------------------------------------------------------- */

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

/* In search order: the folder of the file, the caller's includes, -I options. */
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
