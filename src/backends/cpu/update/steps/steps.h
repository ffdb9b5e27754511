/* Loops of the optimizers over contiguous runs, for both precisions and every instruction set: steps_body.h compiled
 * with different flags. Operations that take a few calls of tchi_loops are not here. */
#ifndef TCHI_CPU_UPDATES_STEPS_H
#define TCHI_CPU_UPDATES_STEPS_H

#include <stdint.h>

#include <torchium/backend.h>

#include "backends/rules.h"
#include "core/codes.h"

/* Hyperparameters and step count of AdamW, reduced to what the loop needs. */
typedef struct tchi_cpu_adamw_numbers {
    double keep1, take1; /* m = keep1 m + take1 g */
    double keep2, take2; /* v = keep2 v + take2 g^2 */
    double root;         /* of 1 / correction2 */
    double eps;
    tchi_keep decay; /* p = decay p - step m / (root sqrt(v) + eps) */
    double step;
} tchi_cpu_adamw_numbers;

/* The same for Lion. */
typedef struct tchi_cpu_lion_numbers {
    double keep1, take1; /* c = keep1 m + take1 g */
    double keep2, take2; /* m = keep2 m + take2 g */
    tchi_keep decay;     /* p = decay p - step sign(c) */
    double step;
} tchi_cpu_lion_numbers;

/* What determines the random bits of a run. */
typedef struct tchi_cpu_random_run {
    uint64_t seed;
    uint32_t parameter, step;
    int64_t element; /* index of the run's first element in its parameter */
} tchi_cpu_random_run;

/* Pointers are to elements of the table's precision; runs may be unaligned, and outputs may be one of the inputs. */
typedef struct tchi_cpu_steps {
    /* out = x / divisor */
    void (*divide)(int64_t n, double divisor, const void *x, void *out);
    /* `largest` is NULL, or the largest v so far, which replaces v in the last formula */
    void (*adamw)(int64_t n, const tchi_cpu_adamw_numbers *c, void *p, const void *g, void *m, void *v, void *largest);
    void (*lion)(int64_t n, const tchi_cpu_lion_numbers *c, void *p, const void *g, void *m);
    /* p = decay p - step u */
    void (*descend)(int64_t n, tchi_keep decay, double step, const void *u, void *p);
    /* v = keep v + take x^2 */
    void (*square)(int64_t n, double keep, double take, const void *x, void *v);
    /* out = factor x / (root sqrt(v) + eps) */
    void (*whiten)(int64_t n, double root, double eps, double factor, const void *v, const void *x, void *out);
    /* out = x / (sqrt(v) + eps), 0 where that divides by 0 */
    void (*divide_by_roots)(int64_t n, double eps, const void *v, const void *x, void *out);
    /* sums = sums + x^2 */
    void (*add_squares)(int64_t n, const void *x, double *sums);
    /* out(j, i) = x(i, j), x being rows by cols */
    void (*transpose)(int64_t rows, int64_t cols, const void *x, int64_t ld, void *out, int64_t out_ld);
    /* float32 to bfloat16 by stochastic rounding, in any precision of the table */
    void (*round_at_random)(int64_t n, const tchi_cpu_random_run *random, const float *x, uint16_t *out);
    /* One random word per element. */
    void (*random_words)(int64_t n, const tchi_cpu_random_run *random, uint32_t *words);
    /* Encodes to TCH_MOMENTS_CODES with scales, using the upper or lower half of the words, and decodes. The run begins
     * at a block; the last block may be short. `squares` are the scales of second moments, or NULL. Codes and scales of
     * first moments are read before they are written: their rounding depends on the previous values. */
    void (*encode_squares)(int64_t n, const float *x, const uint32_t *words, uint8_t *codes, float *scales);
    void (*encode_signed)(int64_t n, tchi_code_use use, const float *x, const uint32_t *words, const float *squares,
                          uint8_t *codes, float *scales);
    void (*decode)(int64_t n, int second, const uint8_t *codes, const float *scales, float *x);
    /* Stochastic rounding to bfloat16, using the upper or lower half of the words. */
    void (*cut)(int64_t n, int second, const float *x, const uint32_t *words, uint16_t *out);
} tchi_cpu_steps;

/* For the instruction set chosen by tchi_loops_for. */
const tchi_cpu_steps *tchi_cpu_steps_for(tch_scalar type);

#endif
