/* Between gathered gradients and a direction: factor updates and products with roots or bases. */
#include "backends/cpu/cpu.h"
#include "backends/packed_sides.h"
#include "core/status.h"

/* product = scale A X, or scale X A. */
static tch_status whiten(void *state, const tch_matrices *a, const tch_factor_update *how, char **room,
                         tch_matrices *product)
{
    tch_matrices root = tchi_packed_place(how->root, a->type, room);
    TCHI_TRY(tchi_packed_move(state, tchi_cpu_pack_matrices, how->root, &root, 1));
    *product = *a;
    product->data = how->product;
    return how->rows != NULL ? tchi_cpu_gemm(state, how->scale, a, 0, &root, 0, 0.0, 0, product)
                             : tchi_cpu_gemm(state, how->scale, &root, 0, a, 0, 0.0, 0, product);
}

static tch_status update_factor(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                const tch_matrices *kept, char *room)
{
    tch_matrices c = tchi_packed_place(kept, a->type, &room);
    TCHI_TRY(tchi_packed_move(state, tchi_cpu_pack_matrices, kept, &c, 1));
    TCHI_TRY(tchi_cpu_gram(state, clock->factor[0], a, transpose, clock->factor[1], 0, &c));
    return tchi_packed_move(state, tchi_cpu_pack_matrices, kept, &c, 0);
}

/* With weights 0 and 1 factors are unchanged whatever the gradients hold: BLAS would multiply them by 0. */
tch_status tchi_cpu_update_factors(void *state, const tch_blocks *blocks, const tch_factor_update *how)
{
    tch_matrices a = blocks->matrices;
    char *room = how->room;
    if (how->clock->factor[0] == 0.0 && how->clock->factor[1] == 1.0) {
        return TCH_OK;
    }
    TCHI_TRY(how->root == NULL ? TCH_OK : whiten(state, &blocks->matrices, how, &room, &a));
    TCHI_TRY(how->rows == NULL ? TCH_OK : update_factor(state, &a, 0, how->clock, how->rows, room));
    return how->columns == NULL ? TCH_OK : update_factor(state, &a, 1, how->clock, how->columns, room);
}

tch_status tchi_cpu_precondition(void *state, const tch_preconditioner *p, const tch_blocks *x, void *other,
                                 const tch_matrices *y, double *norms)
{
    const tch_matrices *kept[2] = {p->left, p->right};
    const tch_matrices *from = &x->matrices;
    tch_matrices side[2];
    tch_matrices between = *from;
    int32_t back = p->sides == TCH_SIDES_OUT_OF_BASES;
    char *room = p->room;
    for (int k = 0; k < 2; k++) {
        if (kept[k] != NULL) {
            side[k] = tchi_packed_place(kept[k], y->type, &room);
            TCHI_TRY(tchi_packed_move(state, tchi_cpu_pack_matrices, kept[k], &side[k], 1));
        }
    }
    between.data = other;
    if (p->left != NULL) {
        const tch_matrices *to = p->right != NULL ? &between : y;
        TCHI_TRY(tchi_cpu_gemm(state, 1.0, &side[0], back, from, 0, 0.0, 0, to));
        from = to;
    }
    if (p->right != NULL) {
        TCHI_TRY(tchi_cpu_gemm(state, 1.0, from, 0, &side[1], !back, 0.0, 0, y));
    }
    return norms == NULL ? TCH_OK : tchi_cpu_reduce(state, TCH_REDUCE_FROBENIUS, y, norms);
}
