/* Errors, headings and the final flush. Only headings are bold, and only on a terminal that shows it. */
#define _POSIX_C_SOURCE 200809L
#include "output.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "text/text.h"

static void print_message(const char *command, const char *kind, const char *format, va_list arguments)
{
    char message[TEXT_SHOWN], shown[TEXT_SHOWN];
    vsnprintf(message, sizeof message, format, arguments);
    fprintf(stderr, "torchium%s%s: %s%s\n", command[0] ? " " : "", command, kind, text_show(message, shown));
}

int output_fail(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_message(command, "", format, arguments);
    va_end(arguments);
    return CLI_FAILED;
}

void output_warn(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_message(command, "warning: ", format, arguments);
    va_end(arguments);
}

int output_fail_library(const char *command)
{
    return output_fail(command, "%s", tch_last_error());
}

int output_usage(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_message(command, "", format, arguments);
    va_end(arguments);
    fprintf(stderr, "Run 'torchium %s%s--help' for usage.\n", command, command[0] ? " " : "");
    return CLI_USAGE;
}

static bool terminal_shows_bold(void)
{
    const char *no_color = getenv("NO_COLOR");
    const char *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && (no_color == NULL || no_color[0] == '\0') && term != NULL &&
           strcmp(term, "dumb") != 0;
}

void output_heading(const char *format, ...)
{
    bool bold = terminal_shows_bold();
    va_list arguments;
    va_start(arguments, format);
    fputs(bold ? "\033[1m" : "", stdout);
    vprintf(format, arguments);
    puts(bold ? "\033[0m" : "");
    va_end(arguments);
}

int output_finish(const char *command, int status)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) {
        return status;
    }
    return output_fail(command, "the output could not be written: %s", errno ? strerror(errno) : "write error");
}

const char *output_device(const tch_context *context, char text[192])
{
    tch_device device = tch_context_device(context);
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    int32_t threads = tch_get_num_threads();
    if (tch_device_info_get(device, &info) != TCH_OK) {
        snprintf(text, 192, "unknown device");
    } else if (device.type == TCH_DEVICE_CPU) {
        snprintf(text, 192, "%s, %d thread%s", info.name, (int)threads, threads == 1 ? "" : "s");
    } else {
        snprintf(text, 192, "%s", info.name);
    }
    return text;
}

const char *output_bytes(double bytes, char text[32])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    size_t unit = 0;
    while (bytes >= 1024.0 && unit + 1 < sizeof units / sizeof units[0]) {
        bytes /= 1024.0;
        unit++;
    }
    snprintf(text, 32, unit == 0 || bytes >= 100.0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
    return text;
}
