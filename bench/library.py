"""A thin ctypes wrapper of libtorchium for benchmarks: calls on NumPy arrays and torch tensors are prepared once and
repeated. Only functions used by the benchmarks are declared.

It is not the Python package, whose overhead must not be part of C figures, which builds may lack (`scripts/gpu-check
--no-python`), and which has no workspace limit.
"""

import ctypes
import pathlib

import numpy as np

_CODES = {"float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32)}
_DEVICES = {"cpu": 1, "cuda": 2}
METHODS = {"auto": 0, "eigen": 1, "newton": 2, "rational": 3}


_TYPES = {
    "size": ctypes.c_size_t,
    "int": ctypes.c_int32,
    "long": ctypes.c_int64,
    "real": ctypes.c_double,
    "text": ctypes.c_char_p,
    "pointer": ctypes.c_void_p,
    "longs": ctypes.POINTER(ctypes.c_int64),
    "byte": ctypes.c_uint8,
    "short": ctypes.c_uint16,
    "unsigned": ctypes.c_uint64,
    "chars": ctypes.c_char,
}


def fields(*groups):
    """The fields of a structure, as in the header: a type with its names; `name[3]` is an array."""
    listed = []
    for group in groups:
        kind, *names = group.split()
        for name in names:
            name, _, length = name.rstrip("]").partition("[")
            listed.append((name, _TYPES[kind] * int(length) if length else _TYPES[kind]))
    return listed


class _Tensor(ctypes.Structure):
    _fields_ = fields(
        "pointer data",
        "int device_type device_index ndim",
        "byte code bits",
        "short lanes",
        "longs shape strides",
        "unsigned byte_offset",
    )


class _RootConfig(ctypes.Structure):
    _fields_ = fields(
        "size struct_size", "real eps relative_eps", "int method", "real tolerance", "int degree exact_residual"
    )


class _Layer(ctypes.Structure):
    _fields_ = fields(
        "size struct_size",
        "int kind rounded",
        "real scale",
        "int dims",
        "long kernel[3] stride[3] dilation[3] before[3] after[3]",
        "int padding",
        "long groups rows padding_index",
        "int normalized",
        "real eps",
    )


def linear_layer(rounded=True):
    """TCH_LAYER_INIT(TCH_LAYER_LINEAR); `rounded` lets a GPU round the operands of norms and factors to TF32."""
    ones, zeros = (1, 1, 1), (0, 0, 0)
    size = ctypes.sizeof(_Layer)
    return _Layer(size, 0, int(rounded), 1.0, 0, ones, ones, ones, zeros, zeros, 0, 1, 0, -1, 1, 1e-5)


class _MemoryInfo(ctypes.Structure):
    _fields_ = fields("size struct_size", "long total free allocated reserved peak requests misses")


def tensor(array):
    """Describes a NumPy array or a torch tensor; the description keeps it, its shape and its strides alive."""
    if isinstance(array, np.ndarray):
        name, address, device = array.dtype.name, array.ctypes.data, (1, 0)
        strides = [s // array.itemsize for s in array.strides]
    else:
        name, address = str(array.dtype).removeprefix("torch."), array.data_ptr()
        device = _DEVICES[array.device.type], array.device.index or 0
        strides = array.stride()
    code, bits = _CODES[name]
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    steps = (ctypes.c_int64 * array.ndim)(*strides)
    described = _Tensor(address, *device, array.ndim, code, bits, 1, shape, steps, 0)
    described.keep = (array, shape, steps)
    return described


class _DeviceInfo(ctypes.Structure):
    _fields_ = fields(
        "size struct_size",
        "chars name[128] features[256]",
        "long total_memory free_memory",
        "int compute_major compute_minor processors",
    )


class _Device(ctypes.Structure):
    _fields_ = fields("int type index")


class Library:
    """libtorchium with one context, by default on the CPU."""

    def __init__(self, path, device="cpu"):
        self.lib = ctypes.CDLL(str(pathlib.Path(path).resolve()))
        self.lib.tch_last_error.restype = ctypes.c_char_p
        self.lib.tch_version.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        self._check(self.lib.tch_context_create(device.encode(), ctypes.byref(self.context)))

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.tch_last_error().decode())

    def close(self):
        self.lib.tch_context_destroy(self.context)
        self.context = ctypes.c_void_p()

    def version(self):
        return self.lib.tch_version().decode()

    def processor(self):
        """The processor's name and the instruction sets in use."""
        info = _DeviceInfo(struct_size=ctypes.sizeof(_DeviceInfo))
        self._check(self.lib.tch_device_info_get(_Device(1, 0), ctypes.byref(info)))
        return f"{info.name.decode()} ({info.features.decode()})"

    def set_threads(self, count):
        self._check(self.lib.tch_set_num_threads(ctypes.c_int32(count)))

    def set_stream(self, stream):
        """`stream` is a number like torch.cuda.Stream.cuda_stream; 0 is the device's default stream."""
        self._check(self.lib.tch_context_set_stream(self.context, ctypes.c_void_p(stream)))

    def synchronize(self):
        self._check(self.lib.tch_context_synchronize(self.context))

    def set_workspace_limit(self, count):
        self._check(self.lib.tch_context_set_workspace_limit(self.context, ctypes.c_int64(count)))

    def trim(self):
        """Returns cached memory to the device."""
        self._check(self.lib.tch_memory_trim(self.context, ctypes.c_int64(0)))

    def reset_peak(self):
        self._check(self.lib.tch_memory_reset_peak(self.context))

    def memory(self):
        info = _MemoryInfo(ctypes.sizeof(_MemoryInfo))
        self._check(self.lib.tch_memory_get_info(self.context, ctypes.byref(info)))
        return {name: getattr(info, name) for name, _ in _MemoryInfo._fields_[1:]}

    def prepare(self, name, *arguments):
        """A function without arguments that makes the call, to time the call without its preparation."""
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

    def matrix_power(self, a, power, eps, out, report=None):
        return self.prepare("tch_matrix_power", tensor(a), float(power), float(eps), tensor(out), _optional(report))

    def inverse_root(self, a, root, out, method="auto", eps=0.0, relative_eps=0.0, tolerance=0.0, report=None):
        """With a `report` the call does not synchronize."""
        config = _RootConfig(ctypes.sizeof(_RootConfig), eps, relative_eps, METHODS[method], tolerance, 0, 0)
        return self.prepare("tch_inverse_root", tensor(a), root, config, tensor(out), None, _optional(report))

    def kronecker_product(self, a, b, out):
        return self.prepare("tch_kronecker_product", tensor(a), tensor(b), tensor(out))

    def matmul_chunked(self, a, b, budget, out):
        return self.prepare("tch_matmul_chunked", tensor(a), tensor(b), budget, tensor(out))

    def grad_samples(self, layer, x, g, weight, bias=None):
        return self.prepare("tch_grad_samples", layer, tensor(x), tensor(g), tensor(weight), _optional(bias))

    def grad_norms(self, layer, x, g, norms, bias=True):
        """Of the weight, and of the weight and bias together."""
        return self.prepare("tch_grad_norms", layer, tensor(x), tensor(g), 3 if bias else 1, 0, tensor(norms))

    def grad_factors(self, layer, x, g, alpha, beta, input_factor, output_factor):
        """Without a bias, and with every position as a sample."""
        numbers = float(alpha), float(beta)
        described = tensor(input_factor), tensor(output_factor)
        return self.prepare("tch_grad_factors", layer, tensor(x), tensor(g), 0, 0, *numbers, *described)


def _optional(array):
    return None if array is None else tensor(array)
