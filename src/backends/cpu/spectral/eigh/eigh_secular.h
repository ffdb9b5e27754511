/* The inner problem of divide and conquer: the eigenvalues of diag(d) + rho z zT, always in double: it is a small part
 * of the work, and the differences d_i - lambda_j determine orthogonality. */
#ifndef TCHI_CPU_EIGH_SECULAR_H
#define TCHI_CPU_EIGH_SECULAR_H

#include <stdint.h>

/* Roots computed together in vector lanes. A thread's range of roots is a multiple of this. */
enum { TCHI_SECULAR_LANES = 16 };

/* The k poles ascend strictly, no z_i is zero, the weights sum to 1 and rho > 0, as deflation ensures. Arrays have room
 * for k + 1 numbers. Root j lies between poles j and j + 1 and is stored as pole[origin] + offset with the nearer pole
 * as origin, which alone makes their small difference accurate. */
typedef struct tchi_secular {
    int64_t k;
    double rho;
    double tolerance;     /* of the residual, relative to its terms; one more step follows convergence */
    double *pole;         /* k, and one more that the solver sets, beyond the last root */
    const double *weight; /* z_i squared */
    double *origin;       /* out: the pole that root j is measured from */
    double *offset;       /* out: root j is origin[j] + offset[j] */
} tchi_secular;

/* Sets the bound beyond the last root; to be called once, before the roots. */
void tchi_secular_prepare(const tchi_secular *s);

/* Finds roots begin to end - 1. Returns how many of them did not converge. */
int tchi_secular_roots(const tchi_secular *s, int64_t begin, int64_t end);

/* The z for which the computed roots are exact (Gu and Eisenstat 1994), up to a common factor: vectors formed from it
 * are orthogonal to working precision even if the roots are inaccurate. Needs all roots. Writes |z_i| for i in [begin,
 * end). */
void tchi_secular_vector(const tchi_secular *s, int64_t begin, int64_t end, double *z);

#endif
