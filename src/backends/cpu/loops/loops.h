/* The loops of the CPU backend outside BLAS: over contiguous runs of a row, per precision and instruction set.
 * tchi_loops_for picks the widest instruction set of the processor. The x86-64 sets compile the same text
 * (loops_body.h) with different flags, so the plain one is the reference; aarch64 replaces the loops that the compiler
 * vectorizes poorly (loops_neon.h). */
#ifndef TCHI_CPU_LOOPS_H
#define TCHI_CPU_LOOPS_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/backend.h>

/* Pointers are to elements of the table's precision; runs may be unaligned, and outputs may be one of the inputs. */
typedef struct tchi_loops {
    /* out = c1 x + c2 y; x or y NULL counts as zero */
    void (*combine)(int64_t n, double c1, const void *x, double c2, const void *y, void *out);
    /* out = factor x */
    void (*scale)(int64_t n, double factor, const void *x, void *out);
    /* One row of a Kronecker product: each of the m entries of a times the n entries of b */
    void (*kronecker)(int64_t m, const void *a, int64_t n, const void *b, void *out);
    /* largest |x|; NaN is skipped */
    double (*max_abs)(int64_t n, const void *x);
    /* sum of (x factor)^2 */
    double (*sum_squares)(int64_t n, double factor, const void *x);
    int64_t (*count_nonfinite)(int64_t n, const void *x);
    /* sum of x y, x of the table's precision and y double */
    double (*dot)(int64_t n, const void *x, const double *y);
    /* sums of x y0, x y1, x y2, x y3 for four contiguous double vectors */
    void (*dot4)(int64_t n, const void *x, const double *y, double sums[4]);
    /* sum of x y, both of the table's precision; bitwise identical for every instruction set with fma */
    double (*inner_product)(int64_t n, const void *x, const void *y);
    /* the same in another order, and the sum of |x y| */
    void (*sum_terms)(int64_t n, const void *x, const void *y, double *sum, double *size);
    /* sums += factor x, sums += factor x^2, and out = beta out + scale sums, where beta = 0 does not read out */
    void (*add_scaled)(int64_t n, double factor, const void *x, double *sums);
    void (*add_scaled_squares)(int64_t n, double factor, const void *x, double *sums);
    void (*store_sums)(int64_t n, double scale, const double *sums, double beta, void *out);
    /* largest |a_ij - a_ji| over rows [from, to) of the lower triangle of an n by n matrix; NaN is skipped */
    double (*asymmetry)(int64_t n, const void *a, int64_t ld, int64_t from, int64_t to);
    /* upper triangle = lower triangle of an n by n matrix, rows [from, to) of the upper one */
    void (*mirror)(int64_t n, void *a, int64_t ld, int64_t from, int64_t to);
} tchi_loops;

const tchi_loops *tchi_loops_for(tch_scalar type);

/* C = alpha A' B in float32: A is `inner` by `rows`, at most TCHI_THIN_MOST_ROWS, B is `inner` by `cols`.
 * `past_caches`: non-temporal stores to C, which require rows aligned to 64 bytes and a single pass over the
 * contraction. */
#define TCHI_THIN_MOST_ROWS 256
typedef struct tchi_thin_ctx {
    const float *a, *b;
    float *c;
    int64_t lda, ldb, ldc;
    int64_t inner, rows, cols;
    float alpha;
    int past_caches;
} tchi_thin_ctx;

/* The kernel of an instruction set, and its intended sizes. */
typedef struct tchi_thin_product {
    void (*run)(const tchi_thin_ctx *ctx);
    int64_t rows, cols;    /* of the tiles of C */
    int64_t one_pass;      /* terms that are summed in registers, for any C */
    int64_t most_elements; /* of C for longer sums, which accumulate in C */
} tchi_thin_product;

/* NULL if the instruction set has none. */
const tchi_thin_product *tchi_thin_product_now(void);

/* dst = src between float types, contiguous; and the name of the instruction set in use. */
void tchi_convert(int64_t n, tch_scalar dst_type, void *dst, tch_scalar src_type, const void *src);
const char *tchi_loops_name(void);

/* Conversions between two precisions; indices are tch_scalar, float types only. */
typedef void (*tchi_convert_run)(int64_t n, const void *src, void *dst);
typedef struct tchi_conversions {
    tchi_convert_run run[TCH_SCALAR_COUNT][TCH_SCALAR_COUNT]; /* [dst][src]; NULL if unsupported */
} tchi_conversions;

/* Everything that one instruction set offers. */
typedef struct tchi_cpu_level {
    const char *name;
    const tchi_loops *loops[2]; /* in float32 and float64 */
    const struct tchi_cpu_steps *steps[2];
    const tchi_conversions *conversions;
    const tchi_thin_product *thin_product; /* NULL if it has none */
    bool (*is_usable)(void);
} tchi_cpu_level;

/* Widest first; the last is plain, which every processor supports. */
extern const tchi_cpu_level tchi_cpu_levels[];

#endif
