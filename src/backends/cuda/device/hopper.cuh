/* Instructions of sm_90 and sm_90a beyond those of ptx.cuh: mbarriers, the tensor memory accelerator and wgmma. They
 * compile for no other architecture. */
#ifndef TCHI_CUDA_HOPPER_CUH
#define TCHI_CUDA_HOPPER_CUH

#include <stdint.h>

#include <torchium/backend.h>

#include "ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TCHI_WGMMA 1
#else
#define TCHI_WGMMA 0
#endif

/* --- threads ----------------------------------------------------------------------------------------------------- */

/* The same in all lanes of a warp, and known to the compiler to be so. */
static __device__ __forceinline__ int tchi_warpgroup()
{
    return __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
}

/* A barrier of 128 threads that the others of the block know nothing of. `number` is 1 to 15. */
static __device__ __forceinline__ void tchi_warpgroup_sync(int number)
{
    asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

/* The same of so many threads, whole warps. */
static __device__ __forceinline__ void tchi_threads_sync(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* A warpgroup gives registers back, or takes what others gave. The kernel needs __launch_bounds__ with both numbers and
 * no trap. */
template <int count> static __device__ __forceinline__ void tchi_registers_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count> static __device__ __forceinline__ void tchi_registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

/* --- barriers in shared memory ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ void tchi_barrier_create(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(tchi_shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

/* Between the creation of barriers and the cluster's barrier after which others use them. */
static __device__ __forceinline__ void tchi_barrier_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void tchi_barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(tchi_shared_address(barrier)) : "memory");
}

/* An arrival that lets the phase end only after so many bytes have been copied to this block in it. */
static __device__ __forceinline__ void tchi_barrier_arrive_expecting(uint64_t *barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(tchi_shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/* An arrival at the barrier that has this one's place in the block of the given rank. It releases nothing: a release to
 * the cluster would fence all of the thread's memory operations. */
static __device__ __forceinline__ void tchi_barrier_arrive_at(uint64_t *barrier, int rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(tchi_shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

static __device__ __forceinline__ bool tchi_barrier_has_ended(uint64_t *barrier, int parity)
{
    uint32_t ended;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(tchi_shared_address(barrier)), "r"(parity)
                 : "memory");
    return ended != 0;
}

/* Waits for the end of the phase of the given parity, the first having 0; parity 1 of a new barrier has ended. */
static __device__ __forceinline__ void tchi_barrier_wait(uint64_t *barrier, int parity)
{
    while (!tchi_barrier_has_ended(barrier, parity)) {
    }
}

/* --- caches ------------------------------------------------------------------------------------------------------ */

/* Asks for the line of the L2 cache that has this address; nobody waits for it. */
static __device__ __forceinline__ void tchi_prefetch(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* --- the tensor memory accelerator ------------------------------------------------------------------------------- */

/* Copies the box at (x, y, z) of the array that `map` describes to `shared`; `barrier` counts its bytes. What lies
 * outside of the array arrives, and counts, as zeros. */
static __device__ __forceinline__ void tchi_tma_load(void *shared, const void *map, int x, int y, int z,
                                                     uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(tchi_shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(tchi_shared_address(barrier))
                 : "memory");
}

/* The same to the place of `shared` in every block of the cluster with a bit in `blocks`, each counting at its own
 * barrier. */
static __device__ __forceinline__ void tchi_tma_load_to(int blocks, void *shared, const void *map, int x, int y, int z,
                                                        uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(tchi_shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(tchi_shared_address(barrier)), "h"((uint16_t)blocks)
                 : "memory");
}

/* The other way. What lies outside of the array is not written, if its rows are multiples of 16 bytes: behind rows of
 * 257 numbers of 2 bytes an H200 wrote on. */
static __device__ __forceinline__ void tchi_tma_store(const void *map, int x, int y, int z, const void *shared)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(tchi_shared_address(shared))
                 : "memory");
}

/* Closes a group of the stores this thread has issued since the last one. */
static __device__ __forceinline__ void tchi_tma_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's stores have been read from shared memory. */
static __device__ __forceinline__ void tchi_tma_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Makes this thread's writes to shared memory visible to the accelerator and completes its reads, without which a
 * k-tile was overwritten under loads in flight. A barrier has to follow. */
static __device__ __forceinline__ void tchi_tma_publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* --- products of a warpgroup -------------------------------------------------------------------------------------- */

/* Describes rows of 128 bytes in shared memory, their 16-byte chunks permuted by chunk ^ (row % 8), to wgmma. The rows
 * begin at a multiple of 1024 bytes; `shared` may point at any of the first row's chunks. Fields, from bit 0: address /
 * 16; from 16: unused here, 1; from 32: bytes from eight rows to the next eight, / 16; from 62: 1, this permutation. */
static __device__ __forceinline__ uint64_t tchi_wgmma_rows(const void *shared)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Describes columns: boxes of 64 of them, each with a row of 128 bytes for every step of the contraction, its 16-byte
 * chunks permuted likewise. Boxes begin at multiples of 1024 bytes, `apart` from each other; `shared` points at a row
 * of the first that is a multiple of 8. Fields as above, but from bit 16: bytes from box to box, / 16; from 32: from
 * eight rows to the next eight, / 16. */
static __device__ __forceinline__ uint64_t tchi_wgmma_columns(const void *shared, int apart)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)(apart >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Before the first wgmma, and after other instructions have written its accumulators. */
static __device__ __forceinline__ void tchi_wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void tchi_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` of the warpgroup's groups are running. */
template <int pending> static __device__ __forceinline__ void tchi_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Registers 0 to 63 or 127 in the text of a wgmma, and the sums that are to be in them. */
#define TCHI_WGMMA_NAMES_64                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TCHI_WGMMA_NAMES_128 TCHI_WGMMA_NAMES_64 TCHI_WGMMA_NAMES_REST
#define TCHI_WGMMA_NAMES_REST                                                                                          \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                                 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                                 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TCHI_WGMMA_SUMS_8(d, i)                                                                                        \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define TCHI_WGMMA_SUMS_32(d, i)                                                                                       \
    TCHI_WGMMA_SUMS_8(d, i), TCHI_WGMMA_SUMS_8(d, i + 8), TCHI_WGMMA_SUMS_8(d, i + 16), TCHI_WGMMA_SUMS_8(d, i + 24)
#define TCHI_WGMMA_SUMS_64(d, i) TCHI_WGMMA_SUMS_32(d, i), TCHI_WGMMA_SUMS_32(d, i + 32)

#define TCHI_WGMMA_TEXT(shape, names, a, b, add, columns)                                                              \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned." shape " {" names "}, " a ", " b      \
    ", p, 1, 1" columns ";\n}"
#define TCHI_WGMMA_TEXT_64(shape) TCHI_WGMMA_TEXT(shape, TCHI_WGMMA_NAMES_64, "%64", "%65", "%66", ", %67, %68")
#define TCHI_WGMMA_TEXT_128(shape) TCHI_WGMMA_TEXT(shape, TCHI_WGMMA_NAMES_128, "%128", "%129", "%130", ", %131, %132")

/* D += A B', or D = A B' if `add` is 0, run in the background by the 128 threads of a warpgroup, for A 64 by 16 and B
 * 2 `count` by 16 of bfloat16 or float16 in shared memory, given by rows or by columns; or by 8 of float32, given by
 * rows, of which the last 13 bits are not looked at. Warp w holds rows 16 w to 16 w + 15; its d[4 j] to d[4 j + 3] are
 * columns 8 j to 8 j + 7, laid out as in tchi_mma_bf16. */
template <tch_scalar type, bool a_columns = false, bool b_columns = a_columns, int count>
static __device__ __forceinline__ void tchi_wgmma(float (&d)[count], uint64_t a, uint64_t b, int add)
{
    constexpr int of_a = a_columns, of_b = b_columns;
    if constexpr (type == TCH_SCALAR_F32) {
        asm volatile(TCHI_WGMMA_TEXT("m64n128k8.f32.tf32.tf32", TCHI_WGMMA_NAMES_64, "%64", "%65", "%66", "")
                     : TCHI_WGMMA_SUMS_64(d, 0)
                     : "l"(a), "l"(b), "r"(add));
    } else if constexpr (type == TCH_SCALAR_F16 && count == 64) {
        asm volatile(TCHI_WGMMA_TEXT_64("m64n128k16.f32.f16.f16")
                     : TCHI_WGMMA_SUMS_64(d, 0)
                     : "l"(a), "l"(b), "r"(add), "n"(of_a), "n"(of_b));
    } else if constexpr (type == TCH_SCALAR_F16) {
        asm volatile(TCHI_WGMMA_TEXT_128("m64n256k16.f32.f16.f16")
                     : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                     : "l"(a), "l"(b), "r"(add), "n"(of_a), "n"(of_b));
    } else if constexpr (count == 64) {
        asm volatile(TCHI_WGMMA_TEXT_64("m64n128k16.f32.bf16.bf16")
                     : TCHI_WGMMA_SUMS_64(d, 0)
                     : "l"(a), "l"(b), "r"(add), "n"(of_a), "n"(of_b));
    } else {
        asm volatile(TCHI_WGMMA_TEXT_128("m64n256k16.f32.bf16.bf16")
                     : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                     : "l"(a), "l"(b), "r"(add), "n"(of_a), "n"(of_b));
    }
}

/* The same for float16, A in registers and B by columns. With lane = 4 g + t, warp w has of A in a[2 i + h] row
 * 16 w + g + 8 h and columns 8 i + 2 t and the next, the first in the lower half; they stay as they are until the
 * product is over. */
static __device__ __forceinline__ void tchi_wgmma_registers(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                                            int add)
{
    asm volatile(TCHI_WGMMA_TEXT("m64n256k16.f32.f16.f16", TCHI_WGMMA_NAMES_128, "{%128, %129, %130, %131}", "%132",
                                 "%133", ", 1")
                 : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* After the last wait: the compiler must not have read the sums before. */
template <int count> static __device__ __forceinline__ void tchi_wgmma_results(float (&d)[count])
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

/* --- 16-bit fragments to shared memory --------------------------------------------------------------------------- */

/* Four 8 by 8 matrices of 16-bit elements. Lane 8 i + j points to where row j of matrix i goes; r[i] is row g, columns
 * 2 t and 2 t + 1 of it: tchi_ldmatrix_x4 the other way. */
static __device__ __forceinline__ void tchi_stmatrix_x4(void *shared_row, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(tchi_shared_address(shared_row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* The same, each matrix transposed: r[i] is rows 2 t and 2 t + 1, column g of what is written. */
static __device__ __forceinline__ void tchi_stmatrix_x4_transposed(void *shared_row, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(tchi_shared_address(shared_row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

#endif
