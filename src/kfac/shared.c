/* KFAC that the ranks of a group share. Every rank sees samples of its own, so all have the factors of all layers; but
 * one of them, a layer's owner, refreshes what preconditions, and what comes of it goes to the others: preconditioned
 * gradients, or under EKFAC the bases, which every rank needs to see the scales. Parts are walked in the order of the
 * layers on every rank alike, so that the schedule of bytes follows from the layers alone. */
#include "comm/comm.h"
#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"

#include "kfac.h"

/* --- owners ------------------------------------------------------------------------------------------------------ */

/* Sizes above this one are far beyond memory; their cubes would not fit. */
#define MOST_SIZE ((int64_t)1 << 18)

static int64_t cube(int64_t n)
{
    n = n < MOST_SIZE ? n : MOST_SIZE;
    return n * n * n;
}

/* What a refresh of the layer costs, up to a constant. */
static int64_t cost_of(const tchi_kfac_layer *layer)
{
    return cube(layer->inputs + layer->bias) + cube(layer->outputs / layer->groups);
}

/* The most expensive layer without an owner, the first of equal ones. */
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

/* Longest processing time first: each layer goes to the rank that has least to do, the first of equal ones. */
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

/* The parts of one rank, one after the other, into a buffer or out of it. */
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
