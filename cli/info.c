/* `torchium info`: the installation and its devices. Each backend is read into a struct that is printed as text or
 * JSON: a new fact is added to both. */
#define _DEFAULT_SOURCE /* getloadavg */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include <torchium/torchium.h>

#include "backends/cuda/product/kernel_choice.h"
#include "commands.h"
#include "terminal/options.h"
#include "terminal/output.h"
#include "text/json.h"
#include "text/table.h"
#include "text/text.h"

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

enum { LABEL_WIDTH = 12, LINE_WIDTH = 96 };

typedef struct machine_facts {
    char system[256];   /* "Linux 6.1.0 x86_64" */
    char compiler[128]; /* "GCC 12.2.0, C17, optimized" */
    double load;        /* run queue averaged over a minute; NaN if unknown */
} machine_facts;

typedef struct device_facts {
    tch_device device;
    tch_device_info info;
    tch_memory_info memory;
    tch_status status; /* of initialization; the message is in `failure` */
    char failure[512];
} device_facts;

/* Environment variables that the library reads. */
static const char *const variables[] = {
    "TORCHIUM_BACKEND_PATH", "TORCHIUM_CPU",    "TORCHIUM_BLAS",     "OMP_NUM_THREADS",     "OPENBLAS_CORETYPE",
    "TORCHIUM_CUDA_PATH",    "TORCHIUM_CUBLAS", "TORCHIUM_CUSOLVER", "TORCHIUM_DEBUG_SYNC", "CUDA_VISIBLE_DEVICES",
};
enum { VARIABLES = sizeof variables / sizeof variables[0] };

/* No build date: builds are reproducible. */
static machine_facts read_machine(void)
{
    struct utsname name;
    machine_facts facts = {.system = "unknown", .load = (double)NAN};
    if (uname(&name) == 0) {
        snprintf(facts.system, sizeof facts.system, "%s %s %s", name.sysname, name.release, name.machine);
    }
    snprintf(facts.compiler, sizeof facts.compiler, "%s, C%ld%s%s", COMPILER, __STDC_VERSION__ / 100 % 100, OPTIMIZED,
             SANITIZER);
    if (getloadavg(&facts.load, 1) != 1) {
        facts.load = (double)NAN;
    }
    return facts;
}

static tch_status read_memory(const char *name, tch_memory_info *memory)
{
    tch_context *context = NULL;
    tch_status status = tch_context_create(name, &context);
    if (status == TCH_OK) {
        status = tch_memory_get_info(context, memory);
    }
    tch_context_destroy(context);
    return status;
}

static device_facts read_device(const char *backend, int32_t index)
{
    device_facts facts = {.info = TCH_DEVICE_INFO_INIT, .memory = TCH_MEMORY_INFO_INIT};
    char name[64];
    snprintf(name, sizeof name, "%s:%d", backend, (int)index);
    facts.status = tch_device_parse(name, &facts.device);
    if (facts.status == TCH_OK) {
        facts.status = tch_device_info_get(facts.device, &facts.info);
    }
    if (facts.status == TCH_OK) {
        facts.status = read_memory(name, &facts.memory);
    }
    if (facts.status != TCH_OK) {
        snprintf(facts.failure, sizeof facts.failure, "%s", tch_last_error());
    }
    return facts;
}

/* "  label       text", the text broken at spaces and continued under itself. */
static void print_fact(const char *label, const char *fact)
{
    char shown[TEXT_SHOWN];
    const char *text = text_show(fact, shown); /* may come from the environment or name a file */
    size_t width = LINE_WIDTH - LABEL_WIDTH - 2;
    printf("  %-*s", LABEL_WIDTH, label);
    while (strlen(text) > width) {
        size_t length = width;
        while (length > 0 && text[length] != ' ') {
            length--;
        }
        length = length > 0 ? length : strcspn(text, " ");
        printf("%.*s\n  %*s", (int)length, text, LABEL_WIDTH, "");
        text += length + strspn(text + length, " ");
    }
    puts(text);
}

static void print_memory(const device_facts *facts)
{
    char total[32], available[32], text[256];
    const tch_memory_info *memory = &facts->memory;
    output_bytes((double)memory->total, total);
    output_bytes((double)memory->free, available);
    snprintf(text, sizeof text, "%s, %s free", total, available);
    print_fact("memory", text);
    char allocated[32], reserved[32], peak[32];
    output_bytes((double)memory->allocated, allocated);
    output_bytes((double)memory->reserved, reserved);
    output_bytes((double)memory->peak, peak);
    snprintf(text, sizeof text, "%s allocated, %s reserved, %s peak", allocated, reserved, peak);
    print_fact("pool", text);
}

static void print_device(const device_facts *facts)
{
    char text[256];
    const tch_device_info *info = &facts->info;
    snprintf(text, sizeof text, "%d: %s", (int)facts->device.index, info->name);
    print_fact("device", text);
    if (facts->status != TCH_OK) {
        print_fact("problem", facts->failure);
        return;
    }
    print_fact("features", info->features[0] ? info->features : "none");
    if (info->compute_major > 0) {
        snprintf(text, sizeof text, "%d.%d", (int)info->compute_major, (int)info->compute_minor);
        print_fact("capability", text);
    }
    snprintf(text, sizeof text, "%d", (int)info->processors);
    print_fact(info->compute_major > 0 ? "processors" : "cores", text);
    print_memory(facts);
}

static void print_backend(const tch_backend_info *backend)
{
    puts("");
    output_heading("Backend %s: %s", backend->name, backend->available ? "available" : "not available");
    if (backend->library[0]) {
        print_fact("library", backend->library);
    }
    if (backend->details[0]) {
        print_fact("details", backend->details);
    }
    if (!backend->available) {
        print_fact("reason", backend->reason);
    }
    for (int32_t i = 0; i < backend->devices && backend->available; i++) {
        device_facts facts = read_device(backend->name, i);
        print_device(&facts);
    }
}

static void print_installation(const machine_facts *machine)
{
    char text[256];
    output_heading("Torchium %s", tch_version());
    if (strcmp(tch_version(), TCH_VERSION_STRING) != 0) {
        snprintf(text, sizeof text, "this command was built for %s and found the library %s: reinstall one of them",
                 TCH_VERSION_STRING, tch_version());
        print_fact("warning", text);
    }
    print_fact("built with", machine->compiler);
    print_fact("system", machine->system);
    snprintf(text, sizeof text, "%d", (int)tch_get_num_threads());
    print_fact("threads", text);
    for (int i = 0; i < VARIABLES; i++) {
        const char *value = getenv(variables[i]);
        if (value == NULL) {
            continue;
        }
        snprintf(text, sizeof text, "%s=%s", variables[i], value);
        print_fact("set", text);
    }
}

static int print_text(void)
{
    machine_facts machine = read_machine();
    print_installation(&machine);
    for (int32_t i = 0; i < tch_backend_count(); i++) {
        tch_backend_info backend = TCH_BACKEND_INFO_INIT;
        if (tch_backend_info_get(i, &backend)) {
            return output_fail_library("info");
        }
        print_backend(&backend);
    }
    return CLI_OK;
}

static void write_memory(json_writer *json, const tch_memory_info *memory)
{
    json_object_begin(json, "memory");
    json_integer(json, "total", memory->total);
    json_integer(json, "free", memory->free);
    json_integer(json, "allocated", memory->allocated);
    json_integer(json, "reserved", memory->reserved);
    json_integer(json, "peak", memory->peak);
    json_integer(json, "requests", memory->requests);
    json_integer(json, "misses", memory->misses);
    json_object_end(json);
}

static void write_device(json_writer *json, const device_facts *facts)
{
    json_object_begin(json, NULL);
    json_integer(json, "index", facts->device.index);
    json_text(json, "name", facts->info.name);
    json_text(json, "features", facts->info.features);
    json_integer(json, "processors", facts->info.processors);
    json_integer(json, "compute_major", facts->info.compute_major);
    json_integer(json, "compute_minor", facts->info.compute_minor);
    json_integer(json, "total_memory", facts->info.total_memory);
    json_integer(json, "free_memory", facts->info.free_memory);
    json_text(json, "problem", facts->status ? facts->failure : NULL);
    if (facts->status == TCH_OK) {
        write_memory(json, &facts->memory);
    }
    json_object_end(json);
}

static void write_backend(json_writer *json, const tch_backend_info *backend)
{
    json_object_begin(json, NULL);
    json_text(json, "name", backend->name);
    json_bool(json, "available", backend->available);
    json_text(json, "library", backend->library[0] ? backend->library : NULL);
    json_text(json, "details", backend->details[0] ? backend->details : NULL);
    json_text(json, "reason", backend->available ? NULL : backend->reason);
    json_array_begin(json, "devices");
    for (int32_t i = 0; i < backend->devices && backend->available; i++) {
        device_facts facts = read_device(backend->name, i);
        write_device(json, &facts);
    }
    json_array_end(json);
    json_object_end(json);
}

static void write_environment(json_writer *json)
{
    json_object_begin(json, "environment");
    for (int i = 0; i < VARIABLES; i++) {
        json_text(json, variables[i], getenv(variables[i]));
    }
    json_object_end(json);
}

static int print_json(void)
{
    machine_facts machine = read_machine();
    json_writer json = json_start(stdout);
    json_object_begin(&json, NULL);
    json_text(&json, "version", tch_version());
    json_text(&json, "header_version", TCH_VERSION_STRING);
    json_text(&json, "system", machine.system);
    json_text(&json, "compiler", machine.compiler);
    json_integer(&json, "threads", tch_get_num_threads());
    json_real(&json, "load_average", machine.load);
    write_environment(&json);
    json_array_begin(&json, "backends");
    for (int32_t i = 0; i < tch_backend_count(); i++) {
        tch_backend_info backend = TCH_BACKEND_INFO_INIT;
        if (tch_backend_info_get(i, &backend)) {
            return output_fail_library("info");
        }
        write_backend(&json, &backend);
    }
    json_array_end(&json);
    json_object_end(&json);
    return CLI_OK;
}

/* --- kernels ----------------------------------------------------------------------------------------------------- */

static void set_types(table *t, int column, int32_t types)
{
    static const char *const names[TCH_SCALAR_COUNT] = {" f64", " f32", " f16", " bf16", "", "", " bf16x2"};
    char text[TABLE_CELL] = "";
    int length = 0;
    for (int i = 0; i < TCH_SCALAR_COUNT; i++) {
        length += snprintf(text + length, sizeof text - (size_t)length, "%s", (types >> i & 1) != 0 ? names[i] : "");
    }
    table_set(t, column, "%s", text[0] != 0 ? text + 1 : "");
}

/* The table by which the CUDA backend chooses: for each operation the first row that matches. */
static int print_kernels(void)
{
    table t;
    table_start(&t, "operation|<kernel|GPU|<A|<C|n|n %|aligned|tile|tiles");
    for (int i = 0; i < TCHI_KERNEL_COUNT; i++) {
        const tchi_kernel_row *row = &tchi_kernel_rows[i];
        table_row(&t);
        table_set(&t, 0, "%s", row->operation);
        table_set(&t, 1, "%s", row->kernel);
        if (row->major > 0 && row->last_major > 90) {
            table_set(&t, 2, "sm_%d0+", (int)row->major);
        } else if (row->last_major > row->major && row->major > 0) {
            table_set(&t, 2, "sm_%d0-%d0", (int)row->major, (int)row->last_major);
        } else if (row->major > 0) {
            table_set(&t, 2, "sm_%d0", (int)row->major);
        }
        set_types(&t, 3, row->a);
        set_types(&t, 4, row->c);
        const int numbers[] = {row->side, row->multiple > 1 ? row->multiple : 0, row->aligned};
        for (int k = 0; k < 3; k++) {
            if (numbers[k] > 0) {
                table_set(&t, 5 + k, "%d", numbers[k]);
            }
        }
        if (row->tile_rows > 0) {
            table_set(&t, 8, "%d x %d", (int)row->tile_rows, (int)row->tile_cols);
        }
        if (row->share > 0) {
            table_set(&t, 9, "SMs / %d", (int)row->share);
        }
    }
    table_print(&t);
    return CLI_OK;
}

int command_info(int argc, char **argv)
{
    bool as_json = false, kernels = false;
    const option_spec specs[] = {
        {"--json", NULL, OPTION_FLAG, &as_json, 0, 0, "one JSON document instead of text"},
        {"--kernels", NULL, OPTION_FLAG, &kernels, 0, 0, "which CUDA kernel computes which product"},
    };
    const option_table table = {"info",
                                "Shows the version and build, this machine, and every backend with its devices; for a\n"
                                "backend that cannot be used, the reason and what to do about it.",
                                specs, sizeof specs / sizeof specs[0]};
    options_result result = options_read(&table, argc, argv);
    if (result != OPTIONS_GO) {
        return result == OPTIONS_HELPED ? CLI_OK : CLI_USAGE;
    }
    return kernels ? print_kernels() : as_json ? print_json() : print_text();
}
