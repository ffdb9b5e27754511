/* Activations, their derivatives, column sums and losses of networks. The elementary functions are polynomials, so that
 * the compiler vectorizes the loops around them; each states its error. */
#include <math.h>
#include <string.h>

#include "backends/cpu/cpu.h"
#include "backends/cpu/runtime/vector_clones.h"
#include "backends/cpu/update/philox.h"
#include "core/arith.h"

/* --- elementary functions ---------------------------------------------------------------------------------------- */

/* e^x for x <= 0 to a relative error of 1e-7, 0 below the normal range. x = n ln 2 + r; n is obtained by adding a
 * constant whose last bit counts ones, which avoids an out-of-range float-to-int conversion: NaN propagates. The
 * polynomial is the best approximation of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2. */
VECTOR_INLINE float exp_of_negative(float x)
{
    const float lowest = -87.0F;
    const float bound = x < lowest ? lowest : x;
    const float shifted = bound * 1.44269504F + 0x1.8p23F;
    const float n = shifted - 0x1.8p23F;
    const float r = (bound - n * 0.693359375F) + n * 2.12194440e-4F;
    float p = 0.0013934545F;
    p = p * r + 0.0083637768F;
    p = p * r + 0.0416664556F;
    p = p * r + 0.1666657329F;
    p = p * r + 0.5F;
    p = (p * r) * r + r + 1.0F;
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127U) << 23;
    memcpy(&power, &bits, sizeof power);
    return x < lowest ? 0.0F : p * power;
}

/* To a relative error of 2e-7: (1 - e^-2x) / (1 + e^-2x), and near 0, where that cancels, x + x^3 times a polynomial in
 * x^2. */
VECTOR_INLINE float tanh_of(float x)
{
    const float size = fabsf(x);
    const float e = exp_of_negative(-2.0F * size);
    const float far = (1.0F - e) / (1.0F + e);
    const float u = x * x;
    float p = -0.0062757717F;
    p = p * u + 0.0211157147F;
    p = p * u - 0.0538750030F;
    p = p * u + 0.1333292276F;
    p = p * u - 0.3333333135F;
    const float near = size + (p * u) * size;
    return copysignf(size < 0.6F ? near : far, x);
}

/* Normal CDF, to 2e-7, and density: with z = |x| / sqrt 2 and t = 1 / (1 + z / 2), erfc(z) e^(z^2) is t times a
 * polynomial in t, fitted on 0 <= z <= 10. */
VECTOR_INLINE float normal_of(float x, float *density)
{
    const float z = fabsf(x) * 0.70710678F;
    const float t = 1.0F / (1.0F + 0.5F * z);
    const float e = exp_of_negative(-0.5F * x * x);
    float p = -0.0585486367F;
    p = p * t + 0.2823123336F;
    p = p * t - 0.4831114113F;
    p = p * t + 0.2740943134F;
    p = p * t - 0.0243820865F;
    p = p * t + 0.2019450963F;
    p = p * t + 0.2432406247F;
    p = p * t + 0.2823629379F;
    p = p * t + 0.2820867896F;
    const float tail = 0.5F * e * (p * t);
    *density = 0.39894228F * e;
    return x < 0.0F ? tail : 1.0F - tail;
}

/* --- activations ------------------------------------------------------------------------------------------------- */

VECTOR_CLONES static void add_row(int64_t n, const float *bias, float *x)
{
    for (int64_t j = 0; j < n; j++) {
        x[j] += bias[j];
    }
}

/* NaN propagates. */
VECTOR_CLONES static void relu_row(int64_t n, float *x)
{
    for (int64_t j = 0; j < n; j++) {
        x[j] = x[j] < 0.0F ? 0.0F : x[j];
    }
}

VECTOR_CLONES static void tanh_row(int64_t n, float *x)
{
    for (int64_t j = 0; j < n; j++) {
        x[j] = tanh_of(x[j]);
    }
}

VECTOR_CLONES static void gelu_row(int64_t n, float *x)
{
    for (int64_t j = 0; j < n; j++) {
        float density;
        x[j] *= normal_of(x[j], &density);
    }
}

VECTOR_CLONES static void relu_backward_row(int64_t n, const float *restrict y, float *restrict gradient)
{
    for (int64_t j = 0; j < n; j++) {
        gradient[j] = y[j] <= 0.0F ? 0.0F : gradient[j];
    }
}

VECTOR_CLONES static void tanh_backward_row(int64_t n, const float *restrict y, float *restrict gradient)
{
    for (int64_t j = 0; j < n; j++) {
        gradient[j] *= 1.0F - y[j] * y[j];
    }
}

VECTOR_CLONES static void gelu_backward_row(int64_t n, const float *restrict z, float *restrict gradient)
{
    for (int64_t j = 0; j < n; j++) {
        float density;
        const float distribution = normal_of(z[j], &density);
        gradient[j] *= distribution + z[j] * density;
    }
}

typedef struct activation_ctx {
    tch_activation activation;
    const tch_matrices *x, *bias, *out;
} activation_ctx;

static void activation_rows(void *argument, int64_t from, int64_t to)
{
    const activation_ctx *j = argument;
    int64_t n = j->x->cols;
    void (*activate)(int64_t n, float *x) = j->activation == TCH_ACTIVATION_RELU   ? relu_row
                                            : j->activation == TCH_ACTIVATION_TANH ? tanh_row
                                            : j->activation == TCH_ACTIVATION_GELU ? gelu_row
                                                                                   : NULL;
    for (int64_t i = from; i < to; i++) {
        float *z = tchi_cpu_row(j->x, 0, i);
        float *out = tchi_cpu_row(j->out, 0, i);
        add_row(n, j->bias->data, z);
        if (out != z) {
            memcpy(out, z, (size_t)n * sizeof *out);
        }
        if (activate != NULL) {
            activate(n, out);
        }
    }
}

static double work_of(tch_activation activation, const tch_matrices *x)
{
    double each = activation == TCH_ACTIVATION_TANH || activation == TCH_ACTIVATION_GELU ? 20.0 : 4.0;
    return each * (double)x->rows * (double)x->cols;
}

tch_status tchi_cpu_bias_activation(void *state, tch_activation activation, const tch_matrices *x,
                                    const tch_matrices *bias, const tch_matrices *out)
{
    activation_ctx ctx = {activation, x, bias, out};
    tchi_cpu_split(state, x->rows, work_of(activation, x), activation_rows, &ctx);
    return TCH_OK;
}

static void backward_rows(void *argument, int64_t from, int64_t to)
{
    const activation_ctx *j = argument;
    int64_t n = j->x->cols;
    for (int64_t i = from; i < to; i++) {
        const float *kept = tchi_cpu_row(j->x, 0, i);
        float *gradient = tchi_cpu_row(j->out, 0, i);
        if (j->activation == TCH_ACTIVATION_RELU) {
            relu_backward_row(n, kept, gradient);
        } else if (j->activation == TCH_ACTIVATION_TANH) {
            tanh_backward_row(n, kept, gradient);
        } else {
            gelu_backward_row(n, kept, gradient);
        }
    }
}

/* --- column sums ------------------------------------------------------------------------------------------------- */

#define STRIP 64 /* columns summed together, down all rows */

typedef struct column_ctx {
    const tch_matrices *x;
    float *out;
} column_ctx;

VECTOR_CLONES static void add_to_sums(int64_t n, const float *restrict x, double *restrict sums)
{
    for (int64_t j = 0; j < n; j++) {
        sums[j] += (double)x[j];
    }
}

static void sum_strips(void *argument, int64_t from, int64_t to)
{
    const column_ctx *c = argument;
    for (int64_t first = from * STRIP; first < to * STRIP && first < c->x->cols; first += STRIP) {
        int64_t n = tchi_min(c->x->cols - first, STRIP);
        double sums[STRIP] = {0};
        for (int64_t i = 0; i < c->x->rows; i++) {
            add_to_sums(n, (const float *)tchi_cpu_row(c->x, 0, i) + first, sums);
        }
        for (int64_t j = 0; j < n; j++) {
            c->out[first + j] = (float)sums[j];
        }
    }
}

tch_status tchi_cpu_bias_activation_backward(void *state, tch_activation activation, const tch_matrices *kept,
                                             const tch_matrices *gradient, const tch_matrices *bias_gradient)
{
    if (activation != TCH_ACTIVATION_NONE) {
        activation_ctx ctx = {.activation = activation, .x = kept, .out = gradient};
        tchi_cpu_split(state, gradient->rows, work_of(activation, gradient), backward_rows, &ctx);
    }
    if (bias_gradient != NULL) {
        column_ctx ctx = {gradient, bias_gradient->data};
        double elements = (double)gradient->rows * (double)gradient->cols;
        tchi_cpu_split(state, (gradient->cols + STRIP - 1) / STRIP, 2.0 * elements, sum_strips, &ctx);
    }
    return TCH_OK;
}

/* --- losses ------------------------------------------------------------------------------------------------------ */

typedef struct loss_sums {
    double loss, right, skipped;
} loss_sums;

typedef struct loss_ctx loss_ctx;
struct loss_ctx {
    const tch_matrices *outputs, *targets;
    const tch_loss_results *results;
    float factor; /* of the gradient: weight times scale */
    void (*row)(const loss_ctx *ctx, int64_t i, loss_sums *sums);
    loss_sums ranges[TCH_LOSS_RANGES];
};

/* The sum of e^(x - top), in LANES parallel sums. */
#define LANES 16
VECTOR_CLONES static float sum_of_exps(int64_t n, const float *x, float top)
{
    float lanes[LANES] = {0};
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        for (int k = 0; k < LANES; k++) {
            lanes[k] += exp_of_negative(x[j + k] - top);
        }
    }
    for (int k = 0; j < n; j++, k++) {
        lanes[k] += exp_of_negative(x[j] - top);
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) {
            lanes[k] += lanes[k + half];
        }
    }
    return lanes[0];
}

VECTOR_CLONES static void softmax_row(int64_t n, const float *x, float top, float factor, float *gradient)
{
    for (int64_t j = 0; j < n; j++) {
        gradient[j] = exp_of_negative(x[j] - top) * factor;
    }
}

/* Index of the first maximum; skips NaN, which propagates through the sum. */
static int64_t largest_at(int64_t n, const float *x)
{
    int64_t best = 0;
    for (int64_t j = 1; j < n; j++) {
        if (x[j] > x[best] || x[best] != x[best]) {
            best = j;
        }
    }
    return best;
}

static float *gradient_row(const loss_ctx *ctx, int64_t i)
{
    return ctx->results->gradient != NULL ? tchi_cpu_row(ctx->results->gradient, 0, i) : NULL;
}

static void cross_entropy_row(const loss_ctx *ctx, int64_t i, loss_sums *sums)
{
    int64_t n = ctx->outputs->cols;
    const float *x = tchi_cpu_row(ctx->outputs, 0, i);
    float *gradient = gradient_row(ctx, i);
    int32_t label = ((const int32_t *)ctx->targets->data)[i];
    if (label < 0 || label >= n) {
        sums->skipped += 1;
        if (gradient != NULL) {
            memset(gradient, 0, (size_t)n * sizeof *gradient);
        }
        return;
    }
    int64_t best = largest_at(n, x);
    float sum = sum_of_exps(n, x, x[best]);
    double loss = log((double)sum) + ((double)x[best] - (double)x[label]);
    sums->loss += loss;
    sums->right += best == label && loss == loss ? 1 : 0;
    if (gradient != NULL) {
        softmax_row(n, x, x[best], ctx->factor / sum, gradient);
        gradient[label] -= ctx->factor;
    }
}

static void squared_row(const loss_ctx *ctx, int64_t i, loss_sums *sums)
{
    int64_t n = ctx->outputs->cols;
    const float *y = tchi_cpu_row(ctx->outputs, 0, i);
    const float *t = tchi_cpu_row(ctx->targets, 0, i);
    float *gradient = gradient_row(ctx, i);
    double sum = 0;
    for (int64_t j = 0; j < n; j++) {
        float difference = y[j] - t[j];
        sum += (double)difference * (double)difference;
        if (gradient != NULL) {
            gradient[j] = difference * ctx->factor;
        }
    }
    sums->loss += sum / (double)n;
}

static void loss_ranges(void *argument, int64_t from, int64_t to)
{
    loss_ctx *ctx = argument;
    int64_t rows = ctx->outputs->rows;
    for (int64_t k = from; k < to; k++) {
        loss_sums sums = {0};
        for (int64_t i = rows * k / TCH_LOSS_RANGES; i < rows * (k + 1) / TCH_LOSS_RANGES; i++) {
            ctx->row(ctx, i, &sums);
        }
        ctx->ranges[k] = sums;
    }
}

static void add_totals(const loss_ctx *ctx)
{
    double *totals = ctx->results->totals;
    loss_sums all = {0};
    for (int k = 0; k < TCH_LOSS_RANGES; k++) {
        all.loss += ctx->ranges[k].loss;
        all.right += ctx->ranges[k].right;
        all.skipped += ctx->ranges[k].skipped;
    }
    totals[TCH_TOTAL_LOSS] += all.loss;
    totals[TCH_TOTAL_RIGHT] += all.right;
    totals[TCH_TOTAL_ROWS] += (double)ctx->outputs->rows - all.skipped;
    totals[TCH_TOTAL_SKIPPED] += all.skipped;
}

tch_status tchi_cpu_loss(void *state, tch_loss loss, const tch_matrices *outputs, const tch_matrices *targets,
                         const tch_loss_results *results)
{
    bool labels = loss == TCH_LOSS_CROSS_ENTROPY;
    double factor = labels ? 1.0 : 2.0 / (double)outputs->cols;
    loss_ctx ctx = {.outputs = outputs, .targets = targets, .results = results};
    ctx.row = labels ? cross_entropy_row : squared_row;
    ctx.factor = (float)(factor * results->weight * (results->scale != NULL ? (double)*results->scale : 1.0));
    double work = 20.0 * (double)outputs->rows * (double)outputs->cols;
    tchi_cpu_split(state, TCH_LOSS_RANGES, work, loss_ranges, &ctx);
    add_totals(&ctx);
    return TCH_OK;
}

/* --- labels ------------------------------------------------------------------------------------------------------ */

/* Labels drawn from the softmax of logits: the output gradients of a loss with such labels have the Fisher matrix as
 * their second moment. The uniform number of a row depends on the seed and the row alone, as specified in
 * torchium/backend.h, so neither the number of threads nor the device changes the labels. */
typedef struct label_ctx {
    const tch_matrices *logits;
    uint64_t seed;
    int32_t *labels;
} label_ctx;

/* Uniform numbers in [0, 1) of rows first to first + PHILOX_LANES - 1. */
static void uniform_numbers(uint64_t seed, int64_t first, double numbers[PHILOX_LANES])
{
    philox_counters c = {0};
    for (int i = 0; i < PHILOX_LANES; i++) {
        uint64_t row = (uint64_t)(first + i);
        c.word[0][i] = (uint32_t)row;
        c.word[1][i] = (uint32_t)(row >> 32);
    }
    philox_encipher(&c, seed);
    for (int i = 0; i < PHILOX_LANES; i++) {
        numbers[i] = (double)(c.word[0][i] & 0xFFFFFFu) * 0x1p-24;
    }
}

/* The maximum, or NaN if any number is not finite. */
static double largest_of(int64_t n, const float *x)
{
    double top = -(double)INFINITY;
    for (int64_t j = 0; j < n; j++) {
        if (!isfinite(x[j])) {
            return (double)NAN;
        }
        top = fmax(top, (double)x[j]);
    }
    return top;
}

/* The uniform number is multiplied by the sum instead of normalizing the probabilities; the last class gets the
 * remainder. */
static int32_t draw_label(int64_t n, const float *x, double uniform)
{
    double top = largest_of(n, x);
    double sum = 0, passed = 0;
    int64_t j = 0;
    if (isnan(top)) {
        return -1;
    }
    for (int64_t k = 0; k < n; k++) {
        sum += exp((double)x[k] - top);
    }
    for (; j < n - 1; j++) {
        passed += exp((double)x[j] - top);
        if (passed > uniform * sum) {
            break;
        }
    }
    return (int32_t)j;
}

static void draw_groups(void *argument, int64_t from, int64_t to)
{
    const label_ctx *ctx = argument;
    int64_t rows = ctx->logits->rows;
    for (int64_t first = from * PHILOX_LANES; first < to * PHILOX_LANES && first < rows; first += PHILOX_LANES) {
        double numbers[PHILOX_LANES];
        uniform_numbers(ctx->seed, first, numbers);
        for (int64_t i = first; i < first + PHILOX_LANES && i < rows; i++) {
            ctx->labels[i] = draw_label(ctx->logits->cols, tchi_cpu_row(ctx->logits, 0, i), numbers[i - first]);
        }
    }
}

tch_status tchi_cpu_sample_labels(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels)
{
    label_ctx ctx = {logits, seed, labels};
    int64_t groups = (logits->rows + PHILOX_LANES - 1) / PHILOX_LANES;
    tchi_cpu_split(state, groups, 40.0 * (double)logits->rows * (double)logits->cols, draw_groups, &ctx);
    return TCH_OK;
}
