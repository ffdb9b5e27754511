/* The tokens of a header. Strings are decoded in place: a decoded string is never longer than its spelling, and its NUL
 * replaces the closing quote or something before it. */
#include "json.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/status.h"
#include "text.h"

#define FOUND_SIZE 32

tch_status tchi_json_fail(const tchi_json *json, const char *format, ...)
{
    char problem[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem, sizeof problem, format, arguments);
    va_end(arguments);
    return tchi_fail(TCH_ERR_IO, "%.600s: %s byte %lld: %s", json->path, json->what, (long long)json->at, problem);
}

static void skip_space(tchi_json *json)
{
    while (json->at < json->length && (json->text[json->at] == ' ' || json->text[json->at] == '\n' ||
                                       json->text[json->at] == '\r' || json->text[json->at] == '\t')) {
        json->at++;
    }
}

/* Describes the next token for a message. */
static const char *found(const tchi_json *json, char text[FOUND_SIZE])
{
    if (json->at >= json->length) {
        snprintf(text, FOUND_SIZE, "the %s ends", json->what);
        return text;
    }
    unsigned char byte = (unsigned char)json->text[json->at];
    snprintf(text, FOUND_SIZE, byte > 0x20 && byte < 0x7f ? "found '%c'" : "found byte 0x%02x", byte);
    return text;
}

bool tchi_json_accept(tchi_json *json, char token)
{
    skip_space(json);
    bool there = json->at < json->length && json->text[json->at] == token;
    json->at += there;
    return there;
}

tch_status tchi_json_expect(tchi_json *json, char token)
{
    char text[FOUND_SIZE];
    return tchi_json_accept(json, token) ? TCH_OK : tchi_json_fail(json, "expected '%c', %s", token, found(json, text));
}

tch_status tchi_json_end(tchi_json *json)
{
    char text[FOUND_SIZE];
    skip_space(json);
    return json->at == json->length
               ? TCH_OK
               : tchi_json_fail(json, "expected the end of the %s, %s", json->what, found(json, text));
}

/* The four digits after \u. */
static tch_status hex_digits(tchi_json *json, uint32_t *value)
{
    *value = 0;
    for (int i = 0; i < 4; i++, json->at++) {
        char c = json->at < json->length ? json->text[json->at] : '\0';
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) {
            return tchi_json_fail(json, "\\u needs four hexadecimal digits");
        }
        *value = 16 * *value + (uint32_t)digit;
    }
    return TCH_OK;
}

/* After \u: a character, which is two escapes above U+FFFF. */
static tch_status unicode_escape(tchi_json *json, uint32_t *character)
{
    TCHI_TRY(hex_digits(json, character));
    if (*character == 0) {
        return tchi_json_fail(json, "a string contains NUL");
    }
    if (*character < 0xd800 || *character > 0xdfff) {
        return TCH_OK;
    }
    uint32_t low = 0;
    bool pair = *character < 0xdc00 && json->at + 1 < json->length && json->text[json->at] == '\\' &&
                json->text[json->at + 1] == 'u';
    if (pair) {
        json->at += 2;
        TCHI_TRY(hex_digits(json, &low));
    }
    if (low < 0xdc00 || low > 0xdfff) {
        return tchi_json_fail(json, "half a surrogate pair");
    }
    *character = 0x10000 + ((*character - 0xd800) << 10) + (low - 0xdc00);
    return TCH_OK;
}

/* Behind a backslash. */
static tch_status escape(tchi_json *json, uint32_t *character)
{
    static const char letters[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    char letter = json->at < json->length ? json->text[json->at] : '\0';
    if (letter == 'u') {
        json->at++;
        return unicode_escape(json, character);
    }
    for (int i = 0; letters[i] != '\0'; i++) {
        if (letters[i] == letter) {
            json->at++;
            *character = (unsigned char)meanings[i];
            return TCH_OK;
        }
    }
    return tchi_json_fail(json, "an escape that JSON does not have");
}

/* Decodes one character of a string from `at` to `out`, and advances both. */
static tch_status character(tchi_json *json, int64_t *out)
{
    char *text = json->text;
    if (text[json->at] == '\\') {
        uint32_t code = 0;
        json->at++;
        TCHI_TRY(escape(json, &code));
        *out += tchi_utf8_encode(code, text + *out);
        return TCH_OK;
    }
    if ((unsigned char)text[json->at] < 0x20) {
        return tchi_json_fail(json, "control character 0x%02x in a string", (unsigned char)text[json->at]);
    }
    int length = tchi_utf8_length(text + json->at, json->length - json->at);
    if (length == 0) {
        return tchi_json_fail(json, "a string is not UTF-8");
    }
    for (int i = 0; i < length; i++) {
        text[(*out)++] = text[json->at++];
    }
    return TCH_OK;
}

tch_status tchi_json_string(tchi_json *json, const char **string)
{
    char text[FOUND_SIZE];
    if (!tchi_json_accept(json, '"')) {
        return tchi_json_fail(json, "expected a string, %s", found(json, text));
    }
    int64_t out = json->at;
    *string = json->text + out;
    while (json->at < json->length && json->text[json->at] != '"') {
        TCHI_TRY(character(json, &out));
    }
    if (json->at >= json->length) {
        return tchi_json_fail(json, "a string does not end");
    }
    json->text[out] = '\0';
    json->at++;
    return TCH_OK;
}

static bool digit_at(const tchi_json *json)
{
    return json->at < json->length && json->text[json->at] >= '0' && json->text[json->at] <= '9';
}

tch_status tchi_json_integer(tchi_json *json, int64_t *value)
{
    char text[FOUND_SIZE];
    skip_space(json);
    int64_t start = json->at;
    if (!digit_at(json)) {
        return tchi_json_fail(json, "expected a nonnegative integer, %s", found(json, text));
    }
    *value = 0;
    for (; digit_at(json); json->at++) {
        if (__builtin_mul_overflow(*value, 10, value) ||
            __builtin_add_overflow(*value, json->text[json->at] - '0', value)) {
            return tchi_json_fail(json, "a number is above 2^63 - 1");
        }
    }
    if (json->text[start] == '0' && json->at - start > 1) {
        return tchi_json_fail(json, "a number begins with 0");
    }
    return TCH_OK;
}

/* --- writing ----------------------------------------------------------------------------------------------------- */

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
