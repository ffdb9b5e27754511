/* The environment of a .cu file in the emulator: CUDA C++ by the prelude of custom kernels (src/kernel/prelude), with
 * the emulated multiprocessor's launches, static shared memory and barriers (machine.h). translate.py rewrites what
 * macros cannot. */
#ifndef EMULATOR_EMULATOR_H
#define EMULATOR_EMULATOR_H

#include "machine.h"

#include "kernel/prelude/cpu_types.h"

#include "kernel/prelude/cpu_threads.h"

#include "kernel/prelude/cpu_math.h"

#include "kernel/prelude/cpu_half.h"

#include "kernel/prelude/cpu_atomics.h"

#include "kernel/prelude/cpu_runner.h"

/* Kernels are Hopper's, all of whose instructions are modeled; the host chooses kernels for other devices
 * (TORCHIUM_EMULATOR_CAPABILITY). */
#undef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#undef __shared__ /* removed by translate.py */

/* Truncated, not rounded. */
static inline float __double2float_rz(double x)
{
    float rounded = (float)x;
    return fabs((double)rounded) > fabs(x) ? nextafterf(rounded, 0.0f) : rounded;
}

namespace tchi
{

static __attribute__((unused)) void named_sync(int number, int threads)
{
    wait({EMULATOR_WAIT_NAMED, (uint32_t)number, (uint32_t)threads, 0});
}

/* The records of all lanes of the warp. */
template <typename T> struct records {
    const unsigned char *at;
    const T &operator[](int lane) const
    {
        return *(const T *)(at + lane * EMULATOR_RECORD);
    }
};

template <typename T> static inline records<T> exchange_records(const T &mine)
{
    static_assert(sizeof(T) <= EMULATOR_RECORD, "a record is too long");
    const unsigned char *at = emulator_leave(&mine, sizeof mine);
    wait({EMULATOR_WAIT_EXCHANGE, 0xFFFFFFFFu, lane(), 0});
    return {at};
}

/* Barriers include the source line, to distinguish threads at different ones. */
static __attribute__((unused)) int sync_at(const char *place, int condition)
{
    uint64_t address = (uint64_t)(uintptr_t)place;
    return (int)wait({TCHI_WAIT_BLOCK, (uint32_t)(address >> 32), (uint32_t)address, condition != 0});
}

} // namespace tchi

#undef __syncthreads
#undef __syncthreads_count
#undef __syncthreads_or
#undef __syncthreads_and
#define EMULATOR_HERE __FILE__ ":" TCHI_TEXT(__LINE__)
#define __syncthreads() ((void)tchi::sync_at(EMULATOR_HERE, 0))
#define __syncthreads_count(c) tchi::sync_at(EMULATOR_HERE, (c))
#define __syncthreads_or(c) ((int)(tchi::sync_at(EMULATOR_HERE, (c)) != 0))
#define __syncthreads_and(c) ((int)(tchi::sync_at(EMULATOR_HERE, !(c)) == 0))

/* At the beginning of every kernel: its name and launch bounds. */
#define EMULATOR_KERNEL(name, ...)                                                                                     \
    do {                                                                                                               \
        static emulator_kernel_note note = {name, 0};                                                                  \
        emulator_enter_kernel(&note, tchi::first_of(__VA_ARGS__));                                                     \
    } while (0)

#include "cuda_runtime_api.h"

namespace tchi
{

static inline int first_of(int threads = 0, int = 0)
{
    return threads;
}

/* The arguments between <<< and >>>. */
struct launch_shape {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    unsigned cluster;
};

static inline launch_shape shape_of(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr)
{
    return {grid, block, shared, stream, 1};
}

template <typename F> struct closure_entry {
    static void enter(const tchi_cpu_launch *l, int64_t block)
    {
        enter_grid(l);
        enter_block(l, block);
    }
    static void thread(const tchi_cpu_launch *l, int32_t number)
    {
        uint32_t n = (uint32_t)number;
        threadIdx.x.value = (int)(n % l->block[0]);
        threadIdx.y = n / l->block[0] % l->block[1];
        threadIdx.z = n / l->block[0] / l->block[1];
        (*(const F *)(const void *)l->arguments)();
    }
    static constexpr tchi_cpu_kernel_entry value = {TCHI_CPU_KERNEL_ABI, TCHI_CPU_KERNEL_FIBERS, nullptr, &enter,
                                                    &thread};
};

/* A launch with copies of its arguments. */
template <typename F> struct launch_work {
    emulator_launch launch;
    F body;
};

template <typename F> static void run_launch(void *data)
{
    launch_work<F> *work = (launch_work<F> *)data;
    work->launch.closure = &work->body;
    emulator_note_result(emulator_run(&work->launch));
}

/* Arguments are evaluated once; the parameters of a kernel are copies of them. */
template <typename K, typename... A>
static void launch_kernel(const char *text, const launch_shape &s, K kernel, const A &...arguments)
{
    auto body = [=] { kernel(arguments...); };
    launch_work<decltype(body)> work = {{text,
                                         {s.grid.x, s.grid.y, s.grid.z},
                                         {s.block.x, s.block.y, s.block.z},
                                         s.cluster,
                                         s.shared,
                                         &closure_entry<decltype(body)>::value,
                                         nullptr},
                                        body};
    emulator_submit(s.stream, run_launch<decltype(body)>, &work, sizeof work);
}

} // namespace tchi

/* --- launches with attributes ------------------------------------------------------------------------------------ */

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

template <typename... P, typename... A>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...arguments)
{
    unsigned cluster = config->numAttrs > 0 ? config->attrs[0].val.clusterDim.x : 1;
    tchi::launch_kernel("cudaLaunchKernelEx",
                        {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, cluster}, kernel,
                        P(arguments)...);
    return cudaSuccess;
}

template <typename... P>
static cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

/* Clusters run one after the other, so any number fits. */
template <typename K> static cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, K, const cudaLaunchConfig_t *)
{
    *clusters = 1 << 20;
    return cudaSuccess;
}

#endif
