/* The bottom of divide and conquer: all eigenvalues and eigenvectors of a small tridiagonal matrix, in double. */
#ifndef TCHI_CPU_EIGH_LEAF_H
#define TCHI_CPU_EIGH_LEAF_H

/* The largest order, and the distance between the columns of the vectors. */
enum { TCHI_LEAF = 32 };

/* On return the diagonal d holds the eigenvalues, unordered; e (n numbers, the last unused) is destroyed; column j of
 * z, z + j * TCHI_LEAF, is the unit eigenvector of d[j]. The matrix is part of one of norm about one, and an
 * off-diagonal entry below tolerance times its neighbors counts as zero. Returns the number of eigenvalues that did not
 * converge. */
int tchi_leaf_eigen(int n, double tolerance, double *d, double *e, double *z);

#endif
