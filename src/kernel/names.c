/* The grammars of names and options. A name becomes part of the text that is compiled, an option an argument of a
 * compiler: whoever wants to allow more here has to think of both. */
#include "names.h"

#include <stddef.h>
#include <string.h>

#include "core/status.h"

#define NAME_MOST 1024
#define OPTION_MOST 4096
#define DEPTH_MOST 16 /* of template arguments in each other */

/* Not those of ctype.h, which depend on the locale. */
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
