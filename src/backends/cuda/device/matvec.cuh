/* Matrix-vector products for kernels that need many in sequence: the rows of a matrix are distributed over the blocks
 * of a cluster, each of which has the vectors in full and, if requested, as many rows as fit in shared memory; blocks
 * synchronize once per product. */
#ifndef TCHI_CUDA_MATVEC_CUH
#define TCHI_CUDA_MATVEC_CUH

#include "backends/cuda/cuda.h"
#include "elements.cuh"
#include "ptx.cuh"

#define TCHI_CUDA_SPREAD_MOST 16     /* blocks of one matrix; clusters above 8 need an opt-in, and sm_90 or sm_100 */
#define TCHI_CUDA_SPREAD_STATIC 3072 /* bytes left to a kernel's own __shared__ variables */
#define TCHI_CUDA_ROWS 4             /* rows that a warp multiplies at once: each vector entry is read once for all */

/* --- how matrices are spread: host ------------------------------------------------------------------------------- */

/* n and derived sizes are int in kernels: n^2 elements fit in memory, so n fits. */
typedef struct tchi_cuda_spread {
    int blocks; /* of one matrix: block `rank` of them has rows n rank / blocks to n (rank + 1) / blocks */
    int threads;
    int resident;       /* rows a block keeps in shared memory, from its first */
    int vectors_shared; /* 0: the vectors are too long for shared memory, and are in scratch */
    int64_t vector_bytes;
    int64_t shared_bytes;
} tchi_cuda_spread;

/* Inputs of the decision. */
typedef struct tchi_cuda_spread_need {
    int64_t n, batch;
    int64_t size;         /* of an element of the rows to keep */
    int64_t vector_bytes; /* of the vectors of one block */
    int threads;          /* the most that the kernel's registers allow */
    int keeps_rows;
} tchi_cuda_spread_need;

/* Padded length of a vector: see tchi_cuda_place. */
static __host__ __device__ inline int64_t tchi_cuda_places(int64_t n)
{
    return (n + n / 16 * 2 + 3) / 4 * 4;
}

/* Pitch of resident rows in bytes. */
static __host__ __device__ inline int64_t tchi_cuda_kept_pitch(int64_t n, int64_t size)
{
    return (n * size + 15) / 16 * 16;
}

static inline int64_t tchi_cuda_spread_limit(const tchi_cuda_state *state)
{
    return state->device.shared_per_block - TCHI_CUDA_SPREAD_STATIC;
}

/* The largest cluster there may be. */
static inline int tchi_cuda_spread_most(const tchi_cuda_state *state)
{
    int major = state->device.major;
    return major < 9 ? 1 : major <= 10 ? TCHI_CUDA_SPREAD_MOST : 8;
}

/* As many blocks as the multiprocessors allow, up to `most`, while each has 32 KB to read. */
static inline int tchi_cuda_spread_blocks(const tchi_cuda_state *state, int64_t bytes, int64_t batch, int most)
{
    int blocks = 1;
    while (blocks < most && batch * blocks * 2 <= state->device.processors && bytes / (2 * blocks) >= 32768) {
        blocks *= 2;
    }
    return blocks;
}

/* Cost of a cluster barrier, in bytes read meanwhile. */
#define TCHI_CUDA_BARRIER_BYTES (13LL << 20)

/* Resident rows of a block that has a multiprocessor to itself. */
static inline int64_t tchi_cuda_spread_kept(const tchi_cuda_state *state, const tchi_cuda_spread_need *need,
                                            int64_t slice)
{
    int64_t left = tchi_cuda_spread_limit(state) - need->vector_bytes;
    int64_t rows = left > 0 ? left / tchi_cuda_kept_pitch(need->n, need->size) : 0;
    return rows < slice ? rows : slice;
}

/* Time of one product of all matrices by clusters of `blocks`, in bytes, as many clusters at a time as fit. */
static inline int64_t tchi_cuda_spread_cost(const tchi_cuda_state *state, const tchi_cuda_spread_need *need, int blocks)
{
    int64_t slice = tchi_cuda_ceil_div(need->n, blocks);
    int64_t together = state->device.processors / blocks;
    int64_t rounds = tchi_cuda_ceil_div(need->batch, together);
    int64_t read = (slice - tchi_cuda_spread_kept(state, need, slice)) * blocks * need->n * need->size;
    return rounds * TCHI_CUDA_BARRIER_BYTES + need->batch * read;
}

/* Clusters in several waves may keep more rows of large matrices resident than small ones that all run at once: up to
 * clusters of 8, two of which fit on every GPU. */
static inline int tchi_cuda_spread_rounds(const tchi_cuda_state *state, const tchi_cuda_spread_need *need, int blocks,
                                          int most)
{
    int best = blocks;
    for (int more = 2 * blocks; need->n * need->size * need->n >= 1 << 20 && more <= most && more <= 8; more *= 2) {
        if (tchi_cuda_spread_cost(state, need, more) < tchi_cuda_spread_cost(state, need, best)) {
            best = more;
        }
    }
    return best;
}

/* With more blocks than multiprocessors two share one: each has half of the threads and half of the shared memory for
 * rows. Clusters that run in waves have all of it. */
static inline tchi_cuda_spread tchi_cuda_spread_of(const tchi_cuda_state *state, const tchi_cuda_spread_need *need,
                                                   int most)
{
    int64_t n = need->n;
    int at_once = tchi_cuda_spread_blocks(state, n * n * need->size, need->batch, most);
    int blocks = need->keeps_rows ? tchi_cuda_spread_rounds(state, need, at_once, most) : at_once;
    int64_t slice = tchi_cuda_ceil_div(n, blocks);
    int crowded = blocks == at_once && need->batch * blocks > state->device.processors;
    int64_t threads = tchi_cuda_ceil_div(slice * (crowded ? 2 : 4), 32) * 32;
    int64_t most_threads = crowded ? need->threads / 2 : need->threads;
    threads = threads < 128 ? 128 : threads > most_threads ? most_threads : threads;
    int64_t limit = tchi_cuda_spread_limit(state);
    int64_t shared = need->vector_bytes <= limit ? need->vector_bytes : 0;
    int64_t left = (crowded ? limit / 2 : limit) - shared;
    int64_t pitch = tchi_cuda_kept_pitch(n, need->size);
    int64_t rows = left > 0 && need->keeps_rows ? left / pitch : 0;
    rows = rows >= slice ? slice : rows / TCHI_CUDA_ROWS * TCHI_CUDA_ROWS;
    return {blocks, (int)threads, (int)rows, shared > 0, need->vector_bytes, rows * pitch + shared};
}

static inline cudaLaunchConfig_t tchi_cuda_spread_config(const tchi_cuda_state *state, const tchi_cuda_spread *spread,
                                                         int64_t batch, cudaLaunchAttribute *cluster)
{
    return tchi_cuda_cluster_config(state, (unsigned)(batch * spread->blocks), spread->threads, spread->shared_bytes,
                                    spread->blocks, cluster);
}

/* Opts in to large shared memory and clusters of 16. A property of the kernel, not of a launch, so always the same. */
template <typename parameters>
static cudaError_t tchi_cuda_spread_allow(const tchi_cuda_state *state, void (*kernel)(parameters))
{
    int bytes = (int)tchi_cuda_spread_limit(state);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess && tchi_cuda_spread_most(state) > 8) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    return error;
}

/* Whether all clusters of 16 run at once: a GPC (16 or 18 multiprocessors on an H100) holds one at most. */
template <typename parameters>
static int tchi_cuda_spread_fits(const tchi_cuda_state *state, void (*kernel)(parameters),
                                 const tchi_cuda_spread *spread, int64_t batch)
{
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = tchi_cuda_spread_config(state, spread, batch, &cluster);
    int clusters = 0;
    if (tchi_cuda_spread_allow(state, kernel) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return clusters >= batch;
}

template <typename parameters>
static tchi_cuda_spread tchi_cuda_spread_for(const tchi_cuda_state *state, void (*kernel)(parameters),
                                             const tchi_cuda_spread_need &need)
{
    tchi_cuda_spread spread = tchi_cuda_spread_of(state, &need, tchi_cuda_spread_most(state));
    if (spread.blocks > 8 && !tchi_cuda_spread_fits(state, kernel, &spread, need.batch)) {
        spread = tchi_cuda_spread_of(state, &need, 8);
    }
    return spread;
}

template <typename parameters>
static tch_status tchi_cuda_spread_launch(const tchi_cuda_state *state, const tchi_cuda_spread *spread, int64_t batch,
                                          void (*kernel)(parameters), const parameters &p, const char *name)
{
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = tchi_cuda_spread_config(state, spread, batch, &cluster);
    TCHI_CUDA_TRY(tchi_cuda_spread_allow(state, kernel), name);
    TCHI_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, p), name);
    return tchi_cuda_launched(state, name);
}

/* --- a block's rows ---------------------------------------------------------------------------------------------- */

/* The rows of one block. Distances between rows are in bytes. */
struct tchi_cuda_rows {
    const char *data;
    int64_t pitch;
    const char *resident; /* copies of the first `kept` rows, all of them or a multiple of TCHI_CUDA_ROWS */
    int resident_pitch;
    int kept;
    int count;
    int wide; /* rows of `data` begin at multiples of 16 bytes; those of `resident` always do */
};

/* Numbers read at once, from a multiple of 16 bytes. */
template <typename T, int count> struct __align__(16) tchi_cuda_rect
{
    T v[count];
};

/* Position of entry c of a vector: two doubles of padding after every sixteen avoid bank conflicts between lanes, which
 * read four doubles each, two at a time. */
template <typename real> static __device__ inline int tchi_cuda_place(int c)
{
    return sizeof(real) == 8 ? c + (c >> 4) * 2 : c;
}

static __device__ inline int tchi_cuda_slice_start(int n, int rank, int blocks)
{
    return (int)((int64_t)n * rank / blocks);
}

/* Rows of block `rank` of matrix b; `keep` of them will be copied to `resident`. */
static __device__ inline tchi_cuda_rows tchi_cuda_rows_of(const tchi_cuda_operand &m, int64_t b, int n, int rank,
                                                          int blocks, char *resident, int keep)
{
    int first = tchi_cuda_slice_start(n, rank, blocks);
    int count = tchi_cuda_slice_start(n, rank + 1, blocks) - first;
    int64_t size = tchi_cuda_size(m.type);
    const char *data = m.data + (b * m.stride + first * m.ld) * size;
    int pitch = (int)tchi_cuda_kept_pitch(n, size);
    return {data, m.ld * size, resident, pitch, keep < count ? keep : count, count, m.wide};
}

/* Copies the resident rows, evicting them from L2 first; must be followed by a barrier. */
template <typename T> static __device__ void tchi_cuda_keep_rows(const tchi_cuda_rows &m, int n)
{
    constexpr int wide = 16 / sizeof(T);
    int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < m.kept; r += blockDim.x / 32) {
        const T *from = (const T *)(m.data + r * m.pitch);
        T *to = (T *)(m.resident + (int64_t)r * m.resident_pitch);
        int body = m.wide ? n - n % wide : 0;
#pragma unroll 8
        for (int c = lane * wide; c < body; c += 32 * wide) {
            *(uint4 *)(to + c) = __ldcs((const uint4 *)(from + c));
        }
        for (int c = body + lane; c < n; c += 32) {
            to[c] = from[c];
        }
    }
}

/* --- the product ------------------------------------------------------------------------------------------------- */

/* Sums each of `count` values (a power of two, at most 32) over the warp: lane l returns the sum of values[l / (32 /
 * count)]. */
template <int count, int distance = 16>
static __device__ inline double tchi_cuda_warp_fold(const double (&values)[count])
{
    if constexpr (count > 1) {
        bool upper = (threadIdx.x & distance) != 0;
        double half[count / 2];
#pragma unroll
        for (int i = 0; i < count / 2; i++) {
            double kept = upper ? values[i + count / 2] : values[i];
            double given = upper ? values[i] : values[i + count / 2];
            half[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, distance);
        }
        return tchi_cuda_warp_fold<count / 2, distance / 2>(half);
    } else {
        double sum = values[0];
#pragma unroll
        for (int rest = distance; rest > 0; rest /= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, rest);
        }
        return sum;
    }
}

/* One lane's share of TCHI_CUDA_ROWS rows times a vector, 16 bytes of the vector at a time. */
template <typename T, typename real>
static __device__ inline void tchi_cuda_dot_rows(const char *const (&rows)[TCHI_CUDA_ROWS], int n, int body,
                                                 const real *v, real (&sums)[TCHI_CUDA_ROWS])
{
    constexpr int wide = 16 / sizeof(T);
    constexpr int part = 16 / sizeof(real);
    int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int c = lane * wide; c < body; c += 32 * wide) {
        tchi_cuda_rect<T, wide> m[TCHI_CUDA_ROWS];
#pragma unroll
        for (int i = 0; i < TCHI_CUDA_ROWS; i++) {
            m[i] = *(const tchi_cuda_rect<T, wide> *)((const T *)rows[i] + c);
        }
#pragma unroll
        for (int at = 0; at < wide; at += part) {
            const real *from = v + tchi_cuda_place<real>(c) + at;
            tchi_cuda_rect<real, part> chunk = *(const tchi_cuda_rect<real, part> *)from;
#pragma unroll
            for (int i = 0; i < TCHI_CUDA_ROWS * part; i++) {
                sums[i / part] += (real)m[i / part].v[at + i % part] * chunk.v[i % part];
            }
        }
    }
#pragma unroll 1
    for (int c = body + lane; c < n; c += 32) {
#pragma unroll
        for (int i = 0; i < TCHI_CUDA_ROWS; i++) {
            sums[i] += (real)((const T *)rows[i])[c] * v[tchi_cuda_place<real>(c)];
        }
    }
}

/* Multiplies the block's rows by a vector and calls store(row, sum) in one lane each. Sums are in `real` within a lane
 * and in double across lanes. */
template <typename T, typename real, typename function>
static __device__ inline void tchi_cuda_multiply(const tchi_cuda_rows &m, int n, const real *v, function store)
{
    constexpr int lanes_of_sum = 32 / TCHI_CUDA_ROWS;
    int lane = threadIdx.x % 32;
    int stride = TCHI_CUDA_ROWS * (blockDim.x / 32);
    for (int r = TCHI_CUDA_ROWS * (threadIdx.x / 32); r < m.count; r += stride) {
        bool kept = r < m.kept;
        const char *rows[TCHI_CUDA_ROWS];
#pragma unroll
        for (int i = 0; i < TCHI_CUDA_ROWS; i++) { /* beyond the end the last row is repeated, and its sum discarded */
            int64_t row = min(r + i, m.count - 1);
            rows[i] = kept ? m.resident + row * m.resident_pitch : m.data + row * m.pitch;
        }
        real sums[TCHI_CUDA_ROWS] = {};
        int body = kept || m.wide ? n - n % (int)(16 / sizeof(T)) : 0;
        tchi_cuda_dot_rows<T, real>(rows, n, body, v, sums);
        double totals[TCHI_CUDA_ROWS];
#pragma unroll
        for (int i = 0; i < TCHI_CUDA_ROWS; i++) {
            totals[i] = sums[i];
        }
        double total = tchi_cuda_warp_fold<TCHI_CUDA_ROWS>(totals);
        int row = r + lane / lanes_of_sum;
        if (lane % lanes_of_sum == 0 && row < m.count) {
            store(row, total);
        }
    }
}

static __device__ inline void tchi_cuda_sync_blocks(int blocks)
{
    if (blocks > 1) {
        __syncwarp(); /* the instruction needs full warps, which diverge while storing */
        tchi_cluster_sync();
    } else {
        __syncthreads();
    }
}

#endif
