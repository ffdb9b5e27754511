/* Parameters of a layer and their first values. These are drawn on the host, from a counter, with nothing but products
 * and a square root: the same bits on every machine, whatever the device. */
#include "network.h"

#include <math.h>
#include <stdalign.h>
#include <stdio.h>

#include "core/allocator.h"
#include "core/status.h"

#define CHUNK 16384 /* weights drawn before they go to the device: 64 KB of the host's memory */

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

static void draw_weights(uint64_t key, int64_t first, int64_t count, double bound, float *weights)
{
    for (int64_t k = 0; k < count; k++) {
        double unit = (double)(bits_of(key, (uint64_t)(first + k)) >> 11) * 0x1p-53;
        weights[k] = (float)(bound * (2.0 * unit - 1.0));
    }
}

static tch_status write_weights(tch_context *context, const tchi_layer *layer, uint64_t key, double bound,
                                float *buffer)
{
    float *to = tchi_tensor_data(layer->weight);
    int64_t count = layer->inputs * layer->outputs;
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t n = count - first < CHUNK ? count - first : CHUNK;
        draw_weights(key, first, n, bound, buffer);
        TCHI_TRY(context->backend->device->copy_bytes(context->state, to + first, buffer, n * (int64_t)sizeof *buffer,
                                                      TCH_COPY_TO_DEVICE));
    }
    return TCH_OK;
}

tch_status tchi_layer_draw(tch_context *context, const tchi_layer *layer, uint64_t key, bool is_last)
{
    float *buffer = tchi_host_allocate(CHUNK * sizeof *buffer, alignof(float));
    if (buffer == NULL) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for first weights",
                         CHUNK * sizeof *buffer);
    }
    tch_status status = write_weights(context, layer, key, bound_of(layer, is_last), buffer);
    tchi_host_release(buffer, CHUNK * sizeof *buffer);
    return status;
}

tch_status tchi_layer_create(tch_context *context, tchi_layer *layer, int32_t number)
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

void tchi_layer_destroy(tchi_layer *layer)
{
    tch_tensor_destroy(layer->weight);
    tch_tensor_destroy(layer->bias);
    tch_tensor_destroy(layer->weight_gradient);
    tch_tensor_destroy(layer->bias_gradient);
}

/* --- what the caller sees of them -------------------------------------------------------------------------------- */

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
