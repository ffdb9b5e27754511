/* An optimizer of the library and the plain float64 references of its parameters, taking the same steps. Parameters lie
 * in guarded memory in the order of their own choice; gradients are fresh random numbers at every step, with a spectrum
 * that is neither flat nor degenerate. */
#ifndef TORCHIUM_TESTS_OPTIM_TRIAL_H
#define TORCHIUM_TESTS_OPTIM_TRIAL_H

#include "optim_reference.h"
#include "support/bad_input.h"
#include "support/random.h"
#include "support/tensors.h"

#define TRIAL_MOST_PARAMETERS 256
#define TRIAL_MOST_GROUPS 4

/* An option of a kind: its name and the fields of the configuration that it sets, by SET. A list of fields ends where
 * there are no more, a list of options with one that has no name. */
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

/* What tests of every kind begin with, so that the references can follow: refreshes all at once, by the eigen method.
 * And the share of the way by which arithmetic in a type may be off: in float64, and in float32, which all others
 * use. */
tch_optim_config trial_config(tch_optim_kind kind);
double trial_tolerance(tch_optim_kind kind, tch_dtype dtype);

void trial_set(tch_optim_config *config, const trial_setting *settings);

/* One parameter of a trial. */
typedef struct trial_shape {
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK]; /* in the order of memory, outermost first */
    int32_t order[TCH_MAX_RANK]; /* dimension d of the tensor is number order[d] in memory; all 0: as in memory */
    int32_t elementwise;
    int32_t gradient_follows; /* 1: the gradient lies as the parameter does; 0: in `gradient` layout of its shape */
    test_layout gradient;
} trial_shape;

typedef struct trial_parameter {
    trial_shape shape;
    int32_t group;
    test_tensor *memory, *gradient_memory;
    tch_tensor tensor, gradient; /* what the library is given */
    int64_t sizes[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    double *drawn;   /* the latest gradient, in the order of memory, as its dtype holds it */
    double path;     /* the length of the reference's way so far */
    double size;     /* the largest norm of its values so far */
    int32_t missing; /* 1: gets no gradient */
    ref_optim *reference;
} trial_parameter;

typedef struct trial {
    tch_context *context;
    tch_optimizer *optimizer;
    tch_dtype dtype, gradient_dtype;
    test_random random;
    int32_t groups, count;
    tch_optim_config configs[TRIAL_MOST_GROUPS];
    trial_parameter parameters[TRIAL_MOST_PARAMETERS];
    int64_t steps;
} trial;

/* An optimizer with one group of these parameters. `gradients` is their gradients' dtype. */
void trial_open(trial *t, tch_context *context, tch_dtype dtype, tch_dtype gradients, const tch_optim_config *config,
                int32_t count, const trial_shape *shapes);
void trial_add_group(trial *t, const tch_optim_config *config, int32_t count, const trial_shape *shapes);
void trial_close(trial *t);

/* Parameters without an optimizer yet, for tests that make it themselves: `entries` has room for count. */
void trial_prepare(trial *t, tch_context *context, tch_dtype dtype, tch_dtype gradients, const tch_optim_config *config,
                   int32_t count, const trial_shape *shapes, tch_parameter *entries);

/* New gradients for the library; the references' step with them. trial_step does both, and the library's between. */
void trial_draw(trial *t);
void trial_list_gradients(const trial *t, const tch_tensor **gradients);
void trial_step_references(trial *t);
void trial_step(trial *t);
void trial_steps(trial *t, int32_t count);

/* Zeros in place of the first `count` numbers of a gradient that was drawn. */
void trial_erase(trial *t, int32_t parameter, int64_t count);

/* Puts a number that is not finite, or any other, into the last element of a gradient that was drawn. */
void trial_spoil(trial *t, int32_t parameter, double value);

/* Multiplies the gradients on the device, not those of the references. */
void trial_scale_gradients(trial *t, double factor);

/* The library's step alone, with the gradients that were drawn. */
tch_status trial_step_library(const trial *t);

tch_optim_stats trial_stats(const trial *t);

/* The state of a number or a name, and the numbers of any tensor on the device, as float64. */
tch_optim_state trial_state_at(const trial *t, int32_t index);
tch_tensor *trial_state(const trial *t, const char *name);
double *trial_read(const trial *t, const tch_tensor *tensor);

/* The bytes of a tensor on the device, and of the state of one parameter or of all (-1), which must not change. */
void *trial_read_bytes(const trial *t, const tch_tensor *tensor);
unsigned char *trial_snapshot(const trial *t, int32_t parameter);
void trial_check_snapshot(const trial *t, int32_t parameter, const unsigned char *before);

/* The optimizer as a checkpoint, under the prefix "optimizer". */
void trial_save(const trial *t, const char *path);
tch_status trial_load(const trial *t, const char *path);

/* A fresh optimizer of the same parameters takes the place of the trial's. */
void trial_replace_optimizer(trial *t, const tch_optim_config *config);

/* A parameter moves to other memory. Returns the old one, for the caller to see that nothing writes there. */
test_tensor *trial_move_parameter(trial *t, int32_t parameter);

/* `to` goes on where `from` is: its parameters, its gradients to come, and its state by way of a checkpoint. */
void trial_take_over(trial *to, const trial *from, const char *path);
void trial_copy_parameters(const trial *to, const trial *from);

/* Fails the test where a bit of the parameters differs. */
void trial_check_same_parameters(const trial *a, const trial *b);

/* The check for every kind of optimizer that there is, as a case of its own each. */
void trial_for_every_kind(tch_context *context, const char *what, void (*check)(tch_context *, tch_optim_kind));

/* Changes the numbers of a group on both sides. */
void trial_set_config(trial *t, int32_t group, const tch_optim_config *config);

/* |p - reference| over the length of the reference's way, for one parameter, after taking away what storing p in its
 * dtype at each of `roundings` steps may have done, and what signs of Lion's leave open. */
double trial_error(const trial *t, int32_t parameter, double roundings);

/* Fails where an error exceeds the tolerance, memory beside a tensor was written, or nothing has moved. */
void trial_check(const trial *t, double tolerance);

#endif
