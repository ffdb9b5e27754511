/* A stream-K split: distributes the tiles of a Gram kernel to blocks, which are all resident, one per multiprocessor.
 * Each first has whole tiles, as many as all can have. Each remaining tile (`split_tiles` of them) has its own block,
 * and the blocks without one (`split_blocks`) take the last k-tiles of G, concatenated and divided into equal
 * stretches. A stretch is in one tile or several; a block's part of a tile is a chunk.
 *
 * Before changing it: <A A', G G'> is a sum over k-tiles of G, so that chunks can be multiplied by the tile of A A'
 * separately, but each needs all of A A'. */
#ifndef TCHI_CUDA_STREAM_K_CUH
#define TCHI_CUDA_STREAM_K_CUH

#include "backends/cuda/device/elements.cuh"

typedef struct tchi_stream_k {
    int32_t blocks;
    int32_t ktiles_a, ktiles_g;
    int32_t whole; /* tiles per block */
    int32_t split_tiles, split_blocks;
    int32_t cut; /* of G's k-tiles in a split tile: its owner has those before it */
} tchi_stream_k;

/* K-tiles of A or of G for one tile. */
typedef struct tchi_k_range {
    int item, of_g, first, ktiles;
} tchi_k_range;

static __host__ __device__ inline int64_t tchi_stream_k_line(const tchi_stream_k &r)
{
    return (int64_t)r.split_tiles * (r.ktiles_g - r.cut);
}

/* The start of a split_block's stretch. */
static __host__ __device__ inline int64_t tchi_stream_k_stretch(const tchi_stream_k &r, int split_block)
{
    return tchi_stream_k_line(r) * split_block / r.split_blocks;
}

/* --- on the device ----------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool tchi_stream_k_helps(const tchi_stream_k &r)
{
    return (int)blockIdx.x >= r.split_tiles;
}

/* Chunks of a split_block. */
static __device__ __forceinline__ int tchi_stream_k_chunks(const tchi_stream_k &r)
{
    int split_block = (int)blockIdx.x - r.split_tiles;
    int each = r.ktiles_g - r.cut;
    if (r.split_tiles == 0 || each == 0) {
        return 0;
    }
    int64_t from = tchi_stream_k_stretch(r, split_block);
    int64_t to = tchi_stream_k_stretch(r, split_block + 1);
    return from == to ? 0 : (int)((to - 1) / each - from / each) + 1;
}

static __device__ __forceinline__ int tchi_stream_k_count(const tchi_stream_k &r)
{
    return 2 * r.whole + (tchi_stream_k_helps(r) ? tchi_stream_k_chunks(r) : 2);
}

static __device__ __forceinline__ tchi_k_range tchi_stream_k_chunk(const tchi_stream_k &r, int number)
{
    int split_block = (int)blockIdx.x - r.split_tiles;
    int each = r.ktiles_g - r.cut;
    int64_t from = tchi_stream_k_stretch(r, split_block);
    int64_t to = tchi_stream_k_stretch(r, split_block + 1);
    int64_t tile = from / each + number;
    int64_t first = from > tile * each ? from : tile * each;
    int64_t end = to < (tile + 1) * each ? to : (tile + 1) * each;
    return {r.whole * r.blocks + (int)tile, 1, r.cut + (int)(first - tile * each), (int)(end - first)};
}

/* Run `number` of this block; a tile's run of A precedes that of G. */
static __device__ __forceinline__ tchi_k_range tchi_stream_k_get(const tchi_stream_k &r, int number)
{
    bool left_over = number >= 2 * r.whole;
    if (left_over && tchi_stream_k_helps(r)) {
        return tchi_stream_k_chunk(r, number - 2 * r.whole);
    }
    int of_g = number % 2;
    return {(int)blockIdx.x + number / 2 * r.blocks, of_g, 0, !of_g ? r.ktiles_a : left_over ? r.cut : r.ktiles_g};
}

/* --- on the host ------------------------------------------------------------------------------------------------- */

#define TCHI_RUNS_WORTH 8 /* k-tiles that a split must save: about the cost of storing and joining chunks */

/* Owners and split_blocks finish together if A and G up to the cut are as many k-tiles as a stretch. */
static inline tchi_stream_k tchi_stream_k_share(int64_t items, int blocks, int64_t ktiles_a, int64_t ktiles_g)
{
    tchi_stream_k r = {};
    r.blocks = blocks;
    r.ktiles_a = (int32_t)ktiles_a;
    r.ktiles_g = (int32_t)ktiles_g;
    r.whole = (int32_t)(items / blocks);
    r.split_tiles = (int32_t)(items % blocks);
    r.split_blocks = blocks - r.split_tiles;
    int64_t less = r.split_tiles * ktiles_g - r.split_blocks * ktiles_a;
    int64_t cut = less > 0 ? tchi_cuda_ceil_div(less, blocks) : 0;
    r.cut = (int32_t)(r.split_tiles > 0 && ktiles_g - cut >= TCHI_RUNS_WORTH ? cut : ktiles_g);
    return r;
}

#endif
