/* Writes a JSON document to a stream, indented or on one line. */
#ifndef CLI_JSON_H
#define CLI_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct json_writer {
    FILE *out;
    int depth;
    bool empty; /* nothing written at this depth */
    bool line;  /* on one line */
} json_writer;

/* Values have keys in objects; in arrays and for the document, the key is NULL. */
json_writer json_start(FILE *out);
json_writer json_start_line(FILE *out);
void json_object_begin(json_writer *json, const char *key);
void json_object_end(json_writer *json);
void json_array_begin(json_writer *json, const char *key);
void json_array_end(json_writer *json);
void json_text(json_writer *json, const char *key, const char *value); /* NULL becomes null */
void json_integer(json_writer *json, const char *key, int64_t value);
void json_real(json_writer *json, const char *key, double value); /* null when not finite */
void json_bool(json_writer *json, const char *key, bool value);

#endif
