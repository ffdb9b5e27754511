"""A thin ctypes view of libtorchium for benchmarks: calls on NumPy arrays are prepared once and made often.

Only what the benchmarks call is declared. It is not the Python package.
"""

import ctypes
import pathlib

import numpy as np

_CODES = {np.dtype(np.float32): (2, 32), np.dtype(np.float64): (2, 64), np.dtype(np.int32): (0, 32)}
METHODS = {"auto": 0, "eigen": 1, "newton": 2, "rational": 3}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _RootConfig(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("eps", ctypes.c_double),
        ("relative_eps", ctypes.c_double),
        ("method", ctypes.c_int),
        ("tolerance", ctypes.c_double),
        ("degree", ctypes.c_int32),
        ("exact_residual", ctypes.c_int32),
    ]


def tensor(array):
    """Describes a NumPy array; the description keeps the array's shape and strides alive."""
    code, bits = _CODES[array.dtype]
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
    described = _Tensor(array.ctypes.data, 1, 0, array.ndim, code, bits, 1, shape, strides, 0)
    described.keep = (array, shape, strides)
    return described


class Library:
    """libtorchium with one context on the CPU."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(pathlib.Path(path).resolve()))
        self.lib.tch_last_error.restype = ctypes.c_char_p
        self.lib.tch_version.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        self._check(self.lib.tch_context_create(b"cpu", ctypes.byref(self.context)))

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.tch_last_error().decode())

    def version(self):
        return self.lib.tch_version().decode()

    def set_threads(self, count):
        self._check(self.lib.tch_set_num_threads(ctypes.c_int32(count)))

    def prepare(self, name, *arguments):
        """A function without arguments that makes the call: what it costs is the call, not its preparation."""
        converted = [self.context]
        for value in arguments:
            if isinstance(value, ctypes.Structure):
                converted.append(ctypes.byref(value))
            elif isinstance(value, float):
                converted.append(ctypes.c_double(value))
            elif isinstance(value, int):
                converted.append(ctypes.c_int64(value))
            else:
                converted.append(value)
        function = getattr(self.lib, name)

        def call():
            status = function(*converted)
            if status != 0:
                self._check(status)

        call.keep = arguments
        return call

    def matrix_power(self, a, power, eps, out):
        return self.prepare("tch_matrix_power", tensor(a), float(power), float(eps), tensor(out), None)

    def inverse_root(self, a, root, out, method="auto", eps=0.0, relative_eps=0.0, tolerance=0.0):
        config = _RootConfig(ctypes.sizeof(_RootConfig), eps, relative_eps, METHODS[method], tolerance, 0, 0)
        return self.prepare("tch_inverse_root", tensor(a), root, config, tensor(out), None, None)

    def kronecker_product(self, a, b, out):
        return self.prepare("tch_kronecker_product", tensor(a), tensor(b), tensor(out))
