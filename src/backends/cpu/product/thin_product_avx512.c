/* C = alpha A' B with a tile of C in registers, for AVX-512. The contraction is divided into bands whose strip of B
 * stays in L1. Operands are packed in the order of the tiles, since rows a power of two apart would evict each other,
 * by the first tile that reads them: copying is nearly free between multiplications, while a separate pass took 10 % of
 * the time. */
#include <immintrin.h>
#include <string.h>

#include "backends/cpu/loops/loops.h"

typedef float vector __attribute__((vector_size(64), may_alias));

enum {
    ROWS = 8,
    COLS = 32,
    ONE_PASS = 256,
    WIDTH = COLS / 2, /* numbers in a register */
    AHEAD = 16,       /* rows prefetched before they are packed; without, 4 to 19 % slower by the shape */
};

/* Terms [0, inner) of the current band. */
typedef struct band {
    const tchi_thin_ctx *ctx;
    const float *a, *b;
    int64_t inner;
    int first;       /* C is not yet written */
    float *packed_a; /* strips of ROWS numbers for each term */
    float *packed_b; /* one strip of COLS */
} band;

typedef struct tile {
    int64_t row, col, rows;
    __mmask16 left, right;
} tile;

typedef struct tile_sums {
    vector left[ROWS], right[ROWS];
} tile_sums;

static __mmask16 first_of(int64_t n)
{
    return (__mmask16)(n >= WIDTH ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

static tile tile_at(const tchi_thin_ctx *j, int64_t row, int64_t col)
{
    tile t = {.row = row, .col = col, .rows = j->rows - row < ROWS ? j->rows - row : ROWS};
    t.left = first_of(j->cols - col);
    t.right = first_of(j->cols - col - WIDTH);
    return t;
}

/* The last three are compile-time constants: whether to pack each strip here, and whether the tile lacks its right
 * half. While packing, factors are read from the source: reading back the copy stalled the loop. */
static inline __attribute__((always_inline)) tile_sums sum_tile(const band *d, const tile *at, int pack_a, int pack_b,
                                                                int narrow)
{
    tile_sums s = {{{0}}, {{0}}};
    const float *from_a = d->a + at->row;
    const float *from_b = d->b + at->col;
    float *a = d->packed_a + at->row * d->inner;
    float *b = d->packed_b;
    for (int64_t t = 0; t < d->inner; t++, a += ROWS, b += COLS) {
        const float *factors = pack_a ? from_a : a;
        if (pack_a) {
            memcpy(a, from_a, ROWS * sizeof *a);
            __builtin_prefetch(from_a + AHEAD * d->ctx->lda);
            from_a += d->ctx->lda;
        }
        if (pack_b) {
            *(vector *)b = (vector)_mm512_maskz_loadu_ps(at->left, from_b);
            __builtin_prefetch(from_b + AHEAD * d->ctx->ldb);
            if (!narrow) {
                *(vector *)(b + WIDTH) = (vector)_mm512_maskz_loadu_ps(at->right, from_b + WIDTH);
                __builtin_prefetch(from_b + AHEAD * d->ctx->ldb + WIDTH);
            }
            from_b += d->ctx->ldb;
        }
        vector left = *(const vector *)b;
        vector right = narrow ? left : *(const vector *)(b + WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            s.left[i] += factors[i] * left;
            if (!narrow) {
                s.right[i] += factors[i] * right;
            }
        }
    }
    return s;
}

/* Half a row of a tile. */
static inline __attribute__((always_inline)) void write_half(const band *d, float *c, __mmask16 these, vector sums)
{
    vector v = d->ctx->alpha * sums;
    if (!d->first) {
        v += (vector)_mm512_maskz_loadu_ps(these, c);
    }
    _mm512_mask_storeu_ps(c, these, (__m512)v);
}

static inline __attribute__((always_inline)) void write_tile(const band *d, const tile *at, const tile_sums *s,
                                                             int narrow)
{
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        float *c = d->ctx->c + (at->row + i) * d->ctx->ldc + at->col;
        if (i < at->rows) {
            write_half(d, c, at->left, s->left[i]);
        }
        if (i < at->rows && !narrow) {
            write_half(d, c + WIDTH, at->right, s->right[i]);
        }
    }
}

/* A whole tile, by non-temporal stores. */
static inline __attribute__((always_inline)) void stream_tile(const band *d, const tile *at, const tile_sums *s)
{
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        float *c = d->ctx->c + (at->row + i) * d->ctx->ldc + at->col;
        _mm512_stream_ps(c, (__m512)(d->ctx->alpha * s->left[i]));
        _mm512_stream_ps(c + WIDTH, (__m512)(d->ctx->alpha * s->right[i]));
    }
}

/* Prefetches the lines of the tile. */
static void ask_for_tile(const tchi_thin_ctx *j, const tile *at)
{
    for (int64_t i = 0; i < at->rows; i++) {
        const float *c = j->c + (at->row + i) * j->ldc + at->col;
        __builtin_prefetch(c, 1);
        __builtin_prefetch(c + WIDTH, 1);
    }
}

static inline __attribute__((always_inline)) void add_tile(const band *d, const tile *at, int pack_a, int pack_b,
                                                           int narrow)
{
    int stream = d->ctx->past_caches && at->rows == ROWS && at->right == 0xffff;
    if (!stream) {
        ask_for_tile(d->ctx, at);
    }
    tile_sums s = sum_tile(d, at, pack_a, pack_b, narrow);
    if (stream) {
        stream_tile(d, at, &s);
    } else {
        write_tile(d, at, &s, narrow);
    }
}

/* Rows that do not fill a strip, padded with zeros: tiles could not read them in place. */
static void pack_last_rows(const band *d)
{
    int64_t row = d->ctx->rows / ROWS * ROWS;
    __mmask8 left = (__mmask8)first_of(d->ctx->rows - row);
    float *packed = d->packed_a + row * d->inner;
    for (int64_t t = 0; left != 0 && t < d->inner; t++) {
        _mm256_store_ps(packed + t * ROWS, _mm256_maskz_loadu_ps(left, d->a + t * d->ctx->lda + row));
    }
}

/* The tiles of one strip of B. */
static inline __attribute__((always_inline)) void add_strip(const band *d, int64_t col, int narrow)
{
    for (int64_t row = 0; row < d->ctx->rows; row += ROWS) {
        tile at = tile_at(d->ctx, row, col);
        int pack_a = col == 0 && at.rows == ROWS;
        if (pack_a && row == 0) {
            add_tile(d, &at, 1, 1, narrow);
        } else if (pack_a) {
            add_tile(d, &at, 1, 0, narrow);
        } else if (row == 0) {
            add_tile(d, &at, 0, 1, narrow);
        } else {
            add_tile(d, &at, 0, 0, narrow);
        }
    }
}

static void add_band(const band *d)
{
    pack_last_rows(d);
    for (int64_t col = 0; col < d->ctx->cols; col += COLS) {
        if (d->ctx->cols - col > WIDTH) {
            add_strip(d, col, 0);
        } else {
            add_strip(d, col, 1);
        }
    }
}

/* Longer contractions into more elements go to BLAS, which with 512 terms was 9 % faster for 4096 by 4096 and 3 %
 * slower for 1024 by 1024. */
#define MOST_ELEMENTS ((int64_t)4 << 20)

/* Bands are of one length, as a short last one would be mostly reading and writing C. */
static void thin_product(const tchi_thin_ctx *j)
{
    float packed_a[TCHI_THIN_MOST_ROWS * ONE_PASS] __attribute__((aligned(64)));
    float packed_b[COLS * ONE_PASS] __attribute__((aligned(64)));
    int64_t bands = (j->inner + ONE_PASS - 1) / ONE_PASS;
    for (int64_t i = 0; i < bands; i++) {
        int64_t from = j->inner * i / bands;
        band d = {.ctx = j, .first = i == 0, .packed_a = packed_a, .packed_b = packed_b};
        d.a = j->a + from * j->lda;
        d.b = j->b + from * j->ldb;
        d.inner = j->inner * (i + 1) / bands - from;
        add_band(&d);
    }
    if (j->past_caches) {
        _mm_sfence();
    }
}

const tchi_thin_product tchi_thin_product_avx512 = {
    .run = thin_product, .rows = ROWS, .cols = COLS, .one_pass = ONE_PASS, .most_elements = MOST_ELEMENTS};
