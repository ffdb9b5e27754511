/* The type torchium._C.Kernel: one tch_kernel with its own context, which follows the stream of each launch. Python
 * code runs only while the lock is not held: an array's __dlpack__ may launch the same kernel. */
#include "kernel.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "arguments.h"
#include "calls.h"
#include "contexts.h"
#include "module.h"

enum { LOG_SIZE = 1 << 16 };

PyTypeObject *py_kernel_type; /* single interpreter, see module.c */

/* --- parsing the configuration ----------------------------------------------------------------------------------- */

typedef struct kernel_source {
    tch_kernel_config config;
    PyObject *options, *includes; /* own the strings */
    const char **option_texts, **include_texts;
} kernel_source;

/* A list or tuple of strings: *items owns them. */
static int take_strings(PyObject *value, const char *name, PyObject **items, const char ***strings, int32_t *count)
{
    *items = PyUnicode_Check(value) || !PySequence_Check(value) ? NULL : PySequence_Tuple(value);
    Py_ssize_t length = *items != NULL ? PyTuple_Size(*items) : 0;
    if (*items == NULL || length > INT32_MAX) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s must be a sequence of strings", name);
        }
        return -1;
    }
    *strings = PyMem_Calloc((size_t)length + 1, sizeof **strings);
    if (*strings == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        char label[48];
        snprintf(label, sizeof label, "%s[%d]", name, (int)i);
        if (py_take_string(PyTuple_GetItem(*items, i), label, &(*strings)[i]) < 0) {
            return -1;
        }
    }
    *count = (int32_t)length;
    return 0;
}

static int take_optional(PyObject *value, const char *name, const char **text)
{
    return value == Py_None ? 0 : py_take_string(value, name, text);
}

static void release_source(kernel_source *source)
{
    PyMem_Free((void *)source->option_texts);
    PyMem_Free((void *)source->include_texts);
    Py_XDECREF(source->options);
    Py_XDECREF(source->includes);
}

/* Parses source, path, name, options, includes and cache; source or path may be None. 0, or -1 with an exception set
 * and nothing to release. The strings are valid as long as the objects. */
static int take_source(kernel_source *source, PyObject *const *values)
{
    tch_kernel_config *config = &source->config;
    bool cache = true;
    *source = (kernel_source){.config = TCH_KERNEL_CONFIG_INIT};
    if (take_optional(values[0], "source", &config->source) < 0 ||
        take_optional(values[1], "path", &config->path) < 0 || py_take_string(values[2], "name", &config->name) < 0 ||
        take_strings(values[3], "options", &source->options, &source->option_texts, &config->option_count) < 0 ||
        take_strings(values[4], "includes", &source->includes, &source->include_texts, &config->include_count) < 0 ||
        py_take_bool(values[5], "cache", &cache) < 0) {
        release_source(source);
        return -1;
    }
    config->options = source->option_texts;
    config->includes = source->include_texts;
    config->use_cache = cache;
    return 0;
}

/* --- compiling --------------------------------------------------------------------------------------------------- */

/* For a wrong name the log of a C++ compiler lists every line of generated code that uses it: only the first sentence
 * matters. False if the name is not the cause. */
static bool blames_name(const char *log, char *cause, size_t size)
{
    static const char title[] = "the kernel's name:";
    const char *error = strncmp(log, title, sizeof title - 1) == 0 ? strstr(log, "error: ") : NULL;
    if (error == NULL) {
        return false;
    }
    error += strlen("error: ");
    snprintf(cause, size, "%.*s", (int)strcspn(error, "\n"), error);
    return true;
}

/* The message is the compiler's log, if any: the library's message is truncated to a few hundred characters of it. */
static void fail_to_compile(const py_kernel *self, tch_status status, const tch_kernel_config *config)
{
    char device[32], cause[512], *log = config->log;
    if (status != TCH_ERR_INVALID_ARGUMENT || log[0] == '\0') {
        if (status == TCH_ERR_UNAVAILABLE) {
            PyErr_SetString(py_kernel_error, tch_last_error());
        } else {
            py_fail(status);
        }
        return;
    }
    for (size_t end = strlen(log); end > 0 && log[end - 1] == '\n'; end--) {
        log[end - 1] = '\0';
    }
    py_device_text(self->device, device, sizeof device);
    if (blames_name(log, cause, sizeof cause)) {
        PyErr_Format(py_kernel_error, "the source has no kernel %s for %s: %s", config->name, device, cause);
    } else {
        PyErr_Format(py_kernel_error, "kernel %s does not compile for %s:\n%s", config->name, device, log);
    }
}

static int describe_parameters(py_kernel *self)
{
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    tch_status status = tch_kernel_get_info(self->kernel, &info);
    self->parameters = status == TCH_OK ? PyMem_Calloc((size_t)info.parameters + 1, sizeof *self->parameters) : NULL;
    if (status == TCH_OK && self->parameters == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int32_t i = 0; i < info.parameters && status == TCH_OK; i++) {
        status = tch_kernel_get_parameter(self->kernel, i, &self->parameters[i].is);
        py_parameter_describe(&self->parameters[i], i);
    }
    self->count = info.parameters;
    if (status != TCH_OK) {
        py_fail(status);
        return -1;
    }
    return 0;
}

static tch_status build_kernel(py_kernel *self, const tch_kernel_config *config)
{
    char text[32];
    tch_status status = tch_context_create(py_device_text(self->device, text, sizeof text), &self->context);
    return status == TCH_OK ? tch_kernel_compile(self->context, config, &self->kernel) : status;
}

static int compile_kernel(py_kernel *self, tch_kernel_config *config)
{
    tch_status status;
    self->lock = PyThread_allocate_lock();
    config->log = PyMem_Malloc(LOG_SIZE);
    config->log_size = LOG_SIZE;
    if (self->lock == NULL || config->log == NULL) {
        PyMem_Free(config->log);
        PyErr_NoMemory();
        return -1;
    }
    config->log[0] = '\0';
    PY_UNLOCKED(status, build_kernel(self, config));
    if (status != TCH_OK) {
        fail_to_compile(self, status, config);
    }
    PyMem_Free(config->log);
    return status == TCH_OK ? describe_parameters(self) : -1;
}

/* Everything is initialized on construction, so that no partial object exists. */
static int prepare_kernel(py_kernel *self, PyObject *device, PyObject *const *source)
{
    kernel_source given;
    if (py_take_device(device, "device", &self->device) < 0 || take_source(&given, source) < 0) {
        return -1;
    }
    int failed = compile_kernel(self, &given.config);
    release_source(&given);
    return failed;
}

static PyObject *new_kernel(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "source", "path", "name", "options", "includes", "cache", NULL};
    PyObject *device, *v[6];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOOO:Kernel", names, &device, &v[0], &v[1], &v[2], &v[3],
                                     &v[4], &v[5])) {
        return NULL;
    }
    py_kernel *self = (py_kernel *)(void *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->process = (long)getpid();
    if (prepare_kernel(self, device, v) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* --- launching --------------------------------------------------------------------------------------------------- */

/* One to three integers, or a single one; missing ones are 1. */
static int take_extent(PyObject *value, const char *name, int64_t extent[3])
{
    extent[0] = extent[1] = extent[2] = 1;
    if (!PyTuple_Check(value) && !PyList_Check(value)) {
        return py_take_int(value, name, 0, INT32_MAX, &extent[0]);
    }
    return py_take_sizes(value, name, 0, INT32_MAX, 1, 3, extent) < 0 ? -1 : 0;
}

static tch_status follow_stream(py_kernel *self, void *stream)
{
    if (self->device.type != TCH_DEVICE_CUDA || (self->has_stream && stream == self->stream)) {
        return TCH_OK;
    }
    tch_status status = tch_context_set_stream(self->context, stream);
    self->has_stream = status == TCH_OK;
    self->stream = stream;
    return status;
}

/* Without the GIL. A stream that may be destroyed after the call is left at once, see py_stream. */
static tch_status launch_locked(py_kernel *self, const py_launch *launch)
{
    tch_status status = follow_stream(self, launch->stream.handle);
    if (status == TCH_OK) {
        status = tch_kernel_launch(self->kernel, &launch->shape, launch->count, launch->arguments);
    }
    if (status == TCH_OK && launch->stream.wait) {
        status = tch_context_synchronize(self->context);
    }
    if (launch->stream.passing) {
        tch_status back = follow_stream(self, NULL);
        status = status == TCH_OK ? back : status;
    }
    return status;
}

PyObject *py_kernel_run(py_kernel *self, const py_launch *launch)
{
    tch_status status;
    Py_BEGIN_ALLOW_THREADS;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    int64_t began = py_library_clock(0);
    status = launch_locked(self, launch);
    (void)py_library_clock(began);
    PyThread_release_lock(self->lock);
    Py_END_ALLOW_THREADS;
    return status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
}

static int check_call(const py_kernel *self, PyObject *args)
{
    if (self->process != (long)getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "this kernel belongs to the parent process");
        return -1;
    }
    if (!PyTuple_Check(args)) {
        PyErr_SetString(PyExc_TypeError, "args must be a tuple");
        return -1;
    }
    if (PyTuple_Size(args) != self->count) {
        PyErr_Format(PyExc_TypeError, "%s has %d parameters, got %zd arguments", tch_kernel_name(self->kernel),
                     (int)self->count, PyTuple_Size(args));
        return -1;
    }
    return 0;
}

static PyObject *launch_kernel(PY_ARGUMENTS)
{
    PY_TAKE("launch", 3, "grid", "block", "args", "shared_mem", "stream", "allow_strided");
    py_kernel *self = (py_kernel *)object;
    PyObject *result = NULL;
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    bool strided = false;
    if (check_call(self, v[2]) < 0 || take_extent(v[0], "grid", shape.grid) < 0 ||
        take_extent(v[1], "block", shape.block) < 0 ||
        (v[3] != NULL && py_take_int(v[3], "shared_mem", 0, INT32_MAX, &shape.shared_bytes) < 0) ||
        (v[5] != NULL && py_take_bool(v[5], "allow_strided", &strided) < 0)) {
        return NULL;
    }
    py_launch *made = py_launch_make(self->count);
    if (made == NULL) {
        return NULL;
    }
    made->shape = shape;
    made->strided = strided;
    if (py_launch_take(made, self->parameters, v[2], self->device, v[4]) == 0) {
        result = py_kernel_run(self, made);
    }
    py_launch_free(made);
    return result;
}

/* --- queries ----------------------------------------------------------------------------------------------------- */

static PyObject *list_parameters(PY_NO_ARGUMENTS)
{
    py_kernel *self = (py_kernel *)object;
    PyObject *list = PyList_New(self->count);
    for (int32_t i = 0; list != NULL && i < self->count; i++) {
        PyObject *text = PyUnicode_FromString(self->parameters[i].type);
        if (text == NULL || PyList_SetItem(list, i, text) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *describe_kernel(PY_NO_ARGUMENTS)
{
    py_kernel *self = (py_kernel *)object;
    tch_kernel_info is = TCH_KERNEL_INFO_INIT;
    tch_status status = tch_kernel_get_info(self->kernel, &is);
    if (status != TCH_OK) {
        return py_fail(status);
    }
    return Py_BuildValue("{s:i,s:L,s:L,s:i,s:i,s:i,s:N}", "registers", (int)is.registers, "shared_bytes",
                         (long long)is.shared_bytes, "local_bytes", (long long)is.local_bytes, "max_threads",
                         (int)is.max_threads, "suggested_threads", (int)is.suggested_threads, "suggested_blocks",
                         (int)is.suggested_blocks, "from_cache", PyBool_FromLong(is.from_cache != 0));
}

static void deallocate_kernel(PyObject *object)
{
    py_kernel *self = (py_kernel *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->process == (long)getpid()) {
        tch_kernel_destroy(self->kernel);
        tch_context_destroy(self->context);
    }
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    PyMem_Free(self->parameters);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* --- the cache --------------------------------------------------------------------------------------------------- */

static PyObject *cache_folder(PY_NO_ARGUMENTS)
{
    const char *folder = tch_kernel_cache_folder();
    return folder == NULL ? py_fail(TCH_ERR_IO) : PyUnicode_DecodeFSDefault(folder);
}

int py_kernel_register(PyObject *module)
{
    static PyMethodDef methods[] = {
        PY_METHOD("launch", launch_kernel, "Runs the kernel, or queues it where it is on a GPU."),
        {"parameters", list_parameters, METH_NOARGS, "The types of the parameters, as C writes them."},
        {"info", describe_kernel, METH_NOARGS, "Registers, shared memory, and the block that fills the device best."},
        {NULL, NULL, 0, NULL}};
    static PyType_Slot slots[] = {
        {Py_tp_doc, "One tch_kernel, compiled for one device."},
        {Py_tp_new, PY_SLOT(new_kernel)},
        {Py_tp_dealloc, PY_SLOT(deallocate_kernel)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Kernel", sizeof(py_kernel), 0, Py_TPFLAGS_DEFAULT, slots};
    static PyMethodDef functions[] = {{"kernel_cache_folder", cache_folder, METH_NOARGS,
                                       "Where compiled kernels are kept; an OSError tells why nowhere."},
                                      {NULL, NULL, 0, NULL}};
    return py_add_type(module, &spec, &py_kernel_type) < 0 || PyModule_AddFunctions(module, functions) < 0
               ? -1
               : py_elementwise_register(module);
}
