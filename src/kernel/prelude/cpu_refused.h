/* GPU-only features are errors at the user's line with a reason; the counter that detects synchronization starts here.
 * Last before the source: system headers use some of these words. */
#define TCHI_REFUSED_(text) _Pragma(#text)
#define TCHI_REFUSED(text) TCHI_REFUSED_(GCC error text)

#define asm TCHI_REFUSED("inline PTX cannot run on the CPU: guard it with #if __CUDA_ARCH__") asm
#define __asm__ TCHI_REFUSED("inline PTX cannot run on the CPU: guard it with #if __CUDA_ARCH__") __asm__
#define cudaTextureObject_t TCHI_REFUSED("textures are not available on the CPU") int
#define cudaLaunchDevice TCHI_REFUSED("a kernel cannot launch kernels on the CPU") tchi_refused
#define __nv_fp8_e4m3 TCHI_REFUSED("8-bit floating-point types are not available on the CPU") tchi_refused
#define __nv_fp8_e5m2 TCHI_REFUSED("8-bit floating-point types are not available on the CPU") tchi_refused

namespace tchi
{
enum { tchi_counter_before = __COUNTER__ };
}
