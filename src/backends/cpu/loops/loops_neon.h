/* The loops of loops_body.h that the compiler vectorizes poorly on aarch64: it accumulates doubles in one register and
 * floats in two, so that additions form a dependency chain, and writes one vector per iteration. VECTOR is a register
 * of REAL; macros name the functions of one precision. NaN follows loops_body.h, with which scale, kronecker and
 * max_abs are bitwise-identical. */
#include <arm_neon.h>

enum {
    LANES = 16 / sizeof(REAL),
    STEP = 4 * LANES /* elements per iteration: four registers */
};

/* Reads all operands of an iteration before writing: out may be x. */
static inline void scale_run(int64_t n, REAL factor, const REAL *x, REAL *out)
{
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        VECTOR v0 = LOAD(x + i), v1 = LOAD(x + i + LANES), v2 = LOAD(x + i + 2 * LANES), v3 = LOAD(x + i + 3 * LANES);
        STORE(out + i, SCALE(v0, factor));
        STORE(out + i + LANES, SCALE(v1, factor));
        STORE(out + i + 2 * LANES, SCALE(v2, factor));
        STORE(out + i + 3 * LANES, SCALE(v3, factor));
    }
    for (; i < n; i++) {
        out[i] = factor * x[i];
    }
}

static void scale(int64_t n, double factor, const void *x, void *out)
{
    scale_run(n, (REAL)factor, x, out);
}

static void kronecker(int64_t m, const void *a_data, int64_t n, const void *b, void *out_data)
{
    const REAL *a = a_data;
    REAL *out = out_data;
    for (int64_t k = 0; k < m; k++) {
        scale_run(n, a[k], b, out + k * n);
    }
}

/* Not the maximum instruction, which prefers a signaling NaN. */
static inline VECTOR larger(VECTOR largest, VECTOR v)
{
    return SELECT(GREATER(v, largest), v, largest);
}

static double max_abs(int64_t n, const void *x_data)
{
    const REAL *x = x_data;
    VECTOR most[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        for (int k = 0; k < 4; k++) {
            most[k] = larger(most[k], ABS(LOAD(x + i + k * LANES)));
        }
    }
    VECTOR all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    REAL largest = 0;
    for (int k = 0; k < LANES; k++) {
        largest = all[k] > largest ? all[k] : largest;
    }
    for (; i < n; i++) {
        REAL v = REAL_ABS(x[i]);
        largest = v > largest ? v : largest;
    }
    return (double)largest;
}

enum { SUMS = 4, TERMS = 2 * SUMS /* of an iteration, two in a register of double */ };

static inline double add_up(const float64x2_t sums[SUMS])
{
    return vaddvq_f64(vaddq_f64(vaddq_f64(sums[0], sums[1]), vaddq_f64(sums[2], sums[3])));
}

static double sum_squares(int64_t n, double factor, const void *x_data)
{
    const REAL *x = x_data;
    float64x2_t sums[SUMS] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + TERMS <= n; i += TERMS) {
        for (int k = 0; k < SUMS; k++) {
            float64x2_t v = vmulq_n_f64(LOAD_DOUBLES(x + i + 2 * k), factor);
            sums[k] = vfmaq_f64(sums[k], v, v);
        }
    }
    double sum = add_up(sums);
    for (; i < n; i++) {
        double v = (double)x[i] * factor;
        sum += v * v;
    }
    return sum;
}

static double dot(int64_t n, const void *x_data, const double *y)
{
    const REAL *x = x_data;
    float64x2_t sums[SUMS] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + TERMS <= n; i += TERMS) {
        for (int k = 0; k < SUMS; k++) {
            sums[k] = vfmaq_f64(sums[k], LOAD_DOUBLES(x + i + 2 * k), vld1q_f64(y + i + 2 * k));
        }
    }
    double sum = add_up(sums);
    for (; i < n; i++) {
        sum += (double)x[i] * y[i];
    }
    return sum;
}
