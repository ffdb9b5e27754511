/* What every command says in the same way: errors, headings, and the check that all output was written. */
#ifndef CLI_OUTPUT_H
#define CLI_OUTPUT_H

#include <stdbool.h>
#include <stdio.h>

#include <torchium/torchium.h>

/* The command's exit statuses; CLI_SIGNAL + n is that of a command which stopped because of signal n. */
enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_SIGNAL = 128 };

/* Says on stderr "torchium COMMAND: message" and returns CLI_FAILED. Messages may quote what files hold: it is shown as
 * text_show does. */
int output_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Says "torchium COMMAND: warning: message": something is not as it should be, and the work goes on. */
void output_warn(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like output_fail, for a call of the library that failed: its own message. */
int output_fail_library(const char *command);

/* The same for wrong arguments, with a line that says where help is; returns CLI_USAGE. */
int output_usage(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A line of its own, bold where stdout is a terminal that shows it. */
void output_heading(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Flushes stdout. `status` if everything was written; otherwise says so and returns CLI_FAILED. */
int output_finish(const char *command, int status);

/* Where a context computes, on a line: "Intel(R) Xeon(R) Processor, 2 threads". Returns `text`. */
const char *output_device(const tch_context *context, char text[192]);

/* 1536 as "1.5 KiB". Returns `text`, which holds 32 characters. */
const char *output_bytes(double bytes, char text[32]);

#endif
