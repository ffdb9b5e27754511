/* Kernels of the user's for a part of a step. Everything that can be wrong with one is found when it is set: it is
 * compiled, its parameters are compared with those it will get, and it is tried on random numbers. What it does not
 * pass it does not get, and the built-in works there; the reason is kept for whoever asks. In a step it is one launch
 * like any other. */
#ifndef TCHI_OPTIM_USER_KERNEL_H
#define TCHI_OPTIM_USER_KERNEL_H

#include "kernel/input.h"
#include "kernel/kernel.h"
#include "linalg/inverse_root.h"

#include "optimizer.h"

/* How a factor stands with the custom kernel. A root that it failed is taken by the built-in from then on. */
typedef enum tchi_user_kernel_state {
    TCHI_USER_KERNEL_NEVER = 0,   /* the latest root is the built-in's */
    TCHI_USER_KERNEL_LATEST = 1,  /* the latest root is the kernel's */
    TCHI_USER_KERNEL_REFUSED = 2, /* the same, and it was seen to fail */
    TCHI_USER_KERNEL_LEFT = 3     /* the built-in has taken over */
} tchi_user_kernel_state;

/* What a kernel that is being set is made from. */
typedef struct tchi_user_kernel_request {
    tch_optimizer *optimizer;
    const tch_optim_kernel *asked;
    const tchi_kernel_input *input; /* of asked->kernel: checked, and read from its file */
} tchi_user_kernel_request;

/* Where in `kernel` of a tchi_user_kernel. */
static inline int tchi_user_kernel_index(tch_scalar real)
{
    return real == TCH_SCALAR_F64 ? 0 : 1;
}

static inline bool tchi_user_kernel_in_use(const tchi_user_kernel *own)
{
    return own->kernel[0] != NULL || own->kernel[1] != NULL;
}

/* Back to the built-in. Waits for the device. */
void tchi_user_kernel_release(tchi_user_kernel *own);

/* Whether a status of compiling or trying a kernel is a finding about the kernel. Then its message becomes the reason,
 * if there is none yet. Everything else is an error of the call. */
bool tchi_user_kernel_finds(const tch_optimizer *optimizer, tchi_user_kernel *own, tch_status status);
void tchi_user_kernel_explain(tchi_user_kernel *own, const char *reason);

/* For the checks: the next random number between -1 and 1, and the larger of two errors, a NaN being the largest. */
float tchi_user_kernel_random(uint64_t *seed);
double tchi_user_kernel_worse(double a, double b);

/* --- the elementwise update */

/* Compiles and tries; counts the parameters that are served and left. */
tch_status tchi_user_kernel_update_make(const tchi_user_kernel_request *request, tchi_user_kernel *own);

/* Whether the custom kernel has this update. */
bool tchi_user_kernel_updates(const tchi_user_kernel *own, int32_t group, tch_scalar real);
tch_status tchi_user_kernel_update(const tch_optimizer *optimizer, tchi_user_kernel *own, int32_t group,
                                   const tch_update *update);

/* Tries the kernel for this arithmetic on random elements, as an update of the group; what it finds is an error. */
tch_status tchi_user_kernel_update_probe(tch_optimizer *optimizer, tchi_user_kernel *own, int32_t group,
                                         tch_scalar real, const char *name);

/* --- roots */

/* Compiles and tries; `passed` gets one entry for every factor batch. */
tch_status tchi_user_kernel_root_make(const tchi_user_kernel_request *request, tchi_user_kernel *own, bool *passed);

/* Whether the next root of this factor is the custom kernel's. */
bool tchi_user_kernel_roots(const tchi_factor_batch *factor_batch, int64_t factor);

/* How an inverse root is taken by it. */
tchi_user_root tchi_user_kernel_root_of(tchi_user_kernel *own);
double tchi_user_kernel_root_tolerance(const tch_optimizer *optimizer, const tchi_user_kernel *own,
                                       const tchi_factor_batch *factor_batch);

/* Workspace for the root of one factor by it. */
int64_t tchi_user_kernel_root_bytes(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch);

#endif
