/* SOAP's Adam inside blocks. Memory-bound; chunks of transposed blocks pass through shared memory.
 *
 *     v = beta2 * v + (1 - beta2) * block[0] * block[0];
 *     block[1] *= sqrt(correction2) / (sqrt(v) + eps); */
#include "norms.cuh"

template <typename real> struct rotated_numbers {
    real keep, take; /* v = keep v + take g^2 */
    real eps;
    real step; /* d = step d / (sqrt(v) + eps) */
    int skip;
};

template <typename real>
static __device__ rotated_numbers<real> rotated_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect)
{
    rotated_numbers<real> n;
    n.keep = (real)list.hyper->beta2;
    n.take = (real)(1.0 - list.hyper->beta2);
    n.eps = (real)list.hyper->eps;
    n.step = (real)sqrt(rect.clock->correction2);
    n.skip = tchi_cuda_skips(list);
    return n;
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void rotated_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, rotated_numbers<real> &numbers,
                                            real *tile, warp_maxima &of_warps, uint32_t *largest)
{
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_BLOCK_0);
    tchi_cuda_vec4s<real> d = tchi_cuda_fetch(ctx, TCHI_CUDA_BLOCK_1);
    tchi_cuda_vec4s<real> v = tchi_cuda_fetch(ctx, TCHI_CUDA_STATE_1);
    if (threadIdx.x == 0) {
        numbers = rotated_numbers_of<real>(ctx.list, ctx.rect);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_block(ctx, TCHI_CUDA_BLOCK_0, tile, g);
    tchi_cuda_unpack_block(ctx, TCHI_CUDA_BLOCK_1, tile, d);
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        real gradient = g.at[k / 4].v[k % 4], *square = &v.at[k / 4].v[k % 4], *direction = &d.at[k / 4].v[k % 4];
        *square = fma(numbers.keep, *square, numbers.take * gradient * gradient);
        *direction = numbers.step * *direction / (sqrt(*square) + numbers.eps);
    }
    tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
    tchi_cuda_put_block(ctx, TCHI_CUDA_BLOCK_1, tile, d);
    if (largest == nullptr) {
        return;
    }
    note_largest(d, of_warps);
    __syncthreads();
    if (threadIdx.x == 0) {
        keep_largest(of_warps, largest + ctx.rect.block_index);
    }
}

template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    rotated_adam_kernel(const __grid_constant__ tchi_cuda_rects list, uint32_t *largest)
{
    __shared__ rotated_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ warp_maxima of_warps;
    tchi_cuda_with_chunk<real, true>(list,
                                     [&](const auto &ctx) { rotated_chunk(ctx, numbers, tile, of_warps, largest); });
}

tch_status tchi_cuda_rotated_adam(void *state, const tch_update *update, uint32_t *notes)
{
    TCHI_TRY(clear_largest((const tchi_cuda_state *)state, update, notes, "rotated_adam"));
    return tchi_cuda_launch_update<uint32_t *>(state, update, TCHI_CUDA_BLOCKS, "rotated_adam",
                                               {rotated_adam_kernel<double>, rotated_adam_kernel<float>}, notes);
}
