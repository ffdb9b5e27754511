/* Creates and destroys networks. Parameters are allocated once; everything that depends on the batch is one block,
 * which grows to the largest batch seen. */
#include "network.h"

#include <math.h>
#include <stdio.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"
#include "linalg/algebra.h"

/* --- checks ------------------------------------------------------------------------------------------------------ */

static tch_status check_size(const char *name, int64_t value, int64_t least)
{
    if (value < least || value > TCHI_MOST_SIZE) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_create: %s is %lld, expected %lld to %d", name,
                         (long long)value, (long long)least, TCHI_MOST_SIZE);
    }
    return TCH_OK;
}

static tch_status check_hidden(const tch_network_config *config)
{
    if (config->hidden_count < 0 || config->hidden_count > TCH_NETWORK_MAX_HIDDEN) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_create: hidden_count is %d, expected 0 to %d",
                         config->hidden_count, TCH_NETWORK_MAX_HIDDEN);
    }
    if (config->hidden_count > 0 && config->hidden == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_create: hidden is NULL, expected %d widths",
                         config->hidden_count);
    }
    for (int32_t i = 0; i < config->hidden_count; i++) {
        TCHI_TRY(check_size("an entry of hidden", config->hidden[i], 1));
    }
    return TCH_OK;
}

static tch_status check_config(const tch_network_config *config)
{
    if (config == NULL || config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_network_create: config must point to a struct set to TCH_NETWORK_CONFIG_INIT");
    }
    TCHI_TRY(check_size("inputs", config->inputs, 1));
    TCHI_TRY(check_size("outputs", config->outputs, 1));
    TCHI_TRY(check_size("max_batch", config->max_batch, 0));
    TCHI_TRY(check_hidden(config));
    if ((int)config->activation < 0 || config->activation >= TCH_ACTIVATION_COUNT) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_create: activation is %d, expected a tch_activation",
                         (int)config->activation);
    }
    if ((int)config->loss < 0 || config->loss >= TCH_LOSS_COUNT) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_create: loss is %d, expected a tch_loss",
                         (int)config->loss);
    }
    return TCH_OK;
}

/* --- memory of a batch ------------------------------------------------------------------------------------------- */

static tch_matrices rows_from(tchi_arena *arena, int64_t rows, int64_t cols)
{
    bool countable = rows <= INT64_MAX / (int64_t)sizeof(float) / cols;
    void *data = tchi_arena_take(arena, countable ? rows * cols * (int64_t)sizeof(float) : INT64_MAX);
    return tchi_matrices_new(data, TCH_SCALAR_F32, 1, rows, cols);
}

/* GELU's derivative needs its argument, so its output gets separate memory. */
static void batch_layout(tch_network *network, tchi_arena *arena, int64_t rows)
{
    network->scratch = tchi_arena_take(arena, 3 * TCH_LOSS_RANGES * (int64_t)sizeof(double));
    network->ignored = tchi_arena_take(arena, TCH_NETWORK_TOTALS * (int64_t)sizeof(double));
    network->labels = rows_from(arena, rows, 1).data;
    for (int32_t i = 0; i < network->layer_count; i++) {
        tchi_layer *layer = &network->layers[i];
        layer->z = rows_from(arena, rows, layer->outputs);
        layer->output = layer->activation == TCH_ACTIVATION_GELU ? rows_from(arena, rows, layer->outputs) : layer->z;
        layer->delta = rows_from(arena, rows, layer->outputs);
        if (i + 1 < network->layer_count) {
            network->layers[i + 1].input = layer->output;
        }
    }
}

static tch_status grow_memory(tch_network *network, int64_t rows)
{
    tchi_arena arena = {0};
    void *memory = NULL;
    batch_layout(network, &arena, rows);
    if (arena.used > INT64_MAX / 4) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "a batch of %lld rows needs more memory than 64 bits can count",
                         (long long)rows);
    }
    TCHI_TRY(tchi_pool_allocate(network->context->pool, arena.used, &memory));
    tchi_pool_free(network->context->pool, network->memory);
    network->memory = memory;
    network->capacity = rows;
    return TCH_OK;
}

tch_status tchi_network_set_batch(tch_network *network, int64_t rows)
{
    network->rows = -1;
    if (rows > network->capacity || network->memory == NULL) {
        TCHI_TRY(grow_memory(network, rows));
    }
    tchi_arena arena = {.base = network->memory};
    batch_layout(network, &arena, rows);
    return TCH_OK;
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* Initial weights are drawn on the host from a counter, using only products and a square root: bitwise-identical on
 * every machine and device. */

#define CHUNK 16384 /* weights drawn before a copy to the device: 64 KB of host memory */

/* 64 bits from a counter: SplitMix64. */
static uint64_t bits_of(uint64_t key, uint64_t counter)
{
    uint64_t z = key + (counter + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Variances as network.h gives them; one uniform on [-b, b) has b^2 / 3. */
static double bound_of(const tchi_layer *layer, bool is_last)
{
    double inputs = (double)layer->inputs;
    bool rectified = layer->activation == TCH_ACTIVATION_RELU || layer->activation == TCH_ACTIVATION_GELU;
    double variance = is_last ? 1.0 / inputs : rectified ? 2.0 / inputs : 2.0 / (inputs + (double)layer->outputs);
    return sqrt(3.0 * variance);
}

static tch_status write_weights(tch_context *context, const tchi_layer *layer, uint64_t key, double bound,
                                float *buffer)
{
    float *to = tchi_tensor_data(layer->weight);
    int64_t count = layer->inputs * layer->outputs;
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t n = count - first < CHUNK ? count - first : CHUNK;
        for (int64_t k = 0; k < n; k++) {
            double unit = (double)(bits_of(key, (uint64_t)(first + k)) >> 11) * 0x1p-53;
            buffer[k] = (float)(bound * (2.0 * unit - 1.0));
        }
        TCHI_TRY(context->backend->device->copy_bytes(context->state, to + first, buffer, n * (int64_t)sizeof *buffer,
                                                      TCH_COPY_TO_DEVICE));
    }
    return TCH_OK;
}

/* Layers of one network need different keys. */
static tch_status draw_layer(tch_context *context, const tchi_layer *layer, uint64_t key, bool is_last)
{
    float *buffer;
    TCHI_TRY(tchi_host_take(CHUNK * sizeof *buffer, "first weights", &buffer));
    tch_status status = write_weights(context, layer, key, bound_of(layer, is_last), buffer);
    tchi_host_release(buffer, CHUNK * sizeof *buffer);
    return status;
}

/* Zeroed parameters and gradients, named as number `number`, from 1. */
static tch_status create_layer(tch_context *context, tchi_layer *layer, int32_t number)
{
    const int64_t shape[] = {layer->outputs, layer->inputs};
    TCHI_TRY(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &layer->weight));
    TCHI_TRY(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &layer->bias));
    TCHI_TRY(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &layer->weight_gradient));
    TCHI_TRY(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &layer->bias_gradient));
    snprintf(layer->weight_name, sizeof layer->weight_name, "layer%d.weight", number);
    snprintf(layer->bias_name, sizeof layer->bias_name, "layer%d.bias", number);
    return TCH_OK;
}

/* --- creation and destruction ------------------------------------------------------------------------------------ */

static size_t struct_bytes(int32_t layer_count)
{
    return sizeof(tch_network) + (size_t)layer_count * sizeof(tchi_layer);
}

static void set_sizes(tch_network *network, const tch_network_config *config)
{
    int32_t last = network->layer_count - 1;
    for (int32_t i = 0; i <= last; i++) {
        network->layers[i] = (tchi_layer){
            .inputs = i == 0 ? config->inputs : config->hidden[i - 1],
            .outputs = i == last ? config->outputs : config->hidden[i],
            .activation = i == last ? TCH_ACTIVATION_NONE : config->activation,
        };
    }
}

/* Hashes a seed to a key per layer. */
static uint64_t key_of(uint64_t seed, int32_t layer)
{
    uint64_t z = (seed + 0xD1B54A32D192ED03u) ^ ((uint64_t)layer + 1) * 0x8CB92BA72F3D8DD7u;
    z = (z ^ (z >> 31)) * 0x7FB5D329728EA185u;
    z = (z ^ (z >> 27)) * 0x81DADEF4BC2DD44Du;
    return z ^ (z >> 33);
}

/* The batch first: an absurd size fails before any allocation. */
static tch_status build_layers(tch_network *network, const tch_network_config *config)
{
    tch_context *context = network->context;
    if (config->max_batch > 0) {
        TCHI_TRY(tchi_network_set_batch(network, config->max_batch));
    }
    for (int32_t i = 0; i < network->layer_count; i++) {
        tchi_layer *layer = &network->layers[i];
        TCHI_TRY(create_layer(context, layer, i + 1));
        TCHI_TRY(draw_layer(context, layer, key_of(config->seed, i), i + 1 == network->layer_count));
    }
    return TCH_OK;
}

tch_status tch_network_create(tch_context *context, const tch_network_config *config, tch_network **network)
{
    TCHI_ENTER_FOR(context, "tch_network_create", network);
    if (network == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_create: network is NULL");
    }
    *network = NULL;
    TCHI_TRY(check_config(config));
    int32_t layer_count = config->hidden_count + 1;
    tch_network *made;
    TCHI_TRY(tchi_host_take(struct_bytes(layer_count), "a network", &made));
    *made = (tch_network){.context = context, .loss = config->loss, .layer_count = layer_count, .rows = -1};
    set_sizes(made, config);
    tch_status status = build_layers(made, config);
    if (status != TCH_OK) {
        tch_network_destroy(made);
        return status;
    }
    *network = made;
    return TCH_OK;
}

void tch_network_destroy(tch_network *network)
{
    if (network == NULL) {
        return;
    }
    for (int32_t i = 0; i < network->layer_count; i++) {
        tch_tensor_destroy(network->layers[i].weight);
        tch_tensor_destroy(network->layers[i].bias);
        tch_tensor_destroy(network->layers[i].weight_gradient);
        tch_tensor_destroy(network->layers[i].bias_gradient);
    }
    tchi_pool_free(network->context->pool, network->memory);
    tchi_host_release(network, struct_bytes(network->layer_count));
}

/* --- parameters as the caller sees them --------------------------------------------------------------------------- */

static const tchi_layer *layer_of(const tch_network *network, int32_t index)
{
    return index >= 0 && index < tch_network_parameter_count(network) ? &network->layers[index / 2] : NULL;
}

int32_t tch_network_parameter_count(const tch_network *network)
{
    return network == NULL ? 0 : 2 * network->layer_count;
}

tch_tensor *tch_network_parameter(const tch_network *network, int32_t index)
{
    const tchi_layer *layer = layer_of(network, index);
    return layer == NULL ? NULL : index % 2 == 0 ? layer->weight : layer->bias;
}

tch_tensor *tch_network_gradient(const tch_network *network, int32_t index)
{
    const tchi_layer *layer = layer_of(network, index);
    return layer == NULL ? NULL : index % 2 == 0 ? layer->weight_gradient : layer->bias_gradient;
}

const char *tch_network_parameter_name(const tch_network *network, int32_t index)
{
    const tchi_layer *layer = layer_of(network, index);
    return layer == NULL ? NULL : index % 2 == 0 ? layer->weight_name : layer->bias_name;
}

int64_t tch_network_size(const tch_network *network)
{
    int64_t size = 0;
    for (int32_t i = 0; i < tch_network_parameter_count(network); i++) {
        size += tch_tensor_numel(tch_network_parameter(network, i));
    }
    return size;
}
