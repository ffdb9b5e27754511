"""Test doubles of array libraries, which implement DLPack through ctypes, correctly or with a chosen error.

A Producer exports the memory of a NumPy array on the CPU, counts calls of its deleter and records requests.
"""

import ctypes as c

import numpy as np

api = c.pythonapi
api.PyCapsule_New.restype = c.py_object
api.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
api.PyCapsule_IsValid.restype = c.c_int
api.PyCapsule_IsValid.argtypes = [c.py_object, c.c_char_p]
api.PyCapsule_GetPointer.restype = c.c_void_p
api.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]

CPU, CUDA = 1, 2
READ_ONLY, IS_COPIED = 1, 2


class Tensor(c.Structure):
    _fields_ = (
        ("data", c.c_void_p),
        ("device_type", c.c_int32),
        ("device_index", c.c_int32),
        ("ndim", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    )


Deleter = c.CFUNCTYPE(None, c.c_void_p)


class Managed(c.Structure):
    _fields_ = (("tensor", Tensor), ("owner", c.c_void_p), ("deleter", Deleter))


class ManagedVersioned(c.Structure):
    _fields_ = (
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("owner", c.c_void_p),
        ("deleter", Deleter),
        ("flags", c.c_uint64),
        ("tensor", Tensor),
    )


CODES = {"f": 2, "i": 0, "u": 1, "c": 5, "b": 6}


def describe(array, device=(CPU, 0)):
    """The correct DLPack description of a NumPy array."""
    rank = array.ndim
    shape = (c.c_int64 * max(rank, 1))(*array.shape)
    strides = (c.c_int64 * max(rank, 1))(*(s // array.itemsize for s in array.strides))
    return Tensor(
        data=array.ctypes.data,
        device_type=device[0],
        device_index=device[1],
        ndim=rank,
        code=CODES[array.dtype.kind],
        bits=array.itemsize * 8,
        lanes=1,
        shape=shape,
        strides=strides,
    )


class Producer:
    def __init__(
        self, array, *, versioned=True, version=(1, 0), flags=0, deleter=True, device=(CPU, 0), name=None, **wrong
    ):
        self.array = array
        self.versioned = versioned
        self.device = device
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self.deleted = 0
        self.asked = []
        self.capsule = None
        tensor = describe(array, device)
        for field, value in wrong.items():
            setattr(tensor, field, value)
        self.function = Deleter(self.delete) if deleter else Deleter()
        if versioned:
            self.managed = ManagedVersioned(*version, None, self.function, flags, tensor)
        else:
            self.managed = Managed(tensor, None, self.function)

    def delete(self, pointer):
        assert pointer == c.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        self.capsule = api.PyCapsule_New(c.addressof(self.managed), self.name, None)
        return self.capsule

    def was_taken(self):
        """Whether the capsule was renamed, as a consumer must."""
        return bool(api.PyCapsule_IsValid(self.capsule, b"used_" + self.name))


class OldProducer(Producer):
    """Older than DLPack 1.0: without max_version and versioned capsules."""

    def __init__(self, array, **options):
        super().__init__(array, versioned=False, **options)

    def __dlpack__(self, stream=None):
        return super().__dlpack__(stream=stream)


def random_array(*shape, dtype=np.float64):
    return np.random.standard_normal(shape).astype(dtype)
