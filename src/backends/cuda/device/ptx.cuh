/* PTX instructions without a CUDA C intrinsic. Fragments are described with lane = 4 g + t, 0 <= t < 4. Every function
 * compiles for every architecture; where the instruction is missing it is emulated, or traps. */
#ifndef TCHI_CUDA_PTX_CUH
#define TCHI_CUDA_PTX_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t tchi_shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* threadIdx.x as a volatile read, so that derived values are recomputed instead of held in registers around a loop. */
static __device__ __forceinline__ int tchi_thread_index()
{
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

/* 1 / x to 20 bits, for normal numbers. */
static __device__ __forceinline__ double tchi_reciprocal_approx(double x)
{
    double inverse;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(x));
    return inverse;
}

/* x^-1/2 likewise. */
static __device__ __forceinline__ double tchi_inverse_root_approx(double x)
{
    double root;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(root) : "d"(x));
    return root;
}

/* --- asynchronous copies: sm_80 ---------------------------------------------------------------------------------- */

/* Asynchronous copy of 16 bytes from global to shared memory, both aligned to 16: the first bytes_valid, zeros for the
 * rest. With bytes_valid 0 nothing is read, but `global` must be a valid expression. */
static __device__ __forceinline__ void tchi_cp_async_16(void *shared, const void *global, int bytes_valid)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tchi_shared_address(shared)), "l"(global),
                 "r"(bytes_valid)
                 : "memory");
#else
    uint32_t words[4] = {0, 0, 0, 0};
    if (bytes_valid == 16) {
        *(uint4 *)shared = *(const uint4 *)global;
        return;
    }
    for (int i = 0; i < bytes_valid; i++) {
        words[i / 4] |= (uint32_t)((const unsigned char *)global)[i] << (8 * (i % 4));
    }
    *(uint4 *)shared = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

/* The same for all 16, in fewer instructions. */
static __device__ __forceinline__ void tchi_cp_async_16(void *shared, const void *global)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tchi_shared_address(shared)), "l"(global)
                 : "memory");
#else
    *(uint4 *)shared = *(const uint4 *)global;
#endif
}

/* Closes a group of the copies this thread has issued since the last one. */
static __device__ __forceinline__ void tchi_cp_async_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most `pending` of this thread's groups are in flight. Other threads see the data after a barrier. */
template <int pending> static __device__ __forceinline__ void tchi_cp_async_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

/* A double from shared memory, loaded where it is written, between products. */
static __device__ __forceinline__ double tchi_load_shared_f64(const void *shared)
{
    double value;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(tchi_shared_address(shared)) : "memory");
    return value;
}

/* --- 16-bit fragments: ldmatrix is sm_75, the bfloat16 product sm_80 --------------------------------------------- */

/* Loads four 8 by 8 matrices of 16-bit elements. Lane 8 i + j points to row j of matrix i, 16 aligned bytes; r[i] gets
 * row g, columns 2 t and 2 t + 1 of matrix i, the lower column in the lower half. */
static __device__ __forceinline__ void tchi_ldmatrix_x4(uint32_t r[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(tchi_shared_address(shared_row))
                 : "memory");
}

/* The same with every matrix transposed: r[i] gets rows 2 t and 2 t + 1 of column g. */
static __device__ __forceinline__ void tchi_ldmatrix_x4_transposed(uint32_t r[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(tchi_shared_address(shared_row))
                 : "memory");
}

/* A product of tensor cores from a[4] and b[2] into the float32 sums c[4]. */
#if __CUDA_ARCH__ >= 800
#define TCHI_MMA(shape)                                                                                                \
    asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"          \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#else
#define TCHI_MMA(shape) __trap()
#endif

/* C (16 by 8, float32) += A (16 by 16) B (16 by 8), bfloat16. a[0], a[1]: rows g, g + 8 at columns 2 t, 2 t + 1;
 * a[2], a[3]: the same rows, columns 2 t + 8, 2 t + 9. b[0], b[1]: rows 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of column g.
 * c[0], c[1]: row g, columns 2 t, 2 t + 1; c[2], c[3]: row g + 8. */
static __device__ __forceinline__ void tchi_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    TCHI_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}

/* The same for float16. */
static __device__ __forceinline__ void tchi_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    TCHI_MMA("m16n8k16.row.col.f32.f16.f16.f32");
}

/* --- float32 products of operands rounded to TF32: sm_80 --------------------------------------------------------- */

/* Rounds to nearest in the 19 bits that tensor cores read; they truncate otherwise. Infinities are unchanged, and NaN,
 * which a carry could overflow. */
static __device__ __forceinline__ uint32_t tchi_round_tf32(uint32_t bits)
{
    return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7F800000u) ? bits + 0x1000u : bits;
}

/* C (16 by 8) += A (16 by 8) B (8 by 8). a[0], a[1]: rows g, g + 8 of column t; a[2], a[3]: of column t + 4. b[0],
 * b[1]: rows t, t + 4 of column g. c as in tchi_mma_bf16. */
static __device__ __forceinline__ void tchi_mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    TCHI_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}

/* --- float64 products: 8x8x4 is sm_80, the larger ones sm_90; 8x8x4 and 16x8x16 work everywhere, if slowly ------- */

/* C (8 by 8) += A (8 by 4) B (4 by 8). a: row g, column t. b: row t, column g. c[0], c[1]: row g, columns 2 t, 2 t +
 * 1. */
static __device__ __forceinline__ void tchi_mma_f64_8x8x4(double c[2], double a, double b)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a), "d"(b));
#else
    int g = (int)threadIdx.x % 32 / 4;
    int t = (int)threadIdx.x % 4;
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
        double left = __shfl_sync(0xFFFFFFFFu, a, 4 * g + k);
        c[0] = fma(left, __shfl_sync(0xFFFFFFFFu, b, 8 * t + k), c[0]);
        c[1] = fma(left, __shfl_sync(0xFFFFFFFFu, b, 8 * t + 4 + k), c[1]);
    }
#endif
}

/* C (16 by 8) += A (16 by 8) B (8 by 8). a[0], a[1]: rows g, g + 8 of column t; a[2], a[3]: of column t + 4. b[0],
 * b[1]: rows t, t + 4 of column g. c[0], c[1]: row g, columns 2 t, 2 t + 1; c[2], c[3]: row g + 8. */
static __device__ __forceinline__ void tchi_mma_f64_16x8x8(double c[4], const double a[4], const double b[2])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
    __trap();
#endif
}

/* C (16 by 8) += A (16 by 16) B (16 by 8). a[2 i], a[2 i + 1]: rows g, g + 8 of column 4 i + t. b[i]: row 4 i + t of
 * column g. c as above. */
static __device__ __forceinline__ void tchi_mma_f64_16x8x16(double c[4], const double a[8], const double b[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
                 : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
                   "d"(b[1]), "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
    for (int i = 0; i < 8; i++) {
        tchi_mma_f64_8x8x4(c + 2 * (i % 2), a[i], b[i / 2]);
    }
#endif
}

/* --- clusters: sm_90 --------------------------------------------------------------------------------------------- */

/* Rank of the block in its cluster, and cluster size; 0 and 1 without clusters. */
static __device__ __forceinline__ int tchi_cluster_rank()
{
#if __CUDA_ARCH__ >= 900
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

static __device__ __forceinline__ int tchi_cluster_size()
{
#if __CUDA_ARCH__ >= 900
    int size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
#else
    return 1;
#endif
}

/* Cluster barrier, with memory visibility. No block may exit while another can still access its shared memory: end with
 * this barrier. */
static __device__ __forceinline__ void tchi_cluster_sync()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#else
    __syncthreads();
#endif
}

/* Maps a shared variable to the block of the given rank: an ordinary pointer. */
static __device__ __forceinline__ void *tchi_cluster_map(void *shared, int rank)
{
#if __CUDA_ARCH__ >= 900
    uint64_t mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"((uint64_t)shared), "r"(rank));
    return (void *)mapped;
#else
    return rank == 0 ? shared : nullptr;
#endif
}

#endif
