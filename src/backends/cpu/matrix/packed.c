/* Packed storage of symmetric matrices: contiguous rows of the lower triangle. */
#include "backends/cpu/cpu.h"
#include "backends/cpu/loops/loops.h"
#include "core/codes.h"

#define TILE 32 /* columns whose cache lines stay cached while rows are mirrored */

typedef struct packed_ctx {
    const tch_matrices *full;
    tch_scalar type; /* of the packed elements */
    char *packed;
} packed_ctx;

static char *packed_row(const packed_ctx *c, int64_t matrix, int64_t row)
{
    int64_t n = c->full->rows;
    int64_t at = matrix * (n * (n + 1) / 2) + row * (row + 1) / 2;
    return c->packed + at * tchi_cpu_size(c->type);
}

static void pack_row(const void *argument, int64_t b, int64_t i)
{
    const packed_ctx *c = argument;
    tchi_convert(i + 1, c->type, packed_row(c, b, i), c->full->type, tchi_cpu_row(c->full, b, i));
}

/* Row i right of the diagonal, from column `from` on: column i of the rows below. */
static void mirror_row(const packed_ctx *c, int64_t b, int64_t i, int64_t from, int64_t to)
{
    char *row = tchi_cpu_row(c->full, b, i);
    for (int64_t j = from; j < to; j++) {
        if (c->type == TCH_SCALAR_F64) {
            ((double *)row)[j] = ((const double *)packed_row(c, b, j))[i];
        } else if (c->type == TCH_SCALAR_BF16) {
            ((float *)row)[j] = tchi_code_float((uint32_t)((const uint16_t *)packed_row(c, b, j))[i] << 16);
        } else {
            ((float *)row)[j] = ((const float *)packed_row(c, b, j))[i];
        }
    }
}

/* Strips of rows, so that a row below is read once per strip. */
static void unpack_strips(void *argument, int64_t from, int64_t to)
{
    const packed_ctx *c = argument;
    int64_t n = c->full->rows;
    int64_t strips = (n + TILE - 1) / TILE;
    for (int64_t s = from; s < to; s++) {
        int64_t b = s / strips;
        int64_t first = s % strips * TILE;
        int64_t end = first + TILE < n ? first + TILE : n;
        for (int64_t i = first; i < end; i++) {
            tchi_convert(i + 1, c->full->type, tchi_cpu_row(c->full, b, i), c->type, packed_row(c, b, i));
        }
        for (int64_t column = first; column < n; column += TILE) {
            for (int64_t i = first; i < end; i++) {
                mirror_row(c, b, i, column > i ? column : i + 1, column + TILE < n ? column + TILE : n);
            }
        }
    }
}

tch_status tchi_cpu_pack_matrices(void *state, const tch_matrices *x, tch_scalar type, void *packed, int32_t unpack)
{
    packed_ctx c = {x, type, packed};
    double elements = (double)x->batch * (double)x->rows * (double)x->cols;
    if (!unpack) {
        tchi_cpu_for_rows(state, x, 1.0, pack_row, &c);
    } else if (elements > 0) {
        tchi_cpu_split(state, x->batch * ((x->rows + TILE - 1) / TILE), 4.0 * elements, unpack_strips, &c);
    }
    return TCH_OK;
}
