/* Labels drawn from the softmax of logits: a loss with such labels has output gradients whose second moment is the
 * Fisher matrix. A row's uniform number depends on the seed and the row alone, in the way torchium/backend.h lays down,
 * so that neither the number of threads nor the device changes what is drawn. */
#include "backends/cpu/cpu.h"

#include <math.h>

#include "backends/cpu/update/philox.h"

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

/* The largest of finite numbers, and NaN where one is not finite. */
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

/* Probabilities are not divided by their sum, the uniform number is multiplied by it; the last class takes what is
 * left. */
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
