/* Plain float64 versions of the optimizers' operations, one element at a time and written from the formulas of
 * torchium/backend.h. Beside every result stands its size, the sum of the magnitudes it was made of: errors of rounding
 * are a few units of it. */
#ifndef TORCHIUM_TESTS_UPDATE_REFERENCE_H
#define TORCHIUM_TESTS_UPDATE_REFERENCE_H

#include <stdbool.h>

#include <torchium/backend.h>

typedef enum ref_field {
    REF_PARAM, /* in full: the master copy where there is one */
    REF_GRAD,
    REF_STATE_0,
    REF_STATE_1,
    REF_STATE_2,
    REF_BLOCK_0,
    REF_BLOCK_1,
    REF_FIELDS
} ref_field;

typedef struct ref_element {
    double value[REF_FIELDS];
    double size[REF_FIELDS];
    bool written[REF_FIELDS];
    double direction; /* of `graft`, and its size */
    double direction_size;
} ref_element;

/* What an element's step depends on beside the element. */
typedef struct ref_setting {
    tch_hyper hyper;
    tch_clock clock;
    bool has[REF_FIELDS]; /* the rectangle has this array */
    double factor;
    double grad_scale; /* 1 for none */
    int32_t maximize, amsgrad, l2, nesterov, decay, replace;
    double roundoff; /* of the arithmetic: a sign is open where a sum is no more than its rounding */
    tch_filter filter;
    tch_graft graft;
    double block_scale;
} ref_setting;

typedef void (*ref_update)(const ref_setting *s, ref_element *e);

void ref_adamw(const ref_setting *s, ref_element *e);
void ref_sgd(const ref_setting *s, ref_element *e);
void ref_lion(const ref_setting *s, ref_element *e);
void ref_gather(const ref_setting *s, ref_element *e);
void ref_gather_skipped(const ref_setting *s, ref_element *e);
void ref_graft(const ref_setting *s, ref_element *e);
void ref_gather_graft(const ref_setting *s, ref_element *e);
void ref_rotated_adam(const ref_setting *s, ref_element *e);
void ref_apply(const ref_setting *s, ref_element *e);
void ref_unscale(const ref_setting *s, ref_element *e);
void ref_nothing(const ref_setting *s, ref_element *e);

/* A clock after `advance`. */
void ref_advance(tch_clock *clock, const tch_hyper *h, bool skip, bool correct, tch_factor_rule rule);

void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* The bits of the bfloat16 that a finite float32 becomes at random. */
uint16_t ref_round_at_random(float value, uint64_t seed, uint32_t step, uint32_t parameter, uint64_t element);

#endif
