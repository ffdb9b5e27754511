/* CUDA's atomics by compiler builtins, relaxed as on a GPU. Floating-point ones retry until the exchange succeeds. */
namespace tchi
{

template <typename T> struct same {
    typedef T type;
};
template <typename T> using value_of = typename same<T>::type; /* not deduced from: 1 may be added to a float */

template <int bytes> struct bits_of;
template <> struct bits_of<2> {
    typedef uint16_t type;
};
template <> struct bits_of<4> {
    typedef uint32_t type;
};
template <> struct bits_of<8> {
    typedef uint64_t type;
};

template <typename T, typename F> static inline T change(T *address, F next)
{
    typedef typename bits_of<sizeof(T)>::type bits;
    typedef bits __attribute__((may_alias)) cell;
    cell *at = (cell *)address;
    bits seen = __atomic_load_n(at, __ATOMIC_RELAXED), desired;
    T before;
    do {
        memcpy(&before, &seen, sizeof before);
        T after = next(before);
        memcpy(&desired, &after, sizeof desired);
    } while (!__atomic_compare_exchange_n(at, &seen, desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

template <typename T> struct adder {
    static T add(T *address, T value)
    {
        return change(address, [=](T now) { return now + value; });
    }
};
#define TCHI_ADDER(T)                                                                                                  \
    template <> struct adder<T> {                                                                                      \
        static T add(T *address, T value)                                                                              \
        {                                                                                                              \
            return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);                                               \
        }                                                                                                              \
    };
TCHI_ADDER(int)
TCHI_ADDER(unsigned)
TCHI_ADDER(long)
TCHI_ADDER(unsigned long)
TCHI_ADDER(long long)
TCHI_ADDER(unsigned long long)
#undef TCHI_ADDER

} // namespace tchi

template <typename T> static inline T atomicAdd(T *address, tchi::value_of<T> value)
{
    return tchi::adder<T>::add(address, value);
}
#define TCHI_ATOMIC(name, fetch)                                                                                       \
    template <typename T> static inline T name(T *address, tchi::value_of<T> value)                                    \
    {                                                                                                                  \
        return fetch(address, value, __ATOMIC_RELAXED);                                                                \
    }
TCHI_ATOMIC(atomicSub, __atomic_fetch_sub)
TCHI_ATOMIC(atomicAnd, __atomic_fetch_and)
TCHI_ATOMIC(atomicOr, __atomic_fetch_or)
TCHI_ATOMIC(atomicXor, __atomic_fetch_xor)
#undef TCHI_ATOMIC
template <typename T> static inline T atomicMin(T *address, tchi::value_of<T> value)
{
    return tchi::change(address, [=](T now) { return value < now ? value : now; });
}
template <typename T> static inline T atomicMax(T *address, tchi::value_of<T> value)
{
    return tchi::change(address, [=](T now) { return now < value ? value : now; });
}
template <typename T> static inline T atomicExch(T *address, tchi::value_of<T> value)
{
    return tchi::change(address, [=](T) { return value; });
}
template <typename T> static inline T atomicCAS(T *address, tchi::value_of<T> expected, tchi::value_of<T> value)
{
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
static inline unsigned atomicInc(unsigned *address, unsigned last)
{
    return tchi::change(address, [=](unsigned now) { return now >= last ? 0u : now + 1; });
}
static inline unsigned atomicDec(unsigned *address, unsigned last)
{
    return tchi::change(address, [=](unsigned now) { return now == 0 || now > last ? last : now - 1; });
}
