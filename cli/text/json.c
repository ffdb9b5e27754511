/* Writes JSON. Strings may come from the environment (file names, processor names): they are escaped, and bytes that
 * are not UTF-8 replaced, so that the document is always valid. */
#include "json.h"

#include <math.h>

#include "text.h"

static void write_string(FILE *out, const char *text)
{
    uint32_t code = 0;
    fputc('"', out);
    for (int length; *text != '\0'; text += length > 0 ? length : 1) {
        length = text_character(text, &code);
        if (length == 0) {
            fputs("\\ufffd", out);
        } else if (*text == '"' || *text == '\\') {
            fprintf(out, "\\%c", *text);
        } else if (code < 0x20 ||
                   (code >= 0x7f && code < 0xa0)) { /* valid in JSON, but control characters of a terminal */
            fprintf(out, "\\u%04x", (unsigned)code);
        } else {
            fwrite(text, 1, (size_t)length, out);
        }
    }
    fputc('"', out);
}

static void new_line(const json_writer *json)
{
    if (!json->line) {
        fprintf(json->out, "\n%*s", 2 * json->depth, "");
    }
}

/* Writes the comma, the indentation and the key. */
static void write_lead(json_writer *json, const char *key)
{
    if (!json->empty) {
        fputs(json->line ? ", " : ",", json->out);
    }
    if (json->depth > 0) {
        new_line(json);
    }
    json->empty = false;
    if (key != NULL) {
        write_string(json->out, key);
        fputs(": ", json->out);
    }
}

static void begin_group(json_writer *json, const char *key, char bracket)
{
    write_lead(json, key);
    fputc(bracket, json->out);
    json->depth++;
    json->empty = true;
}

static void end_group(json_writer *json, char bracket)
{
    json->depth--;
    if (!json->empty) {
        new_line(json);
    }
    fputc(bracket, json->out);
    json->empty = false;
    if (json->depth == 0) {
        fputc('\n', json->out);
    }
}

json_writer json_start(FILE *out)
{
    return (json_writer){out, 0, true, false};
}

json_writer json_start_line(FILE *out)
{
    return (json_writer){out, 0, true, true};
}

void json_object_begin(json_writer *json, const char *key)
{
    begin_group(json, key, '{');
}

void json_object_end(json_writer *json)
{
    end_group(json, '}');
}

void json_array_begin(json_writer *json, const char *key)
{
    begin_group(json, key, '[');
}

void json_array_end(json_writer *json)
{
    end_group(json, ']');
}

void json_text(json_writer *json, const char *key, const char *value)
{
    write_lead(json, key);
    if (value == NULL) {
        fputs("null", json->out);
    } else {
        write_string(json->out, value);
    }
}

void json_integer(json_writer *json, const char *key, int64_t value)
{
    write_lead(json, key);
    fprintf(json->out, "%lld", (long long)value);
}

void json_real(json_writer *json, const char *key, double value)
{
    write_lead(json, key);
    if (isfinite(value)) {
        fprintf(json->out, "%.9g", value);
    } else {
        fputs("null", json->out);
    }
}

void json_bool(json_writer *json, const char *key, bool value)
{
    write_lead(json, key);
    fputs(value ? "true" : "false", json->out);
}
