/* An optimizer of the library and float64 references of its parameters, taking the same steps. Parameters are in
 * guarded memory with any order of dimensions; gradients are random at every step, with a spectrum that is neither flat
 * nor degenerate. */
#ifndef TORCHIUM_TESTS_OPTIM_TRIAL_H
#define TORCHIUM_TESTS_OPTIM_TRIAL_H

#include "optim_reference.h"
#include "support/bad_input.h"
#include "support/random.h"
#include "support/tensors.h"

#define TRIAL_MOST_PARAMETERS 256
#define TRIAL_MOST_GROUPS 4

/* An option of a kind: its name and the configuration fields it sets, by SET. Lists of fields end with an empty field,
 * lists of options with an unnamed one. */
typedef struct trial_setting {
    test_field field; /* no name: none */
    double value;
} trial_setting;

/* clang-format off */
#define SET(member, value) {TEST_FIELD(tch_optim_config, member), value}
/* clang-format on */
#define TRIAL_MOST_SETTINGS 14

typedef struct trial_option {
    const char *name;
    trial_setting settings[TRIAL_MOST_SETTINGS];
} trial_option;

/* Common settings, so that the references can follow: refreshes all at once, by the eigen method; and relative error
 * bounds of the compute type: float64, and float32 for all others. */
tch_optim_config trial_config(tch_optim_kind kind);
double trial_tolerance(tch_optim_kind kind, tch_dtype dtype);

void trial_set(tch_optim_config *config, const trial_setting *settings);

/* One parameter of a trial. */
typedef struct trial_shape {
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK]; /* in the order of memory, outermost first */
    int32_t order[TCH_MAX_RANK]; /* dimension d of the tensor is dimension order[d] of memory; all 0: as in memory */
    int32_t elementwise;
    int32_t gradient_follows; /* 1: the gradient has the parameter's layout; 0: `gradient` layout of its shape */
    test_layout gradient;
} trial_shape;

typedef struct trial_parameter {
    trial_shape shape;
    int32_t group;
    test_tensor *memory, *gradient_memory;
    tch_tensor tensor, gradient; /* passed to the library */
    int64_t sizes[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    double *drawn;   /* the latest gradient in memory order, as rounded to its dtype */
    double path;     /* length of the reference's path so far */
    double size;     /* largest norm of its values so far */
    int32_t missing; /* 1: has no gradient */
    ref_optim *reference;
} trial_parameter;

typedef struct trial {
    tch_context *context;
    tch_optimizer *optimizer;
    bool owned; /* the optimizer is released after the test */
    tch_dtype dtype, gradient_dtype;
    test_random random;
    int32_t groups, count;
    tch_optim_config configs[TRIAL_MOST_GROUPS];
    trial_parameter parameters[TRIAL_MOST_PARAMETERS];
    int64_t steps;
} trial;

/* An optimizer with one group of these parameters. `gradients` is the gradients' dtype. */
void trial_open(trial *t, tch_context *context, tch_dtype dtype, tch_dtype gradients, const tch_optim_config *config,
                int32_t count, const trial_shape *shapes);
void trial_add_group(trial *t, const tch_optim_config *config, int32_t count, const trial_shape *shapes);

/* Before the end of the test, and what trial_prepare and the caller made. */
void trial_close(trial *t);

/* Parameters without an optimizer, for tests that create it: `entries` has room for count. */
void trial_prepare(trial *t, tch_context *context, tch_dtype dtype, tch_dtype gradients, const tch_optim_config *config,
                   int32_t count, const trial_shape *shapes, tch_parameter *entries);

/* New gradients for the library; and the references' step with them. trial_step does both, and the library's step in
 * between. */
void trial_draw(trial *t);
void trial_list_gradients(const trial *t, const tch_tensor **gradients);
void trial_step_references(trial *t);
void trial_step(trial *t);
void trial_steps(trial *t, int32_t count);

/* Zeroes the first `count` elements of the current gradient. */
void trial_erase(trial *t, int32_t parameter, int64_t count);

/* Sets the last element of the current gradient, for instance to NaN. */
void trial_spoil(trial *t, int32_t parameter, double value);

/* Multiplies the gradients on the device, not those of the references. */
void trial_scale_gradients(trial *t, double factor);

/* The library's step alone, with the current gradients. */
tch_status trial_step_library(const trial *t);

tch_optim_stats trial_stats(const trial *t);

/* State by index or name, and any device tensor, as float64. */
tch_optim_state trial_state_at(const trial *t, int32_t index);
tch_tensor *trial_state(const trial *t, const char *name);
double *trial_read(const trial *t, const tch_tensor *tensor);

/* The bytes of a device tensor, and of the state of one parameter or of all (-1), which must not change. */
void *trial_read_bytes(const trial *t, const tch_tensor *tensor);
unsigned char *trial_snapshot(const trial *t, int32_t parameter);
void trial_check_snapshot(const trial *t, int32_t parameter, const unsigned char *before);

/* The optimizer as a checkpoint, with the prefix "optimizer". */
void trial_save(const trial *t, const char *path);
tch_status trial_load(const trial *t, const char *path);

/* Replaces the trial's optimizer by a new one of the same parameters. */
void trial_replace_optimizer(trial *t, const tch_optim_config *config);

/* Moves a parameter to other memory. Returns the old memory, to check that it is not written. */
test_tensor *trial_move_parameter(trial *t, int32_t parameter);

/* `to` continues from `from`: its parameters, random stream, and state through a checkpoint. */
void trial_take_over(trial *to, const trial *from, const char *path);
void trial_copy_parameters(const trial *to, const trial *from);

/* Fails the test unless parameters are bitwise identical. */
void trial_check_same_parameters(const trial *a, const trial *b);

/* Runs the check as one case per kind of optimizer. */
void trial_for_every_kind(tch_context *context, const char *what, void (*check)(tch_context *, tch_optim_kind));

/* Changes hyperparameters of a group on both sides. */
void trial_set_config(trial *t, int32_t group, const tch_optim_config *config);

/* |p - reference| over the length of the reference's path, for one parameter, minus the rounding of p to its dtype in
 * each of `roundings` steps, and undetermined signs of Lion. */
double trial_error(const trial *t, int32_t parameter, double roundings);

/* Fails if an error exceeds the tolerance, memory outside a tensor was written, or no parameter has moved. */
void trial_check(const trial *t, double tolerance);

#endif
