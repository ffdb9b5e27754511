/* A small sharded KFAC: layers of equal and of different sizes, and steps whose data depend on the step number alone,
 * so that a run can resume at any step. */
#ifndef TORCHIUM_TESTS_SHARED_KFAC_H
#define TORCHIUM_TESTS_SHARED_KFAC_H

#include <torchium/torchium.h>

#include "support/random.h"

enum {
    KFAC_LAYERS = 7,
    KFAC_MOST_ELEMENTS = 512, /* of a layer's samples on one side, or of its gradient */
    KFAC_ELEMENTS = 2 * KFAC_LAYERS * KFAC_MOST_ELEMENTS
};

/* Initializes KFAC_LAYERS layers named "layer0" and so on. */
void shared_kfac_describe(tch_kfac_layer *layers);

/* Every layer observes a batch of the stream. */
tch_status shared_kfac_observe(tch_kfac *kfac, test_random *random);

/* An observation, a refresh at every other step, and preconditioned gradients: `gradients` has KFAC_ELEMENTS, weight
 * and bias of each layer in turn. */
tch_status shared_kfac_step(tch_kfac *kfac, int32_t step, double *gradients);

#endif
