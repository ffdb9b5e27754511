/* See saved_matrix.h. */
#include "saved_matrix.h"

#include <string.h>

#include "core/allocator.h"
#include "core/status.h"

#include "saved_state.h"

/* The same matrix in the form that the optimizer does not have. */
typedef struct other_form {
    int64_t shape[2];
    tch_tensor tensor;
} other_form;

static bool is_packed(const tchi_state *s)
{
    return s->tensor.ndim == 1;
}

static int64_t elements(int64_t n, bool packed)
{
    return packed ? n * (n + 1) / 2 : n * n;
}

static void describe(const tchi_state *s, void *data, other_form *f)
{
    int64_t n = s->symmetric;
    bool packed = !is_packed(s);
    f->shape[0] = packed ? elements(n, true) : n;
    f->shape[1] = n;
    f->tensor = tch_tensor_view(data, s->tensor.dtype, packed ? 1 : 2, f->shape);
}

bool tchi_saved_matrix_differs(const tchi_state *state, const tch_checkpoint *file, const char *name)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    int64_t index = state->symmetric > 0 ? tch_checkpoint_find(file, name) : -1;
    return index >= 0 && tch_checkpoint_get_info(file, index, &info) == TCH_OK &&
           info.ndim == (is_packed(state) ? 2 : 1);
}

tch_status tchi_saved_matrix_check(const tchi_state *state, const tch_checkpoint *file, const char *name)
{
    other_form f;
    describe(state, NULL, &f);
    return tchi_saved_check(file, name, &f.tensor);
}

/* Element (i, j) of the lower triangle lies at i (i + 1) / 2 + j where it is packed. */
static void convert(int64_t n, size_t size, bool to_packed, char *to, const char *from)
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

static tch_status read_other(const tch_optimizer *o, const tchi_state *s, const tch_checkpoint *file, const char *name,
                             void *theirs, void *ours)
{
    other_form f;
    describe(s, theirs, &f);
    TCHI_TRY(tch_checkpoint_read(file, NULL, name, &f.tensor));
    convert(s->symmetric, tch_dtype_size(s->tensor.dtype), is_packed(s), ours, theirs);
    tch_tensor host = tch_tensor_view(ours, s->tensor.dtype, s->tensor.ndim, (int64_t *)s->shape);
    tch_tensor device = s->tensor;
    TCHI_TRY(tch_tensor_copy(o->context, &device, &host));
    return tch_context_synchronize(o->context); /* the memory goes */
}

tch_status tchi_saved_matrix_read(const tch_optimizer *optimizer, const tchi_state *state, const tch_checkpoint *file,
                                  const char *name)
{
    size_t size = tch_dtype_size(state->tensor.dtype);
    size_t theirs_bytes = (size_t)elements(state->symmetric, !is_packed(state)) * size;
    size_t ours_bytes = (size_t)elements(state->symmetric, is_packed(state)) * size;
    void *theirs = NULL;
    void *ours = NULL;
    tch_status status = tchi_host_take(theirs_bytes, "a matrix to be converted", &theirs);
    status = status == TCH_OK ? tchi_host_take(ours_bytes, "a matrix to be converted", &ours) : status;
    status = status == TCH_OK ? read_other(optimizer, state, file, name, theirs, ours) : status;
    tchi_host_release(theirs, theirs_bytes);
    tchi_host_release(ours, ours_bytes);
    return status;
}
