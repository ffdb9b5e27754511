/* The functions of src/backends/cuda/device/hopper.cuh on the emulated multiprocessor, like ptx.cuh. */
#ifndef TCHI_CUDA_HOPPER_CUH
#define TCHI_CUDA_HOPPER_CUH

#include <stdint.h>

#include <torchium/backend.h>

#include "ptx.cuh"

/* --- threads ----------------------------------------------------------------------------------------------------- */

static __device__ inline int tchi_warpgroup()
{
    return __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
}

static __device__ inline void tchi_warpgroup_sync(int number)
{
    tchi::named_sync(number, 128);
}

static __device__ inline void tchi_threads_sync(int number, int threads)
{
    tchi::named_sync(number, threads);
}

template <int count> static __device__ inline void tchi_registers_give()
{
}

template <int count> static __device__ inline void tchi_registers_take()
{
}

/* --- barriers in shared memory ----------------------------------------------------------------------------------- */

static __device__ inline void tchi_barrier_create(uint64_t *barrier, int arrivals)
{
    emulator_barrier_create(barrier, arrivals);
}

static __device__ inline void tchi_barrier_publish()
{
}

static __device__ inline void tchi_barrier_arrive(uint64_t *barrier)
{
    emulator_barrier_arrive(barrier, 0);
}

static __device__ inline void tchi_barrier_arrive_expecting(uint64_t *barrier, int bytes)
{
    emulator_barrier_arrive(barrier, bytes);
}

static __device__ inline void tchi_barrier_arrive_at(uint64_t *barrier, int rank)
{
    emulator_barrier_arrive((uint64_t *)emulator_cluster_map(barrier, rank), 0);
}

static __device__ inline bool tchi_barrier_has_ended(uint64_t *barrier, int parity)
{
    return emulator_barrier_has_ended(barrier, parity);
}

static __device__ inline void tchi_barrier_wait(uint64_t *barrier, int parity)
{
    if (!tchi_barrier_has_ended(barrier, parity)) {
        tchi::wait({EMULATOR_WAIT_PHASE, 0, (uint32_t)parity, (uint64_t)(uintptr_t)barrier});
    }
}

/* --- TMA --------------------------------------------------------------------------------------------------------- */

static __device__ inline void tchi_tma_load_to(int blocks, void *shared, const void *map, int x, int y, int z,
                                               uint64_t *barrier)
{
    const int at[3] = {x, y, z};
    emulator_tma_load((uint32_t)blocks, shared, map, at, barrier);
}

static __device__ inline void tchi_prefetch(const void *)
{
}

static __device__ inline void tchi_tma_load(void *shared, const void *map, int x, int y, int z, uint64_t *barrier)
{
    tchi_tma_load_to(1 << tchi_cluster_rank(), shared, map, x, y, z, barrier);
}

static __device__ inline void tchi_tma_store(const void *map, int x, int y, int z, const void *shared)
{
    const int at[3] = {x, y, z};
    emulator_tma_store(map, at, shared);
}

static __device__ inline void tchi_tma_commit()
{
}

static __device__ inline void tchi_tma_wait_read()
{
    emulator_tma_wait_read();
}

static __device__ inline void tchi_tma_publish()
{
}

/* --- matrices in registers --------------------------------------------------------------------------------------- */

namespace tchi
{

/* Of 8 by 8 matrices: lanes 4 j to 4 j + 3 hold two numbers each of row j. */
struct matrix_parts {
    uint32_t r[4];
};

} // namespace tchi

/* --- wgmma products ---------------------------------------------------------------------------------------------- */

static __device__ inline uint64_t tchi_wgmma_rows(const void *shared)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

static __device__ inline void tchi_wgmma_fence()
{
}

static __device__ inline void tchi_wgmma_commit()
{
    emulator_wgmma_commit();
}

template <int pending> static __device__ inline void tchi_wgmma_wait()
{
    emulator_wgmma_wait(pending);
}

static __device__ inline uint64_t tchi_wgmma_columns(const void *shared, int apart)
{
    uint64_t address = (tchi_shared_address(shared) & 0x3FFFFu) >> 4;
    return address | (uint64_t)(apart >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

template <tch_scalar type, bool a_columns = false, bool b_columns = a_columns, int count>
static __device__ inline void tchi_wgmma(float (&d)[count], uint64_t a, uint64_t b, int add)
{
    emulator_wgmma product = {
        d,         a,
        b,         type == TCH_SCALAR_F32 ? EMULATOR_TF32 : type == TCH_SCALAR_F16 ? EMULATOR_F16 : EMULATOR_BF16,
        2 * count, a_columns ? EMULATOR_BY_COLUMNS : b_columns ? EMULATOR_B_BY_COLUMNS : EMULATOR_BY_ROWS,
        add};
    emulator_wgmma_start(&product);
}

/* Four lanes share a row. */
static __device__ inline void tchi_wgmma_registers(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add)
{
    auto all = tchi::exchange_records(tchi::matrix_parts{{a[0], a[1], a[2], a[3]}});
    float rows[2][16];
    for (int k = 0; k < 16; k++) {
        for (int h = 0; h < 2; h++) {
            uint32_t pair = all[(int)tchi::lane() / 4 * 4 + k % 8 / 2].r[k / 8 * 2 + h];
            rows[h][k] = __half2float(__ushort_as_half((unsigned short)(pair >> k % 2 * 16)));
        }
    }
    emulator_wgmma product = {d, 0, b, EMULATOR_F16, 256, EMULATOR_BY_COLUMNS, add, rows[0]};
    emulator_wgmma_start(&product);
}

template <int count> static __device__ inline void tchi_wgmma_results(float (&)[count])
{
}

/* --- 16-bit fragments to shared memory --------------------------------------------------------------------------- */

static __device__ inline void tchi_stmatrix_x4(void *shared_row, const uint32_t (&r)[4])
{
    auto all = tchi::exchange_records(tchi::matrix_parts{{r[0], r[1], r[2], r[3]}});
    int i = (int)tchi::lane() / 8, j = (int)tchi::lane() % 8;
    for (int t = 0; t < 4; t++) {
        uint32_t pair = all[4 * j + t].r[i];
        memcpy((char *)shared_row + 4 * t, &pair, sizeof pair);
    }
}

static __device__ inline void tchi_stmatrix_x4_transposed(void *shared_row, const uint32_t (&r)[4])
{
    auto all = tchi::exchange_records(tchi::matrix_parts{{r[0], r[1], r[2], r[3]}});
    int i = (int)tchi::lane() / 8, j = (int)tchi::lane() % 8;
    for (int g = 0; g < 8; g++) {
        uint16_t one = (uint16_t)(all[4 * g + j / 2].r[i] >> (16 * (j % 2)));
        memcpy((char *)shared_row + 2 * g, &one, sizeof one);
    }
}

#endif
