/* The dimensions of a copy between strided arrays. */
#ifndef TCHI_BACKEND_AXES_H
#define TCHI_BACKEND_AXES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include <torchium/backend/types.h>
#include <torchium/tensor.h>

typedef struct tchi_axis {
    int64_t size, dst, src; /* strides in elements; in CUDA in larger units, and in bytes for kernels */
} tchi_axis;

static inline int tchi_by_dst_stride(const void *a, const void *b)
{
    int64_t x = llabs(((const tchi_axis *)a)->dst);
    int64_t y = llabs(((const tchi_axis *)b)->dst);
    return (x < y) - (x > y);
}

/* Drops sizes of 1, sorts by dst's strides and merges adjacent dimensions that are contiguous on both sides. Returns
 * the rank, at least 1. */
static inline int32_t tchi_merge_axes(const tch_array *dst, const int64_t *src_strides, tchi_axis *axes)
{
    tchi_axis kept[TCH_MAX_RANK];
    int32_t count = 0, rank = 0;
    for (int32_t i = 0; i < dst->rank; i++) {
        if (dst->shape[i] != 1) {
            tchi_axis axis = {dst->shape[i], dst->strides[i], src_strides[i]};
            kept[count++] = axis;
        }
    }
    qsort(kept, (size_t)count, sizeof *kept, tchi_by_dst_stride);
    for (int32_t i = 0; i < count; i++) {
        tchi_axis axis = kept[i];
        tchi_axis *last = rank > 0 ? &axes[rank - 1] : NULL;
        if (last != NULL && last->dst == axis.dst * axis.size && last->src == axis.src * axis.size) {
            axis.size *= last->size;
            *last = axis;
        } else {
            axes[rank++] = axis;
        }
    }
    if (rank == 0) {
        tchi_axis axis = {1, 1, 1};
        axes[rank++] = axis;
    }
    return rank;
}

/* The product of the first `count` sizes. */
static inline int64_t tchi_count_rows(const tchi_axis *axes, int32_t count)
{
    int64_t rows = 1;
    for (int32_t i = 0; i < count; i++) {
        rows *= axes[i].size;
    }
    return rows;
}

static inline bool tchi_is_empty(const tch_array *array)
{
    for (int32_t i = 0; i < array->rank; i++) {
        if (array->shape[i] == 0) {
            return true;
        }
    }
    return false;
}

#endif
