/* Instructions of sm_90 and sm_90a beyond those of ptx.cuh, one small function each: barriers in shared memory that
 * count arrivals and bytes, the tensor memory accelerator, which copies boxes of matrices on its own, and what its
 * kernels use beside them. They compile for no other architecture: use them in code that only sm_90a sees. */
#ifndef TCHI_CUDA_HOPPER_CUH
#define TCHI_CUDA_HOPPER_CUH

#include <stdint.h>

#include "ptx.cuh"

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

/* A warpgroup gives registers back, or takes what others gave. The kernel needs __launch_bounds__ with both numbers,
 * and may contain no trap: the compiler would then stay with the registers a thread has at the beginning. */
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

/* An arrival at the barrier that has this one's place in the block of the given rank. Nothing written by threads is
 * handed over with it: asked to release to the cluster, it would come with a fence that waits for all of the thread's
 * memory operations on the GPU. */
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

/* What this thread has written to shared memory is there for the accelerator, and what it has read has been read: an
 * arrival alone does not wait for loads that are under way, and a k-tile that was given back by one was overwritten
 * under them. A barrier has to follow. */
static __device__ __forceinline__ void tchi_tma_publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* --- products of columns ----------------------------------------------------------------------------------------- */

/* Describes columns to wgmma: boxes of 64 of them, each with a row of 128 bytes for every step of the contraction, its
 * 16-byte chunks permuted by chunk ^ (row % 8). Boxes begin at multiples of 1024 bytes, `apart` from each other;
 * `shared` points at a row of the first that is a multiple of 8. Fields as in tchi_wgmma_rows, but from bit 16: bytes
 * from box to box, / 16; from 32: from eight rows to the next eight, / 16. */
static __device__ __forceinline__ uint64_t tchi_wgmma_columns(const void *shared, int apart)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)(apart >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* D += A' B, or D = A' B if `add` is 0, for 16 rows of 64 columns of A and of 256 columns of B as tchi_wgmma_columns
 * describes them; otherwise as tchi_wgmma_bf16_n128. */
static __device__ __forceinline__ void tchi_wgmma_bf16_n256_columns(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TCHI_WGMMA_NAMES_128
                 "}, %128, %129, p, 1, 1, 1, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same for float16. */
static __device__ __forceinline__ void tchi_wgmma_f16_n256_columns(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" TCHI_WGMMA_NAMES_128
                 "}, %128, %129, p, 1, 1, 1, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same for 128 columns of B. */
static __device__ __forceinline__ void tchi_wgmma_f16_n128_columns(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" TCHI_WGMMA_NAMES_64
                 "}, %64, %65, p, 1, 1, 1, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

/* D += A B, or D = A B if `add` is 0, for A 64 by 16 in registers and 16 rows of 256 columns of B as tchi_wgmma_columns
 * describes them. With lane =
 * 4 g + t, warp w has of A in a[2 i + h] row 16 w + g + 8 h and columns 8 i + 2 t and the next, the first in the lower
 * half; they stay as they are until the product is over. */
static __device__ __forceinline__ void tchi_wgmma_f16_n256_registers(float (&d)[128], const uint32_t (&a)[4],
                                                                     uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %133, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" TCHI_WGMMA_NAMES_128
                 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0), TCHI_WGMMA_SUMS_64(d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* --- products by rows, and of rows by columns --------------------------------------------------------------------- */

/* As tchi_wgmma_bf16_n128, for float16. */
static __device__ __forceinline__ void tchi_wgmma_f16_n128(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" TCHI_WGMMA_NAMES_64
                 "}, %64, %65, p, 1, 1, 0, 0;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same where B lies by columns, as tchi_wgmma_columns describes them. */
static __device__ __forceinline__ void tchi_wgmma_f16_n128_by_columns(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" TCHI_WGMMA_NAMES_64
                 "}, %64, %65, p, 1, 1, 0, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void tchi_wgmma_bf16_n128_by_columns(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TCHI_WGMMA_NAMES_64
                 "}, %64, %65, p, 1, 1, 0, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

/* --- products of float32, cut to TF32 ---------------------------------------------------------------------------- */

/* D += A B', or D = A B' if `add` is 0, for A 64 by 8 and B 128 by 8 of float32, of which the last 13 bits are not
 * looked at; otherwise as tchi_wgmma_bf16_n128. */
static __device__ __forceinline__ void tchi_wgmma_tf32_n128(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" TCHI_WGMMA_NAMES_64 "}, %64, %65, p, 1, 1;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

/* --- sums of wgmma ----------------------------------------------------------------------------------------------- */

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
