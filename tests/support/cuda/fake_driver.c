/* A libcuda.so.1 for machines without one. The CUDA runtime queries its version and initializes it; the environment
 * sets both results, and every other function fails. Tests the module with a driver that is too old, or finds no
 * GPU. */
#include <stdlib.h>
#include <string.h>

typedef void (*any_function)(void);

static int number(const char *variable, int otherwise)
{
    const char *value = getenv(variable);
    return value != NULL ? atoi(value) : otherwise;
}

int cuInit(unsigned int flags)
{
    return number("FAKE_DRIVER_INIT", 100); /* CUDA_ERROR_NO_DEVICE */
}

int cuDriverGetVersion(int *version)
{
    *version = number("FAKE_DRIVER_VERSION", 99000);
    return 0;
}

static int fails(void)
{
    return 999; /* CUDA_ERROR_UNKNOWN */
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *found)
{
    const struct {
        const char *name;
        any_function function;
    } known[] = {{"cuInit", (any_function)cuInit},
                 {"cuDriverGetVersion", (any_function)cuDriverGetVersion},
                 {"cuGetProcAddress", (any_function)cuGetProcAddress_v2}};
    any_function answer = (any_function)fails;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, known[i].name) == 0) {
            answer = known[i].function;
        }
    }
    memcpy(function, &answer, sizeof answer);
    if (found != NULL) {
        *found = 0;
    }
    return 0;
}
