/* The optimizers' loops in one precision, REAL, for the instruction set of the including file. Square roots and
 * divisions are exact: results must be within rounding of a GPU's. A file that defines CUSTOM_TRANSPOSE provides
 * transpose. */
#include "steps.h"

#include <math.h>
#include <string.h>

#include "backends/cpu/update/philox.h"
#include "core/codes.h"
#include "core/arith.h"

static void divide(int64_t n, double divisor, const void *x_data, void *out_data)
{
    const REAL *x = x_data;
    REAL *out = out_data;
    REAL d = (REAL)divisor;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        out[i] = x[i] / d;
    }
}

/* Memory-bound outside the caches: 4 elements read and 3 written per element. Inlined twice, so that each copy knows
 * whether `largest` is NULL. */
static inline __attribute__((always_inline)) void adamw_loop(int64_t n, const tchi_cpu_adamw_numbers *c, REAL *p,
                                                             const REAL *g, REAL *m, REAL *v, REAL *largest)
{
    const REAL keep1 = (REAL)c->keep1, take1 = (REAL)c->take1, keep2 = (REAL)c->keep2, take2 = (REAL)c->take2;
    const REAL root = (REAL)c->root, eps = (REAL)c->eps, step = (REAL)c->step;
    const REAL along = (REAL)c->decay.along, against = (REAL)c->decay.against;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL mean = keep1 * m[i] + take1 * g[i];
        REAL square = keep2 * v[i] + take2 * g[i] * g[i];
        m[i] = mean;
        v[i] = square;
        if (largest != NULL) {
            square = largest[i] >= square ? largest[i] : square; /* NaN propagates */
            largest[i] = square;
        }
        p[i] = (mean * p[i] >= 0 ? along : against) * p[i] - step * mean / (root * REAL_SQRT(square) + eps);
    }
}

static void adamw(int64_t n, const tchi_cpu_adamw_numbers *c, void *p, const void *g, void *m, void *v, void *largest)
{
    if (largest == NULL) {
        adamw_loop(n, c, p, g, m, v, NULL);
    } else {
        adamw_loop(n, c, p, g, m, v, largest);
    }
}

/* 3 elements read and 2 written per element. A NaN is neither above nor below 0. */
static void lion(int64_t n, const tchi_cpu_lion_numbers *c, void *p_data, const void *g_data, void *m_data)
{
    const REAL keep1 = (REAL)c->keep1, take1 = (REAL)c->take1, keep2 = (REAL)c->keep2, take2 = (REAL)c->take2;
    const REAL along = (REAL)c->decay.along, against = (REAL)c->decay.against, step = (REAL)c->step;
    REAL *p = p_data;
    const REAL *g = g_data;
    REAL *m = m_data;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL direction = keep1 * m[i] + take1 * g[i];
        REAL up = direction > 0 ? step : 0;
        REAL down = direction < 0 ? step : 0;
        REAL u = up - down;
        m[i] = keep2 * m[i] + take2 * g[i];
        p[i] = (u * p[i] >= 0 ? along : against) * p[i] - u;
    }
}

static void descend(int64_t n, tchi_keep decay, double step, const void *u_data, void *p_data)
{
    const REAL along = (REAL)decay.along, against = (REAL)decay.against, s = (REAL)step;
    const REAL *u = u_data;
    REAL *p = p_data;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        p[i] = (u[i] * p[i] >= 0 ? along : against) * p[i] - s * u[i];
    }
}

static void square(int64_t n, double keep, double take, const void *x_data, void *v_data)
{
    const REAL *x = x_data;
    REAL *v = v_data;
    REAL k = (REAL)keep;
    REAL t = (REAL)take;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        v[i] = k * v[i] + t * x[i] * x[i];
    }
}

static void whiten(int64_t n, double root, double eps, double factor, const void *v_data, const void *x_data,
                   void *out_data)
{
    const REAL *v = v_data;
    const REAL *x = x_data;
    REAL *out = out_data;
    REAL r = (REAL)root;
    REAL e = (REAL)eps;
    REAL f = (REAL)factor;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        out[i] = f * x[i] / (r * REAL_SQRT(v[i]) + e);
    }
}

static void divide_by_roots(int64_t n, double eps, const void *v_data, const void *x_data, void *out_data)
{
    const REAL *v = v_data;
    const REAL *x = x_data;
    REAL *out = out_data;
    REAL e = (REAL)eps;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL divisor = REAL_SQRT(v[i]) + e;
        REAL quotient = x[i] / divisor;
        out[i] = divisor > 0 ? quotient : 0;
    }
}

static void add_squares(int64_t n, const void *x_data, double *sums)
{
    const REAL *x = x_data;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        sums[i] += (double)x[i] * (double)x[i];
    }
}

#if !defined(CUSTOM_TRANSPOSE)
/* Writes along rows and reads down columns: strided stores took twice the time. The caller passes tiles that fit L1. */
static void transpose(int64_t rows, int64_t cols, const void *x_data, int64_t ld, void *out_data, int64_t out_ld)
{
    const REAL *restrict x = x_data;
    REAL *restrict out = out_data;
    for (int64_t j = 0; j < cols; j++) {
        for (int64_t i = 0; i < rows; i++) {
            out[j * out_ld + i] = x[i * ld + j];
        }
    }
}
#endif

/* --- stochastic rounding ---------------------------------------------------------------------------------------- */

/* The words of PHILOX_LANES counters, in the order of the elements they belong to. */
static void words_of_lanes(const tchi_cpu_random_run *random, uint64_t group, uint32_t words[4 * PHILOX_LANES])
{
    philox_counters c;
    for (int i = 0; i < PHILOX_LANES; i++) {
        c.word[0][i] = (uint32_t)(group + (uint64_t)i);
        c.word[1][i] = (uint32_t)((group + (uint64_t)i) >> 32);
        c.word[2][i] = random->parameter;
        c.word[3][i] = random->step;
    }
    philox_encipher(&c, random->seed);
    for (int i = 0; i < PHILOX_LANES; i++) {
        for (int k = 0; k < 4; k++) {
            words[4 * i + k] = c.word[k][i];
        }
    }
}

static void random_words(int64_t n, const tchi_cpu_random_run *random, uint32_t *out)
{
    uint32_t words[4 * PHILOX_LANES];
    int64_t done = 0;
    while (done < n) {
        uint64_t element = (uint64_t)(random->element + done);
        int64_t within = (int64_t)(element % 4);
        int64_t count = n - done < 4 * PHILOX_LANES - within ? n - done : 4 * PHILOX_LANES - within;
        words_of_lanes(random, element / 4, words);
        memcpy(out + done, words + within, (size_t)count * sizeof *out);
        done += count;
    }
}

/* Stochastic rounding: adds less than a unit of the last kept bit and truncates. */
static void cut(int64_t n, int second, const float *x, const uint32_t *words, uint16_t *out)
{
    int shift = second ? 16 : 0;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        out[i] = tchi_code_bfloat(x[i], words[i] >> shift & 0xFFFFu);
    }
}

static void round_at_random(int64_t n, const tchi_cpu_random_run *random, const float *x, uint16_t *out)
{
    enum { AT_ONCE = 8 * PHILOX_LANES };
    uint32_t words[AT_ONCE];
    for (int64_t done = 0; done < n; done += AT_ONCE) {
        tchi_cpu_random_run here = *random;
        int64_t count = tchi_min(n - done, AT_ONCE);
        here.element += done;
        random_words(count, &here, words);
        cut(count, 0, x + done, words, out + done);
    }
}

/* --- moments in eight bits --------------------------------------------------------------------------------------- */

static tchi_code_extent extent_of(int64_t n, const float *x, const float *was)
{
    tchi_code_extent e = TCHI_CODE_EXTENT_INIT;
    uint32_t largest = e.largest, least = e.least, pairs = e.pairs;
#pragma omp simd reduction(max : largest) reduction(min : least, pairs)
    for (int64_t i = 0; i < n / 2; i++) {
        tchi_code_extent pair = tchi_code_extend(e, x + 2 * i, was + 2 * i);
        largest = pair.largest > largest ? pair.largest : largest;
        least = pair.least < least ? pair.least : least;
        pairs = pair.pairs < pairs ? pair.pairs : pairs;
    }
    e = (tchi_code_extent){largest, least, pairs};
    if (n % 2 != 0) {
        e = tchi_code_extend(e, (const float[]){x[n - 1], 0.0f}, (const float[]){was[n - 1], 0.0f});
    }
    return e;
}

static void encode_second(int64_t n, const float *x, const uint32_t *words, uint8_t *codes, tchi_code_range range)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        codes[i] = (uint8_t)tchi_code_square(x[i], range, words[i] >> 16);
    }
}

/* `was`: the previous values; if unchanged, the random bits decide. */
static void encode_first(int64_t n, const float *x, const float *was, const uint32_t *words, uint8_t *codes,
                         tchi_code_range range)
{
    tchi_code_rounding r = tchi_code_rounding_of(range);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        codes[i] = (uint8_t)tchi_code_signed(x[i], r, tchi_code_random(x[i], was[i], r, words[i] & 0xFFFFu));
    }
}

static void encode_squares(int64_t n, const float *x, const uint32_t *words, uint8_t *codes, float *scales)
{
    for (int64_t first = 0; first < n; first += TCH_CODE_BLOCK) {
        int64_t count = tchi_min(n - first, TCH_CODE_BLOCK);
        uint32_t scale = tchi_code_scale_squares(extent_of(count, x + first, x + first));
        encode_second(count, x + first, words + first, codes + first, tchi_code_range_squares(scale));
        scales[first / TCH_CODE_BLOCK] = tchi_code_float(scale);
    }
}

static void decode(int64_t n, int second, const uint8_t *codes, const float *scales, float *x)
{
    for (int64_t first = 0; first < n; first += TCH_CODE_BLOCK) {
        int64_t end = n - first < TCH_CODE_BLOCK ? n : first + TCH_CODE_BLOCK;
        uint32_t scale = tchi_code_bits(scales[first / TCH_CODE_BLOCK]);
        tchi_code_range range = second ? tchi_code_range_squares(scale) : tchi_code_range_signed(scale);
#pragma omp simd
        for (int64_t i = first; i < end; i++) {
            x[i] = second ? tchi_decode_square(codes[i], range) : tchi_decode_signed(codes[i], range);
        }
    }
}

static void encode_signed(int64_t n, tchi_code_use use, const float *x, const uint32_t *words, const float *squares,
                          uint8_t *codes, float *scales)
{
    float decoded[TCH_CODE_BLOCK];
    for (int64_t first = 0; first < n; first += TCH_CODE_BLOCK) {
        int64_t block = first / TCH_CODE_BLOCK;
        int64_t count = tchi_min(n - first, TCH_CODE_BLOCK);
        uint32_t second = squares == NULL ? 0u : tchi_code_bits(squares[block]);
        const float *was = use == TCHI_CODE_ADAMW ? x + first : decoded;
        if (use != TCHI_CODE_ADAMW) {
            decode(count, 0, codes + first, scales + block, decoded);
        }
        uint32_t scale = tchi_code_scale_signed(use, extent_of(count, x + first, was), second);
        encode_first(count, x + first, was, words + first, codes + first, tchi_code_range_signed(scale));
        scales[block] = tchi_code_float(scale);
    }
}

#define STEPS_TABLE                                                                                                    \
    {                                                                                                                  \
        .divide = divide, .adamw = adamw, .lion = lion, .descend = descend, .divide_by_roots = divide_by_roots,        \
        .add_squares = add_squares, .square = square, .whiten = whiten, .transpose = transpose,                        \
        .round_at_random = round_at_random, .random_words = random_words, .cut = cut, .decode = decode,                \
        .encode_squares = encode_squares, .encode_signed = encode_signed,                                              \
    }
