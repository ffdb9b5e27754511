/* tch_grad_gram: inner products of all pairs of samples' gradients. For linear layers and convolutions either from
 * inner products of positions (gram_positions.c) or from slices of the gradients (gram_slices.c), whichever takes fewer
 * operations: T^2 (d + p) for each pair against p d for each pair and 2 T p d for each sample. */
#include "gram.h"

#include "core/check.h"
#include "core/status.h"

#include "core/arith.h"
#include "call.h"
#include "layer.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

tch_matrices tchi_block(const tch_matrices *x, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    tch_matrices block = *x;
    block.data = (char *)x->data + (row * x->ld + col) * tchi_scalar_size(x->type);
    block.rows = rows;
    block.cols = cols;
    return block;
}

tch_status tchi_transpose(tch_context *context, const tch_matrices *x, const tch_matrices *out)
{
    const int64_t shape[2] = {out->rows, out->cols};
    const int64_t from[2] = {1, x->ld};
    const int64_t to[2] = {out->ld, 1};
    tch_array source = {x->data, x->type, 2, shape, from};
    tch_array target = {out->data, out->type, 2, shape, to};
    return context->backend->matrix->copy(context->state, &target, &source);
}

/* --- from rows, one for each sample ------------------------------------------------------------------------------ */

static int64_t product_rows(const tch_context *context, const tchi_gram_call *c)
{
    int64_t row = c->g.samples * 2 * (int64_t)sizeof(double);
    int64_t rows = tchi_scratch_budget(context) / 4 / row;
    return rows < 1 ? 1 : tchi_min(rows, c->g.samples);
}

tchi_row_products tchi_row_products_layout(tchi_arena *arena, const tch_context *context, const tchi_gram_call *c)
{
    tchi_row_products p = {0};
    if (c->gram.type != c->type) {
        int64_t rows = product_rows(context, c);
        p.products = tchi_scratch_matrices(arena, c->type, 1, rows, c->g.samples);
        p.converted = tchi_scratch_matrices(arena, c->gram.type, 1, rows, c->g.samples);
    }
    return p;
}

/* gram += square X X' where the result is of another type than X. */
static tch_status add_converted(tch_context *context, const tchi_gram_call *c, const tch_matrices *x,
                                const tchi_row_products *p)
{
    const tch_backend *t = context->backend;
    for (int64_t first = 0; first < x->rows; first += p->products.rows) {
        int64_t count = tchi_min(p->products.rows, x->rows - first);
        tch_matrices rows = tchi_block(x, first, count, 0, x->cols);
        tch_matrices product = tchi_block(&p->products, 0, count, 0, x->rows);
        tch_matrices converted = tchi_block(&p->converted, 0, count, 0, x->rows);
        tch_matrices out = tchi_block(&c->gram, first, count, 0, x->rows);
        TCHI_TRY(tchi_layer_product(context, c->layer, c->square, &rows, 0, x, 1, 0.0, &product));
        TCHI_TRY(t->matrix->shift_scale(context->state, &product, NULL, NULL, 1.0, &converted));
        TCHI_TRY(t->matrix->combine(context->state, 0.0, 1.0, &out, 1.0, &converted, &out));
    }
    return TCH_OK;
}

tch_status tchi_gram_add_rows(tch_context *context, const tchi_gram_call *c, const tch_matrices *x,
                              const tchi_row_products *p)
{
    if (c->gram.type != c->type) {
        return add_converted(context, c, x, p);
    }
    return c->layer->rounded ? tchi_gram_rounded(context, c->square, x, 0, 1.0, &c->gram)
                             : tchi_gram(context, c->square, x, 0, 1.0, &c->gram);
}

/* --- the parts --------------------------------------------------------------------------------------------------- */

static bool positions_are_fewer(const tchi_gram_call *c)
{
    double b = (double)c->g.samples;
    double t = (double)c->g.positions;
    double d = (double)c->a.cols;
    double p = (double)c->g.cols;
    return c->g.groups == 1 && b * t * t * (d + p) < (2.0 * t + b) * p * d;
}

typedef struct bias_call {
    const tchi_gram_call *c;
    tch_matrices sums; /* of all samples */
    tchi_row_products products;
    tch_matrices g;
    void *scratch;
} bias_call;

static void bias_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    bias_call *b = call;
    const tchi_side *g = &b->c->g;
    b->sums = tchi_scratch_matrices(arena, b->c->type, g->samples * g->groups, 1, g->cols);
    b->products = tchi_row_products_layout(arena, context, b->c);
    b->g = tchi_side_place(g, arena, first, count, TCHI_APART);
    b->scratch =
        tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, g->type,
                                                                       g->positions, g->cols, count * g->groups, 0));
}

static tch_status bias_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    bias_call *b = call;
    const tchi_side *g = &b->c->g;
    tch_matrices part = tchi_matrices_part(&b->sums, first * g->groups, count * g->groups);
    tch_matrices rows = tchi_tall(&part);
    TCHI_TRY(tchi_side_read(context, g, first, &b->g));
    return context->backend->sample->sample_sums(context->state, &b->g, 1.0, 0.0, &rows, b->scratch);
}

static tchi_walk bias_walk_of(const tchi_gram_call *c)
{
    return (tchi_walk){.samples = c->g.samples, .positions = c->g.positions, .layout = bias_layout, .part = bias_part};
}

static tch_status bias_gram(tch_context *context, const tchi_gram_call *c)
{
    bias_call b = {.c = c};
    const tchi_walk walk = bias_walk_of(c);
    TCHI_TRY(tchi_walk_samples(context, &walk, &b));
    tch_matrices rows = tchi_flat(&b.sums, c->g.samples);
    return tchi_gram_add_rows(context, c, &rows, &b.products);
}

/* --- both halves ------------------------------------------------------------------------------------------------- */

/* Rows and columns at once: what is left to the launches of a GPU is few enough, and the scratch small. */
#define MIRROR_BLOCK 512

static tch_matrices mirror_layout(tchi_arena *arena, const tchi_gram_call *c)
{
    int64_t block = tchi_min(MIRROR_BLOCK, c->gram.rows);
    return tchi_scratch_matrices(arena, c->gram.type, 1, block, block);
}

/* A block on the diagonal is symmetric up to rounding, and becomes the mean of itself and its transpose. */
static tch_status mirror_diagonal(tch_context *context, const tch_matrices *block, const tch_matrices *scratch)
{
    tch_matrices transposed = tchi_block(scratch, 0, block->rows, 0, block->cols);
    TCHI_TRY(tchi_transpose(context, block, &transposed));
    return context->backend->matrix->combine(context->state, 0.0, 0.5, block, 0.5, &transposed, block);
}

/* Both halves are there up to rounding; above the diagonal they become the half below, to the bit, which a solver may
 * ask for. */
static tch_status mirror_lower(tch_context *context, const tchi_gram_call *c)
{
    tchi_arena arena = {0};
    (void)mirror_layout(&arena, c);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tch_matrices scratch = mirror_layout(&arena, c);
    int64_t n = c->gram.rows;
    for (int64_t i = 0; i < n; i += MIRROR_BLOCK) {
        int64_t rows = tchi_min(MIRROR_BLOCK, n - i);
        tch_matrices diagonal = tchi_block(&c->gram, i, rows, i, rows);
        TCHI_TRY(mirror_diagonal(context, &diagonal, &scratch));
        if (i > 0) {
            tch_matrices lower = tchi_block(&c->gram, i, rows, 0, i);
            tch_matrices upper = tchi_block(&c->gram, 0, i, i, rows);
            TCHI_TRY(tchi_transpose(context, &lower, &upper));
        }
    }
    return TCH_OK;
}

/* --- the call ---------------------------------------------------------------------------------------------------- */

static tch_status check_gram(tch_context *context, const tch_tensor *gram, int64_t samples)
{
    const int64_t shape[2] = {samples, samples};
    TCHI_TRY(tchi_check_output(context, gram, "gram"));
    TCHI_TRY(tchi_check_wide(gram, "gram"));
    TCHI_TRY(tchi_check_shape(gram, "gram", 2, shape));
    if (samples > TCHI_MOST_SIZE) {
        return tchi_fail(TCH_ERR_SHAPE, "gram has %lld rows, expected at most %d", (long long)samples, TCHI_MOST_SIZE);
    }
    if (samples > 1 && (tchi_tensor_stride(gram, 1) != 1 || tchi_tensor_stride(gram, 0) < samples)) {
        return tchi_fail(TCH_ERR_LAYOUT, "gram has strides %lld and %lld, expected rows of contiguous elements",
                         (long long)tchi_tensor_stride(gram, 0), (long long)tchi_tensor_stride(gram, 1));
    }
    return TCH_OK;
}

static tch_status check_gram_call(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *output_gradient, tch_grad_part parts, const tch_tensor *gram)
{
    TCHI_TRY(tchi_check_layer_call(context, layer, input, output_gradient));
    TCHI_TRY(tchi_check_parts(parts));
    TCHI_TRY(check_gram(context, gram, input->shape[0]));
    const tchi_named inputs[] = {{input, "input"}, {output_gradient, "output_gradient"}};
    const tchi_named outputs[] = {{gram, "gram"}};
    return tchi_check_all_disjoint(outputs, 1, inputs, 2);
}

tch_status tchi_clear_gram(tch_context *context, int32_t accumulate, const tch_tensor *gram)
{
    int64_t strides[TCH_MAX_RANK];
    tch_array array = tchi_array_of(gram, strides);
    return accumulate ? TCH_OK : context->backend->matrix->fill(context->state, &array, 0.0);
}

static tch_status product_gram(tch_context *context, const tchi_gram_call *c, bool weight, bool bias,
                               int32_t accumulate, const tch_tensor *gram)
{
    tchi_arena all = {0};
    (void)mirror_layout(&all, c);
    bool fewer = weight && positions_are_fewer(c);
    int64_t for_weight = fewer    ? tchi_gram_positions_bytes(context, c)
                         : weight ? tchi_gram_slices_bytes(context, c)
                                  : 0;
    bias_call probe = {.c = c};
    const tchi_walk walk = bias_walk_of(c);
    int64_t for_bias = bias ? tchi_walk_bytes(context, &walk, &probe) : 0;
    TCHI_TRY(tchi_reserve_first(context, tchi_max(all.used, tchi_max(for_weight, for_bias))));
    TCHI_TRY(tchi_clear_gram(context, accumulate, gram));
    if (weight) {
        TCHI_TRY(fewer ? tchi_gram_by_positions(context, c) : tchi_gram_by_slices(context, c));
    }
    if (bias) {
        TCHI_TRY(bias_gram(context, c));
    }
    return mirror_lower(context, c);
}

static tchi_gram_call gram_call_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *output_gradient,
                                   const tch_tensor *gram)
{
    tchi_gram_call c = {.layer = layer, .square = layer->scale * layer->scale};
    int64_t samples = input->shape[0];
    c.a = tchi_input_side(layer, input);
    c.g = tchi_gradient_side(layer, output_gradient);
    c.type = tchi_compute_type(c.g.type);
    c.gram = tchi_matrices_new(tchi_tensor_data(gram), tchi_scalar_of(gram->dtype), 1, samples, samples);
    if (samples > 1) {
        c.gram.ld = tchi_tensor_stride(gram, 0);
    }
    return c;
}

tch_status tch_grad_gram(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                         const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate, tch_tensor *gram)
{
    TCHI_ENTER_FOR(context, "tch_grad_gram", sample);
    TCHI_TRY(check_gram_call(context, layer, input, output_gradient, parts, gram));
    const tchi_grad_call call = {layer, input, output_gradient, .parts = parts, .accumulate = accumulate};
    if (input->shape[0] == 0) {
        return TCH_OK;
    }
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return parts & TCH_GRAD_WEIGHT ? tchi_embedding_gram(context, &call, gram)
                                       : tchi_clear_gram(context, accumulate, gram);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_gram(context, &call, gram);
    }
    tchi_gram_call c = gram_call_of(layer, input, output_gradient, gram);
    bool bias = (parts & TCH_GRAD_BIAS) && c.g.positions > 0 && c.g.cols > 0;
    bool weight = (parts & TCH_GRAD_WEIGHT) && c.g.positions > 0 && c.g.cols > 0 && c.a.cols > 0;
    return product_gram(context, &c, weight, bias, accumulate, gram);
}
