/* JSON as it is written: into memory that is there, or into none, to learn the size. */
#ifndef TCHI_CHECKPOINT_JSON_TEXT_H
#define TCHI_CHECKPOINT_JSON_TEXT_H

#include <stddef.h>
#include <stdint.h>

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
