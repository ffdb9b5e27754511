/* The module torchium._C. Each file registers its own definitions. */
#include "module.h"

#include <string.h>

#include "arrays.h"
#include "contexts.h"

/* Exceptions, types and contexts are per process, so only one interpreter is supported. */
static int check_interpreter(void)
{
    static int64_t first = -1;
    int64_t mine = PyInterpreterState_GetID(PyInterpreterState_Get());
    if (first >= 0 && mine != first) {
        PyErr_SetString(PyExc_ImportError, "torchium can be imported by one interpreter of a process only");
        return -1;
    }
    first = mine;
    return 0;
}

int py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    bool known = kept != NULL && *kept != NULL;
    PyObject *type = known ? Py_NewRef(*kept) : PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type == NULL || PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type) < 0;
    if (kept != NULL && !known) {
        *kept = (PyTypeObject *)Py_XNewRef(type);
    }
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

/* Passes the path of pip's OpenBLAS to the library before its first use. Failure to find it is not an error: on first
 * use the CPU backend reports what it tried. */
static void offer_openblas(void)
{
    PyObject *module = PyImport_ImportModule("torchium._openblas");
    PyObject *find = module != NULL ? PyObject_GetAttrString(module, "find") : NULL;
    PyObject *path = find != NULL ? PyObject_CallNoArgs(find) : NULL;
    char *text = NULL;
    if (path != NULL && path != Py_None && PyBytes_AsStringAndSize(path, &text, NULL) == 0) {
        (void)tch_set_openblas_file(text);
    }
    PyErr_Clear();
    Py_XDECREF(path);
    Py_XDECREF(find);
    Py_XDECREF(module);
}

static int execute_module(PyObject *module)
{
    if (check_interpreter() < 0 || PyModule_AddStringConstant(module, "version", tch_version()) < 0 ||
        py_errors_register(module) < 0 || py_contexts_register() < 0 || py_capsules_register() < 0 ||
        py_devices_register(module) < 0 || py_memory_register(module) < 0 || py_linalg_register(module) < 0 ||
        py_listeners_register(module) < 0 || py_layer_register(module) < 0 || py_grad_register(module) < 0 ||
        py_optimizer_register(module) < 0 || py_scaler_register(module) < 0 || py_kfac_register(module) < 0 ||
        py_kernel_register(module) < 0) {
        return -1;
    }
    offer_openblas();
    return 0;
}

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC PyInit__C(void)
{
    static PyModuleDef_Slot slots[] = {{Py_mod_exec, PY_SLOT(execute_module)}, {0, NULL}};
    static PyModuleDef definition = {
        .m_base = PyModuleDef_HEAD_INIT,
        .m_name = "torchium._C",
        .m_doc = "libtorchium for Python. Private: see torchium, torchium.linalg and torchium.optim.",
        .m_slots = slots,
    };
    return PyModuleDef_Init(&definition);
}
