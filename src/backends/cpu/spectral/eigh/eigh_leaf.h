/* The bottom of divide and conquer: all eigenvalues and eigenvectors of a small tridiagonal matrix, in double. */
#ifndef TCHI_CPU_EIGH_LEAF_H
#define TCHI_CPU_EIGH_LEAF_H

/* The largest order, and the distance between the columns of the vectors. */
enum { TCHI_LEAF = 32 };

/* Diagonal d (n numbers) becomes the eigenvalues, in no order; e (n numbers, the last unused) is used up; column j of
 * z, z + j * TCHI_LEAF, becomes the unit eigenvector of d[j]. The matrix is part of one of norm about one, and an
 * off-diagonal entry below tolerance times its neighbors is taken for zero. Returns how many eigenvalues did not
 * converge. */
int tchi_leaf_eigen(int n, double tolerance, double *d, double *e, double *z);

#endif
