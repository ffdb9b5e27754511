/* The largest eigenvalue of each symmetric matrix, estimated from below by Lanczos iteration, all steps in one launch.
 * Without reorthogonalization, as on the CPU: eigenvalues repeat, which does not affect the largest. All blocks of a
 * matrix redundantly compute the vectors and the decision to stop, bitwise-identically, so that they synchronize only
 * once per step.
 *
 *     v = a start of irregular signs, |v| = 1;
 *     for (w = 0, beta = 0, k = 0; k < 96; k++) {
 *         w = A v - beta w;
 *         alpha = dot(w, v);
 *         w = w - alpha v;
 *         beta = |w|;
 *         T[k][k] = alpha, T[k][k + 1] = T[k + 1][k] = beta;
 *         value = the largest eigenvalue of T, as far as it is known;
 *         if (beta * |last entry of its eigenvector| <= threshold * |value|) {
 *             break;
 *         }
 *         next = w / beta, w = v, v = next;
 *     } */
#include "backends/cuda/device/matvec.cuh"

/* From this tolerance on float32 matrices are multiplied in float32: bench/logs/cuda_lanczos.md. */
#define FLOAT_FROM 1e-6

#define MOST_STEPS 96     /* as on the CPU */
#define SURE 1e-4         /* maximum threshold, as on the CPU: a poor start must not pass for convergence */
#define THREADS 512       /* four rows of 16 bytes each: 32 KB in flight on a multiprocessor */
#define CHECKS_EARLY 8    /* every step is checked up to this one, then every other: checks get slower */
#define NEWTON_ROUNDS 12  /* from within four times the distance, three to eight are enough */
#define NEWTON_STOP 1e-14 /* a step this small, relative to the width of the spectrum, is the last */

/* As on the CPU: an estimate whose square is close to the ends of the range is recomputed with scaled vectors. For
 * float32 the range is that of the float32 products. */
template <typename real> struct range_of;
template <> struct range_of<double> {
    static constexpr double safe = 0x1p+460, large = 0x1p-600, small = 0x1p+600;
};
template <> struct range_of<float> {
    static constexpr double safe = 0x1p+80, large = 0x1p-60, small = 0x1p+60;
};

typedef struct lanczos_parameters {
    tchi_cuda_operand x;
    int n;
    tchi_cuda_spread spread;
    double threshold;  /* of the residual, relative to the value */
    double *published; /* per matrix, twice n: products of even and of odd steps */
    char *vectors;     /* per block, unless they are in shared memory */
    double *out;
} lanczos_parameters;

/* A block's view of its matrix. v is the current vector in units of `unit`, a power of two; w is the previous one until
 * the product overwrites it. */
template <typename real> struct lanczos_block {
    double unit;
    tchi_cuda_rows rows;
    int n, first, blocks;
    real *v;
    double *w;
    double *published;
};

struct tridiagonal {
    double diagonal[MOST_STEPS];
    double off_diagonal[MOST_STEPS];
};

/* --- the tridiagonal matrix: one warp ---------------------------------------------------------------------------- */

/* Characteristic polynomials of the leading k - 1 and k rows, at a point, in units of `scale`. */
struct characteristic {
    double before, last, slope;
    bool above; /* the point is above all eigenvalues */
};

static __device__ characteristic evaluate_characteristic(const tridiagonal &t, int k, double point, double scale)
{
    double before = 0;
    double now = 1;
    double slope_before = 0;
    double slope = 0;
    double off = 0;
    bool above = true;
    for (int i = 0; i < k; i++) {
        double distance = (point - t.diagonal[i]) * scale;
        double next = distance * now - off * before;
        double slope_next = now + (distance * slope - off * slope_before);
        above = above && next > 0;
        before = now;
        now = next;
        slope_before = slope;
        slope = slope_next;
        off = t.off_diagonal[i] * scale;
        off *= off;
    }
    return {before, now, slope, above};
}

/* Bounds of the spectrum by Gershgorin's circles, and the largest entry of the diagonal. */
static __device__ void enclose_eigenvalue(const tridiagonal &t, int k, double *low, double *high, double *middle)
{
    double lowest = -INFINITY; /* negated: maxima are taken of all three */
    double highest = -INFINITY;
    double largest = -INFINITY;
    for (int i = threadIdx.x % 32; i < k; i += 32) {
        double radius = (i > 0 ? t.off_diagonal[i - 1] : 0) + (i < k - 1 ? t.off_diagonal[i] : 0);
        lowest = fmax(lowest, radius - t.diagonal[i]);
        highest = fmax(highest, t.diagonal[i] + radius);
        largest = fmax(largest, t.diagonal[i]);
    }
    *low = -tchi_cuda_warp_max(lowest);
    *high = tchi_cuda_warp_max(highest);
    *middle = tchi_cuda_warp_max(largest);
}

/* The largest eigenvalue of the k by k matrix, at least `known`; *residual is the last entry of its unit vector, whose
 * square is before / slope there, times the next beta. Lanes try points above `known` in steps of four, and Newton's
 * iteration descends from the best of them, as it does from any point above all roots. */
static __device__ double largest_of_tridiagonal(const tridiagonal &t, int k, double known, double *residual)
{
    double low;
    double high;
    double middle;
    enclose_eigenvalue(t, k, &low, &high, &middle);
    double width = high - low;
    if (!(width > 0)) {
        *residual = t.off_diagonal[k - 1];
        return high;
    }
    int lane = threadIdx.x % 32;
    known = fmax(known, middle);
    double reach = fmax(high - known, 0.0);
    double point = known + ldexp(reach, 2 * (lane - 31));
    unsigned below = __ballot_sync(0xFFFFFFFFu, !evaluate_characteristic(t, k, point, 1 / width).above) & 0x7FFFFFFFu;
    point = __shfl_sync(0xFFFFFFFFu, point, 32 - __clz((int)below));
    characteristic c = evaluate_characteristic(t, k, point, 1 / width);
    for (int round = 0; round < NEWTON_ROUNDS && c.last > NEWTON_STOP * c.slope; round++) {
        point -= c.last / c.slope * width;
        c = evaluate_characteristic(t, k, point, 1 / width);
    }
    *residual = t.off_diagonal[k - 1] * sqrt(fmax(c.before / c.slope, 0.0));
    return point;
}

/* --- vectors: every block by itself ------------------------------------------------------------------------------ */

/* The state of the CPU's generator after i + 1 steps, by squaring the map of one step. */
static __device__ uint64_t generator_at(int i)
{
    uint64_t factor = 0x5851F42D4C957F2Du;
    uint64_t term = 0x14057B7EF767814Fu;
    uint64_t bits = 0x853C49E6748FEA9Bu;
    for (unsigned steps = (unsigned)i + 1; steps > 0; steps /= 2) {
        if (steps % 2 != 0) {
            bits = bits * factor + term;
        }
        term = term * factor + term;
        factor *= factor;
    }
    return bits;
}

/* The CPU's initial vector: entries of irregular sign and slowly drifting size. */
template <typename real> static __device__ void start_vector(const lanczos_block<real> &k, double *shared)
{
    double sum = 0;
    for (int i = threadIdx.x; i < k.n; i += blockDim.x) {
        uint64_t bits = generator_at(i);
        double entry = ((bits >> 63) != 0 ? 1.0 : -1.0) * (1.0 + 0.5 * (double)((bits >> 40) & 0xFFFF) / 65536.0);
        k.w[i] = entry;
        sum += entry * entry;
    }
    sum = tchi_cuda_block_sum(sum, threadIdx.x, blockDim.x, shared);
    for (int i = threadIdx.x; i < k.n; i += blockDim.x) {
        k.v[tchi_cuda_place<real>(i)] = (real)(k.w[i] / sqrt(sum) * k.unit);
        k.w[i] = 0;
    }
}

/* w = A v - beta w: each block computes its rows and then reads the others'. */
template <typename T, typename real>
static __device__ void multiply_by_matrix(const lanczos_block<real> &k, double beta, int step)
{
    double *to = k.blocks > 1 ? k.published + (int64_t)(step % 2) * k.n : k.w;
    tchi_cuda_multiply<T, real>(k.rows, k.n, k.v, [&](int row, double sum) {
        int i = k.first + row;
        to[i] = sum - beta * k.w[i];
    });
    tchi_cuda_sync_blocks(k.blocks);
    if (k.blocks > 1) {
        for (int i = threadIdx.x; i < k.n; i += blockDim.x) {
            k.w[i] = __ldcg(to + i);
        }
    }
}

/* Computes the tridiagonal entries; v becomes the next vector and w the current one. Threads access only their own
 * entries between the sums. */
template <typename real>
static __device__ void advance_recurrence(const lanczos_block<real> &k, double *alpha, double *beta, double *shared)
{
    double sum = 0;
    double back = 1 / k.unit;
    for (int i = threadIdx.x; i < k.n; i += blockDim.x) {
        sum += k.w[i] * ((double)k.v[tchi_cuda_place<real>(i)] * back);
    }
    *alpha = tchi_cuda_block_sum(sum, threadIdx.x, blockDim.x, shared);
    sum = 0;
    for (int i = threadIdx.x; i < k.n; i += blockDim.x) {
        k.w[i] -= *alpha * ((double)k.v[tchi_cuda_place<real>(i)] * back);
        sum += k.w[i] * k.w[i];
    }
    *beta = sqrt(tchi_cuda_block_sum(sum, threadIdx.x, blockDim.x, shared));
    double scale = *beta > 0 ? 1 / *beta : 0.0;
    for (int i = threadIdx.x; i < k.n; i += blockDim.x) {
        real present = k.v[tchi_cuda_place<real>(i)];
        k.v[tchi_cuda_place<real>(i)] = (real)(k.w[i] * scale * k.unit);
        k.w[i] = (double)present * back;
    }
}

/* --- the iteration ----------------------------------------------------------------------------------------------- */

/* The error is about the squared residual over the gap, which is at most the value itself: hence a threshold of the
 * square root of the tolerance, or SURE. */
template <typename T, typename real> static __device__ double iterate(const lanczos_block<real> &k, double threshold)
{
    __shared__ tridiagonal t;
    __shared__ double shared[32];
    __shared__ double found[2]; /* the value and its residual */
    double value = -INFINITY;
    double beta = 0;
    int most = k.n < MOST_STEPS ? k.n : MOST_STEPS;
    start_vector(k, shared);
    tchi_cuda_keep_rows<T>(k.rows, k.n);
    for (int step = 0; step < most; step++) {
        __syncthreads();
        multiply_by_matrix<T>(k, beta, step);
        double alpha;
        advance_recurrence(k, &alpha, &beta, shared);
        if (!isfinite(alpha) || !isfinite(beta)) {
            return NAN;
        }
        if (threadIdx.x == 0) {
            t.diagonal[step] = alpha;
            t.off_diagonal[step] = beta;
        }
        bool last = step + 1 == most || beta == 0;
        if (step >= CHECKS_EARLY && step % 2 == 0 && !last) {
            continue;
        }
        if (threadIdx.x < 32) {
            __syncwarp();
            value = largest_of_tridiagonal(t, step + 1, value, &found[1]);
            found[0] = value;
        }
        __syncthreads();
        value = found[0];
        if (last || found[1] <= threshold * fabs(value)) {
            break;
        }
    }
    return value;
}

/* All blocks of a matrix make the same decision, and synchronize before they overwrite what others may still read. */
template <typename T, typename real> static __device__ double estimate(lanczos_block<real> &k, double threshold)
{
    k.unit = 1.0;
    double value = iterate<T>(k, threshold);
    if (fabs(value) < range_of<real>::safe && fabs(value) > 1.0 / range_of<real>::safe) {
        return value;
    }
    k.unit = fabs(value) < 1.0 ? range_of<real>::small : range_of<real>::large;
    tchi_cuda_sync_blocks(k.blocks);
    return iterate<T>(k, threshold) / k.unit;
}

/* Of 16 matrices of 1024 in float32 a step reads 67 MB, of which 40 % stay in shared memory, and does 34 million
 * operations; 64 matrices of 256 stay there whole. One block of a cluster per slice of rows. */
template <typename T, typename real> static __global__ void __launch_bounds__(THREADS, 1) lanczos(lanczos_parameters p)
{
    extern __shared__ __align__(16) char memory[];
    int blocks = p.spread.blocks;
    int64_t b = blockIdx.x / blocks;
    int rank = (int)(blockIdx.x % blocks);
    char *vectors = p.spread.vectors_shared ? memory : p.vectors + blockIdx.x * p.spread.vector_bytes;
    char *resident = p.spread.vectors_shared ? memory + p.spread.vector_bytes : memory;
    lanczos_block<real> k;
    k.rows = tchi_cuda_rows_of(p.x, b, p.n, rank, blocks, resident, p.spread.resident);
    k.n = p.n;
    k.first = tchi_cuda_slice_start(p.n, rank, blocks);
    k.blocks = blocks;
    k.w = (double *)vectors;
    k.v = (real *)(vectors + tchi_cuda_ceil_div(p.n, 2) * 16);
    k.published = p.published + b * 2 * p.n;
    double value = estimate<T>(k, p.threshold);
    if (rank == 0 && threadIdx.x == 0) {
        p.out[b] = value;
    }
}

/* --- host -------------------------------------------------------------------------------------------------------- */

/* w in double, then v. */
static int64_t vector_bytes(int64_t n, int64_t size)
{
    return tchi_cuda_ceil_div(n, 2) * 16 + tchi_cuda_ceil_div(tchi_cuda_places(n) * size, 16) * 16;
}

int64_t tchi_cuda_largest_eigenvalue_scratch(const tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch)
{
    int64_t bytes = vector_bytes(n, sizeof(double));
    int64_t outside = bytes > tchi_cuda_spread_limit(state) ? TCHI_CUDA_SPREAD_MOST * bytes : 0;
    return tchi_cuda_ceil_div(batch * 2 * n, 2) * 16 + batch * outside;
}

template <typename T, typename real>
static tch_status launch_lanczos(const tchi_cuda_state *state, const tch_matrices *x, double tolerance, double *out,
                                 void *scratch)
{
    void (*kernel)(lanczos_parameters) = lanczos<T, real>;
    lanczos_parameters p;
    p.x = tchi_cuda_operand_of(x);
    p.n = (int)x->rows;
    p.spread = tchi_cuda_spread_for(
        state, kernel, {x->rows, x->batch, (int64_t)sizeof(T), vector_bytes(x->rows, sizeof(real)), THREADS, 1});
    p.threshold = fmin(fmin(sqrt(tolerance), SURE), fmax(10.0 * tolerance, 0.01 * SURE)); /* as on the CPU */
    p.published = (double *)scratch;
    p.vectors = (char *)scratch + x->batch * 2 * x->rows * (int64_t)sizeof(double);
    p.out = out;
    return tchi_cuda_spread_launch(state, &p.spread, x->batch, kernel, p, "lanczos");
}

tch_status tchi_cuda_largest_eigenvalue(void *state, const tch_matrices *x, double tolerance, double *out,
                                        void *scratch)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    if (x->batch == 0) {
        return TCH_OK;
    }
    if (x->rows == 0) {
        return tchi_cuda_check(cudaMemsetAsync(out, 0, (size_t)x->batch * sizeof(double), s->stream), "lanczos");
    }
    if (x->type == TCH_SCALAR_F64) {
        return launch_lanczos<double, double>(s, x, tolerance, out, scratch);
    }
    return tolerance >= FLOAT_FROM ? launch_lanczos<float, float>(s, x, tolerance, out, scratch)
                                   : launch_lanczos<float, double>(s, x, tolerance, out, scratch);
}
