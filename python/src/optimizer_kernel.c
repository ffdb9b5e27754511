/* Kernels of the user's in an optimizer: setting one, and what became of it. */
#include "optimizer.h"

#include "arguments.h"
#include "errors.h"
#include "kernel.h"

static int take_part(PyObject *value, tch_optim_part *part)
{
    const char *text;
    if (py_take_string(value, "part", &text) < 0) {
        return -1;
    }
    bool root = PyUnicode_CompareWithASCIIString(value, "root") == 0;
    if (!root && PyUnicode_CompareWithASCIIString(value, "update") != 0) {
        PyErr_Format(PyExc_ValueError, "part must be 'root' or 'update', got '%U'", value);
        return -1;
    }
    *part = root ? TCH_OPTIM_PART_ROOT : TCH_OPTIM_PART_UPDATE;
    return 0;
}

/* tolerance, most_size, threads and shared_bytes, where they are given. */
static int take_numbers(PyObject *const *values, tch_optim_kernel *kernel)
{
    int64_t threads = 0;
    if ((values[0] != NULL && py_take_double(values[0], "tolerance", &kernel->tolerance) < 0) ||
        (values[1] != NULL && py_take_int(values[1], "most_size", 0, INT64_MAX, &kernel->most_size) < 0) ||
        (values[2] != NULL && py_take_int(values[2], "threads", 0, INT32_MAX, &threads) < 0) ||
        (values[3] != NULL && py_take_int(values[3], "shared_bytes", 0, INT64_MAX, &kernel->shared_bytes) < 0)) {
        return -1;
    }
    kernel->threads = (int32_t)threads;
    return 0;
}

/* Compiling takes its time; the source's texts stay, for the caller holds their objects. */
static PyObject *set(py_optimizer *self, tch_optim_part part, const tch_optim_kernel *kernel)
{
    tch_status status;
    if (py_optimizer_enter(self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = tch_optimizer_set_kernel(self->optimizer, part, kernel);
    Py_END_ALLOW_THREADS;
    return py_runner_done(&self->on, status);
}

PyObject *py_optimizer_set_kernel(PY_ARGUMENTS)
{
    PY_TAKE("set_kernel", 1 + PY_KERNEL_SOURCE, "part", "source", "path", "name", "options", "includes", "cache",
            "tolerance", "most_size", "threads", "shared_bytes");
    py_optimizer *self = (py_optimizer *)object;
    tch_optim_part part;
    tch_optim_kernel kernel = TCH_OPTIM_KERNEL_INIT;
    py_kernel_source source;
    if (take_part(v[0], &part) < 0 || take_numbers(v + 1 + PY_KERNEL_SOURCE, &kernel) < 0 ||
        py_kernel_source_take(&source, v + 1) < 0) {
        return NULL;
    }
    kernel.kernel = &source.config;
    PyObject *result = set(self, part, &kernel);
    py_kernel_source_release(&source);
    return result;
}

PyObject *py_optimizer_clear_kernel(PY_ARGUMENTS)
{
    PY_TAKE("clear_kernel", 1, "part");
    tch_optim_part part;
    if (take_part(v[0], &part) < 0) {
        return NULL;
    }
    return set((py_optimizer *)object, part, NULL);
}

static PyObject *describe(const tch_optim_kernel_info *info)
{
    PyObject *reason = py_text(info->reason == NULL ? "" : info->reason);
    if (reason == NULL) {
        return NULL;
    }
    return Py_BuildValue("{sNsNsLsLsLsLsd}", "in_use", PyBool_FromLong(info->in_use != 0), "reason", reason, "served",
                         (long long)info->served, "left", (long long)info->left, "launches", (long long)info->launches,
                         "refused", (long long)info->refused, "worst", info->worst);
}

PyObject *py_optimizer_get_kernel(PY_ARGUMENTS)
{
    PY_TAKE("get_kernel", 1, "part");
    py_optimizer *self = (py_optimizer *)object;
    tch_optim_part part;
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    if (take_part(v[0], &part) < 0 || py_optimizer_enter(self) < 0) {
        return NULL;
    }
    tch_status status = tch_optimizer_get_kernel(self->optimizer, part, &info);
    PyObject *result = status == TCH_OK ? describe(&info) : py_fail(status);
    py_runner_leave(&self->on);
    return result;
}
