/* Output common to all commands: errors, headings, and the check that all output was written. */
#ifndef CLI_OUTPUT_H
#define CLI_OUTPUT_H

#include <stdbool.h>
#include <stdio.h>

#include <torchium/torchium.h>

/* Exit statuses; CLI_SIGNAL + n: stopped by signal n. */
enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_SIGNAL = 128 };

/* Prints "torchium COMMAND: message" to stderr and returns CLI_FAILED. Text from files is escaped by text_show. */
int output_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints "torchium COMMAND: warning: message". */
void output_warn(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* output_fail with the message of the library. */
int output_fail_library(const char *command);

/* The same for wrong arguments, with a hint at --help; returns CLI_USAGE. */
int output_usage(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A heading, bold on a terminal. */
void output_heading(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Flushes stdout. Returns `status` if everything was written; otherwise reports the error and returns CLI_FAILED. */
int output_finish(const char *command, int status);

/* The device of a context: "Intel(R) Xeon(R) Processor, 2 threads". Returns `text`. */
const char *output_device(const tch_context *context, char text[192]);

/* 1536 as "1.5 KiB". Returns `text`, which holds 32 characters. */
const char *output_bytes(double bytes, char text[32]);

#endif
