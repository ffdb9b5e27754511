/* Instructions of sm_90 and sm_90a only, beyond ptx.cuh: mbarriers, TMA and wgmma. */
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

/* Broadcasts a warp-uniform value, so that the compiler knows it is uniform. */
static __device__ __forceinline__ int tchi_warpgroup()
{
    return __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
}

/* A named barrier of 128 threads. `number` is 1 to 15. */
static __device__ __forceinline__ void tchi_warpgroup_sync(int number)
{
    asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

/* The same for any number of whole warps. */
static __device__ __forceinline__ void tchi_threads_sync(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* Releases or acquires registers of a warpgroup. The kernel needs __launch_bounds__ with both numbers and no trap. */
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

/* Fence between creating barriers and the cluster barrier after which others use them. */
static __device__ __forceinline__ void tchi_barrier_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void tchi_barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(tchi_shared_address(barrier)) : "memory");
}

/* Arrives and expects `bytes` of copies to this block in the phase. */
static __device__ __forceinline__ void tchi_barrier_arrive_expecting(uint64_t *barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(tchi_shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/* Arrives at the same barrier in the block of the given rank, without release semantics: a release at cluster scope
 * would fence all memory operations of the thread. */
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

/* Waits for the phase of the given parity, the first having 0; parity 1 of a new barrier counts as complete. */
static __device__ __forceinline__ void tchi_barrier_wait(uint64_t *barrier, int parity)
{
    while (!tchi_barrier_has_ended(barrier, parity)) {
    }
}

/* --- caches ------------------------------------------------------------------------------------------------------ */

/* Prefetches a line into L2. */
static __device__ __forceinline__ void tchi_prefetch(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* --- the tensor memory accelerator ------------------------------------------------------------------------------- */

/* TMA load of the box at (x, y, z) to `shared`; `barrier` counts its bytes. Elements outside the array arrive, and
 * count, as zeros. */
static __device__ __forceinline__ void tchi_tma_load(void *shared, const void *map, int x, int y, int z,
                                                     uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(tchi_shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(tchi_shared_address(barrier))
                 : "memory");
}

/* The same, multicast to the blocks of the cluster with a bit in `blocks`, each counting at its own barrier. */
static __device__ __forceinline__ void tchi_tma_load_to(int blocks, void *shared, const void *map, int x, int y, int z,
                                                        uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(tchi_shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(tchi_shared_address(barrier)), "h"((uint16_t)blocks)
                 : "memory");
}

/* TMA store. Elements outside the array are not written if its rows are multiples of 16 bytes: with rows of 257 16-bit
 * numbers an H200 wrote beyond them. */
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

/* Proxy fence: makes this thread's writes to shared memory visible to TMA and completes its reads, without which a
 * k-tile was overwritten under loads in flight. Must be followed by a barrier. */
static __device__ __forceinline__ void tchi_tma_publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* --- products of a warpgroup -------------------------------------------------------------------------------------- */

/* wgmma descriptor of rows of 128 bytes in shared memory, with 16-byte chunks swizzled by chunk ^ (row % 8). Rows begin
 * at a multiple of 1024 bytes; `shared` may point at any chunk of the first row. Fields, from bit 0: address / 16; from
 * 16: unused here, 1; from 32: stride of eight rows / 16; from 62: 1, this swizzle. */
static __device__ __forceinline__ uint64_t tchi_wgmma_rows(const void *shared)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* wgmma descriptor of columns: boxes of 64 columns, each a 128-byte row per step of the contraction, swizzled likewise.
 * Boxes begin at multiples of 1024 bytes, `apart` from each other; `shared` points at a row of the first that is a
 * multiple of 8. Fields as above, but from bit 16: stride of boxes / 16; from 32: stride of eight rows / 16. */
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

/* Registers 0 to 63 or 127 in the text of a wgmma, and the sums they hold. */
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

/* Asynchronous D += A B', or D = A B' if `add` is 0, by the 128 threads of a warpgroup, for A 64 by 16 and B 2 `count`
 * by 16 of bfloat16 or float16 in shared memory, given by rows or by columns; or by 8 of float32 given by rows, whose
 * last 13 bits are ignored. Warp w holds rows 16 w to 16 w + 15; its d[4 j] to d[4 j + 3] are columns 8 j to 8 j + 7,
 * laid out as in tchi_mma_bf16. */
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

/* The same for float16, A in registers and B by columns. With lane = 4 g + t, a[2 i + h] of warp w has row 16 w + g + 8
 * h and columns 8 i + 2 t and the next, the first in the lower half; they must not change until the product
 * completes. */
static __device__ __forceinline__ void tchi_wgmma_registers(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                                            int add)
{
    asm volatile(TCHI_WGMMA_TEXT("m64n256k16.f32.f16.f16", TCHI_WGMMA_NAMES_128, "{%128, %129, %130, %131}", "%132",
                                 "%133", ", 1")
                 : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* After the last wait: keeps the compiler from reading the sums earlier. */
template <int count> static __device__ __forceinline__ void tchi_wgmma_results(float (&d)[count])
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

/* --- 16-bit fragments to shared memory --------------------------------------------------------------------------- */

/* Stores four 8 by 8 matrices of 16-bit elements, the inverse of tchi_ldmatrix_x4: lane 8 i + j points to row j of
 * matrix i; r[i] is row g, columns 2 t and 2 t + 1. */
static __device__ __forceinline__ void tchi_stmatrix_x4(void *shared_row, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(tchi_shared_address(shared_row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* The same, each matrix transposed: r[i] is rows 2 t and 2 t + 1, column g of the stored matrix. */
static __device__ __forceinline__ void tchi_stmatrix_x4_transposed(void *shared_row, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(tchi_shared_address(shared_row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

#endif
