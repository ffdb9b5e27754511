/* A radix sort of positions by token, eight bits at a time from the lowest. A warp handles the same chunk of a group in
 * all three steps of a pass: it counts the digits; a block computes prefix sums of each group, digit-major; and the
 * warp scatters its positions in order. Counts are integers, so the result does not depend on scheduling.
 *
 *     for (shift = 0; shift < bits of a token; shift += 8) {
 *         for (i = 0; i < length; i++) {
 *             count[token[order[i]] >> shift & 255]++;
 *         }
 *         first = exclusive prefix sums of count;
 *         for (i = 0; i < length; i++) {
 *             next[first[token[order[i]] >> shift & 255]++] = order[i];
 *         }
 *         swap(order, next), clear count;
 *     } */
#include "token_order.cuh"

#define CHUNK 1024 /* positions of a warp */
#define WARPS 4    /* of a block */
#define DIGITS 256
#define SCAN_THREADS 1024

static int64_t chunks_of(int64_t length)
{
    return tchi_cuda_ceil_div(length, CHUNK);
}

typedef struct pass_call {
    tchi_cuda_token_list list;
    const int32_t *from; /* NULL: unsorted positions */
    int32_t *to;
    int32_t *counts; /* (groups, DIGITS, chunks) */
    int64_t chunks;  /* of a group */
    int shift;
} pass_call;

/* A warp's chunk: its group, and positions first to last of it. */
typedef struct chunk_place {
    int64_t group, chunk, first, last;
} chunk_place;

static __device__ inline chunk_place place_of(const pass_call &c, int64_t number)
{
    int64_t group = number / c.chunks;
    int64_t chunk = number - group * c.chunks;
    int64_t first = chunk * CHUNK;
    return {group, chunk, first, first + CHUNK < c.list.length ? first + CHUNK : c.list.length};
}

static __device__ inline int32_t entry_at(const pass_call &c, const chunk_place &place, int64_t e)
{
    return c.from != NULL ? c.from[place.group * c.list.length + e] : (int32_t)e;
}

static __device__ inline int digit_of(const pass_call &c, const chunk_place &place, int32_t entry)
{
    int64_t token = tchi_cuda_token_of(c.list, place.group * c.list.length + entry);
    return (int)((token >> c.shift) & (DIGITS - 1));
}

static __device__ inline int32_t *count_at(const pass_call &c, const chunk_place &place, int digit)
{
    return c.counts + (place.group * DIGITS + digit) * c.chunks + place.chunk;
}

static __global__ void __launch_bounds__(WARPS * 32) count_digits_kernel(const __grid_constant__ pass_call c)
{
    __shared__ int32_t counts[WARPS][DIGITS];
    const int lane = (int)threadIdx.x % 32;
    int32_t *mine = counts[threadIdx.x / 32];
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; n < c.list.groups * c.chunks;
         n += (int64_t)gridDim.x * WARPS) {
        chunk_place place = place_of(c, n);
        for (int digit = lane; digit < DIGITS; digit += 32) {
            mine[digit] = 0;
        }
        __syncwarp();
        for (int64_t e = place.first + lane; e < place.last; e += 32) {
            atomicAdd(&mine[digit_of(c, place, entry_at(c, place, e))], 1);
        }
        __syncwarp();
        for (int digit = lane; digit < DIGITS; digit += 32) {
            *count_at(c, place, digit) = mine[digit];
        }
        __syncwarp();
    }
}

/* Exclusive prefix sums over a block of SCAN_THREADS, and the total in *total. */
static __device__ inline int32_t sum_before(int32_t value, int32_t *shared, int32_t *total)
{
    const int lane = (int)threadIdx.x % 32;
    const int warp = (int)threadIdx.x / 32;
    int32_t upto = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        int32_t below = __shfl_up_sync(0xFFFFFFFFu, upto, distance);
        upto += lane >= distance ? below : 0;
    }
    if (lane == 31) {
        shared[warp] = upto;
    }
    __syncthreads();
    int32_t before = 0;
    *total = 0;
    for (int w = 0; w < SCAN_THREADS / 32; w++) {
        before += w < warp ? shared[w] : 0;
        *total += shared[w];
    }
    __syncthreads();
    return before + upto - value;
}

/* Replaces counts by their exclusive prefix sums per group. Memory: 8 bytes per count. A block per group; four counts
 * per thread, DIGITS being a multiple of four. */
static __global__ void __launch_bounds__(SCAN_THREADS) add_counts_kernel(int64_t groups, int64_t each, int32_t *counts)
{
    __shared__ int32_t shared[SCAN_THREADS / 32];
    for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
        int4 *row = (int4 *)(counts + group * each);
        int32_t passed = 0;
        for (int64_t first = 0; first < each / 4; first += SCAN_THREADS) {
            int64_t i = first + threadIdx.x;
            int4 four = i < each / 4 ? row[i] : make_int4(0, 0, 0, 0);
            int32_t total;
            int32_t before = passed + sum_before(four.x + four.y + four.z + four.w, shared, &total);
            if (i < each / 4) {
                row[i] =
                    make_int4(before, before + four.x, before + four.x + four.y, before + four.x + four.y + four.z);
            }
            passed += total;
        }
    }
}

/* The lanes in `present` with the same digit. */
static __device__ inline unsigned equal_lanes(int digit, unsigned present)
{
    unsigned equal = present;
#pragma unroll
    for (int bit = 1; bit < DIGITS; bit *= 2) {
        unsigned set = __ballot_sync(0xFFFFFFFFu, (digit & bit) != 0);
        equal &= digit & bit ? set : ~set;
    }
    return equal;
}

static __global__ void __launch_bounds__(WARPS * 32) place_digits_kernel(const __grid_constant__ pass_call c)
{
    __shared__ int32_t places[WARPS][DIGITS];
    const int lane = (int)threadIdx.x % 32;
    int32_t *mine = places[threadIdx.x / 32];
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; n < c.list.groups * c.chunks;
         n += (int64_t)gridDim.x * WARPS) {
        chunk_place place = place_of(c, n);
        for (int digit = lane; digit < DIGITS; digit += 32) {
            mine[digit] = *count_at(c, place, digit);
        }
        __syncwarp();
        for (int64_t e = place.first; e < place.last; e += 32) {
            bool here = e + lane < place.last;
            int32_t entry = here ? entry_at(c, place, e + lane) : 0;
            int digit = here ? digit_of(c, place, entry) : 0;
            unsigned equal = equal_lanes(digit, __ballot_sync(0xFFFFFFFFu, here));
            int before = __popc(equal & ((1u << lane) - 1));
            int32_t first = mine[digit];
            __syncwarp();
            if (here) {
                c.to[place.group * c.list.length + first + before] = entry;
            }
            if (here && before == 0) {
                mine[digit] = first + __popc(equal);
            }
            __syncwarp();
        }
    }
}

/* Two orders, used alternately, and the counts. */
static int64_t order_bytes(int64_t groups, int64_t length)
{
    return tchi_cuda_ceil_div(groups * length * (int64_t)sizeof(int32_t), 16) * 16;
}

int64_t tchi_cuda_token_order_scratch(int64_t groups, int64_t length)
{
    return 2 * order_bytes(groups, length) + groups * chunks_of(length) * DIGITS * (int64_t)sizeof(int32_t);
}

static tch_status run_pass(const tchi_cuda_state *state, const pass_call &c)
{
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(c.list.groups * c.chunks, WARPS));
    TCHI_TRY(tchi_cuda_launch(state, "count_digits", count_digits_kernel, blocks, WARPS * 32, c));
    TCHI_TRY(tchi_cuda_launch(state, "add_counts", add_counts_kernel, tchi_cuda_grid(c.list.groups), SCAN_THREADS,
                              c.list.groups, DIGITS * c.chunks, c.counts));
    return tchi_cuda_launch(state, "place_digits", place_digits_kernel, blocks, WARPS * 32, c);
}

/* At least one pass, which writes the order. */
tch_status tchi_cuda_order_tokens(const tchi_cuda_state *state, const tchi_cuda_token_list &list, void *scratch,
                                  const int32_t **order)
{
    int64_t bytes = order_bytes(list.groups, list.length);
    int32_t *orders[2] = {(int32_t *)scratch, (int32_t *)((char *)scratch + bytes)};
    pass_call c = {list, NULL, NULL, (int32_t *)((char *)scratch + 2 * bytes), chunks_of(list.length), 0};
    if (list.length >= INT32_MAX) {
        return tchi_cuda_host->fail(TCH_ERR_UNSUPPORTED, "%lld tokens in one sum: fewer than 2^31 are possible",
                                    (long long)list.length);
    }
    for (int pass = 0; pass == 0 || (list.rows >> c.shift) > 0; pass++) {
        c.to = orders[pass % 2];
        TCHI_TRY(run_pass(state, c));
        c.from = c.to;
        c.shift += 8;
    }
    *order = c.from;
    return TCH_OK;
}
