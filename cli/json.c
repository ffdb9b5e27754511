/* Writes JSON. What goes in may come from the environment (file names, processor names), so strings are escaped and
 * bytes that are not UTF-8 are replaced: the document is valid whatever the text was. */
#include "json.h"

#include <math.h>
#include <string.h>

/* Length of the UTF-8 sequence that starts here, 0 if it is not one. */
static int sequence_length(const unsigned char *s)
{
    if (s[0] < 0x80)
        return 1;
    int length = s[0] >= 0xf0 && s[0] < 0xf5   ? 4
                 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
                 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2
                                               : 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f;
    bool too_large = s[0] == 0xf4 && s[1] > 0x8f;
    return overlong || surrogate || too_large ? 0 : length;
}

static void write_string(FILE *out, const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    fputc('"', out);
    while (*s != '\0') {
        int length = sequence_length(s);
        if (length == 0)
            fputs("\\ufffd", out);
        else if (*s == '"' || *s == '\\')
            fprintf(out, "\\%c", *s);
        else if (*s < 0x20)
            fprintf(out, "\\u%04x", *s);
        else
            fwrite(s, 1, (size_t)length, out);
        s += length ? length : 1;
    }
    fputc('"', out);
}

static void new_line(const json_writer *json)
{
    if (!json->line)
        fprintf(json->out, "\n%*s", 2 * json->depth, "");
}

/* What stands before a value: the comma, the place and the key. */
static void lead(json_writer *json, const char *key)
{
    if (!json->empty)
        fputs(json->line ? ", " : ",", json->out);
    if (json->depth > 0)
        new_line(json);
    json->empty = false;
    if (key != NULL) {
        write_string(json->out, key);
        fputs(": ", json->out);
    }
}

static void begin(json_writer *json, const char *key, char bracket)
{
    lead(json, key);
    fputc(bracket, json->out);
    json->depth++;
    json->empty = true;
}

static void end(json_writer *json, char bracket)
{
    json->depth--;
    if (!json->empty)
        new_line(json);
    fputc(bracket, json->out);
    json->empty = false;
    if (json->depth == 0)
        fputc('\n', json->out);
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
    begin(json, key, '{');
}

void json_object_end(json_writer *json)
{
    end(json, '}');
}

void json_array_begin(json_writer *json, const char *key)
{
    begin(json, key, '[');
}

void json_array_end(json_writer *json)
{
    end(json, ']');
}

void json_text(json_writer *json, const char *key, const char *value)
{
    lead(json, key);
    if (value == NULL)
        fputs("null", json->out);
    else
        write_string(json->out, value);
}

void json_integer(json_writer *json, const char *key, int64_t value)
{
    lead(json, key);
    fprintf(json->out, "%lld", (long long)value);
}

void json_real(json_writer *json, const char *key, double value)
{
    lead(json, key);
    if (isfinite(value))
        fprintf(json->out, "%.9g", value);
    else
        fputs("null", json->out);
}

void json_bool(json_writer *json, const char *key, bool value)
{
    lead(json, key);
    fputs(value ? "true" : "false", json->out);
}
