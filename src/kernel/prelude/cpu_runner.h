/* Runs a kernel for a range of blocks. Precedes the user's source, whose macros must not affect it; cpu_entry.h passes
 * it the kernel.
 *
 * Without barriers the threads of a block are a loop around the inlined kernel; CUDA requires them to be independent,
 * which ivdep tells the compiler. */
namespace tchi
{

template <int... i> struct numbers {
};
template <int n, int... i> struct first_numbers : first_numbers<n - 1, n - 1, i...> {
};
template <int... i> struct first_numbers<0, i...> {
    typedef numbers<i...> type;
};

static inline void enter_grid(const tchi_cpu_launch *l)
{
    launch = l;
    gridDim.x.value = (int)l->grid[0], gridDim.y = l->grid[1], gridDim.z = l->grid[2];
    blockDim.x.value = (int)l->block[0], blockDim.y = l->block[1], blockDim.z = l->block[2];
}

static inline void enter_block(const tchi_cpu_launch *l, int64_t block)
{
    int64_t plane = (int64_t)l->grid[0] * l->grid[1];
    blockIdx.z = (unsigned)(block / plane);
    blockIdx.y = (unsigned)(block % plane / l->grid[0]);
    blockIdx.x.value = (int)(block % l->grid[0]);
}

template <typename F, F kernel> struct tchi_entry;
template <typename... P, void (*kernel)(P...)> struct tchi_entry<void (*)(P...), kernel> {
    /* Parameters are copied once: stores through pointers cannot alias them. */
    static __attribute__((flatten, noinline)) void blocks(const tchi_cpu_launch *l, int64_t from, int64_t to, P... p)
    {
        const int width = (int)l->block[0];
        const unsigned height = l->block[1], depth = l->block[2];
        for (int64_t block = from; block < to; block++) {
            enter_block(l, block);
            for (unsigned z = 0; z < depth; z++) {
                for (unsigned y = 0; y < height; y++) {
                    threadIdx.y = y, threadIdx.z = z;
#pragma GCC ivdep
                    for (int x = 0; x < width; x++) {
                        threadIdx.x.value = x;
                        kernel(p...);
                    }
                }
            }
        }
    }

    template <int... i> static void unpack(const tchi_cpu_launch *l, int64_t from, int64_t to, numbers<i...>)
    {
        const void *const *values = l->arguments;
        (void)values;
        blocks(l, from, to, *(const P *)values[i]...);
    }
    template <int... i> static void call(const tchi_cpu_launch *l, numbers<i...>)
    {
        const void *const *values = l->arguments;
        (void)values;
        kernel(*(const P *)values[i]...);
    }

    typedef typename first_numbers<sizeof...(P)>::type all;

    static void run(const tchi_cpu_launch *l, int64_t from, int64_t to)
    {
        enter_grid(l);
        unpack(l, from, to, all());
    }
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
        call(l, all());
    }
};

/* Only the variant in use is compiled. */
template <int fibers, typename E> struct tchi_describe {
    static constexpr tchi_cpu_kernel_entry tchi_value = {TCHI_CPU_KERNEL_ABI, 0, &E::run, nullptr, nullptr};
};
template <typename E> struct tchi_describe<1, E> {
    static constexpr tchi_cpu_kernel_entry tchi_value = {TCHI_CPU_KERNEL_ABI, TCHI_CPU_KERNEL_FIBERS, nullptr,
                                                         &E::enter, &E::thread};
};

} // namespace tchi
