/* Symmetric matrices that a table's operations take as they are kept: whole, or packed where their `ld` is 0. */
#ifndef TCHI_BACKENDS_PACKED_SIDES_H
#define TCHI_BACKENDS_PACKED_SIDES_H

#include <torchium/backend.h>

/* Where a kept matrix is once it is whole: where it lies, or in *room, which then ends behind it. */
static inline tch_matrices tchi_packed_place(const tch_matrices *kept, tch_scalar real, char **room)
{
    tch_matrices whole = *kept;
    if (kept->ld == 0) {
        whole.data = *room;
        whole.type = real;
        whole.ld = kept->cols;
        whole.stride = kept->rows * kept->cols;
        *room += kept->batch * whole.stride * (real == TCH_SCALAR_F64 ? 8 : 4);
    }
    return whole;
}

/* Brings a packed one there, or keeps what was made of it. */
static inline tch_status tchi_packed_move(void *state, tch_pack_op *pack, const tch_matrices *kept,
                                          const tch_matrices *whole, int32_t unpack)
{
    return kept->ld == 0 ? pack(state, whole, kept->type, kept->data, unpack) : TCH_OK;
}

#endif
