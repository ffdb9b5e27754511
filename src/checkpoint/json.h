/* Reads the JSON of a header, token by token, for whoever knows what should come next. Strict: what RFC 8259 does not
 * allow is an error, and so are a NUL in a string and a number that is not a whole one from 0 to 2^63 - 1. There is no
 * recursion; nesting is as deep as the caller asks for. */
#ifndef TCHI_CHECKPOINT_JSON_H
#define TCHI_CHECKPOINT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <torchium/status.h>

typedef struct tchi_json {
    const char *path; /* for messages */
    const char *what; /* it is, for messages: "header", "index" */
    char *text;       /* strings are decoded where they lie, so it is written to */
    int64_t length;
    int64_t at;
} tchi_json;

/* TCH_ERR_IO with the path and the place: "model.safetensors: header byte 17: ...". */
tch_status tchi_json_fail(const tchi_json *json, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Passes over white space and the character `token`; false, or an error, when something else is there. */
bool tchi_json_accept(tchi_json *json, char token);
tch_status tchi_json_expect(tchi_json *json, char token);

/* A string, decoded and ended by NUL. It lives in `text`. */
tch_status tchi_json_string(tchi_json *json, const char **string);

tch_status tchi_json_integer(tchi_json *json, int64_t *value);

/* Nothing but white space follows. */
tch_status tchi_json_end(tchi_json *json);

/* --- writing ----------------------------------------------------------------------------------------------------- */

/* JSON as it is written: into memory that is there, or into none, to learn the size. */
typedef struct tchi_json_text {
    char *text; /* NULL while measuring */
    int64_t used;
} tchi_json_text;

void tchi_json_put(tchi_json_text *out, const char *bytes, size_t count);

/* Of what is short, below 128 bytes: structure and numbers. */
void tchi_json_put_format(tchi_json_text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* UTF-8 as it is; only what JSON does not allow in a string is escaped. */
void tchi_json_put_escaped(tchi_json_text *out, const char *text);

/* The same in quotes. */
void tchi_json_put_string(tchi_json_text *out, const char *text);

#endif
