/* The residual of a root: R = X^floor(p/2) (A + shift I) X^ceil(p/2) - I, whose norm is that of its transpose, and the
 * bound |X R| / (p |X|) on the error, in float64 for any storage type. Estimated with random signs by a chain of p + 2
 * products with four vectors in one launch; or exactly, by matrix products of the table. */
#include "backends/cuda/device/matvec.cuh"

#define PROBES 4    /* vectors multiplied at once; more probes are processed in groups */
#define THREADS 256 /* eight warps for the 128 rows of a block, with enough registers to read far ahead */
#define ROWS 16     /* of the matrix, which a warp multiplies at once */
#define STEP 16     /* columns, likewise */
#ifndef AHEAD
#define AHEAD 128 /* columns a warp reads ahead: on eight warps 64 KB of float32, which cover 2 us of latency */
#endif
#define SIGNS_SEED 0x726F6F74u
#define EXACT_ELEMENTS 2097152 /* matrices whose elements sum up to this are multiplied at once: 64 MB of scratch */

typedef struct residual_parameters {
    tchi_cuda_operand a, x;
    int n, root, groups;
    tchi_cuda_spread spread;
    double size; /* of the probes; for p = 1 below 1, as on the CPU */
    const double *shift;
    const double *signs; /* n per probe, the same for all matrices */
    double *published;   /* per matrix, twice PROBES vectors: products of even and of odd steps */
    double *sums;        /* per block, SUMS numbers */
    char *vectors;       /* per block, unless they are in shared memory */
    double *out;
    double *error; /* may be NULL */
} residual_parameters;

/* Squares of norms over all probes, or a thread's part of them. */
#define SUMS 3
struct residual_sums {
    double r, xr, x;
};

/* Stride of vectors: whole steps plus two, so that eight lanes reading 16 bytes each of two vectors hit every bank
 * once. */
static __host__ __device__ inline int64_t plane_of(int64_t n)
{
    return (n + STEP - 1) / STEP * STEP + 2;
}

/* A block's view of its matrix. y holds the chain's vectors, `plane` entries apart. */
struct residual_block {
    int64_t b;
    int rank, first, plane;
    double unit; /* of X in sums of squares */
    double *y;
    double *published;
};

/* --- the product ------------------------------------------------------------------------------------------------- */

/* A lane's part in the product of ROWS rows. With lane = 4 g + t it has columns 4 t to 4 t + 3 of every step in rows g
 * and g + 8, and of the vectors in probe g % 4: tensor cores multiply eight vectors, of which the upper four are
 * discarded. */
struct lane_share {
    const char *low, *high; /* rows g and g + 8 */
    const double *y;
    int whole; /* full steps; the rest is read element by element */
};

/* Four adjacent elements; `streamed` ones are evicted from L2 first. */
template <typename T, bool streamed> static __device__ inline tchi_cuda_rect<T, 4> read_whole(const char *from)
{
    tchi_cuda_rect<T, 4> four;
    if constexpr (streamed) {
#pragma unroll
        for (int k = 0; k < (int)(sizeof(four) / 16); k++) {
            ((uint4 *)&four)[k] = __ldcs((const uint4 *)from + k);
        }
    } else {
        four = *(const tchi_cuda_rect<T, 4> *)from;
    }
    return four;
}

template <typename T> static __device__ inline tchi_cuda_rect<T, 4> read_edge(const T *from, int count)
{
    tchi_cuda_rect<T, 4> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = k < count ? from[k] : (T)0;
    }
    return four;
}

/* The instruction expects the lane's columns four apart, but a sum is invariant under permutation. */
template <typename T>
static __device__ inline void multiply_step(double (&sums)[4], const tchi_cuda_rect<T, 4> &low,
                                            const tchi_cuda_rect<T, 4> &high, const tchi_cuda_rect<double, 4> &y)
{
    double a[8];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        a[2 * k] = (double)low.v[k];
        a[2 * k + 1] = (double)high.v[k];
    }
    tchi_mma_f64_16x8x16(sums, a, y.v);
}

template <typename T, bool streamed>
static __device__ inline void multiply_whole(const lane_share &m, double (&sums)[4])
{
    constexpr int bytes = STEP * sizeof(T);
    constexpr int ahead = AHEAD / STEP * 4 / sizeof(T); /* float64 would not fit in registers otherwise */
    tchi_cuda_rect<T, 4> low[ahead];
    tchi_cuda_rect<T, 4> high[ahead];
#pragma unroll
    for (int k = 0; k < ahead; k++) { /* beyond the end the last step is read again, and not used */
        int step = min(k, m.whole - 1);
        low[k] = read_whole<T, streamed>(m.low + (int64_t)step * bytes);
        high[k] = read_whole<T, streamed>(m.high + (int64_t)step * bytes);
    }
    int step = 0;
#pragma unroll 1
    for (; step + ahead <= m.whole; step += ahead) {
#pragma unroll
        for (int k = 0; k < ahead; k++) {
            multiply_step(sums, low[k], high[k], *(const tchi_cuda_rect<double, 4> *)(m.y + (step + k) * STEP));
            int next = min(step + ahead + k, m.whole - 1);
            low[k] = read_whole<T, streamed>(m.low + (int64_t)next * bytes);
            high[k] = read_whole<T, streamed>(m.high + (int64_t)next * bytes);
        }
    }
#pragma unroll
    for (int k = 0; k < ahead - 1; k++) {
        if (step + k < m.whole) {
            multiply_step(sums, low[k], high[k], *(const tchi_cuda_rect<double, 4> *)(m.y + (step + k) * STEP));
        }
    }
}

template <typename T> static __device__ inline void multiply_edge(const lane_share &m, int n, double (&sums)[4])
{
#pragma unroll 1
    for (int column = m.whole * STEP; column < n; column += STEP) {
        int count = n - column - (int)threadIdx.x % 4 * 4;
        multiply_step(sums, read_edge((const T *)m.low + column, count), read_edge((const T *)m.high + column, count),
                      read_edge(m.y + column, count));
    }
}

/* Row `row` of the block, clamped to the last, from the lane's first column on. */
template <typename T> static __device__ inline const char *row_from(const tchi_cuda_rows &m, int row)
{
    return m.data + min(row, m.count - 1) * m.pitch + threadIdx.x % 4 * 4 * sizeof(T);
}

template <typename T>
static __device__ inline lane_share share_of(const tchi_cuda_rows &m, int n, const residual_block &k, int row)
{
    int g = threadIdx.x % 32 / 4;
    lane_share share;
    share.low = row_from<T>(m, row + g);
    share.high = row_from<T>(m, row + g + 8);
    share.y = k.y + g % PROBES * k.plane + threadIdx.x % 4 * 4;
    share.whole = m.wide ? n / STEP : 0;
    return share;
}

/* Multiplies the block's rows by the chain's vectors and calls store(row, probe, sum) for every product, in one
 * lane. */
template <typename T, bool streamed, typename function>
static __device__ inline void multiply_rows(const tchi_cuda_rows &m, int n, const residual_block &k, function store)
{
    int t = threadIdx.x % 4;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * ROWS; first < m.count; first += blockDim.x / 32 * ROWS) {
        double sums[4] = {};
        lane_share share = share_of<T>(m, n, k, first);
        if (share.whole > 0) {
            multiply_whole<T, streamed>(share, sums);
        }
        multiply_edge<T>(share, n, sums);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first + threadIdx.x % 32 / 4 + i / 2 * 8;
            if (t < PROBES / 2 && row < m.count) {
                store(row, 2 * t + i % 2, sums[i]);
            }
        }
    }
}

/* X is reused, A is not: streams A to keep X in L2. */
template <typename function>
static __device__ inline void multiply_by_probes(tch_scalar type, bool with_a, const tchi_cuda_rows &m, int n,
                                                 const residual_block &k, function store)
{
    if (type == TCH_SCALAR_F32 && with_a) {
        multiply_rows<float, true>(m, n, k, store);
    } else if (type == TCH_SCALAR_F32) {
        multiply_rows<float, false>(m, n, k, store);
    } else {
        multiply_rows<double, false>(m, n, k, store);
    }
}

/* --- the chain --------------------------------------------------------------------------------------------------- */

/* The block's rows of A or of X, rebuilt for every product to save registers. */
static __device__ inline tchi_cuda_rows rows_of(const residual_parameters &p, const residual_block &k, bool with_a)
{
    tchi_cuda_operand m;
    m.data = with_a ? p.a.data : p.x.data;
    m.type = with_a ? p.a.type : p.x.type;
    m.wide = with_a ? p.a.wide : p.x.wide;
    m.ld = with_a ? p.a.ld : p.x.ld;
    m.stride = with_a ? p.a.stride : p.x.stride;
    return tchi_cuda_rows_of(m, k.b, p.n, k.rank, p.spread.blocks, NULL, 0);
}

/* Loads the chain's vectors, times a power of two; must be followed by a barrier. */
static __device__ void fetch_probes(const residual_block &k, int n, const double *from, double size)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        double entry[PROBES];
#pragma unroll
        for (int j = 0; j < PROBES; j++) {
            entry[j] = __ldcg(from + (int64_t)j * n + i);
        }
#pragma unroll
        for (int j = 0; j < PROBES; j++) {
            k.y[j * k.plane + i] = entry[j] * size;
        }
    }
}

/* The power of two that scales X near 1, as on the CPU. */
static __device__ double unit_of(const residual_parameters &p, int64_t b)
{
    double first = p.x.type == TCH_SCALAR_F64 ? *((const double *)p.x.data + b * p.x.stride) : 1.0;
    int exponent = isfinite(first) && first != 0.0 ? ilogb(first) : 0;
    return scalbn(1.0, -min(max(exponent, -1000), 1000));
}

/* Adds this thread's squares over the block's rows and one group of probes. `barriers` counts the barriers of the
 * launch: a buffer in `published` is overwritten only two barriers later, when all have read it. */
static __device__ void probe_chain(const residual_parameters &p, const residual_block &k, int group, int *barriers,
                                   residual_sums *sums)
{
    const double *signs = p.signs + (int64_t)group * PROBES * p.n;
    int last = p.error != NULL ? p.root + 1 : p.root;
    fetch_probes(k, p.n, signs, p.size);
    __syncthreads();
    for (int step = 0; step <= last; step++) {
        bool with_a = step == p.root - p.root / 2;
        double shift = with_a && p.shift != NULL ? p.shift[k.b] : 0.0;
        double *to = k.published + (int64_t)(*barriers % 2) * PROBES * p.n;
        tch_scalar type = with_a ? p.a.type : p.x.type;
        multiply_by_probes(type, with_a, rows_of(p, k, with_a), p.n, k, [&](int row, int probe, double sum) {
            int i = k.first + row;
            double entry = with_a ? sum + shift * k.y[probe * k.plane + i] : sum;
            entry -= step == p.root ? signs[(int64_t)probe * p.n + i] * p.size : 0.0;
            double near = entry * k.unit;
            sums->x += step == 0 ? near * near : 0.0;
            sums->r += step == p.root ? entry * entry : 0.0;
            sums->xr += step > p.root ? near * near : 0.0;
            if (step < last) {
                to[(int64_t)probe * p.n + i] = entry;
            }
        });
        if (step == last) {
            break;
        }
        tchi_cuda_sync_blocks(p.spread.blocks);
        *barriers += 1;
        fetch_probes(k, p.n, to, 1.0);
        __syncthreads();
    }
    __syncthreads(); /* the next group overwrites the vectors */
}

/* Publishes the block's sums for the first block of the matrix. */
static __device__ void publish_sums(const residual_parameters &p, const residual_sums &mine, double *shared)
{
    const double parts[SUMS] = {mine.r, mine.xr, mine.x};
    for (int i = 0; i < SUMS; i++) {
        double sum = tchi_cuda_block_sum(parts[i], threadIdx.x, blockDim.x, shared);
        if (threadIdx.x == 0) {
            p.sums[(int64_t)blockIdx.x * SUMS + i] = sum;
        }
        __syncthreads();
    }
}

/* By one thread of the matrix's first block, after all have published. */
static __device__ void write_results(const residual_parameters &p, int64_t b)
{
    double sums[SUMS] = {};
    for (int block = 0; block < p.spread.blocks; block++) {
        for (int i = 0; i < SUMS; i++) {
            sums[i] += __ldcg(p.sums + ((int64_t)blockIdx.x + block) * SUMS + i);
        }
    }
    p.out[b] = sqrt(sums[0] / ((double)p.groups * PROBES * p.n)) / p.size;
    if (p.error != NULL) {
        p.error[b] = sqrt(sums[1] / sums[2]) / p.root;
    }
}

/* For 16 matrices of 1024 in float32 and p = 4 the products read 5 times 67 MB, X from L2 as far as it fits, convert 84
 * million elements to float64, and do 0.67 G operations, twice that with the discarded vectors. Keeping rows of X in
 * shared memory gained nothing there, and 64 x 256 took 42 us with them vs 33 us without, on an H200
 * (bench/logs/cuda_lanczos.md). */
static __global__ void __launch_bounds__(THREADS, 1) root_residual(residual_parameters p)
{
    extern __shared__ __align__(16) char memory[];
    __shared__ double shared[32];
    int blocks = p.spread.blocks;
    residual_block k;
    k.b = blockIdx.x / blocks;
    k.rank = (int)(blockIdx.x % blocks);
    k.first = tchi_cuda_slice_start(p.n, k.rank, blocks);
    k.plane = (int)plane_of(p.n);
    k.unit = unit_of(p, k.b);
    k.y = (double *)(p.spread.vectors_shared ? memory : p.vectors + blockIdx.x * p.spread.vector_bytes);
    k.published = p.published + k.b * 2 * PROBES * p.n;
    residual_sums sums = {};
    int barriers = 0;
    for (int group = 0; group < p.groups; group++) {
        probe_chain(p, k, group, &barriers, &sums);
    }
    publish_sums(p, sums, shared);
    tchi_cuda_sync_blocks(blocks);
    if (k.rank == 0 && threadIdx.x == 0) {
        write_results(p, k.b);
    }
}

static int64_t vector_bytes(int64_t n)
{
    return PROBES * plane_of(n) * (int64_t)sizeof(double);
}

static tch_status launch_probes(tchi_cuda_state *state, int32_t root, const tch_matrices *a, const double *shift,
                                const tch_matrices *x, int64_t probes, double *out, double *error, double *scratch)
{
    int64_t n = a->rows;
    int64_t groups = tchi_cuda_ceil_div(probes, PROBES);
    tch_matrices signs = {scratch, TCH_SCALAR_F64, groups * PROBES, n, n, 1, groups * PROBES * n};
    TCHI_TRY(tchi_cuda_random_signs(state, SIGNS_SEED, &signs));
    residual_parameters p;
    p.a = tchi_cuda_operand_of(a);
    p.x = tchi_cuda_operand_of(x);
    p.n = (int)n;
    p.root = root;
    p.groups = (int)groups;
    p.spread =
        tchi_cuda_spread_for(state, root_residual, {n, a->batch, tchi_cuda_size(x->type), vector_bytes(n), THREADS, 0});
    p.size = root == 1 ? 0x1p-8 : 1.0;
    p.shift = shift;
    p.signs = scratch;
    p.published = scratch + groups * PROBES * n;
    p.sums = p.published + a->batch * 2 * PROBES * n;
    p.vectors = (char *)(p.sums + a->batch * TCHI_CUDA_SPREAD_MOST * SUMS);
    p.out = out;
    p.error = error;
    return tchi_cuda_spread_launch(state, &p.spread, a->batch, root_residual, p, "root_residual");
}

/* --- exact residual ---------------------------------------------------------------------------------------------- */

static int64_t exact_chunk(int64_t n, int64_t batch)
{
    int64_t chunk = EXACT_ELEMENTS / (n * n);
    return chunk < 1 ? 1 : chunk < batch ? chunk : batch;
}

/* The matrices from `first` on; a stride of 0 repeats one. */
static tch_matrices part_of(const tch_matrices *m, int64_t first, int64_t count)
{
    tch_matrices part = *m;
    part.data = (char *)m->data + first * m->stride * tchi_cuda_size(m->type);
    part.batch = count;
    return part;
}

/* y <- m y, written to `spare`, which is swapped with y. */
static tch_status multiply_full(tchi_cuda_state *state, const tch_matrices *m, tch_matrices *y, tch_matrices *spare)
{
    TCHI_TRY(tchi_cuda_gemm(state, 1.0, m, 0, y, 0, 0.0, 0, spare));
    tch_matrices swap = *y;
    *y = *spare;
    *spare = swap;
    return TCH_OK;
}

/* The products of one chunk, in y. Of the four buffers the first two hold X and A + shift I, the others are y and a
 * spare one; the first product reads X as its right factor. */
static tch_status multiply_chain(tchi_cuda_state *state, int32_t root, const tch_matrices *buffer, tch_matrices *y,
                                 tch_matrices *spare)
{
    const tch_matrices *x = &buffer[0];
    const tch_matrices *a = &buffer[1];
    *y = buffer[2];
    *spare = buffer[3];
    for (int32_t step = 1; step <= root; step++) {
        const tch_matrices *left = step == root - root / 2 ? a : x;
        if (step == 1) {
            TCHI_TRY(tchi_cuda_gemm(state, 1.0, left, 0, x, 0, 0.0, 0, y));
        } else {
            TCHI_TRY(multiply_full(state, left, y, spare));
        }
    }
    return TCH_OK;
}

/* error[b] was |X R| / sqrt(n). */
static __global__ void __launch_bounds__(THREADS)
    divide_errors(int64_t batch, double n, double root, const double *sizes, double *error)
{
    for (int64_t b = (int64_t)blockIdx.x * THREADS + threadIdx.x; b < batch; b += (int64_t)gridDim.x * THREADS) {
        error[b] = error[b] / sizes[b] * (sqrt(n) / root);
    }
}

/* The error bound from y = R / sqrt(n); `sizes` is scratch, a number per matrix. */
static tch_status bound_errors(tchi_cuda_state *state, int32_t root, const tch_matrices *x, tch_matrices *y,
                               tch_matrices *spare, double *sizes, double *error)
{
    TCHI_TRY(multiply_full(state, x, y, spare));
    TCHI_TRY(tchi_cuda_reduce(state, TCH_REDUCE_FROBENIUS, y, error));
    TCHI_TRY(tchi_cuda_reduce(state, TCH_REDUCE_FROBENIUS, x, sizes));
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(x->batch, THREADS));
    return tchi_cuda_launch(state, "root_residual", divide_errors, blocks, THREADS, x->batch, (double)x->rows, root,
                            sizes, error);
}

static tch_status exact_part(tchi_cuda_state *state, int32_t root, const tch_matrices *a, const double *shift,
                             const tch_matrices *x, double *out, double *error, double *scratch)
{
    int64_t n = a->rows;
    int64_t elements = a->batch * n * n;
    tch_matrices buffer[4];
    for (int i = 0; i < 4; i++) {
        buffer[i] = {scratch + i * elements, TCH_SCALAR_F64, n, n, n, a->batch, n * n};
    }
    tch_matrices y, spare;
    TCHI_TRY(tchi_cuda_shift_scale(state, x, NULL, NULL, 0.0, &buffer[0]));
    TCHI_TRY(tchi_cuda_shift_scale(state, a, shift, NULL, 0.0, &buffer[1]));
    TCHI_TRY(multiply_chain(state, root, buffer, &y, &spare));
    double unit = 1 / sqrt((double)n);
    TCHI_TRY(tchi_cuda_combine(state, -unit, unit, &y, 0.0, NULL, &y));
    TCHI_TRY(tchi_cuda_reduce(state, TCH_REDUCE_FROBENIUS, &y, out));
    return error == NULL ? TCH_OK : bound_errors(state, root, &buffer[0], &y, &spare, scratch + 4 * elements, error);
}

static tch_status launch_exact(tchi_cuda_state *state, int32_t root, const tch_matrices *a, const double *shift,
                               const tch_matrices *x, double *out, double *error, double *scratch)
{
    int64_t chunk = exact_chunk(a->rows, a->batch);
    for (int64_t first = 0; first < a->batch; first += chunk) {
        int64_t count = a->batch - first < chunk ? a->batch - first : chunk;
        tch_matrices a_part = part_of(a, first, count);
        tch_matrices x_part = part_of(x, first, count);
        TCHI_TRY(exact_part(state, root, &a_part, shift != NULL ? shift + first : NULL, &x_part, out + first,
                            error != NULL ? error + first : NULL, scratch));
    }
    return TCH_OK;
}

/* --- the operation ----------------------------------------------------------------------------------------------- */

int64_t tchi_cuda_root_residual_scratch(const tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch,
                                        int64_t probes)
{
    int64_t size = (int64_t)sizeof(double);
    if (n == 0 || batch == 0) {
        return 0;
    }
    if (probes == 0) {
        return exact_chunk(n, batch) * (4 * n * n + 1) * size;
    }
    int64_t outside = vector_bytes(n) > tchi_cuda_spread_limit(state) ? TCHI_CUDA_SPREAD_MOST * vector_bytes(n) : 0;
    int64_t signs = tchi_cuda_ceil_div(probes, PROBES) * PROBES * n;
    return (signs + batch * (2 * PROBES * n + TCHI_CUDA_SPREAD_MOST * SUMS)) * size + batch * outside;
}

static tch_status find_residuals(tchi_cuda_state *s, int32_t root, const tch_matrices *a, const double *shift,
                                 const tch_matrices *x, int32_t probes, double *out, double *error, double *scratch)
{
    if (a->rows == 0) {
        size_t bytes = (size_t)a->batch * sizeof(double);
        TCHI_CUDA_TRY(error != NULL ? cudaMemsetAsync(error, 0, bytes, s->stream) : cudaSuccess, "root_residual");
        return tchi_cuda_check(cudaMemsetAsync(out, 0, bytes, s->stream), "root_residual");
    }
    return probes == 0 ? launch_exact(s, root, a, shift, x, out, error, scratch)
                       : launch_probes(s, root, a, shift, x, probes, out, error, scratch);
}

tch_status tchi_cuda_root_residual(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                   const tch_matrices *x, int32_t probes, double *out, double *error, double tolerance,
                                   int32_t *flags, void *scratch)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (a->batch == 0) {
        return TCH_OK;
    }
    TCHI_TRY(find_residuals(s, root, a, shift, x, probes, out, error, (double *)scratch));
    return flags == NULL ? TCH_OK : tchi_cuda_root_verdict(s, a->batch, error != NULL ? error : out, tolerance, flags);
}
