/* The cases that all tests of updates run over: types of parameters, gradients and blocks, and lists of rectangles. */
#ifndef TORCHIUM_TESTS_UPDATE_CASES_H
#define TORCHIUM_TESTS_UPDATE_CASES_H

#include "update_world.h"

#define TYPE_CASES 10
/* From one combination of options to the next: all of them for the plain types, a few of all kinds for the others. */
#define OPTION_STEP(types) ((types) < 2 ? 1 : 5)
extern const world_types type_cases[TYPE_CASES];

/* Rectangles of all kinds, with and without gaps, blocks as they are and transposed: rows and columns around the
 * sizes at which work is cut, empty ones, one long row. */
#define SHAPE_CASES 22
extern const world_shape shape_cases[SHAPE_CASES];

/* Many small rectangles and a large one at each end. */
#define MANY_CHUNKS 1501
const world_shape *many_shapes(void);

/* Hyperparameters whose every part shows in the results. */
extern const tch_hyper lively_hyper;

/* A world of these types and rectangles, filled and uploaded. */
world *world_begin(tch_context *context, const world_types *types, const world_shape *shapes, int64_t count,
                   uint64_t stream);

/* Uploads, calls the operation, downloads. */
typedef tch_status (*world_operation)(world *w, const ref_setting *setting);
void world_run(world *w, world_operation operation, const ref_setting *setting);

#endif
