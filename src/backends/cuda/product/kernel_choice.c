/* The table of kernels. The first row of an operation that fits is used if the kernel also supports the operands'
 * sizes: 32-bit indices, TMA descriptors, room in the workspace. Reasons for the limits are at the kernels'
 * launches. */
#include "kernel_choice.h"

enum {
    F64 = 1 << TCH_SCALAR_F64,
    F32 = 1 << TCH_SCALAR_F32,
    HALF = 1 << TCH_SCALAR_F16 | 1 << TCH_SCALAR_BF16,
    SPLIT = 1 << TCH_SCALAR_BF16X2,
    FLOATS = F64 | F32 | HALF,
    ANY = FLOATS | SPLIT,
    BF16S = 1 << TCH_SCALAR_BF16 | SPLIT,
    BF16_OUT = BF16S | F32 | F64,
    NEWEST = 99
};

// clang-format off
const tchi_kernel_row tchi_kernel_rows[TCHI_KERNEL_COUNT] = {
    /* operation     kernel                    capability   A           C               side mult align  tile   share */
    {"symmetric",    "symmetric_f64",            8, 10,     F64,        F64 | F32 | SPLIT,  0,  1, 16,   64,  64, 0},
    {"symmetric",    "symmetric_pingpong",       9, 9,      HALF,       HALF,             256,  8, 16,  128, 128, 1},
    {"symmetric",    "symmetric_pingpong",       9, 9,      SPLIT,      SPLIT | F64,      256,  8, 16,  128, 128, 4},
    {"symmetric",    "symmetric_bf16x2_wgmma",   9, 9,      BF16S,      BF16_OUT,         128,  1, 16,  128, 128, 1},
    {"symmetric",    "symmetric_bf16x2_mma",     8, NEWEST, BF16S,      BF16_OUT,         192,  1, 16,  128, 128, 1},
    {"symmetric",    "symmetric_bf16x2_mma",     8, NEWEST, BF16S,      BF16_OUT,           0,  1, 16,   64,  64, 0},
    {"symmetric",    "cuBLAS, mirrored",         0, NEWEST, FLOATS,     FLOATS,             0,  1,  0,    0,   0, 0},
    {"symmetric",    "symmetric_any",            0, NEWEST, ANY,        ANY,                0,  1,  0,   64,  64, 0},
    {"factor",       "symmetric_pingpong",       9, 9,      F32,        F32,              256,  1,  0,  128, 128, 1},
    {"factor",       "cuBLAS, in panels",        0, NEWEST, F32 | HALF, F32,                0,  1,  0,    0,   0, 0},
    {"two-sided",    "transposed_product",       9, 9,      F32,        F32 | HALF,       256,  8, 16,  128, 256, 0},
    {"two-sided",    "cuBLAS",                   0, NEWEST, FLOATS,     FLOATS,             0,  1,  0,    0,   0, 0},
    {"split",        "split_product",            9, 9,      HALF,       FLOATS,             0,  1, 16,  256, 128, 6},
    {"split",        "cuBLAS",                   0, NEWEST, HALF,       FLOATS,             0,  1,  0,    0,   0, 0},
    {"sample norms", "sample_norms_wgmma",       9, 9,      HALF,       0,                  0,  0, 16,  128, 256, 0},
    {"sample norms", "sample_norms_wgmma, fp16", 9, 9,      F32 | HALF, 0,                  0,  0,  0,  128, 256, 0},
    {"sample norms", "sample_norms_mma",         8, NEWEST, F32 | HALF, 0,                  0,  0,  0,  128, 256, 0},
    {"sample norms", "sample_norms_plain",       0, NEWEST, FLOATS,     0,                  0,  0,  0,   64,  64, 0},
    {"Gram norms",   "sample_norms_wgmma_gram",  9, 9,      F32,        0,                  0,  0, 16,  128, 128, 0},
    {"Gram norms",   "sample_norms_split",       9, 9,      F32,        0,                  0,  0, 16,  128, 128, 0},
    {"token cross",  "token_cross_tiles",        8, NEWEST, HALF,       0,                  0,  0,  0,  128, 128, 0},
    {"token cross",  "token_cross_kernel",       0, NEWEST, FLOATS,     0,                  0,  0,  0,  128, 128, 0},
};
// clang-format on

static int has(int32_t types, tch_scalar type)
{
    return (types >> type & 1) != 0;
}

/* The planes of a split matrix are `stride` apart. */
static int is_aligned(const tch_matrices *m, int64_t bytes)
{
    static const int64_t sizes[TCH_SCALAR_COUNT] = {8, 4, 2, 2, 4, 8, 2};
    int64_t size = sizes[m->type];
    int several = m->batch > 1 || m->type == TCH_SCALAR_BF16X2;
    return bytes == 0 || ((uintptr_t)m->data % (uintptr_t)bytes == 0 && (m->rows <= 1 || m->ld * size % bytes == 0) &&
                          (!several || m->stride * size % bytes == 0));
}

static int64_t tiles_along(int64_t rows, int64_t size)
{
    return (rows + size - 1) / size;
}

static int has_tiles(const tchi_kernel_row *row, int processors, const tch_matrices *c)
{
    if (row->share == 0) {
        return 1;
    }
    int64_t down = tiles_along(c->rows, row->tile_rows), across = tiles_along(c->cols, row->tile_cols);
    int64_t tiles = row->tile_rows == row->tile_cols ? down * (down + 1) / 2 : down * across;
    return tiles * c->batch >= processors / row->share;
}

static int is_sized(const tchi_kernel_row *row, const tch_matrices *c)
{
    return c->rows >= row->side && c->cols >= row->side && c->rows % row->multiple == 0 && c->cols % row->multiple == 0;
}

int tchi_kernel_fits(tchi_kernel kernel, int major, int processors, const tch_matrices *a, const tch_matrices *c)
{
    const tchi_kernel_row *row = &tchi_kernel_rows[kernel];
    return major >= row->major && major <= row->last_major && has(row->a, a->type) && is_aligned(a, row->aligned) &&
           (c == NULL || (has(row->c, c->type) && is_sized(row, c) && has_tiles(row, processors, c)));
}
