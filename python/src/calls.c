#include "calls.h"

#include <time.h>

static _Thread_local int64_t in_library;

int64_t py_library_time(void)
{
    return in_library;
}

int64_t py_library_clock(int64_t began)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t time = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (began != 0) {
        in_library += time - began;
    }
    return time;
}

static int check_stream(tch_device device, PyObject *stream)
{
    if (device.type != TCH_DEVICE_CUDA && stream != NULL && stream != Py_None) {
        PyErr_SetString(PyExc_ValueError, "stream was given for arrays on the CPU, which has no streams");
        return -1;
    }
    return 0;
}

/* Whether PyTorch is capturing a graph on its current stream; the default stream cannot be captured. */
static bool is_capturing(void)
{
    static py_question capturing = {"torch.cuda", "is_current_stream_capturing", NULL, NULL};
    int answer = py_ask_torch(&capturing);
    PyErr_Clear();
    return answer == 1;
}

/* A stream that may be destroyed after the call is used temporarily: the default stream's context switches to it and
 * back, so that no context refers to it. */
static py_context *borrow_place(tch_device device, const py_stream *stream)
{
    bool visit = stream->passing && device.type == TCH_DEVICE_CUDA;
    bool capturing = stream->asked && stream->handle != NULL && is_capturing();
    py_context *place = py_context_borrow(device, visit ? NULL : stream->handle, capturing);
    if (place == NULL || !visit) {
        return place;
    }
    tch_status status = tch_context_set_stream(place->context, stream->handle);
    if (status != TCH_OK) {
        py_fail(status);
        py_context_return(place);
        return NULL;
    }
    return place;
}

/* A context that fails to switch back is not used again. */
static void return_place(py_call *call)
{
    if (call->stream.passing && call->place->device.type == TCH_DEVICE_CUDA &&
        tch_context_set_stream(call->context, NULL) != TCH_OK) {
        return;
    }
    py_context_return(call->place);
}

int py_call_begin(py_call *call, const py_operand *operands, int count, PyObject *stream, const tch_device *device)
{
    if (py_arrays_take(call->arrays, call->tensors, operands, count, stream, &call->stream) < 0) {
        return -1;
    }
    tch_device where = device != NULL ? *device : py_arrays_device(call->tensors, count);
    call->place = check_stream(where, stream) == 0 ? borrow_place(where, &call->stream) : NULL;
    if (call->place == NULL) {
        py_arrays_release(call->arrays, call->tensors, count);
        return -1;
    }
    call->context = call->place->context;
    call->operands = operands;
    call->count = count;
    call->made_count = 0;
    call->status = TCH_OK;
    call->failed = false;
    return 0;
}

/* Created by the call, so borrowed or imported like the array it is modeled on. */
static int take_made(py_call *call, int index, const DLPackExchange *table, const py_operand *operand)
{
    if (table == NULL) {
        return py_array_import(&call->arrays[index], operand, call->stream.handle);
    }
    if (py_table_of(operand->object) != table) {
        return py_array_refuse(PyExc_TypeError, operand, "was made, and is of another library");
    }
    return py_array_borrow_new(&call->arrays[index], operand, table);
}

static int make_result(py_call *call, int index, int like, const py_shape *shape)
{
    PyObject *object = call->operands[like].object;
    if (!py_makes_new(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array, got None: it is made only for torch tensors",
                     call->operands[index].name);
        return -1;
    }
    PyObject *made = py_new_like(object, shape->rank, shape->sizes);
    if (made == NULL) {
        return -1;
    }
    call->made[call->made_count++] = made;
    py_operand operand = {made, call->operands[index].name, PY_WRITTEN};
    if (take_made(call, index, call->arrays[like].table, &operand) < 0) {
        return -1;
    }
    call->tensors[index] = &call->arrays[index].tensor;
    return 0;
}

void py_call_make(py_call *call, int index, int like, py_shape shape)
{
    if (!call->failed) {
        call->failed = make_result(call, index, like, &shape) < 0;
    }
}

/* A new reference to the result; on failure, releases the arrays that the call created. */
static PyObject *result_of(py_call *call)
{
    PyObject *result = NULL;
    if (call->failed) {
        result = NULL;
    } else if (call->made_count == 0) {
        result = Py_NewRef(Py_None);
    } else if (call->made_count == 1) {
        result = Py_NewRef(call->made[0]);
    } else {
        result = Py_BuildValue("(OO)", call->made[0], call->made[1]);
    }
    for (int i = 0; i < call->made_count; i++) {
        Py_DECREF(call->made[i]);
    }
    return result;
}

/* Other work is not ordered after this call, which must synchronize before the arrays are released. */
static void wait_for_results(py_call *call)
{
    PyObject *kind, *value, *trace;
    tch_status status;
    PyErr_Fetch(&kind, &value, &trace);
    PY_UNLOCKED(status, tch_context_synchronize(call->context));
    PyErr_Restore(kind, value, trace);
    if (status != TCH_OK && !call->failed) {
        py_fail(status);
        call->failed = true;
    }
}

PyObject *py_call_end(py_call *call)
{
    if (!call->failed && call->status != TCH_OK) {
        py_fail(call->status);
        call->failed = true;
    }
    if (call->stream.wait) {
        wait_for_results(call);
    }
    return_place(call);
    py_arrays_release(call->arrays, call->tensors, call->count);
    return result_of(call);
}
