/* Facts about the machine and the build, shared by `info` and `bench`. The date of the build is left out on purpose, so
 * that the same source gives the same file. */
#define _DEFAULT_SOURCE /* getloadavg */
#include "machine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>

#if defined(__clang__)
#define COMPILER "Clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "GCC " __VERSION__
#else
#define COMPILER "unknown compiler"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZER ", address sanitizer"
#elif defined(__SANITIZE_THREAD__)
#define SANITIZER ", thread sanitizer"
#elif defined(__has_feature) /* by clang */
#if __has_feature(address_sanitizer)
#define SANITIZER ", address sanitizer"
#elif __has_feature(thread_sanitizer)
#define SANITIZER ", thread sanitizer"
#endif
#endif
#ifndef SANITIZER
#define SANITIZER ""
#endif

#if defined(__OPTIMIZE__)
#define OPTIMIZED ", optimized"
#else
#define OPTIMIZED ", not optimized"
#endif

void machine_facts_get(machine_facts *facts)
{
    struct utsname name;
    if (uname(&name) == 0) {
        snprintf(facts->system, sizeof facts->system, "%s %s %s", name.sysname, name.release, name.machine);
    } else {
        snprintf(facts->system, sizeof facts->system, "unknown");
    }
    snprintf(facts->compiler, sizeof facts->compiler, "%s, C%ld%s%s", COMPILER, __STDC_VERSION__ / 100 % 100, OPTIMIZED,
             SANITIZER);
    facts->threads = tch_get_num_threads();
    if (getloadavg(&facts->load, 1) != 1) {
        facts->load = (double)NAN;
    }
}

const char *machine_device_name(const char *backend, int32_t index, char name[64])
{
    if (index == 0) {
        snprintf(name, 64, "%s", backend);
    } else {
        snprintf(name, 64, "%s:%d", backend, (int)index);
    }
    return name;
}

const char *machine_context_line(const tch_context *context, char text[192])
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
