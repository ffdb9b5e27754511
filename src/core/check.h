/* Argument validation, called by every public function before its first write. Messages name the argument, its shape,
 * type and device, and what was expected. */
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

/* The first line of every public call on a context: checks it, makes its backend current, and opens a profiler range
 * until the call returns. */
#define TCHI_ENTER(context, function)                                                                                  \
    __attribute__((cleanup(tchi_leave))) tch_context *tchi_entered_ = NULL;                                            \
    TCHI_TRY(tchi_enter((context), (function), &tchi_entered_))
tch_status tchi_enter(tch_context *context, const char *function, tch_context **entered);
/* The same for a call that needs an optional chapter of the operations table. */
#define TCHI_ENTER_FOR(context, function, chapter)                                                                     \
    TCHI_ENTER(context, function);                                                                                     \
    TCHI_TRY(tchi_check_chapter((context), (function), (context)->backend->chapter, #chapter))
tch_status tchi_check_chapter(const tch_context *context, const char *function, const void *operations,
                              const char *chapter);
void tchi_leave(tch_context **entered);

/* A named range inside a public call: a phase of its algorithm, on a profiler's timeline. */
void tchi_range_push(tch_context *context, const char *name);
void tchi_range_pop(tch_context *context);

/* The same until the end of the enclosing block. */
#define TCHI_RANGE(context, name)                                                                                      \
    __attribute__((cleanup(tchi_range_close), unused)) tch_context *tchi_range_ = tchi_range_open((context), (name))
tch_context *tchi_range_open(tch_context *context, const char *name);
void tchi_range_close(tch_context **context);

/* "function: name is NULL" where it is. */
tch_status tchi_check_not_null(const char *function, const char *name, const void *pointer);

tch_status tchi_check_device(const tch_context *context, const tch_tensor *tensor, const char *name);

/* A sound description on the context's device. */
tch_status tchi_check_input(const tch_context *context, const tch_tensor *tensor, const char *name);
/* The same, and no two elements alias. */
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
/* NULL, or a setup with valid struct sizes and allocator. */
tch_status tchi_check_setup(const char *function, const tch_optim_setup *setup);
/* `out` and `in` do not overlap. Either may be NULL: an omitted argument. */
tch_status tchi_check_disjoint(const tch_tensor *out, const char *out_name, const tch_tensor *in, const char *in_name);

/* The same for all outputs of a call against its inputs and each other. */
typedef struct tchi_named {
    const tch_tensor *tensor;
    const char *name;
} tchi_named;
tch_status tchi_check_all_disjoint(const tchi_named *outputs, int32_t output_count, const tchi_named *inputs,
                                   int32_t input_count);

#endif
