/* Laboratory of the symmetric product in plain bfloat16 for sm_90a, C = c0 I + c1 D + c2 A B' over the lower tiles of C,
 * mirrored: one thread asks the tensor memory accelerator for k-tiles of A and B, two warpgroups multiply, and the
 * accelerator takes what they have finished away. It compares ways to divide the work; the last one is the library's
 * symmetric_pingpong.cu, and bench/ladder/cuda_orthogonalize.md has the figures. n must be a multiple of 256.
 *
 * The one thing to know before changing the kernel: all of C is written in squares of 64 by 64, and a square belongs to
 * the one warpgroup that has its sums. A square below the diagonal is written with its mirror image, one on it is made
 * symmetric first, one above it is left out. Stand-alone; from the root of the repository:
 *   nvcc -std=c++17 -O3 -lineinfo -gencode=arch=compute_90a,code=sm_90a bench/kernels/symmetric_tma_bench.cu
 * With the argument `backwards` the variants run in the other order. Exits with 1 if a check fails. A way that traps
 * ends its process; another goes on with those that are left. */
#include <algorithm>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cudaTypedefs.h>

/* --- instructions ------------------------------------------------------------------------------------------------- */

#ifndef BENCH_INSTRUCTIONS
#define BENCH_INSTRUCTIONS

static __device__ __forceinline__ uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

static __device__ __forceinline__ int cluster_rank()
{
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* A barrier of all threads of the cluster's blocks. No block exits while another can reach into its memory. */
static __device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* A barrier of 128 threads that the others of the block know nothing of. `number` is 1 to 15. */
static __device__ __forceinline__ void warpgroup_sync(int number)
{
    asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

template <int count> static __device__ __forceinline__ void registers_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count> static __device__ __forceinline__ void registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

static __device__ __forceinline__ void barrier_create(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/* Between the creation of barriers and the cluster's barrier after which others use them. */
static __device__ __forceinline__ void barriers_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* An arrival that lets the phase end only after so many bytes have been copied to this block in it. */
static __device__ __forceinline__ void barrier_arrive_expecting(uint64_t *barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/* An arrival at the barrier that has this one's place in the block of the given rank. Nothing written by threads is
 * handed over with it: asked to release to the cluster, it would come with a fence that waits for all of the thread's
 * memory operations on the GPU. */
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, int rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

static __device__ __forceinline__ bool phase_ended(uint64_t *barrier, int parity)
{
    uint32_t ended;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return ended != 0;
}

/* Ends the kernel with an error, by writing where nothing is: a trap among both the loading and the multiplying code
 * would keep the compiler from using more registers than a thread has before setmaxnreg. */
static __device__ __forceinline__ void give_up()
{
    asm volatile("st.global.u32 [%0], %1;" ::"l"((uint64_t)8), "r"(0) : "memory");
}

/* Cycles after which a wait can only be a mistake: two seconds and more. */
#define WAIT_CYCLES (1ll << 32)

/* Waits for the end of the phase of the given parity, the first having 0; parity 1 of a new barrier has ended. */
static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, int parity)
{
    if (phase_ended(barrier, parity)) {
        return;
    }
    long long since = clock64();
    while (!phase_ended(barrier, parity)) {
        if (clock64() - since > WAIT_CYCLES) {
            give_up();
        }
    }
}

/* Copies the box at (x, y, z) of the array that `map` describes to `shared`; `barrier` counts its bytes. What lies
 * outside of the array arrives, and counts, as zeros. */
static __device__ __forceinline__ void tma_load(void *shared, const CUtensorMap *map, int x, int y, int z,
                                                uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
                 : "memory");
}

/* The same to the place of `shared` in every block of the cluster with a bit in `blocks`, each counting at its own
 * barrier. */
static __device__ __forceinline__ void tma_load_to(int blocks, void *shared, const CUtensorMap *map, int x, int y,
                                                   int z, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"((uint16_t)blocks)
                 : "memory");
}

static __device__ __forceinline__ void tma_store(const CUtensorMap *map, int x, int y, int z, const void *shared)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(shared_address(shared))
                 : "memory");
}

static __device__ __forceinline__ void tma_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until all but this thread's last `pending` groups of stores have been read from shared memory. */
template <int pending> static __device__ __forceinline__ void tma_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/* Shows what this thread has written to shared memory to the accelerator; a barrier has to follow. */
static __device__ __forceinline__ void publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Four 8 by 8 matrices of 16-bit numbers. Lane 8 i + j points to where row j of matrix i goes; with lane = 4 g + t,
 * r[i] is row g, columns 2 t and 2 t + 1 of it. */
static __device__ __forceinline__ void stmatrix_x4(void *shared_row, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared_row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* The same, each matrix transposed: r[i] is rows 2 t and 2 t + 1, column g of what is written. */
static __device__ __forceinline__ void stmatrix_x4_transposed(void *shared_row, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared_row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* Two numbers that nobody writes while the kernel runs, asked for where it is written. */
static __device__ __forceinline__ uint32_t load_pair(const __nv_bfloat16 *global)
{
    uint32_t pair;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(pair) : "l"(global));
    return pair;
}

/* The same in all lanes of a warp, and known to be so. */
static __device__ __forceinline__ int warpgroup_number()
{
    return __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
}

/* A place in shared memory as wgmma counts it. */
static __device__ __forceinline__ uint32_t wgmma_address(const void *shared)
{
    return (shared_address(shared) & 0x3FFFFu) >> 4;
}

/* Describes rows of 128 bytes, their 16-byte chunks permuted by chunk ^ (row % 8), to wgmma. Fields, from bit 0: the
 * address; from 16: unused here, 1; from 32: bytes from eight rows to the next eight, / 16; from 62: 1, this
 * permutation. */
static __device__ __forceinline__ uint64_t wgmma_rows(uint32_t address)
{
    return (uint64_t)(address | 1u << 16) | (uint64_t)(1024 >> 4 | 1u << 30) << 32;
}

static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* After the last wait: the compiler must not have read the sums before. */
static __device__ __forceinline__ void wgmma_results(float (&d)[64])
{
#pragma unroll
    for (int i = 0; i < 64; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

static __device__ __forceinline__ uint64_t nanoseconds()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* D = A B', or D += A B' if `add`, for A 64 by 16 and B 128 by 16, run in the background by the 128 threads of a
 * warpgroup. With lane = 4 g + t, warp w holds rows 16 w + g (of d[4 j], d[4 j + 1]) and 16 w + g + 8 (of d[4 j + 2],
 * d[4 j + 3]), columns 8 j + 2 t and 8 j + 2 t + 1. */
static __device__ __forceinline__ void wgmma_n128(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
                 "%59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1, 0, 0;\n"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
                   "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                   "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
                   "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
                   "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]),
                   "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "r"(add));
}

/* The same for B 256 by 16: d is the left half, e the right one. */
static __device__ __forceinline__ void wgmma_n256(float (&d)[64], float (&e)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
        "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "
        "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(e[0]),
          "+f"(e[1]), "+f"(e[2]), "+f"(e[3]), "+f"(e[4]), "+f"(e[5]), "+f"(e[6]), "+f"(e[7]), "+f"(e[8]), "+f"(e[9]),
          "+f"(e[10]), "+f"(e[11]), "+f"(e[12]), "+f"(e[13]), "+f"(e[14]), "+f"(e[15]), "+f"(e[16]), "+f"(e[17]),
          "+f"(e[18]), "+f"(e[19]), "+f"(e[20]), "+f"(e[21]), "+f"(e[22]), "+f"(e[23]), "+f"(e[24]), "+f"(e[25]),
          "+f"(e[26]), "+f"(e[27]), "+f"(e[28]), "+f"(e[29]), "+f"(e[30]), "+f"(e[31]), "+f"(e[32]), "+f"(e[33]),
          "+f"(e[34]), "+f"(e[35]), "+f"(e[36]), "+f"(e[37]), "+f"(e[38]), "+f"(e[39]), "+f"(e[40]), "+f"(e[41]),
          "+f"(e[42]), "+f"(e[43]), "+f"(e[44]), "+f"(e[45]), "+f"(e[46]), "+f"(e[47]), "+f"(e[48]), "+f"(e[49]),
          "+f"(e[50]), "+f"(e[51]), "+f"(e[52]), "+f"(e[53]), "+f"(e[54]), "+f"(e[55]), "+f"(e[56]), "+f"(e[57]),
          "+f"(e[58]), "+f"(e[59]), "+f"(e[60]), "+f"(e[61]), "+f"(e[62]), "+f"(e[63])
        : "l"(a), "l"(b), "r"(add));
}

#endif

/* --- the plan: which tile is whose -------------------------------------------------------------------------------- */

#define BLOCK 128 /* rows and columns that tiles are counted in */
#define MOST_TILES 1100
#define MOST_PHASES 3

/* Tiles of one matrix that are alike. Shared: the blocks of a cluster take tiles below each other, of which the list
 * has the first, and share B. Otherwise every block takes the next tile of the list for itself. Narrow: 128 columns
 * where others have 256, since the rest lies above the diagonal. */
typedef struct tile_phase {
    int first, count; /* of the list */
    int shared, narrow;
} tile_phase;

/* The items of a group of matrices, phase by phase, then those of the next: so a matrix is still in the cache when its
 * later phases come. An item is a tile for each block of a cluster; cluster i takes items i, i + clusters and so on. */
typedef struct plan {
    int batch, group;
    int items, group_items;
    int ktiles;
    int writes; /* 1: the tile, 2: its mirror image; less than 3 is for finding out what writing costs */
    float c0, c1, c2;
    const __nv_bfloat16 *d;
    int64_t d_ld, d_stride;
    uint64_t *clocks; /* four: cycles and nanoseconds at the first block's beginning and end */
    int phases;
    tile_phase phase[MOST_PHASES];
    uint16_t list[MOST_TILES]; /* row and column of a tile, in blocks: row * 256 + column */
} plan;

typedef struct tensor_maps {
    CUtensorMap a, b, c;
} tensor_maps;

typedef struct tile {
    int matrix, row, col;
    bool shared, narrow;
    bool nothing; /* there was none left for this block: it goes through the motions with another and writes nothing */
} tile;

static __host__ __device__ inline int items_of(const tile_phase &f, int matrices, int cluster)
{
    return f.shared ? matrices * f.count : (matrices * f.count + cluster - 1) / cluster;
}

/* This block's tile of an item. */
template <int cluster> static __host__ __device__ inline tile tile_of(const plan &p, int item, int rank)
{
    int group = item / p.group_items;
    int left = item - group * p.group_items;
    int rest = p.batch - group * p.group;
    int matrices = rest < p.group ? rest : p.group;
    int f = 0;
    while (f + 1 < p.phases && left >= items_of(p.phase[f], matrices, cluster)) {
        left -= items_of(p.phase[f], matrices, cluster);
        f++;
    }
    const tile_phase &now = p.phase[f];
    int number = now.shared ? left : left * cluster + rank;
    tile t;
    t.nothing = number >= matrices * now.count;
    number = t.nothing ? 0 : number;
    int entry = p.list[now.first + number % now.count];
    t.matrix = group * p.group + number / now.count;
    t.row = (entry / 256 + (now.shared ? rank : 0)) * BLOCK;
    t.col = entry % 256 * BLOCK;
    t.shared = now.shared != 0;
    t.narrow = now.narrow != 0;
    return t;
}

/* --- the kernel: shared memory ------------------------------------------------------------------------------------ */

#define GROUPS 2                     /* of 128 threads that multiply */
#define THREADS (128 * (GROUPS + 1)) /* one thread of the last ones asks for copies */
#define TAKEN_REGISTERS 232
#define LEFT_REGISTERS 40
#define DEPTH 64      /* numbers along k in a k-tile */
#define ROW_BYTES 128 /* of a k-tile or of a square */
#define A_BYTES (BLOCK * ROW_BYTES)
#define SQUARE 64 /* of C, written at a time by a warpgroup */
#define SQUARE_BYTES (SQUARE * ROW_BYTES)
#define SET_BYTES (2 * SQUARE_BYTES) /* a square and its mirror image */

/* Together: both warpgroups work on one tile of 128 by 256, 64 rows each. In turn: each has tiles of 128 by 128 of its
 * own, and writes one while the other multiplies. */
enum way { TOGETHER, IN_TURN };

template <enum way way, int cluster, int stages, int sets> struct shape {
    static constexpr int cols = way == TOGETHER ? 256 : 128;
    static constexpr int b_rows = way == TOGETHER ? 128 : 128 / cluster; /* that one copy moves */
    static constexpr int stage_bytes = A_BYTES + cols * ROW_BYTES;
    static constexpr int sets_at = stages * stage_bytes;
    static constexpr int barriers_at = sets_at + GROUPS * sets * SET_BYTES;
    static constexpr int bytes = barriers_at + (2 * stages + GROUPS) * (int)sizeof(uint64_t);
    static constexpr int leaving = (way == TOGETHER ? GROUPS : 1) * 4 * cluster; /* warps that use a stage */
    static_assert(bytes <= 232448, "shared memory of a block");
};

/* Where a walk over the stages stands, and the parity of the full barrier's phase. */
typedef struct place {
    int stage, parity;
} place;

template <int stages> static __device__ inline place place_of(int ktile)
{
    return {ktile % stages, ktile / stages & 1};
}

template <int stages> static __device__ __forceinline__ void step(place *at)
{
    at->stage++;
    if (at->stage == stages) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

/* Chunk `chunk` of 16 bytes of a row, in the permutation that wgmma and the accelerator know. */
static __device__ __forceinline__ char *chunk_at(char *rows, int row, int chunk)
{
    return rows + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

/* --- the kernel: loading, one thread ------------------------------------------------------------------------------ */

template <class s, int cluster>
static __device__ __forceinline__ void load_ktile(char *stage, uint64_t *full, const tensor_maps &maps, const tile &t,
                                                  int rank, int ktile)
{
    int x = ktile * DEPTH;
    char *b = stage + A_BYTES;
    int cols = t.narrow ? 128 : s::cols;
    barrier_arrive_expecting(full, A_BYTES + cols * ROW_BYTES);
    tma_load(stage, &maps.a, x, t.row, t.matrix, full);
    if (cluster > 1 && t.shared) {
        int mine = rank * s::b_rows;
        tma_load_to((1 << cluster) - 1, b + mine * ROW_BYTES, &maps.b, x, t.col + mine, t.matrix, full);
        return;
    }
    for (int row = 0; row < cols; row += s::b_rows) {
        tma_load(b + row * ROW_BYTES, &maps.b, x, t.col + row, t.matrix, full);
    }
}

template <class s, int cluster, int stages>
static __device__ inline void load_all(const plan &p, const tensor_maps &maps, char *shared, uint64_t *full,
                                       uint64_t *empty)
{
    int rank = cluster > 1 ? cluster_rank() : 0;
    place at = {0, 0};
    for (int item = (int)blockIdx.x / cluster; item < p.items; item += (int)gridDim.x / cluster) {
        tile t = tile_of<cluster>(p, item, rank);
        for (int ktile = 0; ktile < p.ktiles; ktile++) {
            barrier_wait(empty + at.stage, at.parity ^ 1);
            load_ktile<s, cluster>(shared + at.stage * s::stage_bytes, full + at.stage, maps, t, rank, ktile);
            step<stages>(&at);
        }
    }
}

/* --- the kernel: multiplying -------------------------------------------------------------------------------------- */

/* A warp leaves a stage: one lane tells each block that copies into it. */
template <int cluster> static __device__ __forceinline__ void leave(uint64_t *empty)
{
    int lane = (int)threadIdx.x % 32;
    if (cluster == 1) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    } else if (lane < cluster) {
        barrier_arrive_at(empty, lane);
    }
}

/* All products of a k-tile as one group in the background; a step of 16 along k is 32 bytes of a row, and addresses in
 * descriptors count 16. The lower 64 rows of A are 64 * 128 bytes on. */
template <enum way way, bool narrow>
static __device__ __forceinline__ void start_ktile(float (&sum)[2][64], uint32_t a, uint32_t b, int add)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint64_t left = wgmma_rows(a + 2 * k);
        uint64_t right = wgmma_rows(b + 2 * k);
        if (way == IN_TURN) {
            wgmma_n128(sum[0], left, right, k > 0 ? 1 : add);
            wgmma_n128(sum[1], wgmma_rows(a + 2 * k + 64 * ROW_BYTES / 16), right, k > 0 ? 1 : add);
        } else if (narrow) {
            wgmma_n128(sum[0], left, right, k > 0 ? 1 : add);
        } else {
            wgmma_n256(sum[0], sum[1], left, right, k > 0 ? 1 : add);
        }
    }
    wgmma_commit();
}

/* A k-tile is left when the next one is already being multiplied, so that the tensor cores do not run dry. The last one
 * is left to the caller: its stage is returned. */
template <class s, enum way way, bool narrow, int cluster, int stages>
static __device__ __forceinline__ int multiply(float (&sum)[2][64], char *shared, uint64_t *full, uint64_t *empty,
                                               int ktiles, place *at)
{
    int rows = way == TOGETHER ? warpgroup_number() * 64 : 0; /* of A, above this warpgroup's */
    uint32_t first = wgmma_address(shared);
    int before = 0;
    for (int ktile = 0; ktile < ktiles; ktile++) {
        uint32_t a = first + (uint32_t)(at->stage * (s::stage_bytes / 16));
        barrier_wait(full + at->stage, at->parity);
        start_ktile<way, narrow>(sum, a + (uint32_t)(rows * ROW_BYTES / 16), a + A_BYTES / 16, ktile > 0);
        wgmma_wait<1>();
        if (ktile > 0) {
            leave<cluster>(empty + before);
        }
        before = at->stage;
        step<stages>(at);
    }
    return before;
}

/* --- the kernel: the result --------------------------------------------------------------------------------------- */

/* Square 2 p + h of a warpgroup has its sums in sum[p], from 32 h on. */
template <enum way way> static __device__ __forceinline__ int square_row(const tile &t, int number)
{
    return t.row + SQUARE * (way == TOGETHER ? warpgroup_number() : number / 2);
}

template <enum way way> static __device__ __forceinline__ int square_col(const tile &t, int number)
{
    return t.col + SQUARE * (way == TOGETHER ? number : number % 2);
}

/* A narrow tile's squares are two: the others would lie above the diagonal. */
template <enum way way> static __device__ __forceinline__ bool square_counts(const tile &t, int number)
{
    return !t.nothing && square_col<way>(t, number) <= square_row<way>(t, number);
}

/* What a thread needs of D for one square: pairs of row g, then of row g + 8, for each eight columns. */
static __device__ __forceinline__ void fetch_d(uint32_t (&d)[16], const plan &p, int matrix, int row, int col)
{
    int lane = (int)threadIdx.x % 32;
    int r = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const __nv_bfloat16 *from = p.d + matrix * p.d_stride + r * p.d_ld + col + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        d[2 * j] = load_pair(from + 8 * j);
        d[2 * j + 1] = load_pair(from + 8 * p.d_ld + 8 * j);
    }
}

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* c0 on the diagonal of a square. */
template <int from> static __device__ __forceinline__ void add_identity(float (&sum)[64], float c0)
{
    int lane = (int)threadIdx.x % 32;
    int r = (int)threadIdx.x % 128 / 32 * 16 + lane / 4 - lane % 4 * 2; /* column - 8 j - e of the diagonal in row g */
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[from + i] += 8 * (i / 4) + i % 2 - i / 2 % 2 * 8 == r ? c0 : 0.0f;
    }
}

/* A finished square and its mirror image into shared memory. */
template <int from>
static __device__ __forceinline__ void stage_square(char *square, char *mirror, const float (&sum)[64])
{
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x % 128 / 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float *v = sum + from + 4 * j;
        uint32_t r[4] = {pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
        stmatrix_x4(chunk_at(square, 16 * warp + lane % 16, j + lane / 16), r);
        stmatrix_x4_transposed(chunk_at(mirror, 8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), r);
    }
}

/* A square on the diagonal: what is above it comes from the mirror image. */
static __device__ inline void merge_mirror(char *square, char *mirror)
{
    for (int i = (int)threadIdx.x % 128; i < SQUARE * 8; i += 128) {
        int row = i / 8;
        int chunk = i % 8;
        uint16_t *to = (uint16_t *)chunk_at(square, row, chunk);
        const uint16_t *with = (const uint16_t *)chunk_at(mirror, row, chunk);
        for (int e = max(row + 1 - 8 * chunk, 0); e < 8; e++) {
            to[e] = with[e];
        }
    }
}

/* Writes one square and its mirror image from `set`, which the accelerator has read by the time the leader passes the
 * first barrier. */
template <int from, int sets, bool has_d>
static __device__ __forceinline__ void write_square(const plan &p, const CUtensorMap *c, int matrix, int row, int col,
                                                    float (&sum)[64], const uint32_t (&d)[16], char *set)
{
    bool leader = threadIdx.x % 128 == 0;
    int barrier = 1 + warpgroup_number();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float v = p.c2 * sum[from + i];
        if (has_d) {
            uint32_t pair = d[i / 4 * 2 + i / 2 % 2];
            v += p.c1 * __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
        }
        sum[from + i] = v;
    }
    if (row == col) {
        add_identity<from>(sum, p.c0);
    }
    if (leader) {
        tma_wait_read<sets - 1>();
    }
    warpgroup_sync(barrier);
    stage_square<from>(set, set + SQUARE_BYTES, sum);
    if (row == col) {
        warpgroup_sync(barrier);
        merge_mirror(set, set + SQUARE_BYTES);
    }
    publish();
    warpgroup_sync(barrier);
    if (leader) {
        if (p.writes & 1) {
            tma_store(c, col, row, matrix, set);
        }
        if (row != col && p.writes & 2) {
            tma_store(c, row, col, matrix, set + SQUARE_BYTES);
        }
        tma_commit();
    }
}

/* The four squares of a warpgroup. `turn` counts those written, for the sets go round. */
template <enum way way, int sets, bool has_d>
static __device__ __forceinline__ void write_tile(const plan &p, const CUtensorMap *c, const tile &t,
                                                  float (&sum)[2][64], const uint32_t (&d)[4][16], char *own_sets,
                                                  int *turn)
{
#pragma unroll
    for (int number = 0; number < 4; number++) {
        if (square_counts<way>(t, number)) {
            int row = square_row<way>(t, number);
            int col = square_col<way>(t, number);
            char *set = own_sets + *turn % sets * SET_BYTES;
            if (number % 2 == 0) {
                write_square<0, sets, has_d>(p, c, t.matrix, row, col, sum[number / 2], d[number], set);
            } else {
                write_square<32, sets, has_d>(p, c, t.matrix, row, col, sum[number / 2], d[number], set);
            }
            ++*turn;
        }
    }
}

/* --- the kernel --------------------------------------------------------------------------------------------------- */

/* In turn, a warpgroup may wait for its tile's first k-tile only when the other has seen the last one of the tile before:
 * a barrier tells the two phases around it apart, not those further away. Warpgroup 0 begins; `own` counts the block's
 * tiles. */
static __device__ __forceinline__ void await_turn(uint64_t *turns, int group, int own)
{
    barrier_wait(turns + group, (own / GROUPS & 1) ^ (group == 0 ? 1 : 0));
}

static __device__ __forceinline__ void pass_turn(uint64_t *turns, int group)
{
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(turns + (group + 1) % GROUPS);
    }
    __syncwarp();
}

/* All tiles of one warpgroup; in turn, those are every second of the block's. D is asked for while the last products
 * run. */
template <class s, enum way way, int cluster, int stages, int sets, bool has_d>
static __device__ __forceinline__ void multiply_all(const plan &p, const tensor_maps &maps, char *shared,
                                                    uint64_t *full, uint64_t *empty)
{
    int group = warpgroup_number();
    int rank = cluster > 1 ? cluster_rank() : 0;
    int clusters = (int)gridDim.x / cluster;
    int own = way == IN_TURN ? group : 0;
    int stride = way == IN_TURN ? GROUPS : 1;
    char *own_sets = shared + s::sets_at + group * sets * SET_BYTES;
    int turn = 0;
    for (; (int)blockIdx.x / cluster + own * clusters < p.items; own += stride) {
        float sum[2][64];
        uint32_t d[4][16];
        tile t = tile_of<cluster>(p, (int)blockIdx.x / cluster + own * clusters, rank);
        place at = place_of<stages>(own * p.ktiles);
        int last;
        if (way == IN_TURN) {
            await_turn(empty + stages, group, own);
        }
        if (way == TOGETHER && t.narrow) {
            last = multiply<s, way, true, cluster, stages>(sum, shared, full, empty, p.ktiles, &at);
        } else {
            last = multiply<s, way, false, cluster, stages>(sum, shared, full, empty, p.ktiles, &at);
        }
        if (way == IN_TURN) {
            pass_turn(empty + stages, group);
        }
#pragma unroll
        for (int number = 0; has_d && number < 4; number++) {
            if (square_counts<way>(t, number)) {
                fetch_d(d[number], p, t.matrix, square_row<way>(t, number), square_col<way>(t, number));
            }
        }
        wgmma_wait<0>();
        wgmma_results(sum[0]);
        wgmma_results(sum[1]);
        leave<cluster>(empty + last);
        if (p.writes != 0) {
            write_tile<way, sets, has_d>(p, &maps.c, t, sum, d, own_sets, &turn);
        }
    }
    if (threadIdx.x % 128 == 0) {
        tma_wait_read<0>();
    }
    __syncwarp();
}

/* When the first block begins and ends: so many cycles in so many nanoseconds. */
static __device__ __forceinline__ void note_time(uint64_t *clocks)
{
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        clocks[0] = (uint64_t)clock64();
        clocks[1] = nanoseconds();
    }
}

/* For 64 matrices of n = k = 2048: 550 GFLOP for exact halves, 0.73 ms at the 757 TFLOP/s of a whole product by
 * cuBLAS; to and from memory 512 MiB for each of A, B, C and half of it for D, 0.45 ms at 4.3 TB/s with all of them.
 *
 * Copies land in the other block of a cluster too, so a stage is empty only when the warps of BOTH have left it; and
 * nobody exits before the cluster's last barrier, since the other block arrives here until it has done. */
template <enum way way, int cluster, int stages, int sets, bool has_d>
static __global__ void __launch_bounds__(THREADS, 1)
    symmetric_tma(const __grid_constant__ plan p, const __grid_constant__ tensor_maps maps)
{
    typedef shape<way, cluster, stages, sets> s;
    extern __shared__ __align__(1024) char shared[];
    uint64_t *full = (uint64_t *)(shared + s::barriers_at);
    uint64_t *empty = full + stages;
    note_time(p.clocks);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            barrier_create(full + i, 1);
            barrier_create(empty + i, s::leaving);
        }
        for (int i = 0; i < GROUPS; i++) {
            barrier_create(empty + stages + i, 4); /* warps of a warpgroup */
        }
        barriers_publish();
    }
    __syncwarp();
    cluster_sync();
    if (threadIdx.x >= 128 * GROUPS) {
        registers_give<LEFT_REGISTERS>();
        if (threadIdx.x == 128 * GROUPS) {
            load_all<s, cluster, stages>(p, maps, shared, full, empty);
        }
        __syncwarp();
        cluster_sync();
    } else {
        registers_take<TAKEN_REGISTERS>();
        multiply_all<s, way, cluster, stages, sets, has_d>(p, maps, shared, full, empty);
        cluster_sync();
        note_time(p.clocks + 2);
    }
}

/* --- host: one product -------------------------------------------------------------------------------------------- */

static void must(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) {
        printf("%s: %s\n", what, cudaGetErrorString(error));
        fflush(stdout);
        _exit(2);
    }
}

/* Batches of matrices in bfloat16. */
typedef struct operand {
    __nv_bfloat16 *data;
    int64_t ld, stride;
} operand;

typedef struct product {
    int n, k, batch;
    int has_d;
    float c0, c1, c2;
    operand a, b, c, d;
    uint64_t *clocks;
} product;

/* How tiles are divided. */
typedef struct division {
    enum way way;
    int cluster;
    int narrow;     /* tiles on the diagonal have 128 columns where that is enough */
    int by_columns; /* tiles of a column of C follow one another, not those of a row */
    int group;      /* of matrices whose phases come one after the other */
} division;

static void add_phase(plan *p, std::vector<int> tiles, const division &how, int shared, int narrow)
{
    if (tiles.empty()) {
        return;
    }
    std::stable_sort(tiles.begin(), tiles.end(),
                     [&](int x, int y) { return how.by_columns ? x % 256 < y % 256 : x / 256 < y / 256; });
    tile_phase *f = &p->phase[p->phases];
    f->first = p->phases == 0 ? 0 : f[-1].first + f[-1].count;
    f->count = (int)tiles.size();
    f->shared = shared;
    f->narrow = narrow;
    if (f->first + f->count > MOST_TILES) {
        printf("too many tiles\n");
        exit(2);
    }
    for (int i = 0; i < f->count; i++) {
        p->list[f->first + i] = (uint16_t)tiles[i];
    }
    p->phases++;
}

/* Tiles of 128 by 256: squares of 256 below the diagonal are two of them, which may share B. Of a square on it the
 * lower tile is needed whole, and the left half of the upper one. */
static void divide_together(plan *p, const division &how, int blocks)
{
    std::vector<int> upper;
    std::vector<int> lower;
    std::vector<int> pairs;
    std::vector<int> halves;
    for (int i = 0; i < blocks; i += 2) {
        for (int j = 0; j <= i; j += 2) {
            bool diagonal = how.narrow && j == i;
            (diagonal ? halves : how.cluster > 1 ? pairs : upper).push_back(i * 256 + j);
            if (diagonal || how.cluster == 1) {
                lower.push_back((i + 1) * 256 + j);
            }
        }
    }
    lower.insert(lower.end(), upper.begin(), upper.end());
    add_phase(p, pairs, how, 1, 0);
    add_phase(p, lower, how, 0, 0);
    add_phase(p, halves, how, 0, 1);
}

/* Tiles of 128 by 128. In clusters, those of a column are taken two by two from below; one on the diagonal may be
 * left. */
static void divide_in_turn(plan *p, const division &how, int blocks)
{
    std::vector<int> pairs;
    std::vector<int> single;
    for (int j = 0; j < blocks; j++) {
        int i = j;
        if (how.cluster == 1 || (blocks - j) % 2 != 0) {
            single.push_back(i * 256 + j);
            i++;
        }
        while (i < blocks) {
            (how.cluster == 1 ? single : pairs).push_back(i * 256 + j);
            i += how.cluster;
        }
    }
    add_phase(p, pairs, how, 1, 0);
    add_phase(p, single, how, 0, 0);
}

static plan plan_of(const product *q, const division &how)
{
    plan p = {};
    p.batch = q->batch;
    p.group = how.group;
    p.ktiles = (q->k + DEPTH - 1) / DEPTH;
    p.writes = 3;
    p.c0 = q->c0;
    p.c1 = q->c1;
    p.c2 = q->c2;
    p.d = q->d.data;
    p.d_ld = q->d.ld;
    p.d_stride = q->d.stride;
    p.clocks = q->clocks;
    (how.way == TOGETHER ? divide_together : divide_in_turn)(&p, how, q->n / BLOCK);
    int last = 0;
    for (int f = 0; f < p.phases; f++) {
        p.group_items += items_of(p.phase[f], p.group, how.cluster);
        last += items_of(p.phase[f], p.batch % p.group, how.cluster);
    }
    p.items = p.batch / p.group * p.group_items + last;
    return p;
}

static PFN_cuTensorMapEncodeTiled_v12000 encoder(void)
{
    void *encode = NULL;
    cudaDriverEntryPointQueryResult found;
    must(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
         "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) {
        printf("the driver has no cuTensorMapEncodeTiled\n");
        exit(2);
    }
    return (PFN_cuTensorMapEncodeTiled_v12000)encode;
}

/* All matrices, cols by rows by batch numbers, copied in boxes of 64 columns by `box_rows` rows. */
static CUtensorMap map_of(const operand *m, int cols, int rows, int batch, int box_rows)
{
    CUtensorMap map;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch};
    cuuint64_t strides[2] = {(cuuint64_t)m->ld * 2, (cuuint64_t)m->stride * 2};
    cuuint32_t box[3] = {DEPTH, (cuuint32_t)box_rows, 1};
    cuuint32_t every[3] = {1, 1, 1};
    CUresult result = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, m->data, sizes, strides, box, every,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        printf("cuTensorMapEncodeTiled: %d\n", (int)result);
        exit(2);
    }
    return map;
}

/* As many clusters as run at one time, one block on a multiprocessor. */
template <enum way way, int cluster, int stages, int sets>
static void launch(const product *q, const plan &p, int processors)
{
    typedef shape<way, cluster, stages, sets> s;
    auto kernel =
        q->has_d ? symmetric_tma<way, cluster, stages, sets, true> : symmetric_tma<way, cluster, stages, sets, false>;
    tensor_maps maps;
    maps.a = map_of(&q->a, q->k, q->n, q->batch, BLOCK);
    maps.b = map_of(&q->b, q->k, q->n, q->batch, s::b_rows);
    maps.c = map_of(&q->c, q->n, q->n, q->batch, SQUARE);
    must(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, s::bytes),
         "cudaFuncSetAttribute");
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(processors / cluster * cluster), 1, 1);
    config.blockDim = dim3(THREADS, 1, 1);
    config.dynamicSmemBytes = s::bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = processors;
    if (cluster > 1) {
        must(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters");
    }
    clusters = std::min(std::min(processors / cluster, clusters), p.items);
    config.gridDim = dim3((unsigned)(clusters * cluster), 1, 1);
    must(cudaLaunchKernelEx(&config, kernel, p, maps), "cudaLaunchKernelEx");
}

/* --- variants ----------------------------------------------------------------------------------------------------- */

typedef struct variant {
    const char *name;
    void (*launch)(const product *, const plan &, int processors);
    division how;
} variant;

static const variant variants[] = {
    {"together            ", launch<TOGETHER, 1, 4, 1>, {TOGETHER, 1, 0, 0, 1}},
    {"together narrow     ", launch<TOGETHER, 1, 4, 1>, {TOGETHER, 1, 1, 0, 4}},
    {"together narrow 3/2 ", launch<TOGETHER, 1, 3, 2>, {TOGETHER, 1, 1, 0, 4}},
    {"pairs               ", launch<TOGETHER, 2, 4, 1>, {TOGETHER, 2, 0, 0, 1}},
    {"pairs narrow        ", launch<TOGETHER, 2, 4, 1>, {TOGETHER, 2, 1, 0, 4}},
    {"pairs narrow 3/2    ", launch<TOGETHER, 2, 3, 2>, {TOGETHER, 2, 1, 0, 4}},
    {"pairs narrow columns", launch<TOGETHER, 2, 4, 1>, {TOGETHER, 2, 1, 1, 4}},
    {"in turn             ", launch<IN_TURN, 1, 6, 1>, {IN_TURN, 1, 0, 0, 1}},
    {"in turn pairs       ", launch<IN_TURN, 2, 6, 1>, {IN_TURN, 2, 0, 0, 4}},
    {"in turn pairs 5/2   ", launch<IN_TURN, 2, 5, 2>, {IN_TURN, 2, 0, 0, 4}},
    {"in turn pairs column", launch<IN_TURN, 2, 6, 1>, {IN_TURN, 2, 0, 1, 4}},
};
#define VARIANTS ((int)(sizeof variants / sizeof variants[0]))

/* Where power holds the clock down, who comes first matters: look at both orders. */
static int backwards;

static const variant &variant_at(int position)
{
    return variants[backwards ? VARIANTS - 1 - position : position];
}

/* --- operands and checks ------------------------------------------------------------------------------------------ */

/* Uniform in [-1, 1). */
static __global__ void fill_kernel(__nv_bfloat16 *data, int64_t count, uint64_t seed)
{
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        uint64_t bits = (uint64_t)at * 0x9E3779B97F4A7C15ull + seed * 0xBF58476D1CE4E5B9ull;
        bits = (bits ^ bits >> 31) * 0xD6E8FEB86659FD93ull;
        bits = (bits ^ bits >> 29) * 0xD6E8FEB86659FD93ull;
        data[at] = __float2bfloat16((float)(bits >> 40) / 8388608.0f - 1.0f);
    }
}

#define REFERENCE 64 /* rows and columns of C for a block of 256 threads, 4 by 4 each */

/* A B' in float32 for tiles on and below the diagonal. */
static __global__ void reference_kernel(product q, float *out)
{
    __shared__ float a[16][REFERENCE + 4];
    __shared__ float b[16][REFERENCE + 4];
    int row = (int)blockIdx.y * REFERENCE;
    int col = (int)blockIdx.x * REFERENCE;
    if (col > row) {
        return;
    }
    int x = (int)threadIdx.x % 16 * 4;
    int y = (int)threadIdx.x / 16 * 4;
    float sum[4][4] = {};
    for (int from = 0; from < q.k; from += 16) {
        for (int i = (int)threadIdx.x; i < 16 * REFERENCE; i += 256) {
            int l = from + i % 16;
            int64_t za = blockIdx.z * q.a.stride + (row + i / 16) * q.a.ld + l;
            int64_t zb = blockIdx.z * q.b.stride + (col + i / 16) * q.b.ld + l;
            a[i % 16][i / 16] = l < q.k ? __bfloat162float(q.a.data[za]) : 0.0f;
            b[i % 16][i / 16] = l < q.k ? __bfloat162float(q.b.data[zb]) : 0.0f;
        }
        __syncthreads();
        for (int l = 0; l < 16; l++) {
            for (int i = 0; i < 16; i++) {
                sum[i / 4][i % 4] += a[l][y + i / 4] * b[l][x + i % 4];
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 16; i++) {
        out[((int64_t)blockIdx.z * q.n + row + y + i / 4) * q.n + col + x + i % 4] = sum[i / 4][i % 4];
    }
}

#define SHOWN 6

/* What a check found: wrong elements, those that differ from their mirror image, those written where C is not. */
typedef struct findings {
    unsigned long long wrong, asymmetric, strayed;
    unsigned shown;
    long long place[SHOWN]; /* from the first number of C, which may be negative */
    float got[SHOWN], wanted[SHOWN];
} findings;

static __device__ inline void note(findings *f, int64_t place, float got, float wanted)
{
    unsigned number = atomicAdd(&f->shown, 1u);
    if (number < SHOWN) {
        f->place[number] = place;
        f->got[number] = got;
        f->wanted[number] = wanted;
    }
}

/* Looks at every number of the memory that C lies in, `before` of them in front of it. The result may be off by
 * rounding to bfloat16 and by what float32 sums lose. */
static __global__ void check_kernel(product q, const float *sums, int64_t before, int64_t total, findings *f)
{
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x - before;
    if (at >= total - before) {
        return;
    }
    int64_t z = at < 0 ? -1 : at / q.c.stride;
    int64_t i = at < 0 ? 0 : at % q.c.stride / q.c.ld;
    int64_t j = at < 0 ? 0 : at % q.c.stride % q.c.ld;
    float got = __bfloat162float(q.c.data[at]);
    if (z < 0 || z >= q.batch || i >= q.n || j >= q.n) {
        uint16_t bits = ((const uint16_t *)q.c.data)[at];
        if (bits != 0xFFFF) {
            atomicAdd(&f->strayed, 1ull);
            note(f, at, got, 0.0f);
        }
        return;
    }
    int64_t row = i > j ? i : j;
    int64_t col = i > j ? j : i;
    float wanted = q.c2 * sums[(z * q.n + row) * q.n + col] + (i == j ? q.c0 : 0.0f);
    if (q.has_d) {
        wanted += q.c1 * __bfloat162float(q.d.data[z * q.d.stride + row * q.d.ld + col]);
    }
    float allowed = fabsf(wanted) * 0.00391f + 1e-6f * (float)q.k;
    if (!(fabsf(got - wanted) <= allowed)) {
        atomicAdd(&f->wrong, 1ull);
        note(f, at, got, wanted);
    }
    if (((const uint16_t *)q.c.data)[at] != ((const uint16_t *)q.c.data)[z * q.c.stride + j * q.c.ld + i]) {
        atomicAdd(&f->asymmetric, 1ull);
    }
}

/* A case: a product, what its sums are, and C in the middle of memory that must not change. */
typedef struct trial {
    int batch, n, k;
    int has_d;
    int gram;   /* B is A */
    int padded; /* rows and matrices of C have space between them */
    int timed;
} trial;

#define GUARD 65536 /* numbers before C and behind it */

typedef struct bench {
    product q;
    float *sums;
    __nv_bfloat16 *c_memory;
    int64_t c_total;
    findings *found;
    int processors;
} bench;

static operand random_operand(int rows, int ld, int batch, uint64_t seed)
{
    operand m = {NULL, ld, (int64_t)rows * ld};
    int64_t count = m.stride * batch;
    must(cudaMalloc((void **)&m.data, (size_t)count * 2), "cudaMalloc");
    fill_kernel<<<(unsigned)((count + 255) / 256), 256>>>(m.data, count, seed);
    must(cudaGetLastError(), "fill_kernel");
    return m;
}

static bench prepare(const trial &t, int processors)
{
    bench e = {};
    product *q = &e.q;
    e.processors = processors;
    *q = {t.n, t.k, t.batch, t.has_d, t.has_d ? 0.75f : 0.0f, -0.5f, 1.25f, {}, {}, {}, {}, NULL};
    int ld = (t.k + 7) / 8 * 8;
    q->a = random_operand(t.n, ld, t.batch, 1);
    q->b = t.gram ? q->a : random_operand(t.n, ld + (t.padded ? 8 : 0), t.batch, 2);
    q->d = random_operand(t.n, t.n + (t.padded ? 2 : 0), t.batch, 3);
    q->c.ld = t.n + (t.padded ? 24 : 0);
    q->c.stride = (t.n + (t.padded ? 3 : 0)) * q->c.ld;
    e.c_total = q->c.stride * t.batch + 2 * GUARD;
    must(cudaMalloc((void **)&e.c_memory, (size_t)e.c_total * 2), "cudaMalloc");
    q->c.data = e.c_memory + GUARD;
    must(cudaMalloc((void **)&q->clocks, 4 * sizeof(uint64_t)), "cudaMalloc");
    must(cudaMalloc((void **)&e.found, sizeof(findings)), "cudaMalloc");
    must(cudaMalloc((void **)&e.sums, (size_t)t.n * t.n * t.batch * sizeof(float)), "cudaMalloc");
    dim3 grid((unsigned)(t.n / REFERENCE), (unsigned)(t.n / REFERENCE), (unsigned)t.batch);
    reference_kernel<<<grid, 256>>>(*q, e.sums);
    must(cudaGetLastError(), "reference_kernel");
    must(cudaDeviceSynchronize(), "reference_kernel");
    return e;
}

static void drop(bench *e)
{
    if (e->q.b.data != e->q.a.data) {
        must(cudaFree(e->q.b.data), "cudaFree");
    }
    void *all[] = {e->q.a.data, e->q.d.data, e->c_memory, e->q.clocks, e->found, e->sums};
    for (void *one : all) {
        must(cudaFree(one), "cudaFree");
    }
}

static void show(const trial &t, const product *q, const char *name, const findings *f)
{
    printf("WRONG %s  %d x %d, k %d: %llu wrong, %llu asymmetric, %llu strayed\n", name, t.batch, t.n, t.k, f->wrong,
           f->asymmetric, f->strayed);
    for (unsigned i = 0; i < f->shown && i < SHOWN; i++) {
        long long at = f->place[i];
        printf("   matrix %lld row %lld column %lld: %g where %g was wanted\n", (long long)(at / q->c.stride),
               (long long)(at % q->c.stride / q->c.ld), (long long)(at % q->c.stride % q->c.ld), f->got[i],
               f->wanted[i]);
    }
}

/* 1 if the result is wrong. */
static int check(const bench *e, const trial &t, const variant &v)
{
    must(cudaMemset(e->c_memory, 0xFF, (size_t)e->c_total * 2), "cudaMemset");
    must(cudaMemset(e->found, 0, sizeof(findings)), "cudaMemset");
    v.launch(&e->q, plan_of(&e->q, v.how), e->processors);
    must(cudaDeviceSynchronize(), v.name);
    check_kernel<<<(unsigned)((e->c_total + 255) / 256), 256>>>(e->q, e->sums, GUARD, e->c_total, e->found);
    findings f;
    must(cudaMemcpy(&f, e->found, sizeof f, cudaMemcpyDeviceToHost), "check_kernel");
    int bad = f.wrong != 0 || f.asymmetric != 0 || f.strayed != 0;
    if (bad) {
        show(t, &e->q, v.name, &f);
    }
    return bad;
}

/* --- speed -------------------------------------------------------------------------------------------------------- */

#define WARM 3
#define TIMES 20

static double median_ms(const bench *e, const variant &v, const plan &p)
{
    std::vector<float> times;
    cudaEvent_t from;
    cudaEvent_t to;
    must(cudaEventCreate(&from), "cudaEventCreate");
    must(cudaEventCreate(&to), "cudaEventCreate");
    for (int i = 0; i < WARM + TIMES; i++) {
        float ms;
        must(cudaEventRecord(from), "cudaEventRecord");
        v.launch(&e->q, p, e->processors);
        must(cudaEventRecord(to), "cudaEventRecord");
        must(cudaEventSynchronize(to), v.name);
        must(cudaEventElapsedTime(&ms, from, to), "cudaEventElapsedTime");
        if (i >= WARM) {
            times.push_back(ms);
        }
    }
    must(cudaEventDestroy(from), "cudaEventDestroy");
    must(cudaEventDestroy(to), "cudaEventDestroy");
    std::sort(times.begin(), times.end());
    return times[TIMES / 2];
}

/* Products done, with what lies above the diagonal, over exact halves. */
static double waste_of(const product *q, const plan &p, const division &how)
{
    double cells = 0.0;
    for (int f = 0; f < p.phases; f++) {
        int cols = how.way == IN_TURN || p.phase[f].narrow ? 128 : 256;
        cells += 128.0 * cols * p.phase[f].count * (p.phase[f].shared ? how.cluster : 1);
    }
    return cells / (0.5 * q->n * q->n);
}

/* TFLOP/s of exact halves as a product is used, then with only the tiles written, then with nothing written. Of the
 * first, also the clock of the multiprocessors and the share of their 4096 operations a cycle that were done. */
static void time_variant(const bench *e, const trial &t, const variant &v)
{
    plan p = plan_of(&e->q, v.how);
    double flop = (double)t.n * t.n * t.k * t.batch;
    double ms = median_ms(e, v, p);
    uint64_t clocks[4];
    must(cudaMemcpy(clocks, e->q.clocks, sizeof clocks, cudaMemcpyDeviceToHost), "cudaMemcpy");
    double ghz = (double)(clocks[2] - clocks[0]) / (double)(clocks[3] - clocks[1]);
    double raw = flop / ms * 1e-9 * waste_of(&e->q, p, v.how);
    p.writes = 1;
    double tiles_ms = median_ms(e, v, p);
    p.writes = 0;
    double silent_ms = median_ms(e, v, p);
    printf("%3d x %4d, k %4d, %s%s  %s %7.4f ms %4.0f TFLOP/s, raw %4.0f, %.2f GHz, %.3f of peak; "
           "tiles only %4.0f, nothing written %4.0f\n",
           t.batch, t.n, t.k, t.gram ? "A A'" : "A B'", t.has_d ? " + D" : "    ", v.name, ms, flop / ms * 1e-9, raw,
           ghz, raw * 1e3 / (ghz * 4096.0 * e->processors), flop / tiles_ms * 1e-9, flop / silent_ms * 1e-9);
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static const trial trials[] = {
    {3, 256, 64, 1, 0, 1, 0},     {300, 256, 192, 1, 0, 0, 0},  {5, 512, 100, 1, 0, 1, 0},
    {7, 768, 320, 0, 0, 1, 0},    {9, 1024, 1000, 1, 0, 0, 0},  {3, 2048, 512, 1, 0, 1, 0},
    {64, 2048, 2048, 0, 1, 0, 1}, {64, 2048, 2048, 1, 0, 0, 1}, {48, 2048, 5632, 0, 1, 0, 1},
    {8, 2048, 2048, 0, 1, 0, 1},  {48, 768, 768, 0, 1, 0, 1},   {48, 768, 768, 1, 0, 0, 1},
    {24, 768, 3072, 0, 1, 0, 1},
};
#define TRIALS ((int)(sizeof trials / sizeof trials[0]))

/* What the process that works tells the one that waits for it. */
typedef struct progress {
    int trial_number, variant_number;
    int failed;
    int banned[VARIANTS]; /* trapped or wrong */
} progress;

/* Seconds for one variant of one trial. */
#define PATIENCE 30

static int go_on(progress *at)
{
    int processors;
    must(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    for (; at->trial_number < TRIALS; at->trial_number++, at->variant_number = 0) {
        const trial &t = trials[at->trial_number];
        alarm(PATIENCE);
        bench e = prepare(t, processors);
        for (; at->variant_number < VARIANTS; at->variant_number++) {
            const variant &v = variant_at(at->variant_number);
            if (at->banned[at->variant_number]) {
                continue;
            }
            alarm(PATIENCE);
            int bad = check(&e, t, v);
            at->failed += bad;
            at->banned[at->variant_number] = bad;
            if (t.timed && !bad) {
                time_variant(&e, t, v);
            }
            fflush(stdout);
        }
        drop(&e);
        printf("done with %d x %d, k %d\n", t.batch, t.n, t.k);
        fflush(stdout);
    }
    return 0;
}

/* CUDA is used in child processes alone: a trap takes the process's device context with it. */
int main(int argc, char **argv)
{
    backwards = argc > 1 && strcmp(argv[1], "backwards") == 0;
    progress *at = (progress *)mmap(NULL, sizeof(progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        return 2;
    }
    while (at->trial_number < TRIALS) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            _exit(go_on(at));
        }
        if (child < 0 || waitpid(child, &status, 0) < 0) {
            return 2;
        }
        if (at->trial_number < TRIALS) {
            printf("STOPPED with status %x: trial %d, %s\n", (unsigned)status, at->trial_number,
                   at->variant_number < VARIANTS ? variant_at(at->variant_number).name : "none");
            fflush(stdout);
            if (at->variant_number >= VARIANTS || at->banned[at->variant_number]) {
                return 2;
            }
            at->failed++;
            at->banned[at->variant_number++] = 1;
        }
    }
    printf("%d checks failed\n", at->failed);
    return at->failed != 0;
}
