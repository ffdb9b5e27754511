/* The frame of one call: its arrays, the stream and the context it runs on.
 *
 *     PY_TAKE("matmul", 3, "a", "b", "out", "stream");
 *     PY_BEGIN(v[3], NULL, PY_IN(0), PY_IN(1), PY_OUT(2));
 *     PY_CALL(call, tch_matmul(call.context, t[0], t[1], t[2]));
 *     return py_call_end(&call);
 */
#ifndef TORCHIUM_PYTHON_CALLS_H
#define TORCHIUM_PYTHON_CALLS_H

#include "arrays.h"
#include "contexts.h"
#include "python.h"

typedef struct py_shape {
    int32_t rank;
    int64_t sizes[TCH_MAX_RANK];
} py_shape;

#define PY_CALL_ARRAYS 6
#define PY_CALL_RESULTS 2

typedef struct py_call {
    tch_context *context;
    tch_status status;
    py_context *place;
    py_stream stream;
    bool failed; /* an exception is set, and the library is not called */
    int count;
    int made_count;
    PyObject *made[PY_CALL_RESULTS];
    const py_operand *operands;
    tch_tensor *tensors[PY_CALL_ARRAYS]; /* NULL for an allowed None */
    py_array arrays[PY_CALL_ARRAYS];
} py_call;

/* Borrows or imports all arrays and borrows a context, on `device` unless NULL, else on the arrays' device. `stream` is
 * NULL, None or the number of a CUDA stream. Returns 0, or -1 with an exception set and nothing to release. */
int py_call_begin(py_call *call, const py_operand *operands, int count, PyObject *stream, const tch_device *device);

/* Creates operand `index`, given as None, as an array like operand `like`, which must be PyTorch's. */
void py_call_make(py_call *call, int index, int like, py_shape shape);

/* Releases everything. Returns the created arrays, two as a tuple, or None if there are none; NULL with an exception
 * set if the call failed. */
PyObject *py_call_end(py_call *call);

/* Nanoseconds that this thread has spent in the library, inside PY_CALL; the rest of a call's time is Python's. The
 * second one adds the time since `began`; if that is 0 it returns the current time. */
int64_t py_library_time(void);
int64_t py_library_clock(int64_t began);

/* Runs the expression, a call that returns a status, without the GIL. */
#define PY_CALL(call, expression)                                                                                      \
    do {                                                                                                               \
        Py_BEGIN_ALLOW_THREADS int64_t py_began_ = py_library_clock(0);                                                \
        (call).status = (expression);                                                                                  \
        (void)py_library_clock(py_began_);                                                                             \
        Py_END_ALLOW_THREADS                                                                                           \
    } while (0)

/* --- shapes of results ------------------------------------------------------------------------------------------- */

/* The shape of `a`; [..., n] for a [..., n, n]; [..., rows, columns] for a [..., m, n]; [..., m, m], or [..., n, n]
 * with transpose. */
py_shape py_shape_like(const tch_tensor *a);
py_shape py_shape_rows(const tch_tensor *a);
py_shape py_shape_matrices(const tch_tensor *a, int64_t rows, int64_t columns);
py_shape py_shape_gram(const tch_tensor *a, bool transpose);

/* [..., m, n] for a [..., m, k] and b [..., k, n], leading dimensions broadcast. */
py_shape py_shape_product(const tch_tensor *a, const tch_tensor *b);

/* [..., m p, n q], [..., m p, r] and [..., m, p] for a [..., m, n], b [..., p, q] and x. The leading dimensions are
 * those of any argument that has them; the library checks that the others agree. */
py_shape py_shape_kronecker(const tch_tensor *a, const tch_tensor *b);
py_shape py_shape_kronecker_matmul(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x);
py_shape py_shape_kronecker_apply(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x);

/* --- declaring a function ---------------------------------------------------------------------------------------- */

/* After PY_TAKE: argument `i` as an array that is read or written; PY_MAYBE_ also allows None. */
#define PY_IN(i) ((py_operand){v[i], names[i], PY_REQUIRED})
#define PY_MAYBE_IN(i) ((py_operand){v[i], names[i], 0})
#define PY_OUT(i) ((py_operand){v[i], names[i], PY_REQUIRED | PY_WRITTEN})
#define PY_MAYBE_OUT(i) ((py_operand){v[i], names[i], PY_WRITTEN})
#define PY_NONE(i) ((py_operand){Py_None, names[i], PY_WRITTEN})

/* Begins `call` with these arrays, and defines `t`, its tensors in order; returns NULL on an error. */
#define PY_BEGIN(stream, device, ...)                                                                                  \
    py_call call;                                                                                                      \
    tch_tensor **t = call.tensors;                                                                                     \
    const py_operand operands[] = {__VA_ARGS__};                                                                       \
    if (py_call_begin(&call, operands, (int)(sizeof operands / sizeof operands[0]), stream, device) < 0) {             \
        return NULL;                                                                                                   \
    }

/* py_call_make, if None was given. */
#define PY_MAKE(index, like, shape)                                                                                    \
    if (t[index] == NULL) {                                                                                            \
        py_call_make(&call, index, like, shape);                                                                       \
    }

#endif
