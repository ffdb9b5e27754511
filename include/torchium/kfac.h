/* KFAC: preconditioning by the Kronecker factors of each layer's Fisher matrix.
 *
 *     tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
 *     tch_kfac *kfac;
 *     tch_kfac_create(context, &config, NULL, count, layers, &kfac);
 *     for (;;) {
 *         ... forward and backward ...
 *         for each layer k: tch_kfac_observe(kfac, k, input, output_gradient, 1.0, NULL);
 *         if (step % 100 == 0) tch_kfac_refresh(kfac);
 *         tch_kfac_precondition(kfac, lr, 2 * count, gradients);      // in place; then any optimizer's step
 *     }
 *
 * Of each layer, linear or convolution, two factors are kept as moving averages, A = E[a a'] of its inputs (with a 1
 * for the bias) and G = E[g g'] of its output gradients, and from them, at a refresh, what preconditions: G^-1 grad
 * A^-1 with factored damping, or Q_G' [(Q_G grad Q_A') / (l_G l_A' + damping)] Q_A in the factors' eigenbases Q
 * (eigenvectors as rows), where EKFAC puts the mean squares of the gradient's own coordinates in place of l_G l_A'.
 * Factors of equal shape are refreshed together, in batches. To factored damping 2 u times the factor's trace is added,
 * u being the roundoff of its type: below that a factor is rounding.
 *
 * Nothing waits for the device but where said, and nothing allocates after the first step. A non-finite input never
 * reaches a factor; a refresh that fails keeps the last good one. */
#ifndef TORCHIUM_KFAC_H
#define TORCHIUM_KFAC_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/checkpoint.h>
#include <torchium/comm.h>
#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/grad.h>
#include <torchium/optim.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

typedef struct tch_kfac tch_kfac;

typedef enum tch_kfac_method {
    TCH_KFAC_EIGEN = 0,
    TCH_KFAC_INVERSE = 1,
    TCH_KFAC_EKFAC = 2,
    TCH_KFAC_METHOD_COUNT = 3
} tch_kfac_method;

typedef struct tch_kfac_config {
    size_t struct_size;
    tch_kfac_method method;
    tch_sharing sharing;
    double damping;      /* (step) > 0 */
    double factor_decay; /* (step) of the moving averages, 0 to 1; 1 with use_bias_correction is the mean of all */
    double kl_clip; /* (step) gradients are scaled by min(1, sqrt(kl_clip / |lr^2 sum of <new, old>|)), decided on the
                                device over all layers; 0 leaves it out */
    int32_t use_bias_correction; /* averages weigh what was seen only; otherwise factors begin at the unit matrix */
    int32_t accumulation_steps;  /* (step) calls of tch_kfac_observe per layer and step that are averaged, at least 1 */
    tch_dtype factor_dtype;      /* float32 or float64 */
} tch_kfac_config;
#define TCH_KFAC_CONFIG_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_kfac_config), TCH_KFAC_EIGEN, TCH_SHARING_EXPAND, 1e-3, 0.95, 1e-3, 1, 1, TCH_FLOAT32               \
    }

typedef struct tch_kfac_layer {
    tch_layer layer;  /* LINEAR or CONV */
    int64_t inputs;   /* columns of the weight as a matrix: d, or C / groups times the kernel's size */
    int64_t outputs;  /* p */
    int32_t bias;     /* the layer has one */
    const char *name; /* for state and messages; copied. NULL: "layerN" */
} tch_kfac_layer;

TCH_BEGIN_DECLS

/* `setup` may be NULL; its placements are not used.
 *
 * With a group in setup->comm its ranks share one KFAC, for replicas of a model: each layer has an owner, chosen by the
 * cost of its refresh, which alone refreshes it and keeps the result, and preconditioned gradients are gathered; under
 * EKFAC bases are, which every rank needs. Factors are local to a rank, of the samples that it sees: average them
 * before a refresh if that is wanted. Given equal factors and gradients, results are those of one process to the bit
 * on a CPU. tch_kfac_refresh and tch_kfac_precondition are collectives, and ranks call them with gradients of the same
 * layers. The state of a rank has "NAME/..._inverse", "..._basis" and "..._values" of the layers it owns. The group
 * lives until tch_kfac_destroy. */
TCH_API tch_status tch_kfac_create(tch_context *context, const tch_kfac_config *config, const tch_optim_setup *setup,
                                   int32_t count, const tch_kfac_layer *layers, tch_kfac **kfac);
/* Waits for the device. NULL is allowed. */
TCH_API void tch_kfac_destroy(tch_kfac *kfac);

TCH_API int32_t tch_kfac_layer_count(const tch_kfac *kfac);
TCH_API tch_status tch_kfac_get_config(const tch_kfac *kfac, tch_kfac_config *config);
/* Changes what is marked (step); anything else is an error that names it. */
TCH_API tch_status tch_kfac_set_config(tch_kfac *kfac, const tch_kfac_config *config);

/* The factors of one layer see one more batch: its input and the gradient of the sum of the samples' losses with
 * respect to its output, as in grad.h; the gradient is multiplied by `scale`, the number of samples where the loss is
 * their mean. `grad_scale`, one float32 on the device or NULL, is the loss scale of mixed precision, by which it is
 * divided. The two may differ in dtype. Under EKFAC the scales see the batch too once there is a basis: they begin at
 * each refresh at l_G l_A' and are a moving average from there. An observation that is not finite changes nothing, and
 * neither does a batch of no samples. After TCH_ERR_OUT_OF_MEMORY nothing has changed; after an error of the device
 * KFAC is marked failed, and every later call says so. */
TCH_API tch_status tch_kfac_observe(tch_kfac *kfac, int32_t layer, const tch_tensor *input,
                                    const tch_tensor *output_gradient, double scale, const tch_tensor *grad_scale);

/* Inverses or eigenbases anew for every layer that has been observed. What fails keeps what it had; see `failed` below.
 * May be called again after TCH_ERR_OUT_OF_MEMORY. */
TCH_API tch_status tch_kfac_refresh(tch_kfac *kfac);

/* Preconditions in place: gradients of weight and bias of each layer in turn, 2 count of them, NULL for a bias that is
 * not there; a layer whose weight's entry is NULL is left out, and so is one that has never been refreshed. Gradients
 * are those of the weight's shape, any dense layout, float32, float64 or a half type. `lr` counts for kl_clip alone.
 * After TCH_ERR_OUT_OF_MEMORY no gradient has changed. */
TCH_API tch_status tch_kfac_precondition(tch_kfac *kfac, double lr, int32_t count, tch_tensor *const *gradients);

/* === State, memory, statistics ==================================================================================== */

/* Everything that must survive a restart: "NAME/input_factor", "NAME/output_factor", then by method
 * "NAME/input_inverse", "NAME/output_inverse", or "NAME/input_basis", "NAME/input_values", ..., "NAME/scales".
 * `parameter` is the layer. */
TCH_API int32_t tch_kfac_state_count(const tch_kfac *kfac);
TCH_API tch_status tch_kfac_get_state(tch_kfac *kfac, int32_t index, tch_optim_state *state);

/* What the host counts for a layer: updates of the factors, observations in the step under way, refreshes, updates of
 * the scales. */
enum { TCH_KFAC_COUNTS = 4 };
TCH_API tch_status tch_kfac_get_counts(const tch_kfac *kfac, int32_t layer, int64_t counts[TCH_KFAC_COUNTS]);
TCH_API tch_status tch_kfac_set_counts(tch_kfac *kfac, int32_t layer, const int64_t counts[TCH_KFAC_COUNTS]);

typedef struct tch_kfac_stats {
    size_t struct_size;
    int64_t observations;  /* since it was made, each layer counted */
    int64_t refreshes;     /* each layer counted */
    int64_t failed;        /* layers whose latest refresh failed: a factor was not finite, not positive, or zero */
    int64_t rejected;      /* observations that were not finite */
    double worst_residual; /* of the latest inverses, see tch_inverse_root; 0 for bases */
    double scale;          /* the factor kl_clip gave last; 1 without it */
} tch_kfac_stats;
#define TCH_KFAC_STATS_INIT                                                                                            \
    {                                                                                                                  \
        sizeof(tch_kfac_stats), 0, 0, 0, 0, 0.0, 1.0                                                                   \
    }
/* Waits for the device. */
TCH_API tch_status tch_kfac_get_stats(tch_kfac *kfac, tch_kfac_stats *stats);

/* Bytes of state, before anything is allocated. */
TCH_API tch_status tch_kfac_forecast(const tch_kfac_config *config, int32_t count, const tch_kfac_layer *layers,
                                     int64_t *state_bytes);

/* As tch_optimizer_save and tch_optimizer_load. Where ranks share it each adds the layers that it owns, and
 * tch_checkpoint_writer_save_sharded saves them together; tch_kfac_load is then a collective, and a rank that could not
 * open the checkpoint comes with NULL. Any number of ranks, and one process, loads what any other has saved. */
TCH_API tch_status tch_kfac_save(tch_kfac *kfac, tch_checkpoint_writer *writer, const char *prefix);
TCH_API tch_status tch_kfac_load(tch_kfac *kfac, tch_checkpoint *checkpoint, const char *prefix);

TCH_END_DECLS

#endif
