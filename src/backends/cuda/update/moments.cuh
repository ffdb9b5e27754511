/* Moments in bfloat16, or in eight-bit codes with a scale per 128 elements, which a warp has at one step. core/codes.h
 * has the codes, torchium/backend/update.h the random bits: one Philox counter serves four elements of both moments. */
#ifndef TCHI_CUDA_MOMENTS_CUH
#define TCHI_CUDA_MOMENTS_CUH

#include "core/codes.h"
#include "updates.cuh"

/* Blocks per multiprocessor: they have fewer bytes in flight each than with float32 moments. AdamW with codes, 822
 * million elements on an H200, with the check of 1 ms: 6.91 ms with 3, 6.57 with 4, 6.45 with 5; Lion 5.11, 4.74, 4.85;
 * with float32 moments 6.58 and 4.95. */
#define TCHI_CUDA_NARROW_RESIDENT 4

template <typename real, tch_moments kept> constexpr int tchi_cuda_moment_resident()
{
    return kept == TCH_MOMENTS_REAL ? tchi_cuda_resident<real>() : TCHI_CUDA_NARROW_RESIDENT;
}

#define TCHI_CUDA_MOMENT_FN                                                                                            \
    template <tch_moments kept, typename real, tchi_cuda_access_path path> static __device__ inline

/* Scales use slots that no operation with such moments has. */
static __device__ inline float *tchi_cuda_scale_at(const tchi_cuda_rect &rect, int index, const tchi_cuda_place &place)
{
    return (float *)rect.data[index == 0 ? TCHI_CUDA_STATE_2 : TCHI_CUDA_BLOCK_1] + place.offset / TCH_CODE_BLOCK;
}

/* Codes are read and written as whole words, including the last. A raw word and its scale are in the first two of the
 * four. */
static __device__ inline tchi_cuda_vec4<float> tchi_cuda_load_codes(const tchi_cuda_rect &rect, int index,
                                                                    const tchi_cuda_place &place)
{
    const uint32_t *words = (const uint32_t *)((const uint8_t *)rect.data[TCHI_CUDA_STATE_0 + index] + place.offset);
    tchi_cuda_vec4<float> raw = {};
    if (place.count > 0) {
        raw.v[0] = __uint_as_float(__ldcs(words));
        raw.v[1] = __ldcs(tchi_cuda_scale_at(rect, index, place));
    }
    return raw;
}

TCHI_CUDA_MOMENT_FN tchi_cuda_vec4s<real> tchi_cuda_fetch_moment(const tchi_cuda_chunk_ctx<real, path> &ctx, int index)
{
    tchi_cuda_slot slot = (tchi_cuda_slot)(TCHI_CUDA_STATE_0 + index);
    if constexpr (kept == TCH_MOMENTS_REAL) {
        return tchi_cuda_fetch(ctx, slot);
    } else {
        tchi_cuda_vec4s<real> raw;
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            tchi_cuda_place place = tchi_cuda_chunk_place(ctx, slot, s);
            raw.at[s] = kept == TCH_MOMENTS_CODES
                            ? tchi_cuda_load_codes(ctx.rect, index, place)
                            : tchi_cuda_load_raw<real>(TCH_SCALAR_BF16, tchi_cuda_chunk_wide(ctx, slot),
                                                       ctx.rect.data[slot], place);
        }
        return raw;
    }
}

static __device__ inline tchi_cuda_vec4<float> tchi_cuda_decode(const tchi_cuda_vec4<float> &raw, int index)
{
    uint32_t word = __float_as_uint(raw.v[0]);
    uint32_t scale = __float_as_uint(raw.v[1]);
    tchi_code_range range = index == 0 ? tchi_code_range_signed(scale) : tchi_code_range_squares(scale);
    tchi_cuda_vec4<float> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t code = word >> (8 * k) & 0xFFu;
        four.v[k] = index == 0 ? tchi_decode_signed(code, range) : tchi_decode_square(code, range);
    }
    return four;
}

template <tch_moments kept, typename real>
static __device__ inline void tchi_cuda_unpack_moment(int index, tchi_cuda_vec4s<real> &moment)
{
    if constexpr (kept != TCH_MOMENTS_REAL) {
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            moment.at[s] = kept == TCH_MOMENTS_CODES ? tchi_cuda_decode(moment.at[s], index)
                                                     : tchi_cuda_unpack_four(TCH_SCALAR_BF16, moment.at[s]);
        }
    }
}

/* --- the way back ------------------------------------------------------------------------------------------------ */

/* Statistics for the scale of a warp's 128 elements, zero beyond the end. `was` are the previous first moments. */
template <bool squares, tchi_code_use use>
static __device__ inline tchi_code_extent
tchi_cuda_code_extent(const tchi_cuda_place &place, const tchi_cuda_vec4<float> &four, const tchi_cuda_vec4<float> &was)
{
    tchi_code_extent e = TCHI_CODE_EXTENT_INIT;
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const float now[2] = {k < place.count ? four.v[k] : 0.0f, k + 1 < place.count ? four.v[k + 1] : 0.0f};
        const float then[2] = {k < place.count ? was.v[k] : 0.0f, k + 1 < place.count ? was.v[k + 1] : 0.0f};
        e = tchi_code_extend(e, now, then);
    }
    e.largest = tchi_cuda_warp_max(e.largest);
    e.least = squares ? ~tchi_cuda_warp_max(~e.least) : 0u;
    e.pairs = !squares && use == TCHI_CODE_LION ? ~tchi_cuda_warp_max(~e.pairs) : 0u;
    return e;
}

/* Stores the words of a warp's 128 elements and their scale. Called by all lanes, with zeros beyond the end. */
template <tchi_code_use use>
static __device__ inline void tchi_cuda_store_codes(const tchi_cuda_rect &rect, int index, const tchi_cuda_place &place,
                                                    const tchi_cuda_vec4<float> &four, const tchi_cuda_vec4<float> &was,
                                                    const uint32_t random[4], uint32_t scale)
{
    tchi_code_range range = tchi_code_range_squares(scale);
    tchi_code_rounding rounding = tchi_code_rounding_of(tchi_code_range_signed(scale)); /* unused ones are left out */
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t low = random[k] & 0xFFFFu;
        low = use == TCHI_CODE_ADAMW ? low : tchi_code_random(four.v[k], was.v[k], rounding, low);
        uint32_t code = index == 0 ? tchi_code_signed(four.v[k], rounding, low)
                                   : tchi_code_square(four.v[k], range, random[k] >> 16);
        word |= k < place.count ? code << (8 * k) : 0u;
    }
    if (place.count > 0) {
        __stcs((uint32_t *)((uint8_t *)rect.data[TCHI_CUDA_STATE_0 + index] + place.offset), word);
    }
    if (place.count > 0 && threadIdx.x % 32 == 0) {
        __stcs(tchi_cuda_scale_at(rect, index, place), __uint_as_float(scale));
    }
}

static __device__ inline void tchi_cuda_store_bfloats(void *data, bool wide, int index, const tchi_cuda_place &place,
                                                      const tchi_cuda_vec4<float> &four, const uint32_t random[4])
{
    uint32_t bits[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        bits[k] = tchi_code_bfloat(four.v[k], index == 0 ? random[k] & 0xFFFFu : random[k] >> 16);
    }
    tchi_cuda_put_shorts((unsigned short *)data + place.offset, wide, place.count, bits, false);
}

/* Rounds and stores the moments of state 0 and, for AdamW, of state 1. `was` is state 0 before the step. */
template <tchi_code_use use, tch_moments kept, typename real, tchi_cuda_access_path path>
static __device__ inline void
tchi_cuda_put_moments(const tchi_cuda_chunk_ctx<real, path> &ctx, const tchi_cuda_vec4s<real> &first,
                      const tchi_cuda_vec4s<real> &second, const tchi_cuda_vec4s<real> &was)
{
    if constexpr (kept == TCH_MOMENTS_REAL) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_0, first);
        if (use == TCHI_CODE_ADAMW) {
            tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, second);
        }
    } else {
        tchi_cuda_random_key key = tchi_cuda_random_key_of(ctx.list, ctx.rect);
        key.parameter += 0x80000000u;
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            tchi_cuda_place place = tchi_cuda_chunk_place(ctx, TCHI_CUDA_STATE_0, s);
            uint4 words = tchi_cuda_random_words(key, tchi_cuda_chunk_element(ctx, place, s));
            const uint32_t random[4] = {words.x, words.y, words.z, words.w};
            if constexpr (kept == TCH_MOMENTS_CODES) {
                uint32_t squares = 0;
                if (use == TCHI_CODE_ADAMW) {
                    squares =
                        tchi_code_scale_squares(tchi_cuda_code_extent<true, use>(place, second.at[s], second.at[s]));
                    tchi_cuda_store_codes<use>(ctx.rect, 1, place, second.at[s], second.at[s], random, squares);
                }
                uint32_t scale = tchi_code_scale_signed(
                    use, tchi_cuda_code_extent<false, use>(place, first.at[s], was.at[s]), squares);
                tchi_cuda_store_codes<use>(ctx.rect, 0, place, first.at[s], was.at[s], random, scale);
            } else {
#pragma unroll
                for (int k = 0; k < (use == TCHI_CODE_ADAMW ? 2 : 1); k++) {
                    tchi_cuda_slot slot = (tchi_cuda_slot)(TCHI_CUDA_STATE_0 + k);
                    tchi_cuda_store_bfloats(ctx.rect.data[slot], tchi_cuda_chunk_wide(ctx, slot), k, place,
                                            k == 0 ? first.at[s] : second.at[s], random);
                }
            }
        }
    }
}

#endif
