/* Shared by the optimizers' kernels: a block finds its chunk of a rectangle, and its threads load vec4s, process them
 * in registers, and store. 16-bit numbers are loaded as bits and converted afterwards, so that all loads of a thread
 * are in flight before the first is needed. Transposed blocks pass through a shared-memory tile, so that both sides are
 * accessed along rows. fma is explicit: the compiler might contract copies of a formula differently, and an element's
 * bits would depend on its position in the rectangle. */
#ifndef TCHI_CUDA_UPDATES_CUH
#define TCHI_CUDA_UPDATES_CUH

#include "backends/cuda/device/elements.cuh"
#include "rects.h"

#define TCHI_CUDA_UPDATE_THREADS 256

/* vec4s per thread. With two, a block has 8 KB in flight per array, and three or more blocks fit on a multiprocessor;
 * an H200 needs about 25 KB there to hide its memory latency (700 ns at 4.8 TB/s over 132). */
#define TCHI_CUDA_STEPS 2

/* Elements of a chunk as a power of two; steps are 1, 2 or 4. */
#define TCHI_CUDA_LOG_CHUNK (10 + TCHI_CUDA_STEPS / 2)

/* Target blocks per multiprocessor. */
template <typename real> constexpr int tchi_cuda_resident()
{
    return sizeof(real) == sizeof(double) ? 2 : 3;
}

/* The same for kernels with one access path for all chunks. */
#define TCHI_CUDA_EVEN_RESIDENT 5

/* --- chunks ------------------------------------------------------------------------------------------------------ */

/* The item that contains blockIdx.x, given the first index of each. */
static __device__ inline int tchi_cuda_find_item(const int32_t *first, int count)
{
    int low = 0;
    int high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (first[middle] <= (int)blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* A chunk as the threads traverse it: at step s thread t has the four elements from number 4 (256 s + t) on, with rows
 * of 2^log_width. */
typedef struct tchi_cuda_view {
    int64_t base, ld; /* of the first element, and from row to row */
    int rows, cols;   /* as far as the chunk lies in the rectangle */
    int log_width;
} tchi_cuda_view;

/* Offset of four elements, and the number from there to the end of the row; none if it is 0 or less. (Clamped to 0 to
 * 4, the count would be compared with 4 in a way that ptxas 13.0 miscompiles for sm_90: partial vec4s were loaded
 * whole.) */
typedef struct tchi_cuda_place {
    int64_t offset;
    int count;
} tchi_cuda_place;

static __device__ inline int tchi_cuda_number(int step)
{
    return (step * TCHI_CUDA_UPDATE_THREADS + (int)threadIdx.x) * 4;
}

/* Origin of the block's chunk in its rectangle. */
typedef struct tchi_cuda_corner {
    int64_t row, col;
} tchi_cuda_corner;

static __device__ inline tchi_cuda_corner tchi_cuda_corner_of(const tchi_cuda_rects &list, int index)
{
    const tchi_cuda_rect &rect = list.rect[index];
    unsigned chunk = blockIdx.x - (unsigned)list.first_chunk[index];
    unsigned down = chunk / (unsigned)rect.across;
    unsigned right = chunk - down * (unsigned)rect.across;
    return {(int64_t)down << rect.log_height, (int64_t)right << rect.log_width};
}

static __device__ inline int tchi_cuda_within(int64_t size, int64_t from, int log)
{
    return size - from < 1 << log ? (int)(size - from) : 1 << log;
}

/* The chunk in the parameter, and so in its gradient and state. */
static __device__ inline tchi_cuda_view tchi_cuda_view_of(const tchi_cuda_rect &rect, const tchi_cuda_corner &at)
{
    return {at.row * rect.stride + at.col, rect.stride, tchi_cuda_within(rect.rows, at.row, rect.log_height),
            tchi_cuda_within(rect.cols, at.col, rect.log_width), rect.log_width};
}

/* The same chunk in the blocks. */
static __device__ inline tchi_cuda_view tchi_cuda_block_view_of(const tchi_cuda_rect &rect, const tchi_cuda_corner &at)
{
    int rows = tchi_cuda_within(rect.rows, at.row, rect.log_height);
    int cols = tchi_cuda_within(rect.cols, at.col, rect.log_width);
    if (rect.transposed) {
        return {at.col * rect.block_ld + at.row, rect.block_ld, cols, rows, rect.log_height};
    }
    return {at.row * rect.block_ld + at.col, rect.block_ld, rows, cols, rect.log_width};
}

/* --- access paths ------------------------------------------------------------------------------------------------ */

/* Compile-time knowledge about a chunk, which reduces access to loads and stores: plain chunks, nearly all, have no
 * branch between them. */
typedef enum tchi_cuda_access_path {
    TCHI_CUDA_ANY = 0,   /* nothing */
    TCHI_CUDA_WHOLE = 1, /* all vec4s are complete and aligned */
    TCHI_CUDA_PLAIN = 2, /* and of the compute type, without a master copy */
    TCHI_CUDA_SHORT = 3, /* the same except for bfloat16 blocks; of uniform lists */
    TCHI_CUDA_HALF = 4   /* or float16 */
} tchi_cuda_access_path;

static __device__ inline tchi_cuda_access_path
tchi_cuda_access_path_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect, const tchi_cuda_view &view)
{
    bool inside = view.rows == 1 << rect.log_height && view.cols == 1 << rect.log_width;
    if (!inside || rect.wide != 0xFF) {
        return TCHI_CUDA_ANY;
    }
    return list.plain && rect.data[TCHI_CUDA_MASTER] == NULL ? TCHI_CUDA_PLAIN : TCHI_CUDA_WHOLE;
}

/* Per-CTA chunk context; compute type and path are compile-time constants. */
template <typename real, tchi_cuda_access_path path> struct tchi_cuda_chunk_ctx {
    const tchi_cuda_rects &list;
    const tchi_cuda_rect &rect;
    tchi_cuda_view view, block_view;
    tchi_cuda_corner corner;
};

#define TCHI_CUDA_CHUNK_FN template <typename real, tchi_cuda_access_path path> static __device__ inline

/* A thread's part of a chunk. */
template <typename real> struct tchi_cuda_vec4s {
    tchi_cuda_vec4<real> at[TCHI_CUDA_STEPS];
};

TCHI_CUDA_CHUNK_FN tchi_cuda_place tchi_cuda_chunk_place(const tchi_cuda_chunk_ctx<real, path> &ctx,
                                                         tchi_cuda_slot slot, int step)
{
    const tchi_cuda_view &view = slot >= TCHI_CUDA_BLOCK_0 ? ctx.block_view : ctx.view;
    int number = tchi_cuda_number(step);
    int i = number >> view.log_width;
    int j = number & ((1 << view.log_width) - 1);
    int count = i < view.rows ? view.cols - j : 0;
    return {view.base + i * view.ld + j, path == TCHI_CUDA_ANY ? count : 4};
}

/* The number of the first of these four elements, for random numbers. */
TCHI_CUDA_CHUNK_FN uint64_t tchi_cuda_chunk_element(const tchi_cuda_chunk_ctx<real, path> &ctx,
                                                    const tchi_cuda_place &place, int step)
{
    int64_t row = ctx.corner.row + (tchi_cuda_number(step) >> ctx.rect.log_width);
    return (uint64_t)(ctx.rect.first + place.offset + row * ctx.rect.skipped);
}

TCHI_CUDA_CHUNK_FN tch_scalar tchi_cuda_chunk_type(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot)
{
    const tch_scalar arithmetic = sizeof(real) == sizeof(double) ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
    bool is_state = slot >= TCHI_CUDA_STATE_0 && slot <= TCHI_CUDA_STATE_2;
    if (path == TCHI_CUDA_SHORT && slot >= TCHI_CUDA_BLOCK_0) {
        return TCH_SCALAR_BF16;
    }
    if (path == TCHI_CUDA_HALF && slot >= TCHI_CUDA_BLOCK_0) {
        return TCH_SCALAR_F16;
    }
    if (path >= TCHI_CUDA_PLAIN || is_state) {
        return arithmetic;
    }
    if (slot == TCHI_CUDA_MASTER) {
        return TCH_SCALAR_F32;
    }
    return slot == TCHI_CUDA_PARAM  ? ctx.list.param_type
           : slot == TCHI_CUDA_GRAD ? ctx.list.grad_type
                                    : ctx.list.block_type;
}

TCHI_CUDA_CHUNK_FN bool tchi_cuda_chunk_wide(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot)
{
    return path != TCHI_CUDA_ANY || (ctx.rect.wide >> slot & 1) != 0;
}

TCHI_CUDA_CHUNK_FN bool tchi_cuda_chunk_has(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot)
{
    return ctx.rect.data[slot] != NULL;
}

/* --- loading four elements --------------------------------------------------------------------------------------- */

/* Data is used once per step and exceeds the caches, so loads and stores are streaming, except stores of blocks, which
 * are multiplied next. */

template <typename real> static __device__ inline bool tchi_cuda_is_packed(tch_scalar type)
{
    return sizeof(real) == sizeof(float) && (type == TCH_SCALAR_F16 || type == TCH_SCALAR_BF16);
}

static __device__ inline uint2 tchi_cuda_load_packed(const unsigned short *from, bool wide, int count)
{
    if (wide && count >= 4) {
        return __ldcs((const uint2 *)from);
    }
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        word[k / 2] |= k < count ? (uint32_t)__ldcs(from + k) << (k % 2 * 16) : 0u;
    }
    return make_uint2(word[0], word[1]);
}

/* Zeros beyond the place's count. Packed elements are in the first two of the four. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> tchi_cuda_load_raw(tch_scalar type, bool wide, const void *data,
                                                                 const tchi_cuda_place &place)
{
    if (tchi_cuda_is_packed<real>(type)) {
        uint2 bits = tchi_cuda_load_packed((const unsigned short *)data + place.offset, wide, place.count);
        return {{(real)__uint_as_float(bits.x), (real)__uint_as_float(bits.y), (real)0, (real)0}};
    }
    if (wide && place.count >= 4 && type == TCH_SCALAR_F32) {
        float4 f = __ldcs((const float4 *)((const float *)data + place.offset));
        return {{(real)f.x, (real)f.y, (real)f.z, (real)f.w}};
    }
    if (wide && place.count >= 4 && type == TCH_SCALAR_F64) {
        const double2 *from = (const double2 *)((const double *)data + place.offset);
        double2 a = __ldcs(from), b = __ldcs(from + 1);
        return {{(real)a.x, (real)a.y, (real)b.x, (real)b.y}};
    }
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = k < place.count ? tchi_cuda_load<real>(type, data, place.offset + k, 0) : (real)0;
    }
    return four;
}

template <typename real>
static __device__ inline tchi_cuda_vec4<real> tchi_cuda_unpack_four(tch_scalar type, const tchi_cuda_vec4<real> &raw)
{
    if (!tchi_cuda_is_packed<real>(type)) {
        return raw;
    }
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t bits = __float_as_uint((float)raw.v[k / 2]) >> (k % 2 * 16);
        four.v[k] = (real)(type == TCH_SCALAR_BF16 ? __uint_as_float(bits << 16)
                                                   : __half2float(__ushort_as_half((unsigned short)bits)));
    }
    return four;
}

/* --- storing four elements --------------------------------------------------------------------------------------- */

static __device__ inline uint32_t tchi_cuda_half_bits(tch_scalar type, float value)
{
    return type == TCH_SCALAR_F16 ? __half_as_ushort(tchi_cuda_to_f16(value))
                                  : __bfloat16_as_ushort(tchi_cuda_to_bf16(value));
}

template <typename word> static __device__ inline void tchi_cuda_put(word *to, const word &bits, bool keep)
{
    if (keep) {
        __stwb(to, bits);
    } else {
        __stcs(to, bits);
    }
}

static __device__ inline void tchi_cuda_put_shorts(unsigned short *to, bool wide, int count, const uint32_t *bits,
                                                   bool keep)
{
    if (wide && count >= 4) {
        tchi_cuda_put((uint2 *)to, make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16), keep);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < count) {
            to[k] = (unsigned short)bits[k];
        }
    }
}

template <typename real>
static __device__ inline void tchi_cuda_store_rounded(tch_scalar type, bool wide, void *data,
                                                      const tchi_cuda_place &place, const tchi_cuda_vec4<real> &four,
                                                      bool keep)
{
    if (tchi_cuda_is_packed<real>(type)) {
        uint32_t bits[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            bits[k] = tchi_cuda_half_bits(type, (float)four.v[k]);
        }
        tchi_cuda_put_shorts((unsigned short *)data + place.offset, wide, place.count, bits, keep);
    } else if (wide && place.count >= 4 && type == TCH_SCALAR_F32) {
        tchi_cuda_put((float4 *)((float *)data + place.offset),
                      make_float4((float)four.v[0], (float)four.v[1], (float)four.v[2], (float)four.v[3]), keep);
    } else if (wide && place.count >= 4 && type == TCH_SCALAR_F64) {
        double2 *to = (double2 *)((double *)data + place.offset);
        tchi_cuda_put(to, make_double2((double)four.v[0], (double)four.v[1]), keep);
        tchi_cuda_put(to + 1, make_double2((double)four.v[2], (double)four.v[3]), keep);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k < place.count) {
                tchi_cuda_store<real>(type, data, place.offset + k, 0, four.v[k]);
            }
        }
    }
}

/* --- stochastic rounding ----------------------------------------------------------------------------------------- */

/* Philox-4x32-10 (Salmon and others, 2011): ten rounds of two products each. */
static __device__ inline uint4 tchi_cuda_philox(uint4 counter, uint32_t key0, uint32_t key1)
{
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t factor0 = 0xD2511F53u;
        const uint32_t factor1 = 0xCD9E8D57u;
        uint32_t high0 = __umulhi(factor0, counter.x);
        uint32_t high1 = __umulhi(factor1, counter.z);
        counter =
            make_uint4(high1 ^ counter.y ^ key0, factor1 * counter.z, high0 ^ counter.w ^ key1, factor0 * counter.x);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

/* Inputs of a rectangle's random bits besides the element. */
typedef struct tchi_cuda_random_key {
    uint32_t parameter, step, key0, key1;
} tchi_cuda_random_key;

static __device__ inline tchi_cuda_random_key tchi_cuda_random_key_of(const tchi_cuda_rects &list,
                                                                      const tchi_cuda_rect &rect)
{
    return {(uint32_t)rect.parameter, (uint32_t)rect.clock->step, (uint32_t)list.seed, (uint32_t)(list.seed >> 32)};
}

static __device__ inline uint4 tchi_cuda_random_words_at(const tchi_cuda_random_key &key, uint64_t number)
{
    uint4 counter = make_uint4((uint32_t)number, (uint32_t)(number >> 32), key.parameter, key.step);
    return tchi_cuda_philox(counter, key.key0, key.key1);
}

/* Random words of elements e to e + 3. If e is not a multiple of four they come from two Philox counters, shifted by e
 * % 4 in two steps, so that they stay in registers. */
static __device__ inline uint4 tchi_cuda_random_words(const tchi_cuda_random_key &key, uint64_t e)
{
    uint4 a = tchi_cuda_random_words_at(key, e / 4);
    if (e % 4 == 0) {
        return a;
    }
    uint4 b = tchi_cuda_random_words_at(key, e / 4 + 1);
    if (e & 1) {
        a = make_uint4(a.y, a.z, a.w, b.x);
        b = make_uint4(b.y, b.z, b.w, 0);
    }
    return e & 2 ? make_uint4(a.z, a.w, b.x, b.y) : a;
}

static __device__ inline uint32_t tchi_cuda_round_randomly(float value, uint32_t random)
{
    uint32_t bits = __float_as_uint(value);
    bool finite = (bits & 0x7F800000u) != 0x7F800000u;
    return finite ? (bits + (random & 0xFFFFu)) >> 16 : tchi_cuda_half_bits(TCH_SCALAR_BF16, value);
}

template <typename real>
static __device__ inline void tchi_cuda_store_randomly(bool wide, void *data, const tchi_cuda_place &place,
                                                       const tchi_cuda_vec4<real> &four,
                                                       const tchi_cuda_random_key &key, uint64_t element)
{
    uint4 words = tchi_cuda_random_words(key, element);
    uint32_t bits[4] = {
        tchi_cuda_round_randomly((float)four.v[0], words.x), tchi_cuda_round_randomly((float)four.v[1], words.y),
        tchi_cuda_round_randomly((float)four.v[2], words.z), tchi_cuda_round_randomly((float)four.v[3], words.w)};
    tchi_cuda_put_shorts((unsigned short *)data + place.offset, wide, place.count, bits, false);
}

/* --- the vec4s of a chunk ---------------------------------------------------------------------------------------- */

/* Loads a thread's part, to be unpacked later. */
TCHI_CUDA_CHUNK_FN tchi_cuda_vec4s<real> tchi_cuda_fetch(const tchi_cuda_chunk_ctx<real, path> &ctx,
                                                         tchi_cuda_slot slot)
{
    tchi_cuda_vec4s<real> raw;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        raw.at[s] = tchi_cuda_load_raw<real>(tchi_cuda_chunk_type(ctx, slot), tchi_cuda_chunk_wide(ctx, slot),
                                             ctx.rect.data[slot], tchi_cuda_chunk_place(ctx, slot, s));
    }
    return raw;
}

/* The same if needed, else zeros. */
TCHI_CUDA_CHUNK_FN tchi_cuda_vec4s<real> tchi_cuda_fetch_if(bool needed, const tchi_cuda_chunk_ctx<real, path> &ctx,
                                                            tchi_cuda_slot slot)
{
    tchi_cuda_vec4s<real> raw = {};
    if (needed) {
        raw = tchi_cuda_fetch(ctx, slot);
    }
    return raw;
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_unpack_all(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot,
                                             tchi_cuda_vec4s<real> &vec4s)
{
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        vec4s.at[s] = tchi_cuda_unpack_four(tchi_cuda_chunk_type(ctx, slot), vec4s.at[s]);
    }
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_put_all(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot,
                                          const tchi_cuda_vec4s<real> &vec4s)
{
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        tchi_cuda_store_rounded(tchi_cuda_chunk_type(ctx, slot), tchi_cuda_chunk_wide(ctx, slot), ctx.rect.data[slot],
                                tchi_cuda_chunk_place(ctx, slot, s), vec4s.at[s], slot >= TCHI_CUDA_BLOCK_0);
    }
}

/* --- parameters and gradients ------------------------------------------------------------------------------------ */

/* The authoritative copy of a parameter: its master copy if it has one. */
TCHI_CUDA_CHUNK_FN tchi_cuda_vec4s<real> tchi_cuda_fetch_param(const tchi_cuda_chunk_ctx<real, path> &ctx)
{
    bool master = path < TCHI_CUDA_PLAIN && tchi_cuda_chunk_has(ctx, TCHI_CUDA_MASTER);
    return master ? tchi_cuda_fetch(ctx, TCHI_CUDA_MASTER) : tchi_cuda_fetch(ctx, TCHI_CUDA_PARAM);
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_unpack_param(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_vec4s<real> &p)
{
    if (!tchi_cuda_chunk_has(ctx, TCHI_CUDA_MASTER)) {
        tchi_cuda_unpack_all(ctx, TCHI_CUDA_PARAM, p);
    }
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_put_randomly(const tchi_cuda_chunk_ctx<real, path> &ctx,
                                               const tchi_cuda_vec4s<real> &p)
{
    tchi_cuda_random_key key = tchi_cuda_random_key_of(ctx.list, ctx.rect);
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        tchi_cuda_place place = tchi_cuda_chunk_place(ctx, TCHI_CUDA_PARAM, s);
        tchi_cuda_store_randomly(tchi_cuda_chunk_wide(ctx, TCHI_CUDA_PARAM), ctx.rect.data[TCHI_CUDA_PARAM], place,
                                 p.at[s], key, tchi_cuda_chunk_element(ctx, place, s));
    }
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_put_param(const tchi_cuda_chunk_ctx<real, path> &ctx, const tchi_cuda_vec4s<real> &p)
{
    bool master = path < TCHI_CUDA_PLAIN && tchi_cuda_chunk_has(ctx, TCHI_CUDA_MASTER);
    bool random = ctx.list.stochastic && tchi_cuda_chunk_type(ctx, TCHI_CUDA_PARAM) == TCH_SCALAR_BF16;
    if (random && !master && sizeof(real) == sizeof(float)) {
        tchi_cuda_put_randomly(ctx, p);
        return;
    }
    tchi_cuda_put_all(ctx, TCHI_CUDA_PARAM, p);
    if (master) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_MASTER, p);
    }
}

/* Divisor of gradients: their scale, negated to maximize. */
template <typename real> static __device__ inline real tchi_cuda_grad_divisor(const tchi_cuda_rects &list)
{
    real scale = list.grad_scale != NULL ? (real)*list.grad_scale : (real)1;
    return list.maximize ? -scale : scale;
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_unpack_grad(const tchi_cuda_chunk_ctx<real, path> &ctx, real divisor,
                                              tchi_cuda_vec4s<real> &g)
{
    tchi_cuda_unpack_all(ctx, TCHI_CUDA_GRAD, g);
    if (divisor == (real)1) {
        return;
    }
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        g.at[k / 4].v[k % 4] /= divisor;
    }
}

static __device__ inline bool tchi_cuda_skips(const tchi_cuda_rects &list)
{
    return list.skip != NULL && *list.skip != 0;
}

/* --- blocks ------------------------------------------------------------------------------------------------------ */

/* Size of the shared tile that transposes a chunk, with rows padded by one against bank conflicts; a chunk has at most
 * a quarter as many rows as elements. */
#define TCHI_CUDA_TILE ((1 << TCHI_CUDA_LOG_CHUNK) / 4 * 5)

/* Position of element k of a four in the tile, with vec4s numbered in the order of the parameter or of the block. */
static __device__ inline int tchi_cuda_in_tile(const tchi_cuda_rect &rect, bool block_order, int number, int k)
{
    int log = block_order ? rect.log_height : rect.log_width;
    int row = number >> log;
    int col = (number & ((1 << log) - 1)) + k;
    int pitch = (1 << rect.log_width) + 1;
    return block_order ? col * pitch + row : row * pitch + col;
}

/* Transposes the vec4s between the two orders. Called by all threads of a block; the tile can be reused at once. */
TCHI_CUDA_CHUNK_FN void tchi_cuda_transpose_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, bool to_block_order,
                                                  real *tile, tchi_cuda_vec4s<real> &vec4s)
{
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        tile[tchi_cuda_in_tile(ctx.rect, !to_block_order, tchi_cuda_number(k / 4), k % 4)] = vec4s.at[k / 4].v[k % 4];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        vec4s.at[k / 4].v[k % 4] = tile[tchi_cuda_in_tile(ctx.rect, to_block_order, tchi_cuda_number(k / 4), k % 4)];
    }
}

/* A fetched block in the order of the parameter. */
TCHI_CUDA_CHUNK_FN void tchi_cuda_unpack_block(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot,
                                               real *tile, tchi_cuda_vec4s<real> &vec4s)
{
    tchi_cuda_unpack_all(ctx, slot, vec4s);
    if (ctx.rect.transposed) {
        tchi_cuda_transpose_chunk(ctx, false, tile, vec4s);
    }
}

TCHI_CUDA_CHUNK_FN void tchi_cuda_put_block(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot, real *tile,
                                            tchi_cuda_vec4s<real> vec4s)
{
    if (ctx.rect.transposed) {
        tchi_cuda_transpose_chunk(ctx, true, tile, vec4s);
    }
    tchi_cuda_put_all(ctx, slot, vec4s);
}

/* --- kernels over chunks ----------------------------------------------------------------------------------------- */

/* Calls work(ctx) for the block's chunk, compiled once for each access path. */
template <typename real, bool blocks, typename chunk_fn>
static __device__ __forceinline__ void tchi_cuda_with_chunk(const tchi_cuda_rects &list, const chunk_fn &work)
{
    int index = tchi_cuda_find_item(list.first_chunk, list.count);
    const tchi_cuda_rect &rect = list.rect[index];
    tchi_cuda_corner corner = tchi_cuda_corner_of(list, index);
    tchi_cuda_view view = tchi_cuda_view_of(rect, corner);
    tchi_cuda_view in_block = blocks ? tchi_cuda_block_view_of(rect, corner) : view;
    switch (tchi_cuda_access_path_of(list, rect, view)) {
    case TCHI_CUDA_PLAIN:
        work(tchi_cuda_chunk_ctx<real, TCHI_CUDA_PLAIN>{list, rect, view, in_block, corner});
        break;
    case TCHI_CUDA_WHOLE:
        work(tchi_cuda_chunk_ctx<real, TCHI_CUDA_WHOLE>{list, rect, view, in_block, corner});
        break;
    default:
        work(tchi_cuda_chunk_ctx<real, TCHI_CUDA_ANY>{list, rect, view, in_block, corner});
    }
}

/* The same for float32 with blocks and a known path of all chunks. */
template <tchi_cuda_access_path path, typename chunk_fn>
static __device__ __forceinline__ void tchi_cuda_with_even_chunk(const tchi_cuda_rects &list, const chunk_fn &work)
{
    int index = tchi_cuda_find_item(list.first_chunk, list.count);
    const tchi_cuda_rect &rect = list.rect[index];
    tchi_cuda_corner corner = tchi_cuda_corner_of(list, index);
    work(tchi_cuda_chunk_ctx<float, path>{list, rect, tchi_cuda_view_of(rect, corner),
                                          tchi_cuda_block_view_of(rect, corner), corner});
}

/* The kernels of an operation, one of which is launched for a list; those for full, aligned chunks may be NULL. */
template <typename... params> struct tchi_cuda_update_kernels {
    void (*f64)(tchi_cuda_rects, params...);
    void (*f32)(tchi_cuda_rects, params...);
    void (*even_bf16)(tchi_cuda_rects, params...) = NULL; /* of float32, with blocks of bfloat16, */
    void (*even_f32)(tchi_cuda_rects, params...) = NULL;  /* of float32, */
    void (*even_fp16)(tchi_cuda_rects, params...) = NULL; /* or of float16 */
};

/* `fp16`: buffers of blocks in float16, see tchi_cuda_pack_fp16; or NULL. */
template <typename... params>
static tch_status tchi_cuda_launch_blocks(void *state, const tch_update *update, tchi_cuda_use use, void *const *fp16,
                                          const char *name, tchi_cuda_update_kernels<params...> kernels, params... with)
{
    tchi_cuda_rects list;
    int64_t next = 0;
    int32_t chunks;
    list.before = 0;
    while ((chunks = tchi_cuda_pack(update, TCHI_CUDA_LOG_CHUNK, use, fp16, &next, &list)) > 0) {
        auto even = !list.even    ? NULL
                    : list.shorts ? kernels.even_bf16
                    : list.fp16   ? kernels.even_fp16
                    : list.plain  ? kernels.even_f32
                                  : NULL;
        auto kernel = update->real == TCH_SCALAR_F64 ? kernels.f64 : even != NULL ? even : kernels.f32;
        TCHI_TRY(tchi_cuda_launch(state, name, kernel, (unsigned)chunks, TCHI_CUDA_UPDATE_THREADS, list, with...));
        list.before += chunks;
    }
    return TCH_OK;
}

template <typename... params>
static tch_status tchi_cuda_launch_update(void *state, const tch_update *update, tchi_cuda_use use, const char *name,
                                          tchi_cuda_update_kernels<params...> kernels, params... with)
{
    return tchi_cuda_launch_blocks(state, update, use, NULL, name, kernels, with...);
}

#endif
