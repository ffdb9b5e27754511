/* Instructions that CUDA C has no name for, one small function each: asynchronous copies, fragment loads, tensor-core
 * products, clusters. Fragments are described with lane = 4 g + t, 0 <= t < 4. Every function compiles for every
 * architecture; where the instruction does not exist it is done another way, or traps: the host never launches a kernel
 * on a GPU that lacks what it uses. */
#ifndef TCHI_CUDA_PTX_CUH
#define TCHI_CUDA_PTX_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t tchi_shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* threadIdx.x, read anew each time: what is computed from it inside a loop is computed there, and holds no registers
 * around it. */
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

/* 16 bytes from global to shared memory, both aligned to 16: the first bytes_valid of them, zeros for the rest. With
 * bytes_valid 0 nothing is read, but `global` must still be an address the compiler may form. */
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

/* The same for all 16, which takes fewer instructions. */
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

/* Waits until at most `pending` of this thread's groups are under way. Other threads see the data after a barrier. */
template <int pending> static __device__ __forceinline__ void tchi_cp_async_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

/* A double from shared memory, asked for where it is written: the compiler leaves it between the products it stands
 * between. */
static __device__ __forceinline__ double tchi_load_shared_f64(const void *shared)
{
    double value;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(tchi_shared_address(shared)) : "memory");
    return value;
}

/* --- 16-bit fragments: ldmatrix is sm_75, the bfloat16 product sm_80 --------------------------------------------- */

/* Four 8 by 8 matrices of 16-bit elements. Lane 8 i + j points to row j of matrix i, 16 bytes aligned to 16; r[i] gets
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

/* C (16 by 8, float32) += A (16 by 16) B (16 by 8), bfloat16. a[0], a[1]: rows g, g + 8 at columns 2 t, 2 t + 1;
 * a[2], a[3]: the same rows, columns 2 t + 8, 2 t + 9. b[0], b[1]: rows 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of column g.
 * c[0], c[1]: row g, columns 2 t, 2 t + 1; c[2], c[3]: row g + 8. */
static __device__ __forceinline__ void tchi_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();
#endif
}

/* The same for float16. */
static __device__ __forceinline__ void tchi_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();
#endif
}

/* --- float32 products of operands rounded to TF32: sm_80 --------------------------------------------------------- */

/* To nearest, in the 19 bits that the tensor core reads of it: it cuts the rest off. Nothing is added to infinities,
 * and to NaN, which could be carried past its own bits. */
static __device__ __forceinline__ uint32_t tchi_round_tf32(uint32_t bits)
{
    return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7F800000u) ? bits + 0x1000u : bits;
}

/* C (16 by 8) += A (16 by 8) B (8 by 8). a[0], a[1]: rows g, g + 8 of column t; a[2], a[3]: of column t + 4. b[0],
 * b[1]: rows t, t + 4 of column g. c as in tchi_mma_bf16. */
static __device__ __forceinline__ void tchi_mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();
#endif
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

/* This block's number in its cluster, and the number of blocks in it; 0 and 1 where there are no clusters. */
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

/* A barrier of all threads of the cluster's blocks, after which each sees what the others wrote. No block may exit
 * while another can still reach into its shared memory: end with one of these. */
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

/* Where this block's shared variable lies in the block of the given rank: an ordinary pointer to read and write. */
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

/* --- warpgroup products of bfloat16: sm_90a and nothing newer ---------------------------------------------------- */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TCHI_WGMMA 1
#else
#define TCHI_WGMMA 0
#endif

/* Describes rows of 128 bytes in shared memory, their 16-byte chunks permuted by chunk ^ (row % 8), to wgmma. The rows
 * begin at a multiple of 1024 bytes; `shared` may point at any of the first row's chunks. Fields, from bit 0: address /
 * 16; from 16: unused here, 1; from 32: bytes from eight rows to the next eight, / 16; from 62: 1, this permutation. */
static __device__ __forceinline__ uint64_t tchi_wgmma_rows(const void *shared)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Before the first wgmma, and after other instructions have written its accumulators. */
static __device__ __forceinline__ void tchi_wgmma_fence()
{
#if TCHI_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

static __device__ __forceinline__ void tchi_wgmma_commit()
{
#if TCHI_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* Waits until at most `pending` of the warpgroup's groups are running. */
template <int pending> static __device__ __forceinline__ void tchi_wgmma_wait()
{
#if TCHI_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#endif
}

/* Shows what this thread has written to shared memory, cp.async included, to wgmma; a barrier has to follow. */
static __device__ __forceinline__ void tchi_wgmma_publish()
{
#if TCHI_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
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

/* D += A B', or D = A B' if `add` is 0, for A 64 by 16 and B 128 by 16 of bfloat16, both in shared memory as
 * tchi_wgmma_rows describes them, run in the background by the 128 threads of a warpgroup. Warp w holds rows 16 w to
 * 16 w + 15; its d[4 j] to d[4 j + 3] are columns 8 j to 8 j + 7, laid out as in tchi_mma_bf16. */
static __device__ __forceinline__ void tchi_wgmma_bf16_n128(float (&d)[64], uint64_t a, uint64_t b, int add)
{
#if TCHI_WGMMA
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TCHI_WGMMA_NAMES_64
                 "}, %64, %65, p, 1, 1, 0, 0;\n"
                 "}"
                 : TCHI_WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
#else
    __trap();
#endif
}

#endif
