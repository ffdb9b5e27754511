/* One weight used as an embedding and as a linear layer: the part of its gradients' norms that neither use knows of.
 * The gradient of the linear layer, as many rows as the vocabulary has, is never formed; its output gradients are read
 * where they lie. */
#include <torchium/grad.h>

#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"

#include "embedding.h"
#include "layer.h"
#include "walk.h"

typedef struct tied_call {
    tchi_tokens tokens;
    tchi_side input, gradient; /* of the linear layer */
    double *norms;
    tchi_token_chunk chunk;
    tch_matrices a, g;
} tied_call;

static void tied_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    tied_call *c = call;
    tchi_tokens_layout(&c->tokens, &c->chunk, arena, context, first, count);
    c->a = tchi_side_place(&c->input, arena, first, count, TCHI_APART);
    c->g = tchi_side_place(&c->gradient, arena, first, count, TCHI_APART);
}

static tch_status tied_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    (void)count;
    tied_call *c = call;
    const tch_layer *layer = c->tokens.layer;
    TCHI_TRY(tchi_tokens_read(context, &c->tokens, first, &c->chunk));
    TCHI_TRY(tchi_side_read(context, &c->input, first, &c->a));
    TCHI_TRY(tchi_side_read(context, &c->gradient, first, &c->g));
    return context->backend->sample->token_dots(context->state, &c->chunk.tokens, layer->rows, layer->padding_index,
                                                &c->chunk.g, &c->a, &c->g, 2.0 * layer->scale * layer->scale,
                                                c->norms + first, c->chunk.scratch);
}

/* --- arguments --------------------------------------------------------------------------------------------------- */

/* The first `count` dimensions of both are equal. */
static bool same_sizes(const tch_tensor *a, const tch_tensor *b, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        if (a->shape[i] != b->shape[i]) {
            return false;
        }
    }
    return true;
}

static tch_status check_tokens(tch_context *context, const tch_tensor *tokens)
{
    TCHI_TRY(tchi_check_input(context, tokens, "tokens"));
    TCHI_TRY(tchi_check_tokens(tokens, "tokens"));
    return tokens->ndim >= 1 ? TCH_OK : tchi_wrong_shape(tokens, "tokens", "[B, ...]");
}

static tch_status check_embedding_gradient(tch_context *context, const tch_tensor *tokens, const tch_tensor *gradient)
{
    TCHI_TRY(tchi_check_input(context, gradient, "embedding_gradient"));
    TCHI_TRY(tchi_check_float(gradient, "embedding_gradient"));
    if (gradient->ndim == tokens->ndim + 1 && same_sizes(gradient, tokens, tokens->ndim)) {
        return TCH_OK;
    }
    return tchi_wrong_shape(gradient, "embedding_gradient", "the shape of tokens and one more dimension");
}

/* One of the linear layer's tensors: [B, ..., cols], of the embedding gradient's type. */
static tch_status check_linear(tch_context *context, const tch_tensor *tensor, const char *name,
                               const tch_tensor *gradient, int64_t cols)
{
    TCHI_TRY(tchi_check_input(context, tensor, name));
    TCHI_TRY(tchi_check_same_dtype(tensor, name, gradient, "embedding_gradient"));
    if (tensor->ndim >= 2 && tensor->shape[0] == gradient->shape[0] && tensor->shape[tensor->ndim - 1] == cols) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected [%lld, ..., %lld]", name,
                     tchi_describe_shape(tensor, text, sizeof text), (long long)gradient->shape[0], (long long)cols);
}

static tch_status check_kind(const tch_layer *layer)
{
    TCHI_TRY(tchi_check_layer(layer));
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer is of kind %s, expected EMBEDDING", tchi_layer_name(layer->kind));
}

static tch_status check_tied(tch_context *context, const tch_layer *layer, const tch_tensor *tokens,
                             const tch_tensor *embedding_gradient, const tch_tensor *linear_input,
                             const tch_tensor *linear_gradient, const tch_tensor *norms)
{
    TCHI_TRY(check_kind(layer));
    TCHI_TRY(check_tokens(context, tokens));
    TCHI_TRY(check_embedding_gradient(context, tokens, embedding_gradient));
    int64_t features = embedding_gradient->shape[embedding_gradient->ndim - 1];
    TCHI_TRY(check_linear(context, linear_input, "linear_input", embedding_gradient, features));
    TCHI_TRY(check_linear(context, linear_gradient, "linear_gradient", embedding_gradient, layer->rows));
    if (linear_gradient->ndim != linear_input->ndim ||
        !same_sizes(linear_gradient, linear_input, linear_input->ndim - 1)) {
        return tchi_wrong_shape(linear_gradient, "linear_gradient", "the positions of linear_input");
    }
    TCHI_TRY(tchi_check_output(context, norms, "norms"));
    TCHI_TRY(tchi_check_numbers(context, norms, "norms", tokens->shape[0]));
    const tchi_named inputs[] = {{tokens, "tokens"},
                                 {embedding_gradient, "embedding_gradient"},
                                 {linear_input, "linear_input"},
                                 {linear_gradient, "linear_gradient"}};
    const tchi_named outputs[] = {{norms, "norms"}};
    return tchi_check_all_disjoint(outputs, 1, inputs, 4);
}

tch_status tch_grad_tied_norms(tch_context *context, const tch_layer *layer, const tch_tensor *tokens,
                               const tch_tensor *embedding_gradient, const tch_tensor *linear_input,
                               const tch_tensor *linear_gradient, tch_tensor *norms)
{
    TCHI_ENTER_FOR(context, "tch_grad_tied_norms", sample);
    TCHI_TRY(check_tied(context, layer, tokens, embedding_gradient, linear_input, linear_gradient, norms));
    const tch_layer linear = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    tied_call c = {.tokens = tchi_tokens_of(layer, tokens, embedding_gradient),
                   .input = tchi_input_side(&linear, linear_input),
                   .gradient = tchi_gradient_side(&linear, linear_gradient),
                   .norms = tchi_tensor_data(norms)};
    tchi_arena one = {0};
    int64_t samples = c.input.samples;
    tied_layout(&c, &one, context, 0, 1);
    const tchi_walk walk = {.samples = samples,
                            .chunk = tchi_chunk_samples(context, samples, c.input.positions, one.used, 0),
                            .layout = tied_layout,
                            .part = tied_part};
    return samples == 0 ? TCH_OK : tchi_walk_samples(context, &walk, &c);
}
