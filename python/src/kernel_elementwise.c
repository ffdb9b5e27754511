/* The type torchium._C.Elementwise: the fast path of torchium.elementwise, for contiguous tensors of one shape with
 * exactly the kernel's types. All other calls go to torchium._elementwise, which handles broadcasting, conversions,
 * layouts and errors: nothing here sets an exception about arguments.
 *
 * The kernel's parameters are the number of elements, the number of 16-byte packs, the inputs, the outputs. */
#include "kernel.h"

#include <string.h>
#include <unistd.h>

#include "arguments.h"
#include "module.h"

enum { BEFORE_INPUTS = 2 };

typedef struct elementwise {
    PyObject ob_base;
    py_kernel *kernel;
    int32_t inputs, outputs;
    int64_t width, threads, blocks; /* of a launch on a GPU: elements per pack, threads per block, maximum blocks */
    int64_t grain;                  /* elements per CPU thread */
    PyObject *tensor_type, *parameter_type;
    PyObject *empty_like, *increment_version;
    PyObject *keywords; /* of empty_like: a tuple with a dictionary or None per output */
} elementwise;

/* Outcome of a call: done, not supported by the fast path, or failed with an exception set. */
typedef enum outcome { DONE, OTHER, FAILED } outcome;

/* One call: its tensor arguments, all like the first. */
typedef struct call {
    elementwise *self;
    py_launch *launch;
    const tch_tensor *like; /* NULL until there is a tensor */
    PyObject *like_object;
} call;

/* --- operands ---------------------------------------------------------------------------------------------------- */

static bool has_exact_type(tch_dtype dtype, const tch_kernel_parameter *is)
{
    enum { SIGNED = 0, REAL = 2, BRAIN = 4 };
    int code = is->pointee == TCH_PARAMETER_REAL ? (is->is_brain ? BRAIN : REAL) : SIGNED;
    return dtype.code == code && dtype.bits == 8 * is->pointee_size && dtype.lanes == 1;
}

static bool is_like(const tch_tensor *a, const tch_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

static bool is_on(const tch_tensor *tensor, tch_device device)
{
    if (tensor->device.type == TCH_DEVICE_CUDA_HOST) {
        return device.type == TCH_DEVICE_CPU; /* page-locked memory counts as the CPU's */
    }
    return tensor->device.type == device.type && tensor->device.index == device.index;
}

/* A tensor as argument `place` of the kernel: PyTorch's own class, contiguous, without autograd. */
static outcome take_tensor(call *c, PyObject *object, int32_t place)
{
    const elementwise *self = c->self;
    const py_parameter *parameter = &self->kernel->parameters[place];
    py_array *array = &c->launch->arrays[place];
    PyObject *type = (PyObject *)Py_TYPE(object);
    const DLPackExchange *table =
        type == self->tensor_type || type == self->parameter_type ? py_table_of(object) : NULL;
    if (table == NULL || py_is_watched(object) != 0) {
        return OTHER;
    }
    c->launch->operands[place] = (py_operand){object, parameter->label, PY_ANY_DTYPE};
    if (py_array_borrow(array, &c->launch->operands[place], table) < 0) {
        return OTHER;
    }
    tch_tensor *tensor = c->launch->tensors[place] = &array->tensor;
    if (!has_exact_type(tensor->dtype, &parameter->is) || !is_on(tensor, self->kernel->device) ||
        (c->like != NULL && !is_like(tensor, c->like)) || !tch_tensor_is_contiguous(tensor)) {
        return OTHER;
    }
    tensor->device = self->kernel->device;
    c->launch->arguments[place] = (tch_kernel_argument)TCH_ARGUMENT_TENSOR(tensor);
    if (c->like == NULL) {
        c->like = tensor;
        c->like_object = object;
    }
    return DONE;
}

/* Python numbers; integers for integer parameters. */
static outcome take_number(const call *c, PyObject *object, int32_t place)
{
    const tch_kernel_parameter *is = &c->self->kernel->parameters[place].is;
    tch_kernel_argument *argument = &c->launch->arguments[place];
    bool is_integer = PyLong_CheckExact(object);
    if (is->what == TCH_PARAMETER_REAL && (is_integer || PyFloat_CheckExact(object))) {
        *argument = (tch_kernel_argument)TCH_ARGUMENT_REAL(PyFloat_AsDouble(object));
        return PyErr_Occurred() ? OTHER : DONE;
    }
    if (is->what != TCH_PARAMETER_INT || !is_integer) {
        return OTHER;
    }
    int overflow = 0;
    int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
    int64_t most = is->size == 8 ? INT64_MAX : INT32_MAX;
    *argument = (tch_kernel_argument)TCH_ARGUMENT_INT(number);
    return overflow != 0 || number > most || number < -most - 1 ? OTHER : DONE;
}

static outcome take_inputs(call *c, PyObject *inputs)
{
    outcome so_far = PyTuple_Size(inputs) == c->self->inputs ? DONE : OTHER;
    for (int32_t i = 0; i < c->self->inputs && so_far == DONE; i++) {
        PyObject *object = PyTuple_GetItem(inputs, i);
        int32_t place = BEFORE_INPUTS + i;
        bool pointer = c->self->kernel->parameters[place].is.what == TCH_PARAMETER_POINTER;
        so_far = pointer ? take_tensor(c, object, place) : take_number(c, object, place);
    }
    return so_far == DONE && c->like == NULL ? OTHER : so_far;
}

/* --- results ----------------------------------------------------------------------------------------------------- */

/* Whether output `place` overlaps an earlier argument, other than an input at the same address. */
static bool meets_another(const call *c, int32_t place, int64_t elements)
{
    const tch_tensor *tensor = c->launch->tensors[place];
    const char *begin = py_data_of(tensor), *end = begin + elements * tensor->dtype.bits / 8;
    for (int32_t i = BEFORE_INPUTS; i < place; i++) {
        const tch_tensor *other = c->launch->tensors[i];
        if (other == NULL) {
            continue;
        }
        const char *first = py_data_of(other), *last = first + elements * other->dtype.bits / 8;
        bool input = i < BEFORE_INPUTS + c->self->inputs;
        bool same = input && first == begin && other->dtype.bits == tensor->dtype.bits;
        if (!same && begin < last && first < end) {
            return true;
        }
    }
    return false;
}

/* The tensors given for the results; a new reference, NULL if their number is wrong. */
static PyObject *given_results(const elementwise *self, PyObject *out)
{
    PyObject *results = NULL;
    if (PyTuple_Check(out) || PyList_Check(out)) {
        results = PySequence_Tuple(out);
    } else if (self->outputs == 1) {
        results = PyTuple_New(1);
        if (results != NULL && PyTuple_SetItem(results, 0, Py_NewRef(out)) < 0) {
            Py_CLEAR(results);
        }
    }
    if (results != NULL && PyTuple_Size(results) != self->outputs) {
        Py_CLEAR(results);
    }
    return results;
}

static PyObject *new_results(const call *c)
{
    const elementwise *self = c->self;
    PyObject *results = PyTuple_New(self->outputs);
    PyObject *like = PyTuple_New(1);
    int failed = results == NULL || like == NULL || PyTuple_SetItem(like, 0, Py_NewRef(c->like_object)) < 0;
    for (int32_t i = 0; i < self->outputs && !failed; i++) {
        PyObject *keywords = PyTuple_GetItem(self->keywords, i);
        PyObject *made = PyObject_Call(self->empty_like, like, keywords == Py_None ? NULL : keywords);
        failed = made == NULL || PyTuple_SetItem(results, i, made) < 0;
    }
    Py_XDECREF(like);
    if (failed) {
        Py_CLEAR(results);
    }
    return results;
}

static outcome take_results(call *c, PyObject *results, int64_t elements, bool given)
{
    outcome so_far = DONE;
    for (int32_t i = 0; i < c->self->outputs && so_far == DONE; i++) {
        int32_t place = BEFORE_INPUTS + c->self->inputs + i;
        so_far = take_tensor(c, PyTuple_GetItem(results, i), place);
        if (so_far == DONE && given && meets_another(c, place, elements)) {
            so_far = OTHER;
        }
    }
    return so_far;
}

/* --- a call ------------------------------------------------------------------------------------------------------ */

static bool are_aligned(const py_launch *launch)
{
    for (int32_t i = 0; i < launch->count; i++) {
        if (launch->tensors[i] != NULL && (uintptr_t)py_data_of(launch->tensors[i]) % 16 != 0) {
            return false;
        }
    }
    return true;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A GPU thread takes one pack at a time; on the CPU a block is one thread's share of the elements. */
static void shape_launch(const call *c, int64_t elements)
{
    const elementwise *self = c->self;
    py_launch *launch = c->launch;
    int64_t packs = 0, grid;
    if (self->kernel->device.type == TCH_DEVICE_CPU) {
        grid = smaller(tch_get_num_threads(), elements / self->grain);
    } else {
        packs = are_aligned(launch) ? elements / self->width : 0;
        int64_t work = packs + elements - packs * self->width;
        grid = smaller((work + self->threads - 1) / self->threads, self->blocks);
    }
    launch->shape = (tch_kernel_shape)TCH_KERNEL_SHAPE_INIT(grid > 1 ? grid : 1, self->threads);
    launch->arguments[0] = (tch_kernel_argument)TCH_ARGUMENT_INT(elements);
    launch->arguments[1] = (tch_kernel_argument)TCH_ARGUMENT_INT(packs);
}

static outcome launch_call(const call *c, int64_t elements)
{
    py_launch *launch = c->launch;
    shape_launch(c, elements);
    if (c->self->kernel->device.type == TCH_DEVICE_CUDA &&
        py_arrays_stream(launch->arrays, launch->tensors, launch->operands, launch->count, &launch->stream) < 0) {
        return FAILED;
    }
    PyObject *none = py_kernel_run(c->self->kernel, launch);
    Py_XDECREF(none);
    return none != NULL ? DONE : FAILED;
}

/* Bumps the version counter like an in-place operator, so that a backward pass that needs the old values raises. */
static outcome count_writes(const elementwise *self, PyObject *results)
{
    PyObject *none = PyObject_CallFunctionObjArgs(self->increment_version, results, NULL);
    Py_XDECREF(none);
    return none != NULL ? DONE : FAILED;
}

static outcome run_call(call *c, PyObject *inputs, PyObject *out, PyObject **results)
{
    bool given = out != Py_None;
    if (take_inputs(c, inputs) != DONE) {
        return OTHER;
    }
    int64_t elements = tch_tensor_numel(c->like);
    if (elements == 0) {
        return OTHER;
    }
    *results = given ? given_results(c->self, out) : new_results(c);
    if (*results == NULL) {
        return given ? OTHER : FAILED;
    }
    if (take_results(c, *results, elements, given) != DONE) {
        return OTHER;
    }
    outcome so_far = launch_call(c, elements);
    return so_far == DONE && given ? count_writes(c->self, *results) : so_far;
}

/* (inputs, out): the result, a tuple of several, or None if the call is not supported. */
static PyObject *run_elementwise(PY_ARGUMENTS)
{
    PY_TAKE("run", 2, "inputs", "out");
    elementwise *self = (elementwise *)object;
    PyObject *results = NULL;
    if (!PyTuple_Check(v[0]) || self->kernel->process != (long)getpid()) {
        return Py_NewRef(Py_None);
    }
    call c = {.self = self, .launch = py_launch_make(self->kernel->count)};
    if (c.launch == NULL) {
        return NULL;
    }
    outcome came = run_call(&c, v[0], v[1], &results);
    py_launch_free(c.launch);
    if (came == OTHER) {
        PyErr_Clear();
    }
    PyObject *result = came == FAILED       ? NULL
                       : came == OTHER      ? Py_NewRef(Py_None)
                       : self->outputs == 1 ? Py_NewRef(PyTuple_GetItem(results, 0))
                                            : Py_NewRef(results);
    Py_XDECREF(results);
    return result;
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static PyObject *of_torch(const char *module, const char *name)
{
    PyObject *from = PyImport_ImportModule(module);
    PyObject *found = from != NULL ? PyObject_GetAttrString(from, name) : NULL;
    Py_XDECREF(from);
    return found;
}

static int prepare_elementwise(elementwise *self)
{
    self->outputs = (int32_t)PyTuple_Size(self->keywords);
    if (self->inputs < 1 || self->width < 1 || self->threads < 1 || self->blocks < 1 || self->grain < 1 ||
        self->kernel->count != BEFORE_INPUTS + self->inputs + self->outputs) {
        PyErr_SetString(PyExc_ValueError, "the numbers do not fit the kernel");
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->outputs; i++) {
        PyObject *keywords = PyTuple_GetItem(self->keywords, i);
        if (keywords != Py_None && !PyDict_Check(keywords)) {
            return py_refuse_type(keywords, "keywords of an output", "a dictionary or None");
        }
    }
    self->tensor_type = of_torch("torch", "Tensor");
    self->parameter_type = of_torch("torch.nn", "Parameter");
    self->empty_like = of_torch("torch", "empty_like");
    self->increment_version = of_torch("torch.autograd.graph", "increment_version");
    return self->tensor_type == NULL || self->parameter_type == NULL || self->empty_like == NULL ||
                   self->increment_version == NULL
               ? -1
               : 0;
}

static PyObject *new_elementwise(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"kernel", "inputs", "keywords", "width", "threads", "blocks", "grain", NULL};
    PyObject *kernel, *options;
    int inputs;
    long long width, threads, blocks, grain;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!iO!LLLL:Elementwise", names, py_kernel_type, &kernel, &inputs,
                                     &PyTuple_Type, &options, &width, &threads, &blocks, &grain)) {
        return NULL;
    }
    elementwise *self = (elementwise *)(void *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->kernel = (py_kernel *)Py_NewRef(kernel);
    self->keywords = Py_NewRef(options);
    self->inputs = inputs;
    self->width = width;
    self->threads = threads;
    self->blocks = blocks;
    self->grain = grain;
    if (prepare_elementwise(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void deallocate_elementwise(PyObject *object)
{
    elementwise *self = (elementwise *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->kernel);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->parameter_type);
    Py_XDECREF(self->empty_like);
    Py_XDECREF(self->increment_version);
    Py_XDECREF(self->keywords);
    PyObject_Free(object);
    Py_DECREF(type);
}

int py_elementwise_register(PyObject *module)
{
    static PyMethodDef methods[] = {
        PY_METHOD("run", run_elementwise, "The results for such inputs, or None where the call is of another kind."),
        {NULL, NULL, 0, NULL}};
    static PyType_Slot slots[] = {
        {Py_tp_doc, "The short way through a call of torchium.elementwise."},
        {Py_tp_new, PY_SLOT(new_elementwise)},
        {Py_tp_dealloc, PY_SLOT(deallocate_elementwise)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Elementwise", sizeof(elementwise), 0, Py_TPFLAGS_DEFAULT, slots};
    return py_add_type(module, &spec, NULL);
}
