/* C = alpha A' B with a tile of C in registers, for aarch64. Contractions are short, so writing C dominates: a row of a
 * tile is one cache line, and with few terms consecutive tiles follow the rows of C, which cores detect and then write
 * lines without reading them. Non-temporal store instructions are only a hint, so `past_caches` is ignored. */
#include <arm_neon.h>
#include <string.h>

#include "backends/cpu/loops/loops.h"

enum {
    ROWS = 4,
    COLS = 16,
    VECTORS = COLS / 4,
    MOST_TERMS = 256,    /* BLAS computes longer sums: see bench/logs/aarch64.md */
    FEW_TERMS = 8,       /* so few rows of B are read in place */
    NEAR_BYTES = 1 << 14 /* of B per pass: half of an L1 of 32 KiB */
};

typedef struct tile_sums {
    float32x4_t row0[VECTORS], row1[VECTORS], row2[VECTORS], row3[VECTORS];
} tile_sums;

/* `a` holds ROWS numbers for each term; rows of `b` are `ldb` apart. */
static inline __attribute__((always_inline)) tile_sums sum_tile(int64_t inner, const float *a, const float *b,
                                                                int64_t ldb)
{
    tile_sums s = {{{0}}, {{0}}, {{0}}, {{0}}};
    for (int64_t t = 0; t < inner; t++, a += ROWS, b += ldb) {
        float32x4_t factors = vld1q_f32(a);
#pragma GCC unroll 4
        for (int k = 0; k < VECTORS; k++) {
            float32x4_t part = vld1q_f32(b + 4 * k);
            s.row0[k] = vfmaq_laneq_f32(s.row0[k], part, factors, 0);
            s.row1[k] = vfmaq_laneq_f32(s.row1[k], part, factors, 1);
            s.row2[k] = vfmaq_laneq_f32(s.row2[k], part, factors, 2);
            s.row3[k] = vfmaq_laneq_f32(s.row3[k], part, factors, 3);
        }
    }
    return s;
}

static inline __attribute__((always_inline)) void write_row(float alpha, const float32x4_t sums[VECTORS], float *c)
{
#pragma GCC unroll 4
    for (int k = 0; k < VECTORS; k++) {
        vst1q_f32(c + 4 * k, vmulq_n_f32(sums[k], alpha));
    }
}

static inline __attribute__((always_inline)) void write_tile(float alpha, const tile_sums *s, float *c, int64_t ldc)
{
    write_row(alpha, s->row0, c);
    write_row(alpha, s->row1, c + ldc);
    write_row(alpha, s->row2, c + 2 * ldc);
    write_row(alpha, s->row3, c + 3 * ldc);
}

static inline __attribute__((always_inline)) void make_tile(const tchi_thin_ctx *j, int64_t row, int64_t col,
                                                            const float *a, const float *b, int64_t ldb)
{
    int64_t rows = j->rows - row < ROWS ? j->rows - row : ROWS;
    int64_t cols = j->cols - col < COLS ? j->cols - col : COLS;
    float *c = j->c + row * j->ldc + col;
    tile_sums s = sum_tile(j->inner, a, b, ldb);
    if (rows == ROWS && cols == COLS) {
        write_tile(j->alpha, &s, c, j->ldc);
        return;
    }
    float whole[ROWS * COLS];
    write_tile(j->alpha, &s, whole, COLS);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(c + i * j->ldc, whole + i * COLS, (size_t)cols * sizeof *c);
    }
}

/* `width` columns of a matrix for each term, padded with zeros. */
static inline __attribute__((always_inline)) void pack(int64_t inner, const float *from, int64_t ld, int64_t there,
                                                       int64_t width, float *to)
{
    for (int64_t t = 0; t < inner; t++, from += ld, to += width) {
        if (there >= width) { /* a constant number of bytes, which is a few instructions */
            memcpy(to, from, (size_t)width * sizeof *to);
        } else {
            memset(to, 0, (size_t)width * sizeof *to);
            memcpy(to, from, (size_t)there * sizeof *to);
        }
    }
}

/* A row of C of one term. Arguments are passed by value: loaded from a struct they would be reloaded after every store,
 * and the loop would be bound by instructions instead of memory. */
static inline __attribute__((always_inline)) void scaled_row(int64_t cols, float factor, const float *restrict b,
                                                             float *restrict c)
{
    int64_t col = 0;
    for (; col + COLS <= cols; col += COLS) {
        const float32x4_t part[VECTORS] = {vld1q_f32(b + col), vld1q_f32(b + col + 4), vld1q_f32(b + col + 8),
                                           vld1q_f32(b + col + 12)};
        write_row(factor, part, c + col);
    }
    for (; col < cols; col++) {
        c[col] = factor * b[col];
    }
}

/* One term: nothing is summed, and C is written row by row. */
static void outer_product(const tchi_thin_ctx *j)
{
    const float *a = j->a;
    float *c = j->c;
    for (int64_t row = 0, rows = j->rows; row < rows; row++, c += j->ldc) {
        scaled_row(j->cols, j->alpha * a[row], j->b, c);
    }
}

/* Columns [from, to) along the rows of C. B is read in place, except for columns that do not fill a tile. */
static void along_rows(const tchi_thin_ctx *j, int64_t from, int64_t to)
{
    float a[ROWS * FEW_TERMS], last[COLS * FEW_TERMS];
    int64_t whole = from + (to - from) / COLS * COLS;
    if (whole < to) {
        pack(j->inner, j->b + whole, j->ldb, to - whole, COLS, last);
    }
    for (int64_t row = 0; row < j->rows; row += ROWS) {
        pack(j->inner, j->a + row, j->lda, j->rows - row, ROWS, a);
        for (int64_t col = from; col < whole; col += COLS) {
            make_tile(j, row, col, a, j->b + col, j->ldb);
        }
        if (whole < to) {
            make_tile(j, row, whole, a, last, COLS);
        }
    }
}

/* Column blocks whose part of B stays in L1. */
static void few_terms(const tchi_thin_ctx *j)
{
    int64_t step = NEAR_BYTES / ((int64_t)sizeof(float) * j->inner) / COLS * COLS;
    for (int64_t from = 0; from < j->cols; from += step) {
        along_rows(j, from, j->cols - from < step ? j->cols : from + step);
    }
}

/* Down the columns of C. Operands are packed in the order of the tiles, since rows a power of two apart would evict
 * each other. */
static void down_columns(const tchi_thin_ctx *j)
{
    float a[TCHI_THIN_MOST_ROWS * MOST_TERMS], b[COLS * MOST_TERMS];
    for (int64_t row = 0; row < j->rows; row += ROWS) {
        pack(j->inner, j->a + row, j->lda, j->rows - row, ROWS, a + row * j->inner);
    }
    for (int64_t col = 0; col < j->cols; col += COLS) {
        pack(j->inner, j->b + col, j->ldb, j->cols - col, COLS, b);
        for (int64_t row = 0; row < j->rows; row += ROWS) {
            make_tile(j, row, col, a + row * j->inner, b, COLS);
        }
    }
}

static void thin_product(const tchi_thin_ctx *j)
{
    if (j->inner == 1) {
        outer_product(j);
    } else if (j->inner <= FEW_TERMS) {
        few_terms(j);
    } else {
        down_columns(j);
    }
}

const tchi_thin_product tchi_thin_product_neon = {
    .run = thin_product, .rows = ROWS, .cols = COLS, .one_pass = MOST_TERMS, .most_elements = 0};
