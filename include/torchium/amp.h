/* Loss scaling for float16 gradients, with PyTorch's state machine and its names.
 *
 * The loss is multiplied by a scale so that small gradients do not vanish in float16, and gradients are divided by it
 * before use. The scale grows after a run of good steps and falls at an infinity. It lives on the device: nothing here
 * waits, except the functions that hand numbers to the host.
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

/* PyTorch's GradScaler calls them init_scale, growth_factor, backoff_factor, growth_interval, enabled. */
typedef struct tch_scaler_config {
    size_t struct_size;
    double init_scale;
    double growth_factor;    /* above 1 */
    double backoff_factor;   /* between 0 and 1 */
    int32_t growth_interval; /* good steps in a row before the scale grows */
    int32_t enabled;         /* 0: a scale of 1 that never changes */
} tch_scaler_config;
#define TCH_SCALER_CONFIG_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(tch_scaler_config), 65536.0, 2.0, 0.5, 2000, 1                                                          \
    }

/* What PyTorch's state_dict holds. */
typedef struct tch_scaler_state {
    size_t struct_size;
    double scale;
    double growth_factor;
    double backoff_factor;
    int32_t growth_interval;
    int32_t growth_tracker; /* good steps since the last change */
} tch_scaler_state;
#define TCH_SCALER_STATE_INIT                                                                                          \
    {                                                                                                                  \
        sizeof(tch_scaler_state), 0.0, 0.0, 0.0, 0, 0                                                                  \
    }

TCH_BEGIN_DECLS

/* `config` may be NULL for the defaults. The context must outlive the scaler. */
TCH_API tch_status tch_scaler_create(tch_context *context, const tch_scaler_config *config, tch_scaler **scaler);
TCH_API void tch_scaler_destroy(tch_scaler *scaler);

/* The scale as a float32 tensor of one element on the device: multiply the loss, or its gradient, by it. And the flag
 * of this iteration, not 0 once an infinity was found. Both are views that live as long as the scaler. */
TCH_API const tch_tensor *tch_scaler_scale(const tch_scaler *scaler);
TCH_API const tch_tensor *tch_scaler_found_inf(const tch_scaler *scaler);

/* Divides gradients by the scale in place and looks for infinities, in one launch for all of them: before clipping, for
 * example. Entries may be NULL. A second call for the same gradients before the update is the caller's error. */
TCH_API tch_status tch_scaler_unscale(tch_scaler *scaler, int32_t count, tch_tensor *const *gradients);

/* Only looks for infinities, in gradients that stay scaled: for a step that divides by itself. */
TCH_API tch_status tch_scaler_check(tch_scaler *scaler, int32_t count, const tch_tensor *const *gradients);

/* A step with scaled gradients, which are not changed; or, after tch_scaler_unscale in this iteration, with unscaled
 * ones. The step is skipped on the device where an infinity was found. */
TCH_API tch_status tch_scaler_step(tch_scaler *scaler, tch_optimizer *optimizer, int32_t count,
                                   const tch_tensor *const *gradients);

/* The end of an iteration: the scale falls or grows, and the flag is cleared. */
TCH_API tch_status tch_scaler_update(tch_scaler *scaler);

/* These wait for the device. */
TCH_API tch_status tch_scaler_get_state(tch_scaler *scaler, tch_scaler_state *state);
TCH_API tch_status tch_scaler_set_state(tch_scaler *scaler, const tch_scaler_state *state);

TCH_END_DECLS

#endif
