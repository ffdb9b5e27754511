/* A backend module for tests of the loader. FAKE_VARIANT selects its defect; variant GOOD has one device, implemented
 * by the CPU backend, and only the two mandatory chapters. */
#include <stdio.h>

#include <torchium/backend.h>

#define GOOD 0
#define WRONG_ABI 1
#define WRONG_SIZE 2
#define NO_ENTRY 3
#define REFUSES 4
#define REFUSES_SILENTLY 5
#define INCOMPLETE 6
#define NO_DEVICES 7
#define NO_MATRICES 8
#define HALF_A_CHAPTER 9

static tch_device_count_op device_count;
static tch_device_info_op device_info;
static tch_fill_op fill;

static const tch_backend_host *host;

static int32_t device_count(char *reason, size_t reason_size, char *libraries, size_t libraries_size)
{
    snprintf(libraries, libraries_size, "nothing but imagination");
    if (FAKE_VARIANT == NO_DEVICES) {
        snprintf(reason, reason_size, "all fake devices are on holiday");
        return 0;
    }
    return 1;
}

static tch_status device_info(int32_t index, tch_device_info *info)
{
    snprintf(info->name, sizeof info->name, "fake device %d", index);
    info->total_memory = 1 << 30;
    info->free_memory = 1 << 29;
    return TCH_OK;
}

static tch_status fill(void *state, const tch_array *dst, double value)
{
    return host->fail(TCH_ERR_UNSUPPORTED, "the fake device cannot do fills");
}

static const tch_backend *make_table(const tch_backend *cpu)
{
    static tch_device_ops device;
    static tch_matrix_ops matrix;
    static tch_update_ops update;
    static tch_backend table;
    device = *cpu->device;
    device.count = device_count;
    device.info = device_info;
    matrix = *cpu->matrix;
    matrix.fill = fill;
    matrix.gemm = FAKE_VARIANT == INCOMPLETE ? NULL : matrix.gemm;
    update.elementwise = cpu->update->elementwise;
    table = (tch_backend){.abi = FAKE_VARIANT == WRONG_ABI ? 7777u : TCH_BACKEND_ABI,
                          .table_size = sizeof(tch_backend) - (FAKE_VARIANT == WRONG_SIZE ? 8 : 0),
                          .name = "cuda",
                          .device_type = TCH_DEVICE_CUDA,
                          .priority = 1000,
                          .device = &device,
                          .matrix = FAKE_VARIANT == NO_MATRICES ? NULL : &matrix,
                          .update = FAKE_VARIANT == HALF_A_CHAPTER ? &update : NULL};
    return &table;
}

#if FAKE_VARIANT == NO_ENTRY
#define ENTRY another_entry
#else
#define ENTRY torchium_backend_entry
#endif

TCH_API const tch_backend *ENTRY(uint32_t abi, const tch_backend_host *offered, char *reason, size_t reason_size);

const tch_backend *ENTRY(uint32_t abi, const tch_backend_host *offered, char *reason, size_t reason_size)
{
    host = offered;
    if (FAKE_VARIANT == REFUSES) {
        snprintf(reason, reason_size, "the driver is older than time");
    }
    return FAKE_VARIANT == REFUSES || FAKE_VARIANT == REFUSES_SILENTLY ? NULL : make_table(host->cpu);
}
