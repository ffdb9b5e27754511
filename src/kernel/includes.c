/* Decides which sources are cached: those that read no file, so that the key covers every dependency. The check is not
 * a preprocessor: it also finds directives in comments, strings and skipped branches, which costs a compilation, but
 * must never miss one. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"

/* In <>: both compilers provide these themselves, and the key covers them. */
static const char *const known_headers[] = {
    "cuda_fp16.h", "cuda_bf16.h", "cuda_runtime.h", "stdint.h", "cstdint", "limits.h", "climits",  "float.h", "cfloat",
    "stddef.h",    "cstddef",     "math.h",         "cmath",    "stdio.h", "cstdio",   "assert.h", "cassert",
};

/* Other dependencies on files or time: __has_include, __has_embed, .incbin and .include of an assembler, __TIME__,
 * __TIMESTAMP__, __DATE__, and trigraphs for # and the backslash. */
static const char *const signs[] = {"__has_", "incbin", ".include", "__TIME", "__DATE__", "?\?=", "?\?/"};

/* Skips line continuations. */
static const char *skip_continuations(const char *at)
{
    while (*at == '\\') {
        const char *end = at + 1 + strspn(at + 1, " \t\v\f");
        size_t newlines = strspn(end, "\r\n");
        if (newlines == 0) {
            break;
        }
        at = end + newlines;
    }
    return at;
}

/* The position after `word`, or NULL if it is not at `at`. */
static const char *skip_text(const char *at, const char *word)
{
    for (; at != NULL && *word != '\0'; word++) {
        at = *at == *word ? skip_continuations(at + 1) : NULL;
    }
    return at;
}

static const char *skip_blanks(const char *at)
{
    while (*at != '\0' && strchr(" \t\v\f\r", *at) != NULL) {
        at = skip_continuations(at + 1);
    }
    return at;
}

/* A file of that name in an include folder takes precedence. */
static bool is_in_folders(const tch_kernel_text *text, const char *name)
{
    char path[PATH_MAX];
    for (int32_t i = 0; i < text->include_count; i++) {
        if (snprintf(path, sizeof path, "%s/%s", text->includes[i], name) >= PATH_MAX || access(path, F_OK) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_known_header(const tch_kernel_text *text, const char *at)
{
    at = skip_text(skip_blanks(at), "<");
    for (size_t i = 0; at != NULL && i < sizeof known_headers / sizeof *known_headers; i++) {
        if (skip_text(skip_text(at, known_headers[i]), ">") != NULL) {
            return !is_in_folders(text, known_headers[i]);
        }
    }
    return false;
}

/* `at` follows a #. A comment there may hide the directive. */
static bool directive_reads(const tch_kernel_text *text, const char *at)
{
    at = skip_blanks(at);
    const char *name = skip_text(at, "include");
    if (name != NULL) {
        return !is_known_header(text, name);
    }
    return *at == '/' || skip_text(at, "import") != NULL || skip_text(at, "embed") != NULL;
}

static bool reads_files(const tch_kernel_text *text, const char *at)
{
    for (at = skip_continuations(at); *at != '\0'; at = skip_continuations(at + 1)) {
        const char *directive = *at == '#' ? skip_text(at, "#") : skip_text(at, "%:");
        if (directive != NULL && directive_reads(text, directive)) {
            return true;
        }
        for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
            if (skip_text(at, signs[i]) != NULL) {
                return true;
            }
        }
    }
    return false;
}

bool tchi_kernel_reads_files(const tch_kernel_text *text)
{
    bool found = reads_files(text, text->source);
    for (int32_t i = 0; i < text->option_count && !found; i++) {
        found = reads_files(text, text->options[i]);
    }
    return found;
}
