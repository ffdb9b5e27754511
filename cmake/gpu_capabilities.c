/* Prints the compute capabilities of the GPUs of this machine, such as "9.0 12.0", or exits with 1 and prints why there
 * are none. cmake/CudaCompiler.cmake runs it while configuring. It asks the driver, since nvidia-smi is missing in many
 * containers and on some boards. */
#include <dlfcn.h>
#include <stdio.h>

typedef int (*init_function)(unsigned);
typedef int (*count_function)(int *);
typedef int (*device_function)(int *, int);
typedef int (*attribute_function)(int *, int, int);

enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 }; /* of CUdevice_attribute */

static int none(const char *why)
{
    printf("%s", why);
    return 1;
}

int main(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) {
        return none("no NVIDIA driver is installed here");
    }
    init_function init = (init_function)dlsym(driver, "cuInit");
    count_function get_count = (count_function)dlsym(driver, "cuDeviceGetCount");
    device_function get_device = (device_function)dlsym(driver, "cuDeviceGet");
    attribute_function get_attribute = (attribute_function)dlsym(driver, "cuDeviceGetAttribute");
    int count = 0;
    if (!init || !get_count || !get_device || !get_attribute || init(0) != 0 || get_count(&count) != 0) {
        return none("the NVIDIA driver does not start here");
    }
    for (int i = 0; i < count; i++) {
        int device;
        int major;
        int minor;
        if (get_device(&device, i) == 0 && get_attribute(&major, CAPABILITY_MAJOR, device) == 0 &&
            get_attribute(&minor, CAPABILITY_MINOR, device) == 0) {
            printf("%s%d.%d", i > 0 ? " " : "", major, minor);
        }
    }
    return count > 0 ? 0 : none("the NVIDIA driver finds no GPU");
}
