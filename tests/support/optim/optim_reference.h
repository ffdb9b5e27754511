/* The optimizers in plain float64, one parameter at a time: the shortest correct code, written from the formulas and
 * independent of the library. Values are in memory order; every call reads its hyperparameters from the given
 * configuration, so that a test may change them between steps. */
#ifndef TORCHIUM_TESTS_OPTIM_REFERENCE_H
#define TORCHIUM_TESTS_OPTIM_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/optim.h>

#define REF_MAX_ORDER 4

/* A box of the parameter with its own state: all of it for the elementwise methods and Muon, at most
 * max_preconditioner_dim wide for Shampoo and SOAP. Unused fields stay zero. */
typedef struct ref_block {
    int64_t start[REF_MAX_ORDER], size[REF_MAX_ORDER], count;
    double *average, *square, *largest, *buffer; /* count numbers each */
    double *factor[REF_MAX_ORDER];               /* size by size; NULL for a dimension without a factor */
    double *root[REF_MAX_ORDER];                 /* Shampoo: the inverse root. SOAP: the basis, in its columns */
    bool due[REF_MAX_ORDER];                     /* with staggered refreshes: set by the caller before a step */
    bool refreshed, stale;                       /* adaptive: roots in this step; to be refreshed in the next */
    double level;                                /* 64 log2 of the direction's mean square after the latest refresh */
} ref_block;

/* Whether a kind has blocks, and leaves the rest to AdamW; and whether it orthogonalizes them, on a GPU in bfloat16. */
bool ref_has_blocks(tch_optim_kind kind);
bool ref_orthogonalizes(tch_optim_kind kind);

typedef struct ref_optim {
    tch_optim_kind method; /* the method of this parameter: ADAMW also if another method does not apply */
    int32_t scalar;        /* AdamW because the method does not apply */
    int32_t order;
    int64_t dims[REF_MAX_ORDER]; /* after dropping and merging, outermost first */
    int64_t count;
    int64_t step; /* gradients seen */
    int32_t block_count;
    ref_block *blocks;
    double *values;
    double *open;       /* possible error of a value because of undetermined signs of Lion */
    double roundoff;    /* of the library's compute type: set by the caller */
    int32_t by_columns; /* the rows of the tensor are columns of its memory: set by the caller */
    int32_t rounds;     /* orthogonalized in bfloat16, without minimax steps: set by the caller */
} ref_optim;

/* `shape` is in the order of memory, outermost first. */
ref_optim *ref_optim_make(const tch_optim_config *config, int32_t ndim, const int64_t *shape, int32_t elementwise,
                          const double *values);

/* One step with a gradient in memory order. */
void ref_optim_step(ref_optim *r, const tch_optim_config *config, const double *gradient);

#endif
