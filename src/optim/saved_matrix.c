/* See saved_matrix.h. */
#include "saved_matrix.h"

#include <string.h>

#include "core/allocator.h"
#include "core/status.h"

#include "saved_state.h"

/* A matrix as a file has it: whole or packed, and of its own type where it can be converted. */
typedef struct saved_form {
    bool packed;
    tch_dtype dtype;
    int64_t shape[2];
} saved_form;

static bool is_packed(const tchi_state *s)
{
    return s->tensor.ndim == 1;
}

static int64_t elements(int64_t n, bool packed)
{
    return packed ? n * (n + 1) / 2 : n * n;
}

static bool is_narrow_or_float(tch_dtype dtype)
{
    return tch_dtype_equal(dtype, TCH_FLOAT32) || tch_dtype_equal(dtype, TCH_BFLOAT16);
}

/* What cannot be converted has the form that the optimizer has, and is refused when it is compared with that. */
static saved_form form_in(const tchi_state *s, const tch_checkpoint *file, const char *name)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    saved_form f = {.packed = is_packed(s), .dtype = s->tensor.dtype};
    int64_t index = s->symmetric > 0 ? tch_checkpoint_find(file, name) : -1;
    if (index >= 0 && tch_checkpoint_get_info(file, index, &info) == TCH_OK) {
        f.packed = info.ndim == 1 || info.ndim == 2 ? info.ndim == 1 : f.packed;
        f.dtype = is_narrow_or_float(info.dtype) && is_narrow_or_float(f.dtype) ? info.dtype : f.dtype;
    }
    f.shape[0] = f.packed ? elements(s->symmetric, true) : s->symmetric;
    f.shape[1] = s->symmetric;
    return f;
}

static tch_tensor tensor_of(saved_form *f, void *data)
{
    return tch_tensor_view(data, f->dtype, f->packed ? 1 : 2, f->shape);
}

bool tchi_saved_matrix_differs(const tchi_state *state, const tch_checkpoint *file, const char *name)
{
    saved_form f = form_in(state, file, name);
    return f.packed != is_packed(state) || !tch_dtype_equal(f.dtype, state->tensor.dtype);
}

tch_status tchi_saved_matrix_check(const tchi_state *state, const tch_checkpoint *file, const char *name)
{
    saved_form f = form_in(state, file, name);
    tch_tensor tensor = tensor_of(&f, NULL);
    return tchi_saved_check(file, name, &tensor);
}

/* Element (i, j) of the lower triangle lies at i (i + 1) / 2 + j where it is packed. */
static void repack(int64_t n, size_t size, bool to_packed, char *to, const char *from)
{
    for (int64_t i = 0, k = 0; i < n; i++) {
        for (int64_t j = 0; j <= i; j++, k++) {
            if (to_packed) {
                memcpy(to + (size_t)k * size, from + (size_t)(i * n + j) * size, size);
            } else {
                memcpy(to + (size_t)(i * n + j) * size, from + (size_t)k * size, size);
                memcpy(to + (size_t)(j * n + i) * size, from + (size_t)k * size, size);
            }
        }
    }
}

/* The type is converted on the way to the device. */
static tch_status read_other(const tch_optimizer *o, const tchi_state *s, const tch_checkpoint *file, const char *name,
                             saved_form *f, void *theirs, void *ours)
{
    tch_tensor saved = tensor_of(f, theirs);
    TCHI_TRY(tch_checkpoint_read(file, NULL, name, &saved));
    bool repacked = f->packed != is_packed(s);
    if (repacked) {
        repack(s->symmetric, tch_dtype_size(f->dtype), is_packed(s), ours, theirs);
    }
    tch_tensor host = tch_tensor_view(repacked ? ours : theirs, f->dtype, s->tensor.ndim, (int64_t *)s->shape);
    tch_tensor device = s->tensor;
    TCHI_TRY(tch_tensor_copy(o->context, &device, &host));
    return tch_context_synchronize(o->context); /* the memory goes */
}

tch_status tchi_saved_matrix_read(const tch_optimizer *optimizer, const tchi_state *state, const tch_checkpoint *file,
                                  const char *name)
{
    saved_form f = form_in(state, file, name);
    size_t size = tch_dtype_size(f.dtype);
    size_t theirs_bytes = (size_t)elements(state->symmetric, f.packed) * size;
    size_t ours_bytes = (size_t)elements(state->symmetric, is_packed(state)) * size;
    void *theirs = NULL;
    void *ours = NULL;
    tch_status status = tchi_host_take(theirs_bytes, "a matrix to be converted", &theirs);
    status = status == TCH_OK ? tchi_host_take(ours_bytes, "a matrix to be converted", &ours) : status;
    status = status == TCH_OK ? read_other(optimizer, state, file, name, &f, theirs, ours) : status;
    tchi_host_release(theirs, theirs_bytes);
    tchi_host_release(ours, ours_bytes);
    return status;
}
