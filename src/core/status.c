/* Status names, and the thread's last message, in thread-local storage of fixed size so that reporting an error cannot
 * fail. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

#include <torchium/version.h>

#define MESSAGE_SIZE 2048

static _Thread_local char last_message[MESSAGE_SIZE];

#define NAME_OF(name, text) #name,
static const char *const names[] = {TCH_STATUS_LIST(NAME_OF)};
#undef NAME_OF

#define TEXT_OF(name, text) text,
static const char *const texts[] = {TCH_STATUS_LIST(TEXT_OF)};
#undef TEXT_OF

static int is_known(tch_status status)
{
    return (int)status >= 0 && (int)status < (int)TCH_STATUS_COUNT;
}

const char *tch_status_name(tch_status status)
{
    return is_known(status) ? names[status] : "unknown status";
}

const char *tch_status_text(tch_status status)
{
    return is_known(status) ? texts[status] : "unknown status";
}

const char *tch_last_error(void)
{
    return last_message;
}

void tch_clear_error(void)
{
    last_message[0] = '\0';
}

tch_status tchi_fail(tch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_message, sizeof last_message, format, arguments);
    va_end(arguments);
    return status;
}

const char *tch_version(void)
{
    return TCH_VERSION_STRING;
}
