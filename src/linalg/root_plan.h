/* What an inverse root will do, decided before any arithmetic: the method, the precision, the coefficients. */
#ifndef TCHI_ROOT_PLAN_H
#define TCHI_ROOT_PLAN_H

#include <torchium/linalg.h>

#include "core/context.h"

#include "newton.h"

/* The matrix is scaled by this much more than its largest eigenvalue as estimated, so that none comes out above 1. */
#define TCHI_ROOT_MARGIN 1.02

typedef struct tchi_root_plan {
    int32_t root;
    tch_root_method method; /* never TCH_ROOT_AUTO */
    bool fall_back;         /* the method was our choice, not the caller's: what fails is done by the eigen method */
    tch_scalar type;        /* of the matrices at hand: A, eigenvalues, the result; Newton's steps have their own */
    double eps, relative_eps;
    double tolerance; /* of the error of X */
    double error;     /* largest that the certificate may show */
    double estimate;  /* relative error allowed in the largest eigenvalue, which sets damping and scale */
    double negative;  /* eigenvalues this far below zero, relative to the largest, are rounding of the input */
    int32_t probes;   /* of the certificate; 0 for the exact norm */
    double low;       /* lower bound of the scaled spectrum */
    bool ready;       /* the coefficients below are there; false while `low` waits for the matrices */
    /* Newton */
    double newton_tolerance; /* that its steps are planned for */
    bool mixed;              /* steps may differ in type, chosen by `rates` */
    bool one_launch;         /* the backend does the whole iteration */
    tch_product_rates rates;
    tch_scalar widest; /* type of the steps that needs most room */
    tchi_newton_plan newton;
    /* rational */
    int poles;
    double shifts[TCHI_MINIMAX_MAX_POLES], weights[TCHI_MINIMAX_MAX_POLES];
} tchi_root_plan;

/* That root and config are what linalg.h says; config is not NULL. */
tch_status tchi_root_check(int32_t root, const tch_root_config *config);

/* How far below zero, relative to the largest, eigenvalues of a semidefinite n by n matrix of this type may be. */
double tchi_root_negative(tch_scalar type, int64_t n);

/* Checks root and config, and decides all that does not depend on the matrices: everything, with relative damping. */
tch_status tchi_root_plan_make(const tch_context *context, tch_scalar type, int64_t n, int32_t root,
                               const tch_root_config *config, tchi_root_plan *plan);

/* Fills in the coefficients once `low` is known, 0 meaning that it never will be. Turns to the eigen method where it
 * must and may. */
tch_status tchi_root_plan_finish(tchi_root_plan *plan, double low);

/* Whether there is another plan for matrices on which this one failed, and that plan: the eigen method in float64,
 * where the method was our choice or was the eigen method already. */
bool tchi_root_plan_has_better(const tchi_root_plan *plan);
tchi_root_plan tchi_root_plan_better(const tchi_root_plan *plan);

#endif
