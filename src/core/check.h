/* Validation of arguments. Every public function calls these before its first write; each names the argument in its
 * message, with shape, type and device, and says what was expected. */
#ifndef TCHI_CHECK_H
#define TCHI_CHECK_H

#include <stddef.h>

#include <torchium/optim.h>
#include <torchium/tensor.h>

#define TCHI_DESCRIBE_SIZE 256

/* "[3, 4]" */
const char *tchi_describe_shape(const tch_tensor *tensor, char *text, size_t size);
/* "float32 [3, 4] on cpu:0" */
const char *tchi_describe(const tch_tensor *tensor, char *text, size_t size);

/* The first line of every public call on a context: it exists, its backend is ready, and a profiler sees a range of the
 * function's name until the call returns, whichever way it does. */
#define TCHI_ENTER(context, function)                                                                                  \
    __attribute__((cleanup(tchi_leave))) tch_context *tchi_entered_ = NULL;                                            \
    TCHI_TRY(tchi_enter((context), (function), &tchi_entered_))
tch_status tchi_enter(tch_context *context, const char *function, tch_context **entered);
/* The same for a call that needs a chapter of the operations table which a backend may lack. */
#define TCHI_ENTER_FOR(context, function, chapter)                                                                     \
    TCHI_ENTER(context, function);                                                                                     \
    TCHI_TRY(tchi_check_chapter((context), (function), (context)->backend->chapter, #chapter))
tch_status tchi_check_chapter(const tch_context *context, const char *function, const void *operations,
                              const char *chapter);
void tchi_leave(tch_context **entered);

/* A named range inside a public call: a phase of its algorithm, on a profiler's timeline. */
void tchi_range_push(tch_context *context, const char *name);
void tchi_range_pop(tch_context *context);

/* The same until the end of the enclosing block, whichever way it is left. */
#define TCHI_RANGE(context, name)                                                                                      \
    __attribute__((cleanup(tchi_range_close), unused)) tch_context *tchi_range_ = tchi_range_open((context), (name))
tch_context *tchi_range_open(tch_context *context, const char *name);
void tchi_range_close(tch_context **context);

/* "function: name is NULL" where it is. */
tch_status tchi_check_not_null(const char *function, const char *name, const void *pointer);

tch_status tchi_check_device(const tch_context *context, const tch_tensor *tensor, const char *name);

/* A sound description on the context's device. */
tch_status tchi_check_input(const tch_context *context, const tch_tensor *tensor, const char *name);
/* The same, and no element stored twice. */
tch_status tchi_check_output(const tch_context *context, const tch_tensor *tensor, const char *name);
tch_status tchi_check_writable(const tch_tensor *tensor, const char *name);

tch_status tchi_check_float(const tch_tensor *tensor, const char *name);
tch_status tchi_check_dtype(const tch_tensor *tensor, const char *name, tch_dtype expected);
/* `other` has the type of `tensor`. */
tch_status tchi_check_same_dtype(const tch_tensor *other, const char *other_name, const tch_tensor *tensor,
                                 const char *name);
tch_status tchi_check_same_shape(const tch_tensor *other, const char *other_name, const tch_tensor *tensor);
/* Rank at least 2. */
tch_status tchi_check_matrix(const tch_tensor *tensor, const char *name);
/* Rank at least 2 and square in the last two dimensions. */
tch_status tchi_check_square(const tch_tensor *tensor, const char *name);
/* `out` has exactly this shape. */
tch_status tchi_check_shape(const tch_tensor *out, const char *name, int32_t ndim, const int64_t *shape);
/* NULL, or a setup whose struct sizes and allocator are sound. */
tch_status tchi_check_setup(const char *function, const tch_optim_setup *setup);
/* No byte of `out` belongs to `in`. Either may be NULL: an argument the caller left out. */
tch_status tchi_check_disjoint(const tch_tensor *out, const char *out_name, const tch_tensor *in, const char *in_name);

/* The same for all outputs of a call against its inputs and each other. */
typedef struct tchi_named {
    const tch_tensor *tensor;
    const char *name;
} tchi_named;
tch_status tchi_check_all_disjoint(const tchi_named *outputs, int32_t output_count, const tchi_named *inputs,
                                   int32_t input_count);

#endif
