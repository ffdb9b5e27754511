/* __half and __nv_bfloat16 with the common part of cuda_fp16.h and cuda_bf16.h. Arithmetic is done in float and rounded
 * once more, which equals a single rounding for one sum, product, quotient or root. */
namespace tchi
{

static inline float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest < 0x400u) { /* zero and subnormal numbers: a whole multiple of 2^-24 */
        float small = (float)rest * 0x1p-24f;
        return sign != 0 ? -small : small;
    }
    return reinterpret<float>(sign | (rest >= 0x7c00u ? 0x7f800000u | rest << 13 : (rest << 13) + 0x38000000u));
}

static inline uint16_t half_from_float(float x)
{
    uint32_t bits = reinterpret<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t normal = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
    /* Floats near 0.5 are spaced 2^-24 like subnormal float16, so the sum rounds. */
    uint32_t small = reinterpret<uint32_t>(reinterpret<float>(size) + 0.5f) - 0x3f000000u;
    uint32_t rounded = size < 0x38800000u ? small : normal;
    rounded = size >= 0x477ff000u ? 0x7c00u : rounded; /* from 65520 on */
    return (uint16_t)(size > 0x7f800000u ? 0x7fffu : sign | rounded);
}

TCHI_FUNCTION(float, brain_to_float, (uint16_t b), return reinterpret<float>((uint32_t)b << 16))

static inline uint16_t brain_from_float(float x)
{
    uint32_t bits = reinterpret<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

} // namespace tchi

#define TCHI_HALF_FROM(H, T, write)                                                                                    \
    H(T x) : __x(write((float)x))                                                                                      \
    {                                                                                                                  \
    }
#define TCHI_HALF_ASSIGN(H, op)                                                                                        \
    H &operator op##=(H y)                                                                                             \
    {                                                                                                                  \
        return *this = H((float)*this op(float) y);                                                                    \
    }
#define TCHI_HALF_TYPE(H, read, write)                                                                                 \
    struct alignas(2) H {                                                                                              \
        unsigned short __x;                                                                                            \
        H() = default;                                                                                                 \
        TCHI_HALF_FROM(H, float, write)                                                                                \
        TCHI_HALF_FROM(H, double, write)                                                                               \
        TCHI_HALF_FROM(H, int, write)                                                                                  \
        TCHI_HALF_FROM(H, unsigned, write)                                                                             \
        TCHI_HALF_FROM(H, long, write)                                                                                 \
        TCHI_HALF_FROM(H, unsigned long, write)                                                                        \
        TCHI_HALF_FROM(H, long long, write)                                                                            \
        TCHI_HALF_FROM(H, unsigned long long, write)                                                                   \
        operator float() const                                                                                         \
        {                                                                                                              \
            return read(__x);                                                                                          \
        }                                                                                                              \
        TCHI_HALF_ASSIGN(H, +) TCHI_HALF_ASSIGN(H, -) TCHI_HALF_ASSIGN(H, *) TCHI_HALF_ASSIGN(H, /)                    \
    };                                                                                                                 \
    TCHI_FUNCTION(H, operator+, (H x, H y), return H((float)x + (float)y))                                             \
    TCHI_FUNCTION(H, operator-, (H x, H y), return H((float)x - (float)y))                                             \
    TCHI_FUNCTION(H, operator*, (H x, H y), return H((float)x * (float)y))                                             \
    TCHI_FUNCTION(H, operator/, (H x, H y), return H((float)x / (float)y))                                             \
    TCHI_FUNCTION(H, operator-, (H x), return H(-(float)x))                                                            \
    TCHI_FUNCTION(H, operator+, (H x), return x)                                                                       \
    TCHI_FUNCTION(bool, operator==, (H x, H y), return (float)x == (float)y)                                           \
    TCHI_FUNCTION(bool, operator!=, (H x, H y), return (float)x != (float)y)                                           \
    TCHI_FUNCTION(bool, operator<, (H x, H y), return (float)x < (float)y)                                             \
    TCHI_FUNCTION(bool, operator>, (H x, H y), return (float)x > (float)y)                                             \
    TCHI_FUNCTION(bool, operator<=, (H x, H y), return (float)x <= (float)y)                                           \
    TCHI_FUNCTION(bool, operator>=, (H x, H y), return (float)x >= (float)y)                                           \
    TCHI_FUNCTION(H, __hadd, (H x, H y), return x + y)                                                                 \
    TCHI_FUNCTION(H, __hsub, (H x, H y), return x - y)                                                                 \
    TCHI_FUNCTION(H, __hmul, (H x, H y), return x * y)                                                                 \
    TCHI_FUNCTION(H, __hdiv, (H x, H y), return x / y)                                                                 \
    TCHI_FUNCTION(H, __hneg, (H x), return -x)                                                                         \
    TCHI_FUNCTION(H, __habs, (H x), return H(fabsf((float)x)))                                                         \
    TCHI_FUNCTION(H, __hfma, (H x, H y, H z), return H(fmaf((float)x, (float)y, (float)z)))                            \
    TCHI_FUNCTION(H, __hmin, (H x, H y), return H(fminf((float)x, (float)y)))                                          \
    TCHI_FUNCTION(H, __hmax, (H x, H y), return H(fmaxf((float)x, (float)y)))                                          \
    TCHI_FUNCTION(bool, __heq, (H x, H y), return x == y)                                                              \
    TCHI_FUNCTION(bool, __hne, (H x, H y), return x != y)                                                              \
    TCHI_FUNCTION(bool, __hlt, (H x, H y), return x < y)                                                               \
    TCHI_FUNCTION(bool, __hgt, (H x, H y), return x > y)                                                               \
    TCHI_FUNCTION(bool, __hle, (H x, H y), return x <= y)                                                              \
    TCHI_FUNCTION(bool, __hge, (H x, H y), return x >= y)                                                              \
    TCHI_FUNCTION(bool, __hisnan, (H x), return x != x)                                                                \
    TCHI_FUNCTION(H, hexp, (H x), return H(expf((float)x)))                                                            \
    TCHI_FUNCTION(H, hlog, (H x), return H(logf((float)x)))                                                            \
    TCHI_FUNCTION(H, hsqrt, (H x), return H(sqrtf((float)x)))                                                          \
    TCHI_FUNCTION(H, hrsqrt, (H x), return H(rsqrtf((float)x)))                                                        \
    TCHI_FUNCTION(H, hrcp, (H x), return H(1.0f / (float)x))
TCHI_HALF_TYPE(__half, tchi::half_to_float, tchi::half_from_float)
TCHI_HALF_TYPE(__nv_bfloat16, tchi::brain_to_float, tchi::brain_from_float)
#undef TCHI_HALF_TYPE
#undef TCHI_HALF_FROM
#undef TCHI_HALF_ASSIGN

#define TCHI_HALF_PAIR(H, P, make)                                                                                     \
    struct alignas(4) P {                                                                                              \
        H x, y;                                                                                                        \
        P() = default;                                                                                                 \
        P(H x_, H y_) : x(x_), y(y_)                                                                                   \
        {                                                                                                              \
        }                                                                                                              \
    };                                                                                                                 \
    TCHI_FUNCTION(P, make, (H x, H y), return P(x, y))                                                                 \
    TCHI_FUNCTION(P, operator+, (P a, P b), return P(a.x + b.x, a.y + b.y))                                            \
    TCHI_FUNCTION(P, operator-, (P a, P b), return P(a.x - b.x, a.y - b.y))                                            \
    TCHI_FUNCTION(P, operator*, (P a, P b), return P(a.x * b.x, a.y * b.y))                                            \
    TCHI_FUNCTION(P, __hadd2, (P a, P b), return a + b)                                                                \
    TCHI_FUNCTION(P, __hsub2, (P a, P b), return a - b)                                                                \
    TCHI_FUNCTION(P, __hmul2, (P a, P b), return a * b)                                                                \
    TCHI_FUNCTION(P, __hfma2, (P a, P b, P c), return P(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)))
TCHI_HALF_PAIR(__half, __half2, make_half2)
TCHI_HALF_PAIR(__nv_bfloat16, __nv_bfloat162, make_bfloat162)
#undef TCHI_HALF_PAIR

typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

TCHI_FUNCTION(__half, __float2half, (float x), return __half(x))
TCHI_FUNCTION(__half, __float2half_rn, (float x), return __half(x))
TCHI_FUNCTION(float, __half2float, (__half x), return (float)x)
TCHI_FUNCTION(unsigned short, __half_as_ushort, (__half x), return x.__x)
TCHI_FUNCTION(__half, __ushort_as_half, (unsigned short bits), return tchi::reinterpret<__half>(bits))
TCHI_FUNCTION(__half, __low2half, (__half2 p), return p.x)
TCHI_FUNCTION(__half, __high2half, (__half2 p), return p.y)
TCHI_FUNCTION(float, __low2float, (__half2 p), return (float)p.x)
TCHI_FUNCTION(float, __high2float, (__half2 p), return (float)p.y)
TCHI_FUNCTION(__half2, __halves2half2, (__half x, __half y), return __half2(x, y))
TCHI_FUNCTION(__half2, __half2half2, (__half x), return __half2(x, x))
TCHI_FUNCTION(__half2, __float2half2_rn, (float x), return __half2(x, x))
TCHI_FUNCTION(__half2, __floats2half2_rn, (float x, float y), return __half2(x, y))
TCHI_FUNCTION(float2, __half22float2, (__half2 p), return {(float)p.x, (float)p.y})

TCHI_FUNCTION(__nv_bfloat16, __float2bfloat16, (float x), return __nv_bfloat16(x))
TCHI_FUNCTION(__nv_bfloat16, __float2bfloat16_rn, (float x), return __nv_bfloat16(x))
TCHI_FUNCTION(float, __bfloat162float, (__nv_bfloat16 x), return (float)x)
TCHI_FUNCTION(unsigned short, __bfloat16_as_ushort, (__nv_bfloat16 x), return x.__x)
TCHI_FUNCTION(__nv_bfloat16, __ushort_as_bfloat16, (unsigned short bits), return tchi::reinterpret<__nv_bfloat16>(bits))
TCHI_FUNCTION(__nv_bfloat162, __floats2bfloat162_rn, (float x, float y), return __nv_bfloat162(x, y))
TCHI_FUNCTION(float2, __bfloat1622float2, (__nv_bfloat162 p), return {(float)p.x, (float)p.y})
TCHI_FUNCTION(__nv_bfloat16, __low2bfloat16, (__nv_bfloat162 p), return p.x)
TCHI_FUNCTION(__nv_bfloat16, __high2bfloat16, (__nv_bfloat162 p), return p.y)
#undef TCHI_FUNCTION
