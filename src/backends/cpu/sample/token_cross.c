/* What a weight that is both an embedding and a linear layer adds to the norms of its samples' gradients. The inner
 * products of the positions of the two come from BLAS in tiles, and are multiplied by entries of the linear layer's
 * output gradients, which are picked out of rows as long as the vocabulary, where they lie. */
#include "backends/cpu/cpu.h"
#include "core/arith.h"

enum { TILE = 64, PANEL = 256 }; /* positions on either side of a tile; columns of half types widened at once */

typedef struct cross_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *tokens, *h, *a, *g;
    int64_t padding;
    int64_t blocks;   /* of TILE positions of one sample's tokens */
    double *partials; /* one for each block of each sample */
    float *panels;    /* two for each thread: TILE by PANEL */
} cross_ctx;

/* The products of a tile: `rows` positions of H by `cols` of A, in float64 or float32. */
typedef union tile_products {
    double f64[TILE * TILE];
    float f32[TILE * TILE];
} tile_products;

/* Scratch is for `samples` by `positions` tokens. */
int64_t tchi_cpu_token_scratch(const tchi_cpu_state *state, int64_t samples, int64_t positions)
{
    const int64_t lists = 2 * 16 * samples * positions; /* token and place, twice */
    const int64_t partials = samples * ((positions + TILE - 1) / TILE) * (int64_t)sizeof(double);
    const int64_t panels = (int64_t)state->threads * 2 * TILE * PANEL * (int64_t)sizeof(float);
    const int64_t cross = TCHI_CPU_SCRATCH_ROUND(partials) + panels;
    return lists > cross ? lists : cross;
}

static void half_type_products(const cross_ctx *j, int64_t sample, int64_t s, int64_t rows, int64_t t, int64_t cols,
                               float *panels, float *out)
{
    for (int64_t column = 0; column < j->h->cols; column += PANEL) {
        int64_t n = tchi_min(j->h->cols - column, PANEL);
        tchi_cpu_convert_block(j->h, sample, s, rows, column, n, TCH_SCALAR_F32, panels, PANEL);
        tchi_cpu_convert_block(j->a, sample, t, cols, column, n, TCH_SCALAR_F32, panels + TILE * PANEL, PANEL);
        j->state->blas->f32.gemm(TCHI_ROW_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)rows, (int)cols, (int)n, 1.0F, panels,
                                 PANEL, panels + TILE * PANEL, PANEL, column > 0 ? 1.0F : 0.0F, out, TILE);
    }
}

static void multiply_tile(const cross_ctx *j, int64_t sample, int64_t s, int64_t rows, int64_t t, int64_t cols,
                          float *panels, tile_products *out)
{
    const void *h = tchi_cpu_row(j->h, sample, s);
    const void *a = tchi_cpu_row(j->a, sample, t);
    int depth = (int)j->h->cols;
    if (j->h->type == TCH_SCALAR_F64) {
        j->state->blas->f64.gemm(TCHI_ROW_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)rows, (int)cols, depth, 1.0, h,
                                 (int)j->h->ld, a, (int)j->a->ld, 0.0, out->f64, TILE);
    } else if (j->h->type == TCH_SCALAR_F32) {
        j->state->blas->f32.gemm(TCHI_ROW_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)rows, (int)cols, depth, 1.0F, h,
                                 (int)j->h->ld, a, (int)j->a->ld, 0.0F, out->f32, TILE);
    } else {
        half_type_products(j, sample, s, rows, t, cols, panels, out->f32);
    }
}

static double gradient_entry(const tch_matrices *g, const void *row, int64_t column)
{
    double value;
    if (g->type == TCH_SCALAR_F64 || g->type == TCH_SCALAR_F32) {
        return g->type == TCH_SCALAR_F64 ? ((const double *)row)[column] : (double)((const float *)row)[column];
    }
    tchi_convert(1, TCH_SCALAR_F64, &value, g->type, (const uint16_t *)row + column);
    return value;
}

/* The sum over a tile of products times the entries of G that belong to them. */
static double weigh_tile(const cross_ctx *j, int64_t sample, int64_t t, int64_t cols, const int64_t *token,
                         int64_t rows, const tile_products *tile)
{
    double sum = 0;
    for (int64_t k = 0; k < cols; k++) {
        const void *g = tchi_cpu_row(j->g, sample, t + k);
        for (int64_t i = 0; i < rows; i++) {
            if (token[i] >= 0) {
                int64_t at = i * TILE + k;
                double product = j->h->type == TCH_SCALAR_F64 ? tile->f64[at] : (double)tile->f32[at];
                sum += product * gradient_entry(j->g, g, token[i]);
            }
        }
    }
    return sum;
}

static void cross_of_block(void *argument, int64_t index, int thread)
{
    const cross_ctx *j = argument;
    int64_t sample = index / j->blocks;
    int64_t s = index % j->blocks * TILE;
    int64_t rows = tchi_min(j->h->rows - s, TILE);
    int64_t token[TILE];
    tile_products tile;
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) {
        token[i] = tchi_cpu_token(j->tokens, sample, s + i, j->g->cols, j->padding);
    }
    for (int64_t t = 0; t < j->a->rows; t += TILE) {
        int64_t cols = tchi_min(j->a->rows - t, TILE);
        multiply_tile(j, sample, s, rows, t, cols, j->panels + 2 * TILE * PANEL * (int64_t)thread, &tile);
        sum += weigh_tile(j, sample, t, cols, token, rows, &tile);
    }
    j->partials[index] = sum;
}

tch_status tchi_cpu_token_cross(const tchi_cpu_state *state, const tch_matrices *tokens, int64_t padding,
                                const tch_matrices *h, const tch_matrices *a, const tch_matrices *g, double scale,
                                double *dots, void *scratch)
{
    int64_t blocks = (h->rows + TILE - 1) / TILE;
    int64_t count = tokens->rows * blocks;
    double *partials = scratch;
    void *panels = (char *)scratch + TCHI_CPU_SCRATCH_ROUND(count * (int64_t)sizeof *partials);
    cross_ctx ctx = {state, tokens, h, a, g, padding, blocks, partials, panels};
    if (count == 0 || a->rows == 0 || h->cols == 0) {
        return TCH_OK;
    }
    double work = 2.0 * TILE * (double)a->rows * (double)h->cols;
    tchi_cpu_for_each(state, count, work, cross_of_block, &ctx);
    for (int64_t i = 0; i < count; i++) {
        dots[i / blocks] += scale * partials[i];
    }
    return TCH_OK;
}
