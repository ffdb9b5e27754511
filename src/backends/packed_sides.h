/* Symmetric matrices as stored in optimizer state: in full, or packed if their `ld` is 0. */
#ifndef TCHI_BACKENDS_PACKED_SIDES_H
#define TCHI_BACKENDS_PACKED_SIDES_H

#include <torchium/backend.h>

/* The unpacked form of a stored matrix: itself, or in *room, which is advanced. */
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

/* Unpacks or packs; nothing for a full matrix. */
static inline tch_status tchi_packed_move(void *state, tch_pack_op *pack, const tch_matrices *kept,
                                          const tch_matrices *whole, int32_t unpack)
{
    return kept->ld == 0 ? pack(state, whole, kept->type, kept->data, unpack) : TCH_OK;
}

#endif
