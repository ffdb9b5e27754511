/* Loss scaling for float16 gradients, with PyTorch's state machine and its names.
 *
 * The loss is multiplied by a scale so that small gradients do not vanish in float16, and gradients are divided by it
 * before use. The scale grows after growth_interval finite steps and is reduced at an infinity. It is on the device:
 * only the functions that return numbers to the host synchronize.
 *
 *     tch_scaler_step(scaler, optimizer, count, gradients);   // divides inside the step, skips it at an infinity
 *     tch_scaler_update(scaler);                              // once per iteration, after all optimizers
 */
#ifndef TORCHIUM_AMP_H
#define TORCHIUM_AMP_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/optim.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

typedef struct tch_scaler tch_scaler;

/* The arguments of PyTorch's GradScaler. */
typedef struct tch_scaler_config {
    size_t struct_size;
    double init_scale;
    double growth_factor;    /* above 1 */
    double backoff_factor;   /* between 0 and 1 */
    int32_t growth_interval; /* consecutive finite steps before the scale grows */
    int32_t enabled;         /* 0: a scale of 1 that never changes */
} tch_scaler_config;
#define TCH_SCALER_CONFIG_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(tch_scaler_config), 65536.0, 2.0, 0.5, 2000, 1                                                          \
    }

/* PyTorch's state_dict. */
typedef struct tch_scaler_state {
    size_t struct_size;
    double scale;
    double growth_factor;
    double backoff_factor;
    int32_t growth_interval;
    int32_t growth_tracker; /* finite steps since the last change */
} tch_scaler_state;
#define TCH_SCALER_STATE_INIT                                                                                          \
    {                                                                                                                  \
        sizeof(tch_scaler_state), 0.0, 0.0, 0.0, 0, 0                                                                  \
    }

TCH_BEGIN_DECLS

/* `config` may be NULL for the defaults. The context must outlive the scaler. */
TCH_API tch_status tch_scaler_create(tch_context *context, const tch_scaler_config *config, tch_scaler **scaler);
TCH_API void tch_scaler_destroy(tch_scaler *scaler);

/* The scale, by which to multiply the loss or its gradient, and the flag of this iteration, not 0 after an infinity or
 * NaN: float32 tensors of one element on the device, valid while the scaler exists. */
TCH_API const tch_tensor *tch_scaler_scale(const tch_scaler *scaler);
TCH_API const tch_tensor *tch_scaler_found_inf(const tch_scaler *scaler);

/* Divides gradients by the scale in place and checks them for infinities, in one launch: before clipping, for example.
 * Entries may be NULL. Call it at most once per iteration for the same gradients. */
TCH_API tch_status tch_scaler_unscale(tch_scaler *scaler, int32_t count, tch_tensor *const *gradients);

/* Checks for infinities and leaves gradients scaled, for a step that divides by the scale. */
TCH_API tch_status tch_scaler_check(tch_scaler *scaler, int32_t count, const tch_tensor *const *gradients);

/* An optimizer step with scaled gradients, which are not modified, or, after tch_scaler_unscale in this iteration, with
 * unscaled ones. The device skips the step after an infinity. */
TCH_API tch_status tch_scaler_step(tch_scaler *scaler, tch_optimizer *optimizer, int32_t count,
                                   const tch_tensor *const *gradients);

/* Ends an iteration: adjusts the scale and clears the flag. */
TCH_API tch_status tch_scaler_update(tch_scaler *scaler);

/* These wait for the device. */
TCH_API tch_status tch_scaler_get_state(tch_scaler *scaler, tch_scaler_state *state);
TCH_API tch_status tch_scaler_set_state(tch_scaler *scaler, const tch_scaler_state *state);

TCH_END_DECLS

#endif
