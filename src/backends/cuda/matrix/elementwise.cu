/* Elementwise operations on batches of matrices. Every element is read once and written once.
 *
 *     for (i = 0; i < rows; i++) {
 *         for (j = 0; j < cols; j++) {
 *             out[i][j] = c0 * (i == j) + c1 * x[i][j] + c2 * y[i][j];    // combine
 *             out[i][j] = x[i][j] * w[i];                                 // scale_rows
 *             out[i][j] = random_bit(seed, i, j) ? 1 : -1;                // random_signs
 *             out[i][j] = flag == TCH_REPORT_OK ? x[i][j] : out[i][j];    // select
 *             x[i][j] /= (values == NULL ? max(row[i], 0) * max(col[j], 0) : max(values[i][j], 0)) + damping;
 *         }
 *     } */
#include "backends/cuda/device/batch_walk.cuh"

/* A missing operand as kernels see it: data NULL. */
static tchi_cuda_operand operand_or_none(const tch_matrices *m)
{
    return m != NULL ? tchi_cuda_operand_of(m) : tchi_cuda_operand{NULL, TCH_SCALAR_F32, 0, 0, 0};
}

static bool is_double(const tch_matrices *m)
{
    return m != NULL && m->type == TCH_SCALAR_F64;
}

template <typename real> struct combine {
    real c0, c1, c2;
    tchi_cuda_operand x, y, out;

    static __device__ inline void accumulate(tchi_cuda_patch_values<real> &sum, real c, const tchi_cuda_operand &m,
                                             const tchi_cuda_patch &p)
    {
        tchi_cuda_patch_values<real> values = tchi_cuda_load_patch<real>(m, p);
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            sum.row[k / 4].v[k % 4] += c * values.row[k / 4].v[k % 4];
        }
    }

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<real> sum = {};
        if (x.data != NULL) {
            accumulate(sum, c1, x, p);
        }
        if (y.data != NULL) {
            accumulate(sum, c2, y, p);
        }
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            sum.row[k / 4].v[k % 4] += p.i + k / 4 * p.step == p.j + k % 4 ? c0 : (real)0;
        }
        tchi_cuda_store_patch(out, p, sum);
    }
};

tch_status tchi_cuda_combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                             const tch_matrices *out)
{
    tchi_cuda_operand from = operand_or_none(x), other = operand_or_none(y), to = tchi_cuda_operand_of(out);
    if (is_double(x) || is_double(y) || is_double(out)) {
        return tchi_cuda_walk(state, "combine", out, combine<double>{c0, c1, c2, from, other, to});
    }
    return tchi_cuda_walk(state, "combine", out, combine<float>{(float)c0, (float)c1, (float)c2, from, other, to});
}

/* w (batch, 1, rows). */
template <typename real> struct scale_rows {
    tchi_cuda_operand x, w, out;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<real> values = tchi_cuda_load_patch<real>(x, p);
#pragma unroll
        for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
            int64_t i = p.i + k * p.step;
            real factor = i < p.rows ? tchi_cuda_load<real>(w.type, tchi_cuda_at(w, p.b, 0, i), 0, w.stride) : (real)0;
#pragma unroll
            for (int l = 0; l < 4; l++) {
                values.row[k].v[l] *= factor;
            }
        }
        tchi_cuda_store_patch(out, p, values);
    }
};

tch_status tchi_cuda_scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out)
{
    tchi_cuda_operand from = tchi_cuda_operand_of(x), by = tchi_cuda_operand_of(w), to = tchi_cuda_operand_of(out);
    return is_double(x) || is_double(w) || is_double(out)
               ? tchi_cuda_walk(state, "scale_rows", out, scale_rows<double>{from, by, to})
               : tchi_cuda_walk(state, "scale_rows", out, scale_rows<float>{from, by, to});
}

/* Bitwise-identical to the CPU's function. */
static __device__ inline uint64_t mix(uint64_t counter)
{
    uint64_t z = counter * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93u;
    z = (z ^ (z >> 29)) * 0xD6E8FEB86659FD93u;
    return z ^ (z >> 32);
}

struct random_signs {
    uint64_t seed;
    tchi_cuda_operand out;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<float> signs;
#pragma unroll
        for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
            uint64_t row = seed + mix((uint64_t)(p.i + k * p.step) + 1);
#pragma unroll
            for (int l = 0; l < 4; l++) {
                signs.row[k].v[l] = mix(row + (uint64_t)(p.j + l)) >> 63 != 0 ? 1.0f : -1.0f;
            }
        }
        tchi_cuda_store_patch(out, p, signs);
    }
};

tch_status tchi_cuda_random_signs(void *state, uint64_t seed, const tch_matrices *out)
{
    return tchi_cuda_walk(state, "random_signs", out, random_signs{seed, tchi_cuda_operand_of(out)});
}

template <typename real> struct select_matrices {
    const int32_t *flags;
    tchi_cuda_operand x, out;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        if (flags[p.b] == TCH_REPORT_OK) {
            tchi_cuda_store_patch(out, p, tchi_cuda_load_patch<real>(x, p));
        }
    }
};

/* Integers are handled as floats of the same size, which are copied bit by bit between equal types. */
static tchi_cuda_operand selectable(const tch_matrices *m)
{
    tch_matrices floats = *m;
    floats.type = m->type == TCH_SCALAR_I32 ? TCH_SCALAR_F32 : m->type == TCH_SCALAR_I64 ? TCH_SCALAR_F64 : m->type;
    return tchi_cuda_operand_of(&floats);
}

tch_status tchi_cuda_select(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out)
{
    tchi_cuda_operand from = selectable(x), to = selectable(out);
    return from.type == TCH_SCALAR_F64 || to.type == TCH_SCALAR_F64
               ? tchi_cuda_walk(state, "select", out, select_matrices<double>{flags, from, to})
               : tchi_cuda_walk(state, "select", out, select_matrices<float>{flags, from, to});
}

/* KFAC's division in the eigenbasis. Divisors are formed in float64: the product of two small eigenvalues may be below
 * float32's range, and so may the damping. */
template <typename real> struct damped_divide {
    tchi_cuda_operand x;
    tchi_cuda_operand rows, cols; /* without data if `values` contains it */
    tchi_cuda_operand values;
    double damping;

    /* NaN propagates. */
    static __device__ inline double at_least_0(double value)
    {
        return value < 0.0 ? 0.0 : value;
    }

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<real> quotients = tchi_cuda_load_patch<real>(x, p);
#pragma unroll
        for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
            int64_t i = p.i + k * p.step;
            bool whole = values.data != NULL, inside = i < p.rows && p.count > 0;
            tchi_cuda_vec4<real> by = whole ? tchi_cuda_load_vec4<real>(values, p.b, i, p.j, inside ? p.count : 0)
                                            : tchi_cuda_load_vec4<real>(cols, p.b, 0, p.j, p.count);
            double row = whole || !inside
                             ? 1.0
                             : at_least_0((double)tchi_cuda_load<real>(rows.type, tchi_cuda_at(rows, p.b, 0, i), 0, 0));
#pragma unroll
            for (int l = 0; l < 4; l++) {
                real *value = &quotients.row[k].v[l];
                *value = (real)((double)*value / (row * at_least_0((double)by.v[l]) + damping));
            }
        }
        tchi_cuda_store_patch(x, p, quotients);
    }
};

tch_status tchi_cuda_damped_divide(void *state, const tch_matrices *x, const tch_matrices *rows,
                                   const tch_matrices *cols, const tch_matrices *values, double damping)
{
    tchi_cuda_operand to = tchi_cuda_operand_of(x), row = operand_or_none(rows), col = operand_or_none(cols);
    tchi_cuda_operand whole = operand_or_none(rows == NULL ? values : NULL);
    return is_double(x) ? tchi_cuda_walk(state, "damped_divide", x, damped_divide<double>{to, row, col, whole, damping})
                        : tchi_cuda_walk(state, "damped_divide", x, damped_divide<float>{to, row, col, whole, damping});
}
