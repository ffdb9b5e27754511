/* Thread indices, and synchronization within a block.
 *
 * blockIdx.x * blockDim.x + threadIdx.x is unsigned in CUDA and may wrap, which hides contiguous accesses from the
 * compiler. Launches have fewer than 2^31 threads along x here, so this sum and gridDim.x * blockDim.x never wrap: they
 * are computed as signed numbers, everything else as unsigned. */
namespace tchi
{

enum index_kind { THREAD, BLOCK, BLOCK_SIZE, GRID_SIZE, FIRST, PLACE, SPAN };

template <index_kind kind> struct index {
    int value;
    operator unsigned() const
    {
        return (unsigned)value;
    }
    template <typename T> index &operator+=(T more)
    {
        return value = (int)((unsigned)value + (unsigned)more), *this;
    }
    template <typename T> index &operator-=(T less)
    {
        return value = (int)((unsigned)value - (unsigned)less), *this;
    }
    index &operator++()
    {
        return ++value, *this;
    }
    index operator++(int)
    {
        return index{value++};
    }
};
TCHI_FUNCTION(index<FIRST>, operator*, (index<BLOCK> a, index<BLOCK_SIZE> b), return {a.value * b.value})
TCHI_FUNCTION(index<FIRST>, operator*, (index<BLOCK_SIZE> a, index<BLOCK> b), return {a.value * b.value})
TCHI_FUNCTION(index<PLACE>, operator+, (index<FIRST> a, index<THREAD> b), return {a.value + b.value})
TCHI_FUNCTION(index<PLACE>, operator+, (index<THREAD> a, index<FIRST> b), return {a.value + b.value})
TCHI_FUNCTION(index<SPAN>, operator*, (index<BLOCK_SIZE> a, index<GRID_SIZE> b), return {a.value * b.value})
TCHI_FUNCTION(index<SPAN>, operator*, (index<GRID_SIZE> a, index<BLOCK_SIZE> b), return {a.value * b.value})

template <index_kind kind> struct place {
    index<kind> x;
    unsigned y, z;
    operator uint3() const
    {
        return {x, y, z};
    }
    operator dim3() const
    {
        return {x, y, z};
    }
};

} // namespace tchi

static thread_local tchi::place<tchi::THREAD> threadIdx;
static thread_local tchi::place<tchi::BLOCK> blockIdx;
static thread_local tchi::place<tchi::BLOCK_SIZE> blockDim;
static thread_local tchi::place<tchi::GRID_SIZE> gridDim;
static constexpr int warpSize = 32;

namespace tchi
{

static thread_local const tchi_cpu_launch *launch;

[[noreturn]] static __attribute__((noinline, cold, unused)) void fail(const char *message)
{
    launch->fail(launch->runner, message);
    __builtin_unreachable();
}

/* Other threads run meanwhile and change the current position. */
static __attribute__((noinline, unused)) uint64_t wait(tchi_cpu_wait w)
{
    auto here = threadIdx;
    uint64_t answer = launch->wait(launch->runner, &w);
    threadIdx = here;
    return answer;
}

TCHI_FUNCTION(unsigned, lane, (), return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32)

TCHI_FUNCTION(int, sync_count, (int condition), return (int)wait({TCHI_WAIT_BLOCK, 0, 0, condition != 0}))
TCHI_FUNCTION(unsigned, ballot, (unsigned mask, int condition),
              return (unsigned)wait({TCHI_WAIT_BALLOT, mask, 0, condition != 0}))

template <typename T> static inline T exchange(unsigned mask, T value, unsigned source)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = wait({TCHI_WAIT_SHUFFLE, mask, source, bits});
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Lanes outside the segment of `width` return the thread's own value. */
template <typename T> static inline T shfl(unsigned mask, T value, int source, int width = 32)
{
    unsigned first = lane() & ~(unsigned)(width - 1);
    return exchange(mask, value, first + ((unsigned)source & (unsigned)(width - 1)));
}
template <typename T> static inline T shfl_up(unsigned mask, T value, unsigned delta, int width = 32)
{
    unsigned inside = lane() & (unsigned)(width - 1);
    return exchange(mask, value, inside >= delta ? lane() - delta : lane());
}
template <typename T> static inline T shfl_down(unsigned mask, T value, unsigned delta, int width = 32)
{
    unsigned inside = lane() & (unsigned)(width - 1);
    return exchange(mask, value, inside + delta < (unsigned)width ? lane() + delta : lane());
}
template <typename T> static inline T shfl_xor(unsigned mask, T value, int bits, int width = 32)
{
    unsigned other = lane() ^ (unsigned)bits;
    unsigned end = (lane() & ~(unsigned)(width - 1)) + (unsigned)width;
    return exchange(mask, value, other < end ? other : lane());
}

template <typename T> static inline unsigned match_any(unsigned mask, T value)
{
    unsigned same = 0;
    for (unsigned source = 0; source < 32; source++) {
        T other = exchange(mask, value, source);
        same |= (mask >> source & 1) && memcmp(&other, &value, sizeof value) == 0 ? 1u << source : 0;
    }
    return same;
}
template <typename T> static inline unsigned match_all(unsigned mask, T value, int *all)
{
    *all = match_any(mask, value) == mask;
    return *all ? mask : 0;
}
template <typename T, typename F> static inline T reduce(unsigned mask, T value, F join)
{
    T result = value;
    bool first = true;
    for (unsigned source = 0; source < 32; source++) {
        T other = exchange(mask, value, source);
        if (mask >> source & 1) {
            result = first ? other : join(result, other);
            first = false;
        }
    }
    return result;
}

/* Whether a source waits anywhere is whether __COUNTER__ has moved between its two ends. */
template <int> struct waits {
};

} // namespace tchi

#define TCHI_WAITS (void)tchi::waits<__COUNTER__>()
#define __syncthreads() (TCHI_WAITS, (void)tchi::sync_count(0))
#define __syncthreads_count(c) (TCHI_WAITS, tchi::sync_count(c))
#define __syncthreads_or(c) (TCHI_WAITS, (int)(tchi::sync_count(c) != 0))
#define __syncthreads_and(c) (TCHI_WAITS, (int)(tchi::sync_count(!(c)) == 0))
#define __syncwarp(...) (TCHI_WAITS, (void)tchi::ballot(tchi::mask_or_all(__VA_ARGS__), 0))
#define __ballot_sync(m, c) (TCHI_WAITS, tchi::ballot(m, c))
#define __any_sync(m, c) (TCHI_WAITS, (int)(tchi::ballot(m, c) != 0))
#define __all_sync(m, c) (TCHI_WAITS, (int)(tchi::ballot(m, !(c)) == 0))
#define __activemask() (TCHI_WAITS, tchi::active())
#define __shfl_sync(...) (TCHI_WAITS, tchi::shfl(__VA_ARGS__))
#define __shfl_up_sync(...) (TCHI_WAITS, tchi::shfl_up(__VA_ARGS__))
#define __shfl_down_sync(...) (TCHI_WAITS, tchi::shfl_down(__VA_ARGS__))
#define __shfl_xor_sync(...) (TCHI_WAITS, tchi::shfl_xor(__VA_ARGS__))
#define __match_any_sync(m, v) (TCHI_WAITS, tchi::match_any(m, v))
#define __match_all_sync(m, v, p) (TCHI_WAITS, tchi::match_all(m, v, p))
#define __reduce_add_sync(m, v) (TCHI_WAITS, tchi::reduce(m, v, [](auto a, auto b) { return a + b; }))
#define __reduce_min_sync(m, v) (TCHI_WAITS, tchi::reduce(m, v, [](auto a, auto b) { return b < a ? b : a; }))
#define __reduce_max_sync(m, v) (TCHI_WAITS, tchi::reduce(m, v, [](auto a, auto b) { return a < b ? b : a; }))
#define __reduce_and_sync(m, v) (TCHI_WAITS, tchi::reduce(m, v, [](auto a, auto b) { return a & b; }))
#define __reduce_or_sync(m, v) (TCHI_WAITS, tchi::reduce(m, v, [](auto a, auto b) { return a | b; }))
#define __reduce_xor_sync(m, v) (TCHI_WAITS, tchi::reduce(m, v, [](auto a, auto b) { return a ^ b; }))

namespace tchi
{

TCHI_FUNCTION(unsigned, mask_or_all, (unsigned mask = 0xffffffffu), return mask)

/* The lanes that exist; a returned thread counts as arrived. */
static inline unsigned active()
{
    unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    unsigned self = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned left = threads - self / 32 * 32;
    return left < 32 ? (1u << left) - 1 : 0xffffffffu;
}

#ifdef TCHI_DYNAMIC
alignas(128) static thread_local unsigned char dynamic_bytes[TCHI_CPU_KERNEL_SHARED];

/* Target of "extern __shared__ T name[]". */
struct dynamic_shared {
    template <typename T> operator T *() const
    {
        return (T *)dynamic_bytes;
    }
};
#endif

} // namespace tchi

#undef assert
#define TCHI_TEXT_(x) #x
#define TCHI_TEXT(x) TCHI_TEXT_(x)
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition)                                                                                              \
    ((condition) ? (void)0 : tchi::fail(__FILE__ ":" TCHI_TEXT(__LINE__) ": assertion failed: " #condition))
#endif
#define __trap() tchi::fail(__FILE__ ":" TCHI_TEXT(__LINE__) ": __trap()")
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_block() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_system() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __nanosleep(ns) ((void)(ns))

/* Nanoseconds, near a processor's clock. */
static inline long long clock64()
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
#define clock() ((int)clock64())
