/* C = alpha A' B with few rows in A and B, for AVX-512. A tile of C stays in registers until it is written, once. Operands
 * are packed as the tiles read them, since rows that lie a power of two apart would drive each other out of the cache. */
#include <immintrin.h>
#include <string.h>

#include "loops.h"

/* A vector register, and the same at any address. */
typedef float vector __attribute__((vector_size(64)));
typedef float anywhere __attribute__((vector_size(64), aligned(4), may_alias));

enum { WIDTH = TCHI_THIN_COLS / 2 };

typedef struct tile_sums {
    vector left[TCHI_THIN_ROWS], right[TCHI_THIN_ROWS];
} tile_sums;

/* a: TCHI_THIN_ROWS numbers for each term; b: TCHI_THIN_COLS. */
static inline __attribute__((always_inline)) tile_sums sum_tile(int64_t inner, const float *a, const float *b)
{
    tile_sums s = {{{0}}, {{0}}};
    for (int64_t t = 0; t < inner; t++, a += TCHI_THIN_ROWS, b += TCHI_THIN_COLS) {
        vector left = *(const anywhere *)b;
        vector right = *(const anywhere *)(b + WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < TCHI_THIN_ROWS; i++) {
            s.left[i] += a[i] * left;
            s.right[i] += a[i] * right;
        }
    }
    return s;
}

/* Columns of x in strips of `width`, each strip with its rows one after the other. */
static void pack(int64_t inner, const float *x, int64_t ld, int64_t cols, int64_t width, float *packed)
{
    for (int64_t col = 0; col < cols; col += width) {
        for (int64_t t = 0; t < inner; t++, packed += width) {
            memcpy(packed, x + t * ld + col, (size_t)width * sizeof *x);
        }
    }
}

static void write_tile(const tile_sums *s, float alpha, float *c, int64_t ldc)
{
    for (int i = 0; i < TCHI_THIN_ROWS; i++) {
        *(anywhere *)(c + i * ldc) = alpha * s->left[i];
        *(anywhere *)(c + i * ldc + WIDTH) = alpha * s->right[i];
    }
}

static void stream_tile(const tile_sums *s, float alpha, float *c, int64_t ldc)
{
    for (int i = 0; i < TCHI_THIN_ROWS; i++) {
        _mm512_stream_ps(c + i * ldc, (__m512)(alpha * s->left[i]));
        _mm512_stream_ps(c + i * ldc + WIDTH, (__m512)(alpha * s->right[i]));
    }
}

void tchi_thin_product_avx512(const tchi_thin_job *j)
{
    float packed_a[TCHI_THIN_MOST_ROWS * TCHI_THIN_MOST_INNER];
    float packed_b[TCHI_THIN_COLS * TCHI_THIN_MOST_INNER];
    pack(j->inner, j->a, j->lda, j->rows, TCHI_THIN_ROWS, packed_a);
    for (int64_t col = 0; col < j->cols; col += TCHI_THIN_COLS) {
        pack(j->inner, j->b + col, j->ldb, TCHI_THIN_COLS, TCHI_THIN_COLS, packed_b);
        for (int64_t row = 0; row < j->rows; row += TCHI_THIN_ROWS) {
            tile_sums s = sum_tile(j->inner, packed_a + row * j->inner, packed_b);
            float *c = j->c + row * j->ldc + col;
            if (j->past_caches) {
                stream_tile(&s, j->alpha, c, j->ldc);
            } else {
                write_tile(&s, j->alpha, c, j->ldc);
            }
        }
    }
    if (j->past_caches) {
        _mm_sfence();
    }
}
