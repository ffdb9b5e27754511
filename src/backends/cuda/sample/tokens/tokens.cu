/* Gradients of embeddings: sums over the positions of equal tokens, added to the rows of the weight or squared for
 * per-sample norms. Positions are sorted by token first (token_order.cu) into runs. The order is divided into spans by
 * its length alone, a warp walks a span with four columns per lane, and runs that cross spans leave partial sums in
 * scratch, which a second kernel joins: a token that fills half a batch costs no more than many rare ones, and the
 * order of sums is fixed.
 *
 *     out *= beta;
 *     for (b = 0; b < samples; b++) {
 *         for (s = 0; s < positions; s++) {
 *             out[token[b][s]] += weights[b] * scale * g[b][s];           // token_sums: a row of d numbers
 *         }
 *     }
 *     for (b = 0; b < samples; b++) {                                     // token_dots, squared norms
 *         for (each token v of the sample) {
 *             norms[b] += scale * |sum of g[b][s] over the s with token[b][s] == v|^2;
 *         }
 *     } */
#include "backends/cuda/device/batch_walk.cuh"
#include "token_order.cuh"

#define WARPS 8
#define COLUMNS 128    /* of a warp */
#define AT_ONCE 4      /* positions whose rows a warp has in flight */
#define SPAN 32        /* positions of a span, at least */
#define MAX_SPANS 4096 /* of all groups, if these are longer than a span */

/* Partial sums of a run that crosses spans: at the start of a span, or only at its end. */
enum { HEAD = 0, TAIL = 1, PARTS = 2 };

typedef struct run_call {
    tchi_cuda_token_list list;
    const int32_t *order;
    tchi_cuda_operand g;
    const double *weights;
    double scale;
    int64_t cols, chunks;  /* of columns */
    int64_t span, spans;   /* positions of one, and spans of a group */
    void *parts;           /* (groups, spans, PARTS, cols) */
    double *squares;       /* (groups, spans, chunks), for norms */
    tchi_cuda_operand out; /* otherwise */
} run_call;

/* --- spans ------------------------------------------------------------------------------------------------------ */

static int64_t span_of(int64_t groups, int64_t length)
{
    int64_t span = SPAN;
    while (groups * length > span * MAX_SPANS) {
        span *= 2;
    }
    return span;
}

typedef struct run_place {
    int64_t number; /* of the span among all */
    int64_t group, first, last;
    int64_t chunk, j;
    int count;
} run_place;

static __device__ inline run_place place_of(const run_call &c, int64_t item, int lane)
{
    run_place p;
    p.number = item / c.chunks;
    p.chunk = item - p.number * c.chunks;
    p.group = p.number / c.spans;
    p.first = (p.number - p.group * c.spans) * c.span;
    p.last = p.first + c.span < c.list.length ? p.first + c.span : c.list.length;
    p.j = p.chunk * COLUMNS + lane * 4;
    int64_t left = c.cols - p.j;
    p.count = left < 0 ? 0 : left < 4 ? (int)left : 4;
    return p;
}

static __device__ inline int64_t position_at(const run_call &c, int64_t group, int64_t e)
{
    int64_t base = group * c.list.length;
    return base + c.order[base + e];
}

static __device__ inline int64_t token_at(const run_call &c, int64_t group, int64_t e)
{
    return tchi_cuda_token_of(c.list, position_at(c, group, e));
}

static __device__ inline bool continues_beyond(const run_call &c, const run_place &p)
{
    return p.last < c.list.length && token_at(c, p.group, p.last) == token_at(c, p.group, p.last - 1);
}

template <typename real> static __device__ inline real *part_at(const run_call &c, int64_t number, int part, int64_t j)
{
    return (real *)c.parts + (number * PARTS + part) * c.cols + j;
}

/* --- sums of runs ------------------------------------------------------------------------------------------------ */

/* A lane's position: offset of its row of G, or -1 if it is ignored, its token, and the row's factor. A factor of 0
 * skips the position even if the row is not finite. */
template <typename real> struct run_entry {
    int64_t row, token;
    real factor;
};

template <typename real> static __device__ inline run_entry<real> entry_at(const run_call &c, int64_t group, int64_t e)
{
    int64_t n = position_at(c, group, e);
    int64_t sample = n / c.list.positions;
    int64_t position = n - sample * c.list.positions;
    int64_t token = tchi_cuda_token_at(c.list, sample, position);
    double factor = c.weights != NULL ? c.weights[sample] * c.scale : c.scale;
    bool counts = token < c.list.rows && factor != 0.0;
    return {counts ? sample * c.g.stride + position * c.g.ld : -1, token, counts ? (real)factor : (real)0};
}

/* Only the block that has the whole run writes its row. */
template <typename sum>
static __device__ inline void add_to_out(const run_call &c, int64_t group, int64_t token, int64_t j, int count,
                                         const tchi_cuda_vec4<sum> &sums)
{
    tchi_cuda_vec4<double> before = tchi_cuda_load_vec4<double>(c.out, group, token, j, count);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        before.v[k] += (double)sums.v[k];
    }
    tchi_cuda_store_vec4<double>(c.out, group, token, j, count, before);
}

template <typename sum> static __device__ inline double square_of(const tchi_cuda_vec4<sum> &sums)
{
    double square = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        square = fma((double)sums.v[k], (double)sums.v[k], square);
    }
    return square;
}

/* State of a warp's walk along a run. */
template <typename real> struct run_walk {
    int64_t token;
    bool head; /* it began before the span */
    tchi_cuda_vec4<real> sums;
    double squares; /* of the runs that ended */
};

/* The run ends in this span, or (`on`) continues beyond it. */
template <typename real, bool squared>
static __device__ inline void end_run(const run_call &c, const run_place &p, run_walk<real> &walk, bool on)
{
    if (walk.token == c.list.rows) {
        return;
    }
    if (walk.head || on) {
        real *to = part_at<real>(c, p.number, walk.head ? HEAD : TAIL, p.j);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k < p.count) {
                to[k] = walk.sums.v[k];
            }
        }
    } else if (squared) {
        walk.squares += square_of(walk.sums);
    } else {
        add_to_out(c, p.group, walk.token, p.j, p.count, walk.sums);
    }
}

/* AT_ONCE positions, from `from` of the lanes' entries on. */
template <typename real, bool squared>
static __device__ inline void walk_rows(const run_call &c, const run_place &p, const run_entry<real> &mine, int from,
                                        int live, run_walk<real> &walk)
{
    tchi_cuda_vec4<real> rows[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        int64_t row = (int64_t)__shfl_sync(0xFFFFFFFFu, (long long)mine.row, from + k);
        const char *at = c.g.data + (row + p.j) * tchi_cuda_size(c.g.type);
        rows[k] = tchi_cuda_load_from<real>(c.g, at, row < 0 ? 0 : p.count);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        int64_t token = (int64_t)__shfl_sync(0xFFFFFFFFu, (long long)mine.token, from + k);
        real factor = __shfl_sync(0xFFFFFFFFu, mine.factor, from + k);
        if (from + k < live && token != walk.token) {
            end_run<real, squared>(c, p, walk, false);
            walk.token = token;
            walk.head = false;
            walk.sums = {};
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            walk.sums.v[i] = fma(factor, rows[k].v[i], walk.sums.v[i]);
        }
    }
}

template <typename real, bool squared>
static __device__ inline double walk_span(const run_call &c, const run_place &p, int lane)
{
    const int64_t token = token_at(c, p.group, p.first);
    run_walk<real> walk = {token, p.first > 0 && token_at(c, p.group, p.first - 1) == token, {}, 0.0};
    for (int64_t e = p.first; e < p.last; e += 32) {
        int live = p.last - e < 32 ? (int)(p.last - e) : 32;
        run_entry<real> mine = {-1, c.list.rows, 0};
        if (lane < live) {
            mine = entry_at<real>(c, p.group, e + lane);
        }
        for (int from = 0; from < live; from += AT_ONCE) {
            walk_rows<real, squared>(c, p, mine, from, live, walk);
        }
    }
    end_run<real, squared>(c, p, walk, continues_beyond(c, p));
    return walk.squares;
}

/* G (positions, cols) per sample. Memory: G once, and the rows of out that have tokens in and out. Compute: a product
 * and a sum per element. A warp per span and COLUMNS columns. */
template <typename real, bool squared>
static __global__ void __launch_bounds__(WARPS * 32, 2) run_sums_kernel(const __grid_constant__ run_call c)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t items = c.list.groups * c.spans * c.chunks;
    for (int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; item < items;
         item += (int64_t)gridDim.x * WARPS) {
        double squares = walk_span<real, squared>(c, place_of(c, item, lane), lane);
        if (squared) {
            squares = tchi_cuda_warp_sum(squares);
            if (lane == 0) {
                c.squares[item] = squares;
            }
        }
    }
}

/* --- runs across spans ------------------------------------------------------------------------------------------- */

/* The sum of the heads of the spans after p in the run of `token`; warps take spans round-robin. */
template <typename real>
static __device__ inline tchi_cuda_vec4<double> sum_of_heads(const run_call &c, const run_place &p, int64_t token,
                                                             int warp)
{
    tchi_cuda_vec4<double> sums = {};
    for (int64_t ahead = 1 + warp; p.first + ahead * c.span < c.list.length; ahead += WARPS) {
        if (token_at(c, p.group, p.first + ahead * c.span) != token) {
            break;
        }
        const real *from = part_at<real>(c, p.number + ahead, HEAD, p.j);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sums.v[k] += k < p.count ? (double)from[k] : 0.0;
        }
    }
    return sums;
}

/* Memory: 4 bytes per column of a span whose run continues, of float32. Compute: a sum each. A block per span and
 * COLUMNS columns; only spans where a continuing run begins have work. */
template <typename real, bool squared>
static __global__ void __launch_bounds__(WARPS * 32) join_runs_kernel(const __grid_constant__ run_call c)
{
    __shared__ tchi_cuda_vec4<double> shared[WARPS][32];
    const int lane = (int)threadIdx.x % 32;
    const int warp = (int)threadIdx.x / 32;
    for (int64_t item = blockIdx.x; item < c.list.groups * c.spans * c.chunks; item += gridDim.x) {
        run_place p = place_of(c, item, lane);
        int64_t token = token_at(c, p.group, p.last - 1);
        bool began_before = p.first > 0 && token_at(c, p.group, p.first - 1) == token;
        if (token == c.list.rows || began_before || !continues_beyond(c, p)) {
            continue;
        }
        shared[warp][lane] = sum_of_heads<real>(c, p, token, warp);
        __syncthreads();
        if (warp == 0) {
            tchi_cuda_vec4<double> sums = {};
            for (int k = 0; k < p.count; k++) {
                sums.v[k] = (double)*part_at<real>(c, p.number, TAIL, p.j + k);
                for (int w = 0; w < WARPS; w++) {
                    sums.v[k] += shared[w][lane].v[k];
                }
            }
            if (squared) {
                double square = tchi_cuda_warp_sum(square_of(sums));
                if (lane == 0) {
                    c.squares[item] += square;
                }
            } else {
                add_to_out(c, p.group, token, p.j, p.count, sums);
            }
        }
        __syncthreads();
    }
}

/* --- the operations ---------------------------------------------------------------------------------------------- */

/* Parts use the widest type: the type is unknown when scratch is requested. */
static int64_t run_scratch(int64_t groups, int64_t length, int64_t cols)
{
    int64_t spans = groups * tchi_cuda_ceil_div(length, span_of(groups, length));
    int64_t chunks = tchi_cuda_ceil_div(cols, COLUMNS);
    int64_t parts = length > span_of(groups, length) ? spans * PARTS * cols : 0;
    return tchi_cuda_token_order_scratch(groups, length) + (parts + spans * chunks) * (int64_t)sizeof(double);
}

int64_t tchi_cuda_token_runs_scratch(int64_t samples, int64_t positions, int64_t cols)
{
    int64_t apart = run_scratch(samples, positions, cols);
    int64_t together = run_scratch(1, samples * positions, cols);
    return apart > together ? apart : together;
}

static run_call call_of(const tchi_cuda_token_list &list, const tch_matrices *g, void *scratch)
{
    run_call c = {};
    c.list = list;
    c.g = tchi_cuda_operand_of(g);
    c.scale = 1.0;
    c.cols = g->cols;
    c.chunks = tchi_cuda_ceil_div(g->cols, COLUMNS);
    c.span = span_of(list.groups, list.length);
    c.spans = tchi_cuda_ceil_div(list.length, c.span);
    c.squares = (double *)((char *)scratch + tchi_cuda_token_order_scratch(list.groups, list.length));
    c.parts = c.squares + list.groups * c.spans * c.chunks;
    return c;
}

template <typename real, bool squared> static tch_status run_runs(const tchi_cuda_state *state, const run_call &c)
{
    int64_t items = c.list.groups * c.spans * c.chunks;
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(items, WARPS));
    TCHI_TRY(tchi_cuda_launch(state, "run_sums", run_sums_kernel<real, squared>, blocks, WARPS * 32, c));
    if (c.spans == 1) {
        return TCH_OK;
    }
    return tchi_cuda_launch(state, "join_runs", join_runs_kernel<real, squared>, tchi_cuda_grid(items), WARPS * 32, c);
}

tch_status tchi_cuda_token_norms(tchi_cuda_state *s, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                 const tch_matrices *g, double scale, double *norms, void *scratch)
{
    if (tokens->rows == 0 || tokens->cols == 0 || g->cols == 0) {
        return TCH_OK;
    }
    run_call c = call_of(tchi_cuda_token_list_of(tokens, rows, padding, true), g, scratch);
    TCHI_TRY(tchi_cuda_order_tokens(s, c.list, scratch, &c.order));
    TCHI_TRY(g->type == TCH_SCALAR_F64 ? (run_runs<double, true>(s, c)) : (run_runs<float, true>(s, c)));
    return tchi_cuda_add_partials(s, c.list.groups, c.spans * c.chunks, c.squares, scale, norms);
}

/* out *= beta, or 0 without reading it. */
template <typename real> struct begin_sums {
    tchi_cuda_operand out;
    real beta;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<real> values = {};
        if (beta != 0) {
            values = tchi_cuda_load_patch<real>(out, p);
        }
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            values.row[k / 4].v[k % 4] *= beta;
        }
        tchi_cuda_store_patch(out, p, values);
    }
};

tch_status tchi_cuda_token_sums(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                                const double *weights, double scale, double beta, int32_t apart,
                                const tch_matrices *out, void *scratch)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tchi_cuda_operand to = tchi_cuda_operand_of(out);
    if (beta != 1.0) {
        TCHI_TRY(out->type == TCH_SCALAR_F64
                     ? tchi_cuda_walk(s, "begin_sums", out, begin_sums<double>{to, beta})
                     : tchi_cuda_walk(s, "begin_sums", out, begin_sums<float>{to, (float)beta}));
    }
    if (tokens->rows == 0 || tokens->cols == 0 || g->cols == 0 || out->rows == 0) {
        return TCH_OK;
    }
    run_call c = call_of(tchi_cuda_token_list_of(tokens, out->rows, padding, apart != 0), g, scratch);
    TCHI_TRY(tchi_cuda_order_tokens(s, c.list, scratch, &c.order));
    c.weights = weights;
    c.scale = scale;
    c.out = to;
    return g->type == TCH_SCALAR_F64 ? run_runs<double, false>(s, c) : run_runs<float, false>(s, c);
}
