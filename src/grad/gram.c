/* tch_grad_gram: inner products of all pairs of per-sample gradients. For linear layers and convolutions either from
 * inner products of positions or from slices of the gradients, whichever takes fewer operations: T^2 (d + p) per pair
 * vs p d per pair and 2 T p d per sample. Both compute both triangles, equal up to rounding. */
#include "call.h"

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "layer.h"
#include "positions.h"
#include "walk.h"

typedef struct gram_call {
    const tch_layer *layer;
    tchi_side a, g;
    tch_matrices gram;
    double square;   /* of the layer's scale */
    tch_scalar type; /* of products: float32, or float64 where the sides are */
} gram_call;

/* --- from rows, one for each sample ------------------------------------------------------------------------------ */

/* gram += square X X', with a row of X per sample. If the result's type differs from X's, blocks of rows go through
 * scratch. */
typedef struct row_products {
    tch_matrices products, converted;
} row_products;

static row_products row_products_layout(tchi_arena *arena, const tch_context *context, const gram_call *c)
{
    row_products p = {0};
    if (c->gram.type != c->type) {
        int64_t row = c->g.samples * 2 * (int64_t)sizeof(double);
        int64_t rows = tchi_max(1, tchi_min(tchi_scratch_budget(context) / 4 / row, c->g.samples));
        p.products = tchi_scratch_matrices(arena, c->type, 1, rows, c->g.samples);
        p.converted = tchi_scratch_matrices(arena, c->gram.type, 1, rows, c->g.samples);
    }
    return p;
}

/* gram += square X X' for a result of another type than X. */
static tch_status add_converted(tch_context *context, const gram_call *c, const tch_matrices *x, const row_products *p)
{
    const tch_backend *t = context->backend;
    for (int64_t first = 0; first < x->rows; first += p->products.rows) {
        int64_t count = tchi_min(p->products.rows, x->rows - first);
        tch_matrices rows = tchi_matrices_block(x, first, 0, count, x->cols);
        tch_matrices product = tchi_matrices_block(&p->products, 0, 0, count, x->rows);
        tch_matrices converted = tchi_matrices_block(&p->converted, 0, 0, count, x->rows);
        tch_matrices out = tchi_matrices_block(&c->gram, first, 0, count, x->rows);
        TCHI_TRY(tchi_layer_product(context, c->layer, c->square, &rows, 0, x, 1, 0.0, &product));
        TCHI_TRY(t->matrix->shift_scale(context->state, &product, NULL, NULL, 1.0, &converted));
        TCHI_TRY(t->matrix->combine(context->state, 0.0, 1.0, &out, 1.0, &converted, &out));
    }
    return TCH_OK;
}

static tch_status add_rows(tch_context *context, const gram_call *c, const tch_matrices *x, const row_products *p)
{
    if (c->gram.type != c->type) {
        return add_converted(context, c, x, p);
    }
    return c->layer->rounded ? tchi_gram_rounded(context, c->square, x, 0, 1.0, &c->gram)
                             : tchi_gram(context, c->square, x, 0, 1.0, &c->gram);
}

/* --- from inner products of positions ----------------------------------------------------------------------------- */

/* Sums <a_s, a_t> <g_s, g_t> over the positions of two samples, in one group, for two blocks of samples. */
typedef struct pair_buffers {
    tch_matrices a[2], g[2]; /* of two blocks of samples */
    tch_matrices of_a, of_g; /* inner products of their positions */
    void *scratch;
} pair_buffers;

static void pair_layout(pair_buffers *b, tchi_arena *arena, tch_context *context, const gram_call *c,
                        const int64_t first[2], const int64_t count[2])
{
    int64_t rows = count[0] * c->g.positions;
    int64_t cols = count[1] * c->g.positions;
    for (int k = 0; k < 2; k++) {
        b->a[k] = tchi_side_place(&c->a, arena, first[k], count[k], TCHI_TALL);
        b->g[k] = tchi_side_place(&c->g, arena, first[k], count[k], TCHI_TALL);
    }
    b->of_a = tchi_scratch_matrices(arena, c->type, 1, rows, cols);
    b->of_g = tchi_scratch_matrices(arena, c->type, 1, rows, cols);
    b->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_BLOCK_DOTS,
                                                                                c->type, rows, cols, 1, 0));
}

/* Samples per block: halved until two blocks and their inner products fit. */
static int64_t choose_block(tch_context *context, const gram_call *c)
{
    int64_t budget = tchi_scratch_budget(context);
    int64_t block = tchi_min(c->g.samples, TCHI_MOST_SIZE / c->g.positions);
    for (;;) {
        pair_buffers probe;
        tchi_arena arena = {0};
        const int64_t first[2] = {0, 0};
        const int64_t count[2] = {block, block};
        pair_layout(&probe, &arena, context, c, first, count);
        if (block <= 1 || arena.used <= budget) {
            return block < 1 ? 1 : block;
        }
        block = (block + 1) / 2;
    }
}

static tch_status positions_product(tch_context *context, const gram_call *c, const tch_matrices sides[2],
                                    const tch_matrices *out)
{
    tch_matrices left = tchi_tall(&sides[0]);
    tch_matrices right = tchi_tall(&sides[1]);
    return tchi_layer_product(context, c->layer, 1.0, &left, 0, &right, 1, 0.0, out);
}

static tch_status add_pair(tch_context *context, const gram_call *c, const int64_t first[2], const int64_t count[2])
{
    pair_buffers b;
    tchi_arena arena = {0};
    pair_layout(&b, &arena, context, c, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    pair_layout(&b, &arena, context, c, first, count);
    for (int k = 0; k < 2; k++) {
        TCHI_TRY(tchi_side_read(context, &c->a, first[k], &b.a[k]));
        TCHI_TRY(tchi_side_read(context, &c->g, first[k], &b.g[k]));
    }
    TCHI_TRY(positions_product(context, c, b.a, &b.of_a));
    TCHI_TRY(positions_product(context, c, b.g, &b.of_g));
    tch_matrices out = tchi_matrices_block(&c->gram, first[0], first[1], count[0], count[1]);
    TCHI_TRY(context->backend->sample->block_dots(context->state, &b.of_a, &b.of_g, c->g.positions, c->g.positions,
                                                  c->square, 1.0, &out, b.scratch));
    if (first[0] == first[1]) {
        return TCH_OK;
    }
    tch_matrices upper = tchi_matrices_block(&c->gram, first[1], first[0], count[1], count[0]);
    return tchi_transpose(context, &out, &upper);
}

static int64_t positions_bytes(tch_context *context, const gram_call *c)
{
    pair_buffers probe;
    tchi_arena arena = {0};
    int64_t block = choose_block(context, c);
    const int64_t first[2] = {0, 0};
    const int64_t count[2] = {block, block};
    pair_layout(&probe, &arena, context, c, first, count);
    return arena.used;
}

static tch_status add_by_positions(tch_context *context, const gram_call *c)
{
    int64_t samples = c->g.samples;
    int64_t block = choose_block(context, c);
    for (int64_t i = 0; i < samples; i += block) {
        for (int64_t j = 0; j <= i; j += block) {
            const int64_t first[2] = {i, j};
            const int64_t count[2] = {tchi_min(block, samples - i), tchi_min(block, samples - j)};
            TCHI_TRY(add_pair(context, c, first, count));
        }
    }
    return TCH_OK;
}

/* --- from slices of the gradients --------------------------------------------------------------------------------- */

/* A slice of the weight's matrix, for all samples: inner products of slices add up to those of gradients. */

/* Rows [row, row + rows) and columns [col, col + cols) of the weight's matrix in groups [group, group + groups). */
typedef struct slice {
    int64_t group, groups, row, rows, col, cols;
} slice;

typedef struct slice_buffers {
    tch_matrices formed; /* of all samples */
    row_products products;
    tch_matrices a, g;
} slice_buffers;

/* The largest slice that fits for all samples: the whole gradient, rows of one group, or part of a row. */
static slice choose_slice(const tch_context *context, const gram_call *c)
{
    int64_t most = tchi_scratch_budget(context) / 2 / (c->g.samples * tchi_scalar_size(c->type));
    int64_t rows = most / c->a.cols;
    slice s = {.groups = 1, .rows = tchi_min(rows < 1 ? 1 : rows, c->g.cols), .cols = c->a.cols};
    if (rows / c->g.groups >= c->g.cols) {
        s.groups = c->g.groups;
    } else if (rows < 1) {
        s.cols = most < 1 ? 1 : most;
    }
    return s;
}

static void slice_layout(slice_buffers *b, tchi_arena *arena, const tch_context *context, const gram_call *c,
                         const slice *s, int64_t first, int64_t count)
{
    b->formed = tchi_scratch_matrices(arena, c->type, c->g.samples * s->groups, s->rows, s->cols);
    b->products = row_products_layout(arena, context, c);
    b->a = tchi_side_place(&c->a, arena, first, count, TCHI_APART);
    b->g = tchi_side_place(&c->g, arena, first, count, TCHI_APART);
}

/* The columns and groups of a side for a slice. */
static tch_matrices part_of_side(const tch_matrices *x, const tchi_side *side, const slice *s, int64_t col,
                                 int64_t cols)
{
    tch_matrices part = *x;
    part.data = (char *)x->data + (s->group * x->stride + col) * tchi_scalar_size(x->type);
    part.cols = cols;
    if (s->groups < side->groups) {
        part.batch = x->batch / side->groups;
        part.stride = x->stride * side->groups;
    }
    return part;
}

static tch_status form_slice(tch_context *context, const gram_call *c, const slice *s, const slice_buffers *b,
                             int64_t first, int64_t count)
{
    TCHI_TRY(tchi_side_read(context, &c->a, first, &b->a));
    TCHI_TRY(tchi_side_read(context, &c->g, first, &b->g));
    tch_matrices a = part_of_side(&b->a, &c->a, s, s->col, s->cols);
    tch_matrices g = part_of_side(&b->g, &c->g, s, s->row, s->rows);
    tch_matrices out = tchi_matrices_new(b->formed.data, c->type, c->g.samples * s->groups, s->rows, s->cols);
    out = tchi_matrices_part(&out, first * s->groups, count * s->groups);
    return context->backend->matrix->gemm(context->state, 1.0, &g, 1, &a, 0, 0.0, 0, &out);
}

static tch_status add_slice(tch_context *context, const gram_call *c, const slice *s, const slice *largest, void *base,
                            int64_t chunk)
{
    slice_buffers b;
    int64_t first = 0;
    do { /* at least one sample: the buffers common to all chunks are needed */
        int64_t count = tchi_min(chunk, c->g.samples - first);
        tchi_arena arena = {.base = base};
        slice_layout(&b, &arena, context, c, largest, first, count);
        TCHI_TRY(form_slice(context, c, s, &b, first, count));
        first += chunk;
    } while (first < c->g.samples);
    int64_t cols = s->groups * s->rows * s->cols;
    tch_matrices rows = tchi_matrices_new(b.formed.data, c->type, 1, c->g.samples, cols);
    return add_rows(context, c, &rows, &b.products);
}

/* Samples whose sides are read at once, with the slice of all samples in scratch. */
static int64_t choose_chunk(tch_context *context, const gram_call *c, const slice *s)
{
    slice_buffers probe;
    tchi_arena none = {0};
    tchi_arena one = {0};
    slice_layout(&probe, &none, context, c, s, 0, 0);
    slice_layout(&probe, &one, context, c, s, 0, 1);
    return tchi_chunk_samples(context, c->g.samples, c->g.positions, one.used - none.used, none.used);
}

static int64_t slices_bytes(tch_context *context, const gram_call *c)
{
    slice_buffers probe;
    tchi_arena arena = {0};
    slice s = choose_slice(context, c);
    slice_layout(&probe, &arena, context, c, &s, 0, choose_chunk(context, c, &s));
    return arena.used;
}

static tch_status add_by_slices(tch_context *context, const gram_call *c)
{
    slice s = choose_slice(context, c);
    const slice largest = s;
    int64_t chunk = choose_chunk(context, c, &s);
    tchi_arena arena = {.used = slices_bytes(context, c)};
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    for (s.group = 0; s.group < c->g.groups; s.group += s.groups) {
        for (s.row = 0; s.row < c->g.cols; s.row += largest.rows) {
            s.rows = tchi_min(largest.rows, c->g.cols - s.row);
            for (s.col = 0; s.col < c->a.cols; s.col += largest.cols) {
                s.cols = tchi_min(largest.cols, c->a.cols - s.col);
                TCHI_TRY(add_slice(context, c, &s, &largest, arena.base, chunk));
            }
        }
    }
    return TCH_OK;
}

/* --- the parts --------------------------------------------------------------------------------------------------- */

static bool positions_are_fewer(const gram_call *c)
{
    double b = (double)c->g.samples;
    double t = (double)c->g.positions;
    double d = (double)c->a.cols;
    double p = (double)c->g.cols;
    return c->g.groups == 1 && b * t * t * (d + p) < (2.0 * t + b) * p * d;
}

typedef struct bias_call {
    const gram_call *c;
    tch_matrices sums; /* of all samples */
    row_products products;
    tch_matrices g;
    void *scratch;
} bias_call;

static void bias_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    bias_call *b = call;
    const tchi_side *g = &b->c->g;
    b->sums = tchi_scratch_matrices(arena, b->c->type, g->samples * g->groups, 1, g->cols);
    b->products = row_products_layout(arena, context, b->c);
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

/* --- both halves ------------------------------------------------------------------------------------------------- */

/* Rows and columns per block: large enough for few launches on a GPU, with little scratch. */
#define MIRROR_BLOCK 512

static tch_matrices mirror_layout(tchi_arena *arena, const gram_call *c)
{
    int64_t block = tchi_min(MIRROR_BLOCK, c->gram.rows);
    return tchi_scratch_matrices(arena, c->gram.type, 1, block, block);
}

/* Makes the matrix exactly symmetric, which a solver may require: the lower triangle becomes a copy of the upper; a
 * diagonal block becomes the mean of itself and its transpose. */
static tch_status mirror_lower(tch_context *context, const gram_call *c)
{
    tchi_arena arena = {0};
    (void)mirror_layout(&arena, c);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tch_matrices scratch = mirror_layout(&arena, c);
    int64_t n = c->gram.rows;
    for (int64_t i = 0; i < n; i += MIRROR_BLOCK) {
        int64_t rows = tchi_min(MIRROR_BLOCK, n - i);
        tch_matrices diagonal = tchi_matrices_block(&c->gram, i, i, rows, rows);
        tch_matrices transposed = tchi_matrices_block(&scratch, 0, 0, rows, rows);
        TCHI_TRY(tchi_transpose(context, &diagonal, &transposed));
        TCHI_TRY(context->backend->matrix->combine(context->state, 0.0, 0.5, &diagonal, 0.5, &transposed, &diagonal));
        if (i > 0) {
            tch_matrices lower = tchi_matrices_block(&c->gram, i, 0, rows, i);
            tch_matrices upper = tchi_matrices_block(&c->gram, 0, i, i, rows);
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

tch_status tchi_clear_gram(tch_context *context, int32_t accumulate, const tch_tensor *gram)
{
    int64_t strides[TCH_MAX_RANK];
    tch_array array = tchi_array_of(gram, strides);
    return accumulate ? TCH_OK : context->backend->matrix->fill(context->state, &array, 0.0);
}

static tch_status product_gram(tch_context *context, const gram_call *c, bool weight, bool bias, int32_t accumulate,
                               const tch_tensor *gram)
{
    tchi_arena all = {0};
    (void)mirror_layout(&all, c);
    bool fewer = weight && positions_are_fewer(c);
    int64_t for_weight = fewer ? positions_bytes(context, c) : weight ? slices_bytes(context, c) : 0;
    bias_call b = {.c = c};
    const tchi_walk walk = {
        .samples = c->g.samples, .positions = c->g.positions, .layout = bias_layout, .part = bias_part};
    int64_t for_bias = bias ? tchi_walk_bytes(context, &walk, &b) : 0;
    TCHI_TRY(tchi_reserve_first(context, tchi_max(all.used, tchi_max(for_weight, for_bias))));
    TCHI_TRY(tchi_clear_gram(context, accumulate, gram));
    if (weight) {
        TCHI_TRY(fewer ? add_by_positions(context, c) : add_by_slices(context, c));
    }
    if (bias) {
        TCHI_TRY(tchi_walk_samples(context, &walk, &b));
        tch_matrices rows = tchi_flat(&b.sums, c->g.samples);
        TCHI_TRY(add_rows(context, c, &rows, &b.products));
    }
    return mirror_lower(context, c);
}

static gram_call gram_call_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *output_gradient,
                              const tch_tensor *gram)
{
    gram_call c = {.layer = layer, .square = layer->scale * layer->scale};
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
    TCHI_TRY(tchi_check_layer_call(context, layer, input, output_gradient));
    TCHI_TRY(tchi_check_parts(parts));
    TCHI_TRY(check_gram(context, gram, input->shape[0]));
    TCHI_TRY(tchi_check_disjoint(gram, "gram", input, "input"));
    TCHI_TRY(tchi_check_disjoint(gram, "gram", output_gradient, "output_gradient"));
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
    gram_call c = gram_call_of(layer, input, output_gradient, gram);
    bool bias = (parts & TCH_GRAD_BIAS) && c.g.positions > 0 && c.g.cols > 0;
    bool weight = (parts & TCH_GRAD_WEIGHT) && c.g.positions > 0 && c.g.cols > 0 && c.a.cols > 0;
    return product_gram(context, &c, weight, bias, accumulate, gram);
}
