/* im2col: a row per output position of a convolution. Tap offsets are computed once per position and then used in every
 * channel; coordinates outside the input are mapped inside, or to zero, by the padding mode. */
#include "backends/cpu/cpu.h"
#include "core/arith.h"

#include <string.h>

#define TAPS 256 /* taps whose places are kept at once */
#define NOWHERE INT64_MIN

/* The padded coordinate of `at`; -1 for a zero. */
static int64_t place_in_padding(tch_padding padding, int64_t at, int64_t size)
{
    if (at >= 0 && at < size) {
        return at;
    }
    switch (padding) {
    case TCH_PADDING_REFLECT:
        return at < 0 ? -at : 2 * (size - 1) - at;
    case TCH_PADDING_REPLICATE:
        return at < 0 ? 0 : size - 1;
    case TCH_PADDING_CIRCULAR:
        return at < 0 ? at + size : at - size;
    default:
        return -1;
    }
}

/* Element offset of a tap of output position `output` within its channel; NOWHERE for a zero. */
static int64_t tap_offset(const tch_patches *p, const int64_t output[3], int64_t tap)
{
    int64_t offset = 0;
    for (int k = 2; k >= 0; k--) {
        int64_t at = output[k] * p->stride[k] - p->before[k] + tap % p->kernel[k] * p->dilation[k];
        int64_t source = place_in_padding(p->padding, at, p->size[k]);
        if (source < 0) {
            return NOWHERE;
        }
        tap /= p->kernel[k];
        offset += source * p->strides[2 + k];
    }
    return offset;
}

/* True if the taps are contiguous. */
static int find_taps(const tch_patches *p, const int64_t output[3], int64_t first, int64_t count, int64_t *offsets)
{
    int follow = 1;
    for (int64_t k = 0; k < count; k++) {
        offsets[k] = tap_offset(p, output, first + k);
        follow &= offsets[k] != NOWHERE && offsets[k] == offsets[0] + k;
    }
    return follow;
}

/* A zero is all bits zero in every type. */
static inline __attribute__((always_inline)) void read_sized(size_t size, int64_t count, const int64_t *offsets,
                                                             const char *source, char *target)
{
    for (int64_t k = 0; k < count; k++) {
        if (offsets[k] == NOWHERE) {
            memset(target + (size_t)k * size, 0, size);
        } else {
            memcpy(target + (size_t)k * size, source + offsets[k] * (int64_t)size, size);
        }
    }
}

static void read_taps(int64_t size, int64_t count, const int64_t *offsets, const char *source, char *target)
{
    if (size == 8) {
        read_sized(8, count, offsets, source, target);
    } else if (size == 4) {
        read_sized(4, count, offsets, source, target);
    } else {
        read_sized(2, count, offsets, source, target);
    }
}

typedef struct im2col_ctx {
    const tch_patches *patches;
    const tch_matrices *out;
    int64_t taps; /* of the whole kernel */
} im2col_ctx;

/* Taps [first, first + count) of all channels, for one row of the result. */
static void fill_taps(const im2col_ctx *j, const int64_t output[3], const char *group, char *row, int64_t first,
                      int64_t count)
{
    const tch_patches *p = j->patches;
    int64_t size = tchi_cpu_size(p->type);
    int64_t offsets[TAPS];
    int follow = find_taps(p, output, first, count, offsets);
    if (follow && j->taps == 1 && p->strides[1] == 1) {
        memcpy(row, group + offsets[0] * size, (size_t)(p->channels * size));
        return;
    }
    for (int64_t c = 0; c < p->channels; c++) {
        const char *source = group + c * p->strides[1] * size;
        char *target = row + (c * j->taps + first) * size;
        if (follow) {
            memcpy(target, source + offsets[0] * size, (size_t)(count * size));
        } else {
            read_taps(size, count, offsets, source, target);
        }
    }
}

static void fill_row(const void *argument, int64_t b, int64_t l)
{
    const im2col_ctx *j = argument;
    const tch_patches *p = j->patches;
    const int64_t output[3] = {l / (p->outputs[1] * p->outputs[2]), l / p->outputs[2] % p->outputs[1],
                               l % p->outputs[2]};
    int64_t start = b / p->groups * p->strides[0] + b % p->groups * p->channels * p->strides[1];
    const char *group = (const char *)p->data + start * tchi_cpu_size(p->type);
    for (int64_t first = 0; first < j->taps; first += TAPS) {
        int64_t count = tchi_min(j->taps - first, TAPS);
        fill_taps(j, output, group, tchi_cpu_row(j->out, b, l), first, count);
    }
}

tch_status tchi_cpu_im2col(void *state, const tch_patches *patches, const tch_matrices *out)
{
    im2col_ctx ctx = {patches, out, patches->kernel[0] * patches->kernel[1] * patches->kernel[2]};
    tchi_cpu_for_rows(state, out, 1.0, fill_row, &ctx);
    return TCH_OK;
}
