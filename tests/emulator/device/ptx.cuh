/* The functions of src/backends/cuda/device/ptx.cuh on the emulated multiprocessor, with the same names, signatures and
 * semantics. */
#ifndef TCHI_CUDA_PTX_CUH
#define TCHI_CUDA_PTX_CUH

#include <stdint.h>

#define TCHI_WGMMA 1

static __device__ inline uint32_t tchi_shared_address(const void *shared)
{
    return emulator_shared_address(shared);
}

static __device__ inline int tchi_thread_index()
{
    return (int)threadIdx.x;
}

namespace tchi
{

/* 20 bits, like the hardware's approximations. */
static inline double cut_to_20_bits(double x)
{
    return reinterpret<double>(reinterpret<uint64_t>(x) & ~(((uint64_t)1 << 32) - 1));
}

} // namespace tchi

static __device__ inline double tchi_reciprocal_approx(double x)
{
    return tchi::cut_to_20_bits(1.0 / x);
}

static __device__ inline double tchi_inverse_root_approx(double x)
{
    return tchi::cut_to_20_bits(1.0 / sqrt(x));
}

/* --- asynchronous copies ----------------------------------------------------------------------------------------- */

static __device__ inline void tchi_cp_async_16(void *shared, const void *global, int bytes_valid)
{
    emulator_copy_16(shared, global, bytes_valid);
}

static __device__ inline void tchi_cp_async_16(void *shared, const void *global)
{
    emulator_copy_16(shared, global, 16);
}

static __device__ inline void tchi_cp_async_commit()
{
    emulator_copy_commit();
}

template <int pending> static __device__ inline void tchi_cp_async_wait()
{
    emulator_copy_wait(pending);
}

static __device__ inline double tchi_load_shared_f64(const void *shared)
{
    return *(const double *)shared;
}

/* --- fragments --------------------------------------------------------------------------------------------------- */

namespace tchi
{

template <typename T> static inline T read_as(const void *from)
{
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline const char *matrix_row(const records<const void *> &rows, int i)
{
    const char *row = (const char *)rows[i];
    if ((uintptr_t)row % 16 != 0) {
        emulator_fail("a row of ldmatrix or stmatrix that is not aligned to 16 bytes");
    }
    return row;
}

/* Tensor core operands from the lanes' fragments: A has `depth` columns, of which lane 4 g + t has a[...] as ptx.cuh
 * describes it. */
struct half_fragments {
    uint32_t a[4], b[2];
};

static inline float half_at(uint32_t pair, int which, bool brain)
{
    uint16_t bits = (uint16_t)(pair >> (16 * which));
    return brain ? brain_to_float(bits) : half_to_float(bits);
}

/* The same as numbers, which each lane converts once for all readers. */
struct float_fragments {
    float a[4][2], b[2][2];
};

static inline void multiply_halves(float c[4], const uint32_t a[4], const uint32_t b[2], bool brain)
{
    float_fragments mine;
    for (int i = 0; i < 8; i++) {
        mine.a[i / 2][i % 2] = half_at(a[i / 2], i % 2, brain);
        mine.b[i / 2 % 2][i % 2] = half_at(b[i / 2 % 2], i % 2, brain);
    }
    records<float_fragments> all = exchange_records(mine);
    int g = (int)lane() / 4, t = (int)lane() % 4;
    for (int k = 0; k < 16; k++) {
        const float_fragments &row = all[4 * g + k % 8 / 2];
        for (int j = 0; j < 2; j++) {
            float right = all[4 * (2 * t + j) + k % 8 / 2].b[k / 8][k % 2];
            c[j] += row.a[k / 8 * 2][k % 2] * right;
            c[2 + j] += row.a[k / 8 * 2 + 1][k % 2] * right;
        }
    }
}

} // namespace tchi

static __device__ inline void tchi_ldmatrix_x4(uint32_t r[4], const void *shared_row)
{
    auto rows = tchi::exchange_records(shared_row);
    int g = (int)tchi::lane() / 4, t = (int)tchi::lane() % 4;
    for (int i = 0; i < 4; i++) {
        r[i] = tchi::read_as<uint32_t>(tchi::matrix_row(rows, 8 * i + g) + 4 * t);
    }
}

static __device__ inline void tchi_ldmatrix_x4_transposed(uint32_t r[4], const void *shared_row)
{
    auto rows = tchi::exchange_records(shared_row);
    int g = (int)tchi::lane() / 4, t = (int)tchi::lane() % 4;
    for (int i = 0; i < 4; i++) {
        uint32_t low = tchi::read_as<uint16_t>(tchi::matrix_row(rows, 8 * i + 2 * t) + 2 * g);
        uint32_t high = tchi::read_as<uint16_t>(tchi::matrix_row(rows, 8 * i + 2 * t + 1) + 2 * g);
        r[i] = low | high << 16;
    }
}

static __device__ inline void tchi_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    tchi::multiply_halves(c, a, b, true);
}

static __device__ inline void tchi_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    tchi::multiply_halves(c, a, b, false);
}

/* --- float32 products of operands rounded to TF32 ---------------------------------------------------------------- */

static __device__ inline uint32_t tchi_round_tf32(uint32_t bits)
{
    return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7F800000u) ? bits + 0x1000u : bits;
}

static __device__ inline void tchi_mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    auto all = tchi::exchange_records(tchi::half_fragments{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    int g = (int)tchi::lane() / 4, t = (int)tchi::lane() % 4;
    auto cut = [](uint32_t bits) { return __uint_as_float(bits & 0xFFFFE000u); };
    for (int k = 0; k < 8; k++) {
        const tchi::half_fragments &row = all[4 * g + k % 4];
        for (int j = 0; j < 2; j++) {
            float right = cut(all[4 * (2 * t + j) + k % 4].b[k / 4]);
            c[j] += cut(row.a[k / 4 * 2]) * right;
            c[2 + j] += cut(row.a[k / 4 * 2 + 1]) * right;
        }
    }
}

/* --- float64 products -------------------------------------------------------------------------------------------- */

static __device__ inline void tchi_mma_f64_8x8x4(double c[2], double a, double b)
{
    auto all = tchi::exchange_records(make_double2(a, b));
    int g = (int)tchi::lane() / 4, t = (int)tchi::lane() % 4;
    for (int k = 0; k < 4; k++) {
        double left = all[4 * g + k].x;
        c[0] = fma(left, all[8 * t + k].y, c[0]);
        c[1] = fma(left, all[8 * t + 4 + k].y, c[1]);
    }
}

namespace tchi
{

/* C (16 by 8) += A (16 by 4 count) B: a[2 i], a[2 i + 1] rows g, g + 8 of column 4 i + t, b[i] row 4 i + t of column
 * g. */
template <int count> struct double_fragments {
    double a[2 * count], b[count];
};

template <int count> static inline void multiply_doubles(double c[4], const double *a, const double *b)
{
    double_fragments<count> mine;
    memcpy(mine.a, a, sizeof mine.a);
    memcpy(mine.b, b, sizeof mine.b);
    records<double_fragments<count>> all = exchange_records(mine);
    int g = (int)lane() / 4, t = (int)lane() % 4;
    for (int k = 0; k < 4 * count; k++) {
        const double_fragments<count> &row = all[4 * g + k % 4];
        for (int j = 0; j < 2; j++) {
            double right = all[4 * (2 * t + j) + k % 4].b[k / 4];
            c[j] = fma(row.a[k / 4 * 2], right, c[j]);
            c[2 + j] = fma(row.a[k / 4 * 2 + 1], right, c[2 + j]);
        }
    }
}

} // namespace tchi

static __device__ inline void tchi_mma_f64_16x8x8(double c[4], const double a[4], const double b[2])
{
    tchi::multiply_doubles<2>(c, a, b);
}

static __device__ inline void tchi_mma_f64_16x8x16(double c[4], const double a[8], const double b[4])
{
    tchi::multiply_doubles<4>(c, a, b);
}

/* --- clusters ---------------------------------------------------------------------------------------------------- */

static __device__ inline int tchi_cluster_rank()
{
    return emulator_cluster_rank();
}

static __device__ inline int tchi_cluster_size()
{
    return emulator_cluster_size();
}

static __device__ inline void tchi_cluster_sync()
{
    tchi::wait({EMULATOR_WAIT_CLUSTER, 0, 0, 0});
}

static __device__ inline void *tchi_cluster_map(void *shared, int rank)
{
    return emulator_cluster_map(shared, rank);
}

#endif
