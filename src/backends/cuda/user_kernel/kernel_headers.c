/* Texts that NVRTC gets with a user's source. NVRTC has no C library headers: what sources commonly use is declared
 * here, and the headers exist in name, so that sources for nvcc compile unchanged. 64-bit integers are long long, as in
 * libcu++ under NVRTC: sources may use both. */
#include "kernel_text.h"

const char tchi_cuda_kernel_prelude[] =
    "typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;\n"
    "typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;\n"
    "typedef unsigned long long uint64_t; typedef int64_t intptr_t; typedef uint64_t uintptr_t;\n"
    "#define INFINITY (__builtin_bit_cast(float, 0x7f800000))\n"
    "#define NAN (__builtin_bit_cast(float, 0x7fc00000))\n"
    "#define HUGE_VAL (__builtin_bit_cast(double, 0x7ff0000000000000))\n"
    "#define HUGE_VALF (__builtin_bit_cast(float, 0x7f800000))\n"
    "#define M_E 2.7182818284590452354\n"
    "#define M_LOG2E 1.4426950408889634074\n"
    "#define M_LN2 0.69314718055994530942\n"
    "#define M_PI 3.14159265358979323846\n"
    "#define M_PI_2 1.57079632679489661923\n"
    "#define M_SQRT2 1.41421356237309504880\n";

static const char nothing[] = "";

static const char integers[] =
    "#ifndef INT8_MAX\n"
    "#define INT8_MAX 127\n"
    "#define INT8_MIN (-128)\n"
    "#define INT16_MAX 32767\n"
    "#define INT16_MIN (-32768)\n"
    "#define INT32_MAX 2147483647\n"
    "#define INT32_MIN (-INT32_MAX - 1)\n"
    "#define INT64_MAX 9223372036854775807LL\n"
    "#define INT64_MIN (-INT64_MAX - 1)\n"
    "#define UINT8_MAX 255\n"
    "#define UINT16_MAX 65535\n"
    "#define UINT32_MAX 4294967295U\n"
    "#define UINT64_MAX 18446744073709551615ULL\n"
    "#define SIZE_MAX 18446744073709551615UL\n"
    "#endif\n"
    "namespace std {\n"
    "using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t; using ::intptr_t;\n"
    "using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::uintptr_t;\n"
    "}\n";

static const char limits[] = "#ifndef INT_MAX\n"
                             "#define CHAR_BIT 8\n"
                             "#define SCHAR_MAX 127\n"
                             "#define SCHAR_MIN (-128)\n"
                             "#define UCHAR_MAX 255\n"
                             "#define SHRT_MAX 32767\n"
                             "#define SHRT_MIN (-32768)\n"
                             "#define USHRT_MAX 65535\n"
                             "#define INT_MAX 2147483647\n"
                             "#define INT_MIN (-INT_MAX - 1)\n"
                             "#define UINT_MAX 4294967295U\n"
                             "#define LONG_MAX 9223372036854775807L\n"
                             "#define LONG_MIN (-LONG_MAX - 1)\n"
                             "#define ULONG_MAX 18446744073709551615UL\n"
                             "#define LLONG_MAX 9223372036854775807LL\n"
                             "#define LLONG_MIN (-LLONG_MAX - 1)\n"
                             "#define ULLONG_MAX 18446744073709551615ULL\n"
                             "#endif\n";

static const char floats[] = "#ifndef FLT_MAX\n"
                             "#define FLT_MAX 3.402823466e+38F\n"
                             "#define FLT_MIN 1.175494351e-38F\n"
                             "#define FLT_EPSILON 1.192092896e-07F\n"
                             "#define FLT_DIG 6\n"
                             "#define FLT_MANT_DIG 24\n"
                             "#define DBL_MAX 1.7976931348623157e+308\n"
                             "#define DBL_MIN 2.2250738585072014e-308\n"
                             "#define DBL_EPSILON 2.2204460492503131e-16\n"
                             "#define DBL_DIG 15\n"
                             "#define DBL_MANT_DIG 53\n"
                             "#endif\n";

static const char sizes[] = "namespace std {\n"
                            "using ::size_t;\n"
                            "}\n";

static const char functions[] = "namespace std {\n"
                                "using ::abs; using ::fabs; using ::sqrt; using ::cbrt; using ::exp; using ::exp2;\n"
                                "using ::expm1; using ::log; using ::log2; using ::log10; using ::log1p; using ::pow;\n"
                                "using ::sin; using ::cos; using ::tan; using ::sinh; using ::cosh; using ::tanh;\n"
                                "using ::erf; using ::erfc; using ::fma; using ::fmin; using ::fmax; using ::fmod;\n"
                                "using ::floor; using ::ceil; using ::trunc; using ::round; using ::copysign;\n"
                                "using ::isnan; using ::isinf; using ::isfinite; using ::signbit;\n"
                                "}\n";

const char *const tchi_cuda_header_names[TCHI_CUDA_HEADERS] = {
    "stdint.h", "cstdint", "limits.h", "climits", "float.h",  "cfloat",  "stddef.h",       "cstddef",
    "math.h",   "cmath",   "stdio.h",  "cstdio",  "assert.h", "cassert", "cuda_runtime.h",
};
const char *const tchi_cuda_header_texts[TCHI_CUDA_HEADERS] = {
    integers,  integers,  limits,  limits,  floats,  floats,  sizes,   sizes,
    functions, functions, nothing, nothing, nothing, nothing, nothing,
};
