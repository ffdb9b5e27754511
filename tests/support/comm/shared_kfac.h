/* A small KFAC for tests of what ranks share: layers of equal sizes and of others, and steps whose numbers follow from
 * the step alone, so that training may be taken up at any of them. */
#ifndef TORCHIUM_TESTS_SHARED_KFAC_H
#define TORCHIUM_TESTS_SHARED_KFAC_H

#include <torchium/torchium.h>

#include "support/random.h"

enum {
    KFAC_LAYERS = 7,
    KFAC_MOST_ELEMENTS = 512, /* of a layer's samples on one side, or of its gradient */
    KFAC_ELEMENTS = 2 * KFAC_LAYERS * KFAC_MOST_ELEMENTS
};

/* Fills in KFAC_LAYERS layers, called "layer0" and so on. */
void shared_kfac_describe(tch_kfac_layer *layers);

/* Every layer sees a batch of the stream. */
tch_status shared_kfac_observe(tch_kfac *kfac, test_random *random);

/* An observation, at every other step a refresh, and gradients that are preconditioned: `gradients` has KFAC_ELEMENTS,
 * weight and bias of each layer in turn. */
tch_status shared_kfac_step(tch_kfac *kfac, int32_t step, double *gradients);

#endif
