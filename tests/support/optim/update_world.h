/* Parameters, gradients, states and blocks on the device under test, as rectangles for the operations of optimizers:
 * all arrays of a kind lie in one block of memory, each rectangle at an offset of its own that is aligned to nothing
 * but the element, with poison before, between and after the rows. A check compares every element of every array with
 * the reference, and every byte between them with what was there. */
#ifndef TORCHIUM_TESTS_UPDATE_WORLD_H
#define TORCHIUM_TESTS_UPDATE_WORLD_H

#include "core/context.h"
#include "support/random.h"
#include "update_reference.h"

typedef struct world_types {
    const char *name;
    tch_scalar real, param, grad, block;
    bool master;
} world_types;

/* One rectangle: `gap` elements between its rows in the parameter, `block_gap` in the blocks. */
typedef struct world_shape {
    int64_t rows, cols, gap, block_gap;
    int32_t transposed;
} world_shape;

typedef struct world_field {
    tch_scalar type;
    int64_t elements;
    void *device;
    unsigned char *before, *after;
} world_field;

/* The numbers of the device beside the arrays. */
typedef struct world_numbers {
    tch_hyper hyper;
    int32_t skip, found, tracker;
    float grad_scale, found_inf;
    double counts[2];
} world_numbers;

typedef struct world {
    tch_context *context;
    const tch_backend *backend;
    world_types types;
    int64_t count;
    tch_update update; /* of all rectangles; tests change it as they like */
    tch_rect *rects;
    int64_t *param_at, *block_at; /* where each rectangle begins, in elements */
    world_field field[REF_FIELDS];
    world_field rounded; /* the parameter itself where there is a master copy */
    tch_clock *clocks;   /* on the device, one for each rectangle */
    tch_clock **clock_list;
    world_numbers *numbers; /* on the device */
    double *wanted, *norms; /* on the device, one for each rectangle */
    int64_t blocks;
    void *scratch; /* for graft */
    int64_t scratch_bytes;
} world;

/* Every array is there; what a test wants to be missing it sets to NULL in the rectangles. Two rectangles that follow
 * each other belong to one block. */
world *world_open(tch_context *context, const world_types *types, const world_shape *shapes, int64_t count);
void world_close(world *w);

/* Fresh numbers for every element of every array; states and what follows from squares are not negative. */
void world_fill(world *w, test_random *random);
/* Gradients alone; and one number in place of every element of a field. */
void world_fill_gradients(world *w, test_random *random);
void world_fill_constant(world *w, ref_field field, double value);

/* To the device from `before`, and back into `after`. */
void world_upload(world *w);
void world_download(world *w);
/* What the device holds becomes the start of the next step. */
void world_keep(world *w);

void world_set(world *w, const void *value, const void *member, int64_t bytes);
void world_get(world *w, void *value, const void *member, int64_t bytes);
void world_set_hyper(world *w, const tch_hyper *hyper);
void world_set_steps(world *w, double steps); /* of all clocks, not yet advanced */
void world_advance(world *w, bool correct);

/* Fails the test unless `after` is what the operation makes of `before`. The setting's clock, factor and arrays are
 * taken from each rectangle. `scales` are those of the blocks, or NULL. */
void world_check(world *w, ref_update operation, const ref_setting *setting, const double *scales);

/* The element (i, j) of a rectangle in a field. */
int64_t world_index(const world *w, int64_t rect, ref_field field, int64_t i, int64_t j);

tch_dtype world_dtype(tch_scalar type);

#endif
