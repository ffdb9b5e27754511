/* See json_text.h. */
#include "json_text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void tchi_json_put(tchi_json_text *out, const char *bytes, size_t count)
{
    if (out->text != NULL) {
        memcpy(out->text + out->used, bytes, count);
    }
    out->used += (int64_t)count;
}

void tchi_json_put_format(tchi_json_text *out, const char *format, ...)
{
    char text[128];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    tchi_json_put(out, text, (size_t)length);
}

void tchi_json_put_escaped(tchi_json_text *out, const char *text)
{
    for (; *text != '\0'; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte < 0x20) {
            tchi_json_put_format(out, "\\u%04x", byte);
        } else {
            tchi_json_put(out, "\\", byte == '"' || byte == '\\');
            tchi_json_put(out, text, 1);
        }
    }
}

void tchi_json_put_string(tchi_json_text *out, const char *text)
{
    tchi_json_put(out, "\"", 1);
    tchi_json_put_escaped(out, text);
    tchi_json_put(out, "\"", 1);
}
