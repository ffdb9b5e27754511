/* KFAC shared by the ranks of a group. All ranks have the factors of all layers, since each sees other samples; the
 * owner of a layer refreshes its inverses or bases and sends the result: preconditioned gradients, or for EKFAC the
 * bases, which every rank needs for the scales. All ranks use the order of the layers, which determines the sizes of
 * messages. */
#include "comm/comm.h"
#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"

#include "kfac.h"

/* --- owners ------------------------------------------------------------------------------------------------------ */

/* Larger sizes exceed any memory; their cubes would overflow. */
#define MOST_SIZE ((int64_t)1 << 18)

static int64_t cube(int64_t n)
{
    n = n < MOST_SIZE ? n : MOST_SIZE;
    return n * n * n;
}

/* Cost of a layer's refresh, up to a constant. */
static int64_t cost_of(const tchi_kfac_layer *layer)
{
    return cube(layer->inputs + layer->bias) + cube(layer->outputs / layer->groups);
}

/* The most expensive layer without an owner; the first of ties. */
static tchi_kfac_layer *next_layer(tch_kfac *k)
{
    tchi_kfac_layer *found = NULL;
    for (int32_t i = 0; i < k->count; i++) {
        tchi_kfac_layer *layer = &k->layers[i];
        if (layer->owner < 0 && (found == NULL || layer->groups * cost_of(layer) > found->groups * cost_of(found))) {
            found = layer;
        }
    }
    return found;
}

/* Longest processing time first: each layer goes to the rank with the least load, the first of ties. */
tch_status tchi_kfac_choose_owners(tch_kfac *k)
{
    int32_t size = tch_comm_size(k->comm);
    int64_t *loads;
    TCHI_TRY(tchi_host_take((size_t)size * sizeof *loads, "KFAC's owners", &loads));
    for (int32_t i = 0; i < k->count; i++) {
        k->layers[i].owner = -1;
    }
    for (tchi_kfac_layer *layer = next_layer(k); layer != NULL; layer = next_layer(k)) {
        int32_t least = 0;
        for (int32_t rank = 1; rank < size; rank++) {
            least = loads[rank] < loads[least] ? rank : least;
        }
        layer->owner = least;
        loads[least] += layer->groups * cost_of(layer);
    }
    tchi_host_release(loads, (size_t)size * sizeof *loads);
    return TCH_OK;
}

bool tchi_kfac_is_mine(const tch_kfac *k, int32_t layer)
{
    return k->comm == NULL || k->layers[layer].owner == tch_comm_rank(k->comm);
}

bool tchi_kfac_is_held(const tch_kfac *k, int32_t layer)
{
    return tchi_kfac_is_mine(k, layer) || k->config.method == TCH_KFAC_EKFAC;
}

/* --- what travels ------------------------------------------------------------------------------------------------ */

typedef struct part {
    char *data;
    int64_t bytes;
    int32_t owner;
} part;

/* Of bases: those of both sides, each with its eigenvalues. */
enum { PARTS_OF_BASES = 2 * TCHI_SIDES };

static int32_t part_count(const tch_kfac *k, tchi_kfac_traffic what)
{
    return what == TCHI_GRADIENTS ? k->count : PARTS_OF_BASES * k->count;
}

static part gradient_part(const tch_kfac *k, const tchi_kfac_layer *layer)
{
    const tchi_kfac_block_batch *c = &k->block_batches[layer->block_batch];
    int64_t each = c->size[TCHI_INPUT] * c->size[TCHI_OUTPUT] * tchi_scalar_size(k->type);
    char *data = c->kept == NULL ? NULL : c->kept + layer->unit * each;
    return (part){data, layer->groups * each, layer->owner};
}

static part basis_part(const tch_kfac *k, const tchi_kfac_layer *layer, int32_t index)
{
    const tchi_kfac_block_batch *c = &k->block_batches[layer->block_batch];
    int side = index / 2;
    const tchi_kfac_factor_batch *f = tchi_kfac_factor_batch_of(k, c, side);
    int64_t first = c->position[side] + layer->unit;
    bool basis = index % 2 == 0;
    int64_t each = (basis ? f->n * f->n : f->n) * tchi_scalar_size(k->type);
    return (part){(basis ? f->results : f->values) + first * each, layer->groups * each, layer->owner};
}

static part part_of(const tch_kfac *k, tchi_kfac_traffic what, int32_t index)
{
    return what == TCHI_GRADIENTS ? gradient_part(k, &k->layers[index])
                                  : basis_part(k, &k->layers[index / PARTS_OF_BASES], index % PARTS_OF_BASES);
}

int64_t tchi_kfac_traffic_bytes(const tch_kfac *k, tchi_kfac_traffic what)
{
    int64_t most = 0;
    for (int32_t rank = 0; rank < tch_comm_size(k->comm); rank++) {
        int64_t bytes = 0;
        for (int32_t i = 0; i < part_count(k, what); i++) {
            part p = part_of(k, what, i);
            bytes += p.owner == rank ? p.bytes : 0;
        }
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Copies the parts of one rank, in order, into or out of a buffer. */
static tch_status copy_parts(const tch_kfac *k, tchi_kfac_traffic what, int32_t rank, char *buffer, bool out)
{
    for (int32_t i = 0; i < part_count(k, what); i++) {
        part p = part_of(k, what, i);
        if (p.owner == rank) {
            TCHI_TRY(k->context->backend->device->copy_bytes(k->context->state, out ? p.data : buffer,
                                                             out ? buffer : p.data, p.bytes, TCH_COPY_DEVICE));
            buffer += p.bytes;
        }
    }
    return TCH_OK;
}

tch_status tchi_kfac_exchange(const tch_kfac *k, tchi_kfac_traffic what, char *send, char *receive)
{
    int64_t bytes = tchi_kfac_traffic_bytes(k, what);
    int32_t local = tch_comm_rank(k->comm);
    TCHI_TRY(k->context->backend->device->zero_bytes(k->context->state, send, bytes));
    TCHI_TRY(copy_parts(k, what, local, send, false));
    TCHI_TRY(tchi_comm_all_gather(k->comm, send, receive, bytes, tchi_comm_stream(k->context)));
    for (int32_t rank = 0; rank < tch_comm_size(k->comm); rank++) {
        if (rank != local) {
            TCHI_TRY(copy_parts(k, what, rank, receive + rank * bytes, true));
        }
    }
    return TCH_OK;
}
