/* The plan of an inverse root, made before any arithmetic: method, precision, coefficients. */
#ifndef TCHI_ROOT_PLAN_H
#define TCHI_ROOT_PLAN_H

#include <torchium/linalg.h>

#include "core/context.h"

#include "newton.h"

/* The matrix is divided by this much more than its estimated largest eigenvalue, so that no eigenvalue exceeds 1. */
#define TCHI_ROOT_MARGIN 1.02

typedef struct tchi_root_plan {
    int32_t root;
    tch_root_method method; /* never TCH_ROOT_AUTO */
    bool fall_back;         /* the method was chosen here, not by the caller: failures use the eigen method */
    tch_scalar type;        /* of A, eigenvalues and the result; Newton's steps have their own */
    double eps, relative_eps;
    double tolerance; /* of the error of X */
    double error;     /* largest that the certificate may show */
    double estimate;  /* relative error allowed in the largest eigenvalue, which determines damping and scale */
    double negative;  /* more negative eigenvalues, relative to the largest, are not rounding error of the input */
    int32_t probes;   /* of the certificate; 0 for the exact norm */
    double low;       /* lower bound of the scaled spectrum */
    bool ready;       /* the coefficients below are set; false while `low` is unknown */
    /* Newton */
    double newton_tolerance; /* the tolerance of its steps */
    bool mixed;              /* steps may differ in type, chosen by `rates` */
    bool one_launch;         /* the backend does the whole iteration */
    tch_product_rates rates;
    tch_scalar widest; /* largest type of the steps */
    tchi_newton_plan newton;
    /* rational */
    int poles;
    double shifts[TCHI_MINIMAX_MAX_POLES], weights[TCHI_MINIMAX_MAX_POLES];
} tchi_root_plan;

/* Validates root and config as documented in linalg.h; config is not NULL. */
tch_status tchi_root_check(int32_t root, const tch_root_config *config);

/* How negative, relative to the largest, eigenvalues of a semidefinite n by n matrix of this type may be. */
double tchi_root_negative(tch_scalar type, int64_t n);

/* Checks root and config, and decides what does not depend on the matrices: everything, with relative damping. */
tch_status tchi_root_plan_make(const tch_context *context, tch_scalar type, int64_t n, int32_t root,
                               const tch_root_config *config, tchi_root_plan *plan);

/* Computes the coefficients once `low` is known; 0 means it never will be. Switches to the eigen method if necessary
 * and allowed. */
tch_status tchi_root_plan_finish(tchi_root_plan *plan, double low);

/* Whether there is another plan for matrices on which this one failed, and that plan: the eigen method in float64, if
 * the method was chosen here or was the eigen method already. */
bool tchi_root_plan_has_better(const tchi_root_plan *plan);
tchi_root_plan tchi_root_plan_better(const tchi_root_plan *plan);

#endif
