/* A fake CUDA module with two devices, in host memory and with the CPU backend's arithmetic. It logs contexts created,
 * streams set and synchronizations for the Python tests of streams. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <torchium/backend.h>

#include "table_copy.h"

#define MOST_STATES 64

static const tch_backend *cpu;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char diary[1 << 16];
static struct {
    void *state; /* the CPU's, which its operations need */
    void *stream;
} states[MOST_STATES];
static int state_count;

TCH_API void pretend_take_diary(char *text, size_t size);

/* Copies the entries since the last call. */
void pretend_take_diary(char *text, size_t size)
{
    pthread_mutex_lock(&lock);
    snprintf(text, size, "%s", diary);
    diary[0] = '\0';
    pthread_mutex_unlock(&lock);
}

static int number_of(const void *state)
{
    int i = 0;
    while (states[i].state != state) {
        i++;
    }
    return i;
}

static void note(const char *what, int number, long long detail)
{
    pthread_mutex_lock(&lock);
    size_t used = strlen(diary);
    snprintf(diary + used, sizeof diary - used, "%s %d %lld\n", what, number, detail);
    pthread_mutex_unlock(&lock);
}

static int32_t device_count(char *reason, size_t reason_size, char *libraries, size_t libraries_size)
{
    (void)cpu->device->count(reason, reason_size, libraries, libraries_size);
    return 2;
}

static tch_status device_info(int32_t index, tch_device_info *info)
{
    tch_status status = cpu->device->info(0, info);
    snprintf(info->name, sizeof info->name, "pretended GPU %d", index);
    return status;
}

static tch_status state_create(int32_t index, void **state)
{
    tch_status status = cpu->device->state_create(0, state);
    if (status == TCH_OK) {
        states[state_count].state = *state;
        note("made", state_count++, index);
    }
    return status;
}

static tch_status stream_of_state(void *state, int32_t set, void **stream)
{
    int number = number_of(state);
    if (set && states[number].stream != *stream) {
        states[number].stream = *stream;
        note("stream", number, (long long)(intptr_t)*stream);
    }
    *stream = states[number].stream;
    return TCH_OK;
}

static tch_status synchronize(void *state)
{
    note("wait", number_of(state), 0);
    return TCH_OK;
}

static tch_status gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                       int32_t transpose_b, double beta, int32_t rounded, const tch_matrices *c)
{
    note("gemm", number_of(state), (long long)(intptr_t)states[number_of(state)].stream);
    return cpu->matrix->gemm(state, alpha, a, transpose_a, b, transpose_b, beta, rounded, c);
}

const tch_backend *torchium_backend_entry(uint32_t abi, const tch_backend_host *host, char *reason, size_t reason_size)
{
    static table_copy table;
    if (abi != TCH_BACKEND_ABI) {
        snprintf(reason, reason_size, "built for another interface");
        return NULL;
    }
    cpu = host->cpu;
    table_copy_make(&table, cpu);
    table.backend.name = "cuda";
    table.backend.device_type = TCH_DEVICE_CUDA;
    table.device.count = device_count;
    table.device.info = device_info;
    table.device.state_create = state_create;
    table.device.stream = stream_of_state;
    table.device.synchronize = synchronize;
    table.matrix.gemm = gemm;
    return &table.backend;
}
