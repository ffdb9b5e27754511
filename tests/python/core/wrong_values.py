"""Objects that users and other libraries may pass by mistake. Each maker takes a random.Random and returns a new
object, so that a call cannot spoil another's argument."""

import array
import math

import numpy as np
import torch


class Mischief(Exception):
    """Raised by the arguments themselves. Calls may propagate it to the caller."""


# --- misbehaving objects ----------------------------------------------------------------------------------------------


PROTOCOL = ("__dlpack__", "__dlpack_device__", "__float__", "__index__", "__bool__", "__len__", "__iter__")


def _raise_mischief(*_, **__):
    raise Mischief("from a function")


class Raises:
    def __dlpack_device__(self):
        return (1, 0)


class Recurses:
    pass


for _name in PROTOCOL:
    if _name != "__dlpack_device__":
        setattr(Raises, _name, _raise_mischief)
    setattr(Recurses, _name, lambda self, _name=_name, **_: getattr(self, _name)())


class Returns:
    """Returns the given value from every method."""

    def __init__(self, value):
        self.value = value

    def __dlpack__(self, **_):
        return self.value

    def __getitem__(self, index):
        if isinstance(index, int) and index > 3:
            raise IndexError  # finite, like every sequence: reading an endless one exhausts memory
        return self.value

    __dlpack_device__ = __len__ = __dlpack__


class Clears:
    """An item that empties its list during iteration."""

    def __init__(self, items):
        self.items = items

    def cleared(self, value):
        self.items.clear()
        return value

    def __dlpack__(self, **_):
        return self.cleared(np.eye(3, dtype=np.float32).__dlpack__())

    def __dlpack_device__(self):
        return self.cleared((1, 0))

    def __index__(self):
        return self.cleared(3)

    def __float__(self):
        return self.cleared(1.0)


def _cleared_list(_):
    items = []
    items += [Clears(items), torch.eye(3), Clears(items), "text"]
    return items


class ExchangeLiar:
    """Claims the table of torch's tensor type."""

    __dlpack_c_exchange_api__ = "not a capsule"


class WrongExchange:
    __dlpack_c_exchange_api__ = None

    def __dlpack__(self, **_):
        return np.eye(3, dtype=np.float32).__dlpack__()


# --- tensors ----------------------------------------------------------------------------------------------------------


def _freed(random):
    tensor = torch.ones(random.choice(((3, 3), (3, 3), (3,), (1,), ())))
    tensor.untyped_storage().resize_(0)
    return tensor


def _read_only(_):
    matrix = np.eye(3, dtype=np.float32)
    matrix.flags.writeable = False
    return matrix


def _released(_):
    view = memoryview(bytearray(36)).cast("f", (3, 3))
    view.release()
    return view


def _nested_list(_):
    items = []
    items.append(items)
    return items


def _used_capsule(_):
    capsule = np.eye(3).__dlpack__()
    torch.from_dlpack(capsule)
    return capsule


def _any_rank(random):
    return torch.ones([random.choice((0, 1, 2, 3)) for _ in range(random.randrange(10))])


def _any_dtype(random):
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "complex64", "complex128", "float16", "bfloat16")
    return torch.eye(3).to(getattr(torch, random.choice(names)))


def _not_finite(random):
    tensor = torch.eye(3)
    tensor[1, 1] = random.choice((math.nan, math.inf, -math.inf))
    return tensor


def _strange_layout(random):
    base = torch.eye(6)
    return random.choice(
        (base[::2, 1::2], base.T[1:4, 1:4], torch.ones(1, 3).expand(3, 3), base[:3, :3].as_strided((3, 3), (1, 1)))
    )


def _numpy_layout(random):
    base = np.eye(6, dtype=np.float32)
    unaligned = np.frombuffer(bytearray(37), dtype=np.float32, count=9, offset=1).reshape(3, 3)
    return random.choice((base[::-1, ::-1], base[::2], unaligned, np.broadcast_to(np.float32(1), (3, 3))))


def _numpy_dtype(random):
    return np.zeros((3, 3), dtype=random.choice(("O", "S4", "U4", "M8[s]", "f2", "g", ">f4", "i1", "?", "c8", "V8")))


WILD = {
    "None": lambda _: None,
    "a flag": lambda r: r.choice((True, False)),
    "a number": lambda r: r.choice((0, 1, -1, 2, 3, 7, 0.0, -0.0, 0.5, -1.5, 1e-30, 1e300, -1e300)),
    "a number that is none": lambda r: r.choice((math.nan, math.inf, -math.inf)),
    "a large integer": lambda r: r.choice((2**31, 2**32, -(2**31) - 1, 2**62, 2**63, -(2**63) - 1, 2**64, 10**30)),
    "a complex number": lambda _: 1 + 2j,
    "text": lambda r: r.choice(
        ("", "cpu", "cuda", "cuda:99", "meta", "auto", "x" * 5000, "\0", "sh\0ampoo", "\ud800", "é")
    ),
    "bytes": lambda r: r.choice((b"", b"cpu", b"\xff\xfe", bytearray(36), memoryview(b"abc"))),
    "a list": lambda r: r.choice(
        ([], [1, 2, 3], [[1.0, 0.0], [0.0, 1.0]], [None], ["a"], (1,), (3, -3), (2**62, 2**62))
    ),
    "a list in itself": _nested_list,
    "a dict": lambda r: r.choice(({}, {"lr": "high"}, {1: 2}, {"params": []}, {"kind": "shampoo", "lr": math.nan})),
    "a set": lambda _: {1, 2},
    "a function": lambda r: r.choice((len, lambda *a, **k: None, _raise_mischief)),
    "a class": lambda r: r.choice((int, torch.Tensor, np.ndarray, Exception)),
    "an object": lambda _: object(),
    "an iterator": lambda r: r.choice((iter([]), iter([torch.eye(2)]), (x for x in "abc"))),
    "an array.array": lambda _: array.array("f", range(9)),
    "a released view": _released,
    "raises": lambda _: Raises(),
    "returns": lambda r: Returns(r.choice((None, 0, -1, "text", 2**40, (1, 0), (99, -1), object()))),
    "returns a used capsule": lambda r: Returns(_used_capsule(r)),
    "recurses": lambda _: Recurses(),
    "a list that its items clear": _cleared_list,
    "lies about its exchange": lambda r: r.choice((ExchangeLiar(), WrongExchange(), ExchangeLiar)),
    "a tensor of any rank": _any_rank,
    "a tensor of any type": _any_dtype,
    "a tensor that is not finite": _not_finite,
    "a tensor of strange layout": _strange_layout,
    "a tensor whose memory is gone": _freed,
    "a meta tensor": lambda _: torch.empty(3, 3, device="meta"),
    "a sparse tensor": lambda r: r.choice((torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr())),
    "a quantized tensor": lambda _: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    "a nested tensor": lambda _: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a conjugated tensor": lambda r: r.choice((torch.eye(3).cfloat().conj(), torch._neg_view(torch.eye(3)))),
    "a parameter": lambda _: torch.nn.Parameter(torch.eye(3)),
    "a result with history": lambda _: torch.eye(3, requires_grad=True) * 2,
    "an inference tensor": lambda _: torch.inference_mode()(torch.eye)(3),
    "a module": lambda r: r.choice((torch.nn.Linear(3, 2), torch.nn.Identity(), torch.nn.Linear)),
    "a torch.dtype": lambda r: r.choice((torch.float32, torch.int8, torch.complex64)),
    "a torch.device": lambda r: r.choice((torch.device("cpu"), torch.device("meta"), torch.device("cuda", 5))),
    "a NumPy array of strange layout": _numpy_layout,
    "a NumPy array of any type": _numpy_dtype,
    "a NumPy array to read only": _read_only,
    "a NumPy number": lambda r: r.choice((np.float32(0.5), np.float64("nan"), np.int64(-3), np.array(2.0))),
}


# Crashes PyTorch itself: its repr() of such a tensor aborts the process.
NOT_FOR_TORCH = ("a tensor whose memory is gone",)


def wild(random, for_torch=False):
    """(description, object)."""
    label = random.choice([label for label in WILD if not (for_torch and label in NOT_FOR_TORCH)])
    return label, WILD[label](random)
