/* Fills the list of backends once, at the first query. The list is static and of fixed size: it must work without
 * memory, and lives as long as the process. */
#include "registry.h"

#include <stdio.h>
#include <string.h>

#include "allocator.h"
#include "status.h"
#include "threads.h"

#define MAX_BACKENDS 16

typedef struct entry {
    const tch_backend *table;
    char name[32];
    char library[512];
    char reason[1024];
} entry;

static entry entries[MAX_BACKENDS];
static int32_t entry_count;
static atomic_bool filled;

static tch_backend_host host = {sizeof(tch_backend_host), tchi_fail, tchi_host_allocate, tchi_host_release, NULL};

const tch_backend_host *tchi_registry_host(void)
{
    return &host;
}

void tchi_registry_add(const tch_backend *table, const char *name, const char *library, const char *reason)
{
    if (entry_count == MAX_BACKENDS) {
        return;
    }
    entry *e = &entries[entry_count++];
    e->table = table;
    snprintf(e->name, sizeof e->name, "%s", name);
    snprintf(e->library, sizeof e->library, "%s", library);
    snprintf(e->reason, sizeof e->reason, "%s", reason);
}

int tchi_registry_has(const char *name)
{
    for (int32_t i = 0; i < entry_count; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            return 1;
        }
    }
    return 0;
}

static void fill_registry(void)
{
    host.cpu = tchi_add_built_in(&host);
    tchi_load_modules();
}

static void ensure_filled(void)
{
    tchi_once(&filled, fill_registry);
}

/* Devices are counted at every query: a driver may start to fail while the process runs. */
static int32_t count_devices(const entry *e, char *reason, size_t reason_size)
{
    if (e->table == NULL) {
        snprintf(reason, reason_size, "%s", e->reason);
        return 0;
    }
    return e->table->device->count(reason, reason_size, NULL, 0);
}

static const entry *entry_of_type(int32_t device_type)
{
    for (int32_t i = 0; i < entry_count; i++) {
        if (entries[i].table != NULL && entries[i].table->device_type == device_type) {
            return &entries[i];
        }
    }
    return NULL;
}

static const char *type_name(int32_t device_type)
{
    const entry *e = entry_of_type(device_type);
    if (e != NULL) {
        return e->name;
    }
    return device_type == TCH_DEVICE_CPU ? "cpu" : device_type == TCH_DEVICE_CUDA ? "cuda" : "unknown";
}

static const entry *entry_of_name(const char *name)
{
    for (int32_t i = 0; i < entry_count; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            return &entries[i];
        }
    }
    return NULL;
}

const tch_backend *tchi_registry_find(int32_t device_type)
{
    ensure_filled();
    const entry *e = entry_of_type(device_type);
    if (e == NULL) {
        e = entry_of_name(type_name(device_type));
    }
    char reason[1024] = "no backend of this kind is known to this build";
    if (e == NULL || count_devices(e, reason, sizeof reason) == 0) {
        tchi_fail(TCH_ERR_UNAVAILABLE, "no %s device can be used: %s", type_name(device_type), reason);
        return NULL;
    }
    return e->table;
}

int32_t tch_backend_count(void)
{
    ensure_filled();
    return entry_count;
}

tch_status tch_backend_info_get(int32_t index, tch_backend_info *info)
{
    ensure_filled();
    if (info == NULL || info->struct_size != sizeof(tch_backend_info)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_backend_info_get: info must point to a struct set to TCH_BACKEND_INFO_INIT");
    }
    if (index < 0 || index >= entry_count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_backend_info_get: index is %d, expected 0 to %d", index,
                         entry_count - 1);
    }
    const entry *e = &entries[index];
    *info = (tch_backend_info)TCH_BACKEND_INFO_INIT;
    snprintf(info->name, sizeof info->name, "%s", e->name);
    snprintf(info->library, sizeof info->library, "%s", e->library);
    info->devices = e->table == NULL ? count_devices(e, info->reason, sizeof info->reason)
                                     : e->table->device->count(info->reason, sizeof info->reason, info->details,
                                                               sizeof info->details);
    info->available = info->devices > 0;
    return TCH_OK;
}

int32_t tch_device_count(tch_device_type type)
{
    ensure_filled();
    char reason[1024];
    const entry *e = entry_of_type((int32_t)type);
    return e == NULL ? 0 : count_devices(e, reason, sizeof reason);
}

tch_status tch_device_info_get(tch_device device, tch_device_info *info)
{
    if (info == NULL || info->struct_size != sizeof(tch_device_info)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_device_info_get: info must point to a struct set to TCH_DEVICE_INFO_INIT");
    }
    const tch_backend *backend = tchi_registry_find(device.type);
    if (backend == NULL) {
        return TCH_ERR_UNAVAILABLE;
    }
    int32_t count = tch_device_count((tch_device_type)device.type);
    if (device.index < 0 || device.index >= count) {
        return tchi_fail(TCH_ERR_UNAVAILABLE, "tch_device_info_get: %s:%d was requested; there are %d such devices",
                         type_name(device.type), device.index, count);
    }
    *info = (tch_device_info)TCH_DEVICE_INFO_INIT;
    return backend->device->info(device.index, info);
}

static tch_device best_device(void)
{
    tch_device best = {TCH_DEVICE_CPU, 0};
    int32_t priority = INT32_MIN;
    char reason[1024];
    for (int32_t i = 0; i < entry_count; i++) {
        const entry *e = &entries[i];
        if (e->table != NULL && e->table->priority > priority && count_devices(e, reason, sizeof reason) > 0) {
            priority = e->table->priority;
            best.type = e->table->device_type;
        }
    }
    return best;
}

/* The number after "cuda:"; -1 if it is not a plain small number. */
static int32_t parse_index(const char *text)
{
    int32_t value = 0;
    int digits = 0;
    for (; text[digits] >= '0' && text[digits] <= '9' && digits < 4; digits++) {
        value = value * 10 + (text[digits] - '0');
    }
    return digits > 0 && text[digits] == '\0' ? value : -1;
}

/* Whether `text` is NAME or NAME:INDEX. */
static int parse_as(const char *name, int32_t type, const char *text, tch_device *device)
{
    size_t length = strlen(name);
    if (strncmp(text, name, length) != 0 || (text[length] != '\0' && text[length] != ':')) {
        return 0;
    }
    int32_t index = text[length] == '\0' ? 0 : parse_index(text + length + 1);
    if (index >= 0) {
        *device = (tch_device){type, index};
    }
    return index >= 0;
}

tch_status tch_device_parse(const char *text, tch_device *device)
{
    if (text == NULL || device == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_device_parse: %s is NULL", text == NULL ? "text" : "device");
    }
    ensure_filled();
    if (strcmp(text, "auto") == 0) {
        *device = best_device();
        return TCH_OK;
    }
    if (parse_as("cpu", TCH_DEVICE_CPU, text, device) || parse_as("cuda", TCH_DEVICE_CUDA, text, device)) {
        return TCH_OK;
    }
    for (int32_t i = 0; i < entry_count; i++) {
        const entry *e = &entries[i];
        if (e->table != NULL && parse_as(e->name, e->table->device_type, text, device)) {
            return TCH_OK;
        }
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                     "device \"%.64s\" is not understood; expected \"auto\", \"cpu\", \"cuda\" or \"cuda:N\"", text);
}
