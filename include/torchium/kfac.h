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
 * For each linear or convolution layer KFAC keeps moving averages of two factors, A = E[a a'] of the inputs (with a 1
 * for the bias) and G = E[g g'] of the output gradients. A refresh computes the preconditioner from them: G^-1 grad
 * A^-1 with factored damping, or Q_G' [(Q_G grad Q_A') / (l_G l_A' + damping)] Q_A in the factors' eigenbases Q
 * (eigenvectors as rows); EKFAC replaces l_G l_A' with the mean squares of the gradient's coordinates in that basis.
 * Factors of equal shape are refreshed in batches. Factored damping is increased by 2 u trace(factor), u the unit
 * roundoff: rounding errors are of that size.
 *
 * Calls synchronize only where stated, and allocate nothing after the first step. A non-finite input never reaches a
 * factor; a failed refresh keeps the previous result. */
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
    double factor_decay; /* (step) of the moving averages, 0 to 1; 1 with use_bias_correction: the mean of all */
    double kl_clip; /* (step) gradients are scaled by min(1, sqrt(kl_clip / |lr^2 sum of <new, old>|)), computed on the
                                device over all layers; 0: off */
    int32_t use_bias_correction; /* of the moving averages; without it factors start at the identity */
    int32_t accumulation_steps;  /* (step) calls of tch_kfac_observe per layer and step, which are averaged */
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
 * The ranks of setup->comm share one KFAC for a replicated model. Each layer has an owner, balanced by the cost of
 * refreshes, that refreshes it and keeps the result; preconditioned gradients are gathered, or for EKFAC the bases,
 * which every rank needs. Factors are local, of the rank's samples: average them before a refresh if needed. With equal
 * factors and gradients, results on a CPU are bitwise those of one process. tch_kfac_refresh and tch_kfac_precondition
 * are collectives, and ranks call them with gradients of the same layers. The state of a rank has "NAME/..._inverse",
 * "..._basis" and "..._values" of the layers it owns. The group lives until tch_kfac_destroy. */
TCH_API tch_status tch_kfac_create(tch_context *context, const tch_kfac_config *config, const tch_optim_setup *setup,
                                   int32_t count, const tch_kfac_layer *layers, tch_kfac **kfac);
/* Waits for the device. NULL is allowed. */
TCH_API void tch_kfac_destroy(tch_kfac *kfac);

TCH_API int32_t tch_kfac_layer_count(const tch_kfac *kfac);
TCH_API tch_status tch_kfac_get_config(const tch_kfac *kfac, tch_kfac_config *config);
/* Changes the fields marked (step); a change of any other is an error that names it. */
TCH_API tch_status tch_kfac_set_config(tch_kfac *kfac, const tch_kfac_config *config);

/* Updates the factors of a layer with a batch: its input and the gradient of the sum of the samples' losses with
 * respect to its output, as in grad.h. The gradient is multiplied by `scale`, the number of samples if the loss is
 * their mean, and divided by `grad_scale`, the loss scale of mixed precision, one float32 on the device or NULL. The
 * two may differ in dtype. EKFAC also updates the scales once there is a basis: a refresh sets them to l_G l_A', and
 * they are a moving average from there. A non-finite observation and a batch without samples change nothing. After
 * TCH_ERR_OUT_OF_MEMORY nothing has changed; after a device error KFAC is marked failed, and every later call returns
 * that error. */
TCH_API tch_status tch_kfac_observe(tch_kfac *kfac, int32_t layer, const tch_tensor *input,
                                    const tch_tensor *output_gradient, double scale, const tch_tensor *grad_scale);

/* Recomputes inverses or eigenbases of every observed layer. A layer that fails keeps the previous ones; see `failed`
 * below. May be called again after TCH_ERR_OUT_OF_MEMORY. */
TCH_API tch_status tch_kfac_refresh(tch_kfac *kfac);

/* Preconditions gradients in place: weight and bias of each layer in turn, 2 count entries, NULL for a missing bias.
 * Layers whose weight entry is NULL or that were never refreshed are skipped. Gradients have the weight's shape, any
 * dense layout, and are float64, float32, float16 or bfloat16. `lr` is used by kl_clip only.
 * After TCH_ERR_OUT_OF_MEMORY no gradient has changed. */
TCH_API tch_status tch_kfac_precondition(tch_kfac *kfac, double lr, int32_t count, tch_tensor *const *gradients);

/* === State, memory, statistics ==================================================================================== */

/* The state as named tensors: "NAME/input_factor", "NAME/output_factor", then by method
 * "NAME/input_inverse", "NAME/output_inverse", or "NAME/input_basis", "NAME/input_values", ..., "NAME/scales".
 * `parameter` is the layer. */
TCH_API int32_t tch_kfac_state_count(const tch_kfac *kfac);
TCH_API tch_status tch_kfac_get_state(tch_kfac *kfac, int32_t index, tch_optim_state *state);

/* The host's counters of a layer: updates of the factors, observations in the current step, refreshes, updates of the
 * scales. */
enum { TCH_KFAC_COUNTS = 4 };
TCH_API tch_status tch_kfac_get_counts(const tch_kfac *kfac, int32_t layer, int64_t counts[TCH_KFAC_COUNTS]);
TCH_API tch_status tch_kfac_set_counts(tch_kfac *kfac, int32_t layer, const int64_t counts[TCH_KFAC_COUNTS]);

typedef struct tch_kfac_stats {
    size_t struct_size;
    int64_t observations;  /* counting every layer */
    int64_t refreshes;     /* counting every layer */
    int64_t failed;        /* layers whose latest refresh failed: a factor not finite, not positive, or zero */
    int64_t rejected;      /* non-finite observations */
    double worst_residual; /* of the latest inverses, see tch_inverse_root; 0 for bases */
    double scale;          /* the latest factor of kl_clip; 1 without it */
} tch_kfac_stats;
#define TCH_KFAC_STATS_INIT                                                                                            \
    {                                                                                                                  \
        sizeof(tch_kfac_stats), 0, 0, 0, 0, 0.0, 1.0                                                                   \
    }
/* Waits for the device. */
TCH_API tch_status tch_kfac_get_stats(tch_kfac *kfac, tch_kfac_stats *stats);

/* Bytes of state; allocates nothing. */
TCH_API tch_status tch_kfac_forecast(const tch_kfac_config *config, int32_t count, const tch_kfac_layer *layers,
                                     int64_t *state_bytes);

/* As tch_optimizer_save and tch_optimizer_load. With a group each rank adds the layers that it owns, for
 * tch_checkpoint_writer_save_sharded, and tch_kfac_load is a collective, to which a rank that could not open the
 * checkpoint passes NULL. One process and any number of ranks load each other's checkpoints. */
TCH_API tch_status tch_kfac_save(tch_kfac *kfac, tch_checkpoint_writer *writer, const char *prefix);
TCH_API tch_status tch_kfac_load(tch_kfac *kfac, tch_checkpoint *checkpoint, const char *prefix);

TCH_END_DECLS

#endif
