/* CUDA's math functions, integer intrinsics and conversions that the C library lacks. The fast variants (__expf etc.)
 * are the exact ones, as macros since the C library reserves the names. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)

/* --- min and max, with CUDA's mixtures of types ------------------------------------------------------------------ */

#define TCHI_MIN_MAX(A, B, R)                                                                                          \
    TCHI_FUNCTION(R, min, (A a, B b), return (R)b < (R)a ? (R)b : (R)a)                                                \
    TCHI_FUNCTION(R, max, (A a, B b), return (R)a < (R)b ? (R)b : (R)a)
TCHI_MIN_MAX(int, int, int)
TCHI_MIN_MAX(unsigned, unsigned, unsigned)
TCHI_MIN_MAX(int, unsigned, unsigned)
TCHI_MIN_MAX(unsigned, int, unsigned)
TCHI_MIN_MAX(long, long, long)
TCHI_MIN_MAX(unsigned long, unsigned long, unsigned long)
TCHI_MIN_MAX(long, unsigned long, unsigned long)
TCHI_MIN_MAX(unsigned long, long, unsigned long)
TCHI_MIN_MAX(long long, long long, long long)
TCHI_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
TCHI_MIN_MAX(long long, unsigned long long, unsigned long long)
TCHI_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef TCHI_MIN_MAX
TCHI_FUNCTION(float, min, (float a, float b), return fminf(a, b))
TCHI_FUNCTION(float, max, (float a, float b), return fmaxf(a, b))
TCHI_FUNCTION(double, min, (double a, double b), return fmin(a, b))
TCHI_FUNCTION(double, max, (double a, double b), return fmax(a, b))
TCHI_FUNCTION(double, min, (float a, double b), return fmin((double)a, b))
TCHI_FUNCTION(double, max, (float a, double b), return fmax((double)a, b))
TCHI_FUNCTION(double, min, (double a, float b), return fmin(a, (double)b))
TCHI_FUNCTION(double, max, (double a, float b), return fmax(a, (double)b))

/* --- functions of real numbers ----------------------------------------------------------------------------------- */

/* C23 and C libraries from glibc 2.41 on also have these names. */
#define rsqrt tchi_rsqrt
#define rsqrtf tchi_rsqrtf
#define sinpi tchi_sinpi
#define sinpif tchi_sinpif
#define cospi tchi_cospi
#define cospif tchi_cospif

#define TCHI_REAL_FUNCTIONS(T, f)                                                                                      \
    TCHI_FUNCTION(T, rsqrt##f, (T x), return (T)1 / sqrt##f(x))                                                        \
    TCHI_FUNCTION(T, sinpi##f, (T x), return sin##f((T)M_PI * remainder##f(x, (T)2)))                                  \
    TCHI_FUNCTION(T, cospi##f, (T x), return cos##f((T)M_PI * remainder##f(x, (T)2)))                                  \
    TCHI_FUNCTION(T, normcdf##f, (T x), return (T)0.5 * erfc##f(x * (T)-M_SQRT1_2))
TCHI_REAL_FUNCTIONS(double, )
TCHI_REAL_FUNCTIONS(float, f)
#undef TCHI_REAL_FUNCTIONS

TCHI_FUNCTION(float, rsqrt, (float x), return rsqrtf(x))
TCHI_FUNCTION(float, fdividef, (float x, float y), return x / y)
TCHI_FUNCTION(float, __fdividef, (float x, float y), return x / y)
TCHI_FUNCTION(float, __saturatef, (float x), return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)

/* Rounds to nearest, the CPU's default mode. */
TCHI_FUNCTION(float, __fadd_rn, (float x, float y), return x + y)
TCHI_FUNCTION(float, __fmul_rn, (float x, float y), return x * y)
TCHI_FUNCTION(float, __fmaf_rn, (float x, float y, float z), return fmaf(x, y, z))
TCHI_FUNCTION(float, __fdiv_rn, (float x, float y), return x / y)
TCHI_FUNCTION(float, __frcp_rn, (float x), return 1.0f / x)
TCHI_FUNCTION(float, __fsqrt_rn, (float x), return sqrtf(x))
TCHI_FUNCTION(float, __frsqrt_rn, (float x), return rsqrtf(x))

/* --- conversions ------------------------------------------------------------------------------------------------- */

namespace tchi
{

/* Converts like a GPU: saturates, and NaN becomes 0. */
template <typename To, typename From> static inline To saturate(From x, double least, double end)
{
    if (!((double)x == (double)x)) {
        return 0;
    }
    To low = (To)least;
    return (double)x < least ? low : (double)x >= end ? (To)~low : (To)x;
}

} // namespace tchi

#define TCHI_TO_INTEGER(from, F, name, To, least, end)                                                                 \
    TCHI_FUNCTION(To, __##from##2##name##_rn, (F x), return tchi::saturate<To>(rint(x), least, end))                   \
    TCHI_FUNCTION(To, __##from##2##name##_rz, (F x), return tchi::saturate<To>(trunc(x), least, end))                  \
    TCHI_FUNCTION(To, __##from##2##name##_ru, (F x), return tchi::saturate<To>(ceil(x), least, end))                   \
    TCHI_FUNCTION(To, __##from##2##name##_rd, (F x), return tchi::saturate<To>(floor(x), least, end))
TCHI_TO_INTEGER(float, float, int, int, -0x1p31, 0x1p31)
TCHI_TO_INTEGER(float, float, uint, unsigned, 0.0, 0x1p32)
TCHI_TO_INTEGER(float, float, ll, long long, -0x1p63, 0x1p63)
TCHI_TO_INTEGER(float, float, ull, unsigned long long, 0.0, 0x1p64)
TCHI_TO_INTEGER(double, double, int, int, -0x1p31, 0x1p31)
TCHI_TO_INTEGER(double, double, uint, unsigned, 0.0, 0x1p32)
TCHI_TO_INTEGER(double, double, ll, long long, -0x1p63, 0x1p63)
TCHI_TO_INTEGER(double, double, ull, unsigned long long, 0.0, 0x1p64)
#undef TCHI_TO_INTEGER
TCHI_FUNCTION(float, __int2float_rn, (int x), return (float)x)
TCHI_FUNCTION(float, __uint2float_rn, (unsigned x), return (float)x)
TCHI_FUNCTION(double, __int2double_rn, (int x), return (double)x)
TCHI_FUNCTION(float, __double2float_rn, (double x), return (float)x)

namespace tchi
{

template <typename To, typename From> static inline To reinterpret(From from)
{
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

} // namespace tchi

TCHI_FUNCTION(int, __float_as_int, (float x), return tchi::reinterpret<int>(x))
TCHI_FUNCTION(unsigned, __float_as_uint, (float x), return tchi::reinterpret<unsigned>(x))
TCHI_FUNCTION(float, __int_as_float, (int x), return tchi::reinterpret<float>(x))
TCHI_FUNCTION(float, __uint_as_float, (unsigned x), return tchi::reinterpret<float>(x))
TCHI_FUNCTION(long long, __double_as_longlong, (double x), return tchi::reinterpret<long long>(x))
TCHI_FUNCTION(double, __longlong_as_double, (long long x), return tchi::reinterpret<double>(x))
TCHI_FUNCTION(int, __double2hiint, (double x), return (int)(tchi::reinterpret<uint64_t>(x) >> 32))
TCHI_FUNCTION(int, __double2loint, (double x), return (int)tchi::reinterpret<uint64_t>(x))
TCHI_FUNCTION(double, __hiloint2double, (int high, int low),
              return tchi::reinterpret<double>((uint64_t)(unsigned)high << 32 | (unsigned)low))

/* --- integers ---------------------------------------------------------------------------------------------------- */

TCHI_FUNCTION(int, __popc, (unsigned x), return __builtin_popcount(x))
TCHI_FUNCTION(int, __popcll, (unsigned long long x), return __builtin_popcountll(x))
TCHI_FUNCTION(int, __clz, (int x), return x == 0 ? 32 : __builtin_clz((unsigned)x))
TCHI_FUNCTION(int, __clzll, (long long x), return x == 0 ? 64 : __builtin_clzll((unsigned long long)x))
TCHI_FUNCTION(int, __ffs, (int x), return __builtin_ffs(x))
TCHI_FUNCTION(int, __ffsll, (long long x), return __builtin_ffsll(x))
static inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) {
        reversed |= (x >> bit & 1u) << (31 - bit);
    }
    return reversed;
}
TCHI_FUNCTION(int, __mulhi, (int a, int b), return (int)((long long)a * b >> 32))
TCHI_FUNCTION(unsigned, __umulhi, (unsigned a, unsigned b), return (unsigned)((unsigned long long)a * b >> 32))
TCHI_FUNCTION(unsigned long long, __umul64hi, (unsigned long long a, unsigned long long b),
              return (unsigned long long)((unsigned __int128)a * b >> 64))
TCHI_FUNCTION(unsigned, __funnelshift_l, (unsigned low, unsigned high, unsigned shift),
              return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32))
TCHI_FUNCTION(unsigned, __funnelshift_r, (unsigned low, unsigned high, unsigned shift),
              return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31)))
static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++) {
        c += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
    }
    return c;
}

/* --- loads and stores with a hint, which is ignored -------------------------------------------------------------- */

#define TCHI_LOAD(name)                                                                                                \
    template <typename T> static inline T name(const T *p)                                                             \
    {                                                                                                                  \
        return *p;                                                                                                     \
    }
TCHI_LOAD(__ldg)
TCHI_LOAD(__ldcg)
TCHI_LOAD(__ldcs)
#undef TCHI_LOAD

#define TCHI_STORE(name)                                                                                               \
    template <typename T> static inline void name(T *p, T value)                                                       \
    {                                                                                                                  \
        *p = value;                                                                                                    \
    }
TCHI_STORE(__stcg)
TCHI_STORE(__stcs)
TCHI_STORE(__stwb)
#undef TCHI_STORE
