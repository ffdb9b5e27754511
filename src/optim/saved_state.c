#include "saved_state.h"

#include <string.h>

#include "core/arith.h"
#include "core/status.h"

#include "shape.h"
#include "shared/shared.h"

int32_t tchi_saved_shape(const tch_optimizer *optimizer, int32_t param, const int64_t **shape)
{
    if (optimizer->shared == NULL) {
        *shape = tchi_param_at(optimizer, param)->shape;
        return tchi_param_at(optimizer, param)->ndim;
    }
    *shape = tchi_shared_param_at(optimizer, param)->shape;
    return tchi_shared_param_at(optimizer, param)->ndim;
}

bool tchi_saves_param(const tch_optimizer *optimizer, int32_t param)
{
    return optimizer->shared == NULL ||
           param % tch_comm_size(optimizer->shared->comm) == tch_comm_rank(optimizer->shared->comm);
}

/* --- rectangles -------------------------------------------------------------------------------------------------- */

/* One rectangle of a state tensor, with the name of the whole tensor. */
typedef struct saved {
    char name[TCHI_SAVED_NAME];
    bool sharded; /* a rectangle of a larger tensor; otherwise a tensor of its own */
    bool mine;    /* this rank saves it */
    tch_tensor tensor;
    int64_t sizes[TCH_MAX_RANK];
    const int64_t *whole;
    int64_t start[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    int64_t length; /* of a whole list */
} saved;

static bool is_a_part(const tchi_state *s)
{
    return s->kind == TCHI_STATE_LIKE_TILE || s->kind == TCHI_STATE_OF_ELEMENTS;
}

static bool is_like_a_shard(const tch_optimizer *o, const tchi_state *s)
{
    return s->kind == TCHI_STATE_LIKE_PARAM && o->shared != NULL && tchi_shared_param_at(o, s->param)->sharded;
}

/* The number of rectangles of the tensor in the file. */
static int64_t count_saved(const tch_optimizer *o, const tchi_state *s)
{
    bool listed = s->kind == TCHI_STATE_OF_ELEMENTS && s->tile < 0;
    return listed                  ? tchi_shared_param_at(o, s->param)->stretches
           : is_like_a_shard(o, s) ? tchi_shared_param_at(o, s->param)->held
                                   : 1;
}

/* A part of a list with an entry for every `per` elements of the whole parameter. */
static void place_elements(const tch_optimizer *o, const tchi_state *s, int64_t number, saved *f)
{
    const tchi_param *p = s->tile < 0 ? tchi_param_at(o, s->param) : tchi_tile_at(o, s->tile);
    int64_t stretches;
    tchi_stretch stretch = {.start = p->base, .count = p->count, .first = true};
    if (s->tile < 0) {
        stretch = tchi_stretches_of(o, p, &stretches)[number];
    }
    f->tensor.byte_offset += (uint64_t)(stretch.at / s->per) * tch_dtype_size(s->tensor.dtype);
    f->sizes[0] = tchi_ceil_div(stretch.count, s->per);
    f->start[0] = stretch.start / s->per;
    f->length = tchi_ceil_div(p->whole, s->per);
    f->whole = &f->length;
    f->mine = stretch.first;
}

static void place_shard(const tch_optimizer *o, const tchi_state *s, int64_t number, saved *f)
{
    const tchi_shared_param *p = tchi_shared_param_at(o, s->param);
    const tchi_held *held = (const tchi_held *)o->shared->held.items + p->first_held + number;
    int64_t offset = 0;
    bool flat = s->tensor.ndim == 1 && p->ndim > 1;
    int64_t stride = 1;
    for (int32_t k = p->ndim - 1; k >= 0; k--) {
        offset += flat ? 0 : held->offset[k] * s->strides[k];
        f->sizes[k] = held->size[k];
        f->start[k] = held->start[k];
        f->strides[k] = stride;
        stride *= p->shape[k];
    }
    if (flat) {
        offset = held->offset[0];
        f->tensor.ndim = p->ndim;
        f->tensor.strides = f->strides;
    }
    f->tensor.byte_offset += (uint64_t)offset * tch_dtype_size(s->tensor.dtype);
    f->whole = p->shape;
    f->mine = held->first;
}

static void find_saved(const tch_optimizer *o, const tchi_state *s, int64_t number, const char *prefix, saved *f)
{
    *f = (saved){.tensor = s->tensor, .whole = s->shape, .mine = true};
    tchi_saved_name(f->name, prefix, s->name);
    memcpy(f->sizes, s->shape, sizeof f->sizes);
    f->tensor.shape = f->sizes;
    if (s->tile >= 0) { /* without its number: a part of the whole */
        *strrchr(f->name, '.') = '\0';
    }
    if (s->kind == TCHI_STATE_OF_ELEMENTS) {
        place_elements(o, s, number, f);
    } else if (s->kind == TCHI_STATE_LIKE_TILE) { /* a rectangle, in merged dimensions */
        const tchi_param *p = tchi_param_at(o, s->param);
        int64_t size[TCHI_MOST_ORDER];
        tchi_cut cut = tchi_shared_cut(o, p);
        tchi_cut_block(&cut, tchi_tile_at(o, s->tile)->tile, f->start, size);
        f->whole = p->dims.size;
    } else if (is_like_a_shard(o, s)) {
        place_shard(o, s, number, f);
    } else if (s->kind != TCHI_STATE_OF_BLOCK) {
        f->mine = tchi_saves_param(o, s->param);
    }
    f->sharded = f->tensor.ndim > 0 && (is_a_part(s) || is_like_a_shard(o, s));
}

/* --- saving ------------------------------------------------------------------------------------------------------ */

tch_status tchi_saved_state_add(const tch_optimizer *optimizer, int64_t index, tch_checkpoint_writer *writer,
                                const char *prefix)
{
    const tchi_state *s = tchi_state_at(optimizer, index);
    for (int64_t i = 0; i < count_saved(optimizer, s); i++) {
        saved f;
        find_saved(optimizer, s, i, prefix, &f);
        if (f.mine && f.sharded) {
            TCHI_TRY(tch_checkpoint_writer_add_shard(writer, f.name, &f.tensor, f.whole, f.start));
        } else if (f.mine) {
            TCHI_TRY(tch_checkpoint_writer_add(writer, f.name, &f.tensor));
        }
    }
    return TCH_OK;
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* How to read a tensor that the file may store in another format. */
typedef enum form { AS_IT_IS, CONVERTED, MADE_WITH_ITS_MOMENT, REPACKED } form;

static form form_in(const tch_optimizer *o, const tchi_state *s, const tch_checkpoint *file, const char *prefix)
{
    char name[TCHI_SAVED_NAME];
    tchi_saved_name(name, prefix, s->name);
    if (s->moment == 0) {
        return tchi_saved_matrix_differs(s, file, name) ? REPACKED : AS_IT_IS;
    }
    if (s->moment < 0) {
        name[strlen(name) - strlen("_scale")] = '\0';
    }
    const tchi_param *p = tchi_param_at(o, s->param);
    bool same = tchi_saved_moments_of(p, file, name) == p->moments;
    return same ? AS_IT_IS : s->moment > 0 ? CONVERTED : MADE_WITH_ITS_MOMENT;
}

int64_t tchi_saved_state_count(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                               const char *prefix)
{
    const tchi_state *s = tchi_state_at(optimizer, index);
    char name[TCHI_SAVED_NAME];
    form form = form_in(optimizer, s, file, prefix);
    bool coded =
        form == CONVERTED && tchi_saved_moments_of(tchi_param_at(optimizer, s->param), file,
                                                   tchi_saved_name(name, prefix, s->name)) == TCH_MOMENTS_CODES;
    return form == MADE_WITH_ITS_MOMENT ? 0 : coded ? 2 : 1;
}

static bool is_like(const tchi_state *s)
{
    return s->kind == TCHI_STATE_LIKE_PARAM || is_a_part(s) || s->per > 0;
}

static tch_status check_one(const tch_checkpoint *file, const tchi_state *s, const saved *f)
{
    if (!is_like(s) || (!f->sharded && tch_checkpoint_find(file, f->name) >= 0)) {
        return tchi_saved_check(file, f->name, &f->tensor);
    }
    tch_status status = tch_checkpoint_check_shard(file, f->name, f->whole, f->start, &f->tensor);
    return status == TCH_ERR_INVALID_ARGUMENT ? tchi_saved_missing(f->name) : status;
}

tch_status tchi_saved_state_check(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                                  const char *prefix)
{
    const tchi_state *s = tchi_state_at(optimizer, index);
    form form = form_in(optimizer, s, file, prefix);
    for (int64_t i = 0; i < count_saved(optimizer, s) && form != MADE_WITH_ITS_MOMENT; i++) {
        saved f;
        find_saved(optimizer, s, i, prefix, &f);
        const tchi_param *param = tchi_param_at(optimizer, s->param);
        TCHI_TRY(form == CONVERTED  ? tchi_saved_moment_check(param, file, f.name)
                 : form == REPACKED ? tchi_saved_matrix_check(s, file, f.name)
                 : s->moment < 0    ? tchi_saved_scales_check(param, file, f.name)
                                    : check_one(file, s, &f));
    }
    return TCH_OK;
}

tch_status tchi_saved_state_read(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                                 const char *prefix)
{
    const tchi_state *s = tchi_state_at(optimizer, index);
    form form = form_in(optimizer, s, file, prefix);
    char name[TCHI_SAVED_NAME];
    tchi_saved_name(name, prefix, s->name);
    switch (form) {
    case MADE_WITH_ITS_MOMENT:
        return TCH_OK;
    case CONVERTED:
        return tchi_saved_moment_read(optimizer, tchi_param_at(optimizer, s->param), s->moment - 1, file, name);
    case REPACKED:
        return tchi_saved_matrix_read(optimizer, s, file, name);
    default:
        break;
    }
    for (int64_t i = 0; i < count_saved(optimizer, s); i++) {
        saved f;
        find_saved(optimizer, s, i, prefix, &f);
        TCHI_TRY(is_like(s) ? tch_checkpoint_read_shard(file, optimizer->context, f.name, f.whole, f.start, &f.tensor)
                            : tch_checkpoint_read(file, optimizer->context, f.name, &f.tensor));
    }
    return TCH_OK;
}
