/* See macros.h. Both the library and the CUDA module compile this file. */
#include "macros.h"

#include <stdio.h>
#include <string.h>

bool tchi_option_is_macro(const char *option)
{
    return strncmp(option, "-D", 2) == 0 || strncmp(option, "-U", 2) == 0;
}

bool tchi_option_is_for_both(const char *option)
{
    return strcmp(option, "-DNDEBUG") == 0;
}

/* Bound: a name twice, a value and the directives. */
size_t tchi_macro_bytes(const tch_kernel_text *text)
{
    size_t bytes = 1;
    for (int32_t i = 0; i < text->option_count; i++) {
        bytes += 2 * strlen(text->options[i]) + 32;
    }
    return bytes;
}

/* The last definition of a name counts, as on a command line, and may be one of the prelude's. */
void tchi_macros_write(const tch_kernel_text *text, char *room, size_t size)
{
    size_t used = 0;
    room[0] = '\0';
    for (int32_t i = 0; i < text->option_count; i++) {
        const char *name = text->options[i] + 2;
        if (!tchi_option_is_macro(text->options[i])) {
            continue;
        }
        int length = (int)strcspn(name, "=");
        const char *value = name[length] == '=' ? name + length + 1 : "1";
        used += (size_t)snprintf(room + used, size - used, "#undef %.*s\n", length, name);
        if (text->options[i][1] == 'D') {
            used += (size_t)snprintf(room + used, size - used, "#define %.*s %s\n", length, name, value);
        }
    }
}

size_t tchi_quoted_bytes(const char *file)
{
    return 2 * strlen(file) + 1;
}

void tchi_quoted_write(const char *file, char *room)
{
    for (; *file != '\0'; file++) {
        if (*file == '"' || *file == '\\') {
            *room++ = '\\';
        }
        *room++ = *file;
    }
    *room = '\0';
}
