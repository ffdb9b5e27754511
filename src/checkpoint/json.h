/* A strict JSON tokenizer for headers; the caller knows the expected tokens. Errors: all that RFC 8259 excludes, NUL in
 * a string, and numbers other than integers from 0 to 2^63 - 1. No recursion: the caller determines the depth. */
#ifndef TCHI_CHECKPOINT_JSON_H
#define TCHI_CHECKPOINT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <torchium/status.h>

typedef struct tchi_json {
    const char *path; /* for messages */
    const char *what; /* for messages: "header", "index" */
    char *text;       /* modified: strings are decoded in place */
    int64_t length;
    int64_t at;
} tchi_json;

/* TCH_ERR_IO with the path and the place: "model.safetensors: header byte 17: ...". */
tch_status tchi_json_fail(const tchi_json *json, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Skips white space and the character `token`; false, or an error, for anything else. */
bool tchi_json_accept(tchi_json *json, char token);
tch_status tchi_json_expect(tchi_json *json, char token);

/* A decoded string, terminated by NUL, in `text`. */
tch_status tchi_json_string(tchi_json *json, const char **string);

tch_status tchi_json_integer(tchi_json *json, int64_t *value);

/* Checks that only white space follows. */
tch_status tchi_json_end(tchi_json *json);

/* --- writing ----------------------------------------------------------------------------------------------------- */

/* A JSON writer into memory, or without memory to measure the length. */
typedef struct tchi_json_text {
    char *text; /* NULL while measuring */
    int64_t used;
} tchi_json_text;

void tchi_json_put(tchi_json_text *out, const char *bytes, size_t count);

/* Structure and numbers, less than 128 bytes. */
void tchi_json_put_format(tchi_json_text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* UTF-8 with the escapes that JSON requires. */
void tchi_json_put_escaped(tchi_json_text *out, const char *text);

/* The same in quotes. */
void tchi_json_put_string(tchi_json_text *out, const char *text);

#endif
