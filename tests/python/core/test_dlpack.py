"""Arrays are imported by DLPack without copying: every layout, every library, and every error of a producer."""

import gc
import sys
import threading
import weakref

import pytest

np = pytest.importorskip("numpy")

from producers import CUDA, IS_COPIED, READ_ONLY, OldProducer, Producer, api, random_array  # noqa: E402
from torchium import _C  # noqa: E402


def poisoned(*shape, dtype=np.float64):
    return np.full(shape, np.nan, dtype)


def close(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def product(a, b, rows=2, columns=None):
    """Allocated by the library, filled with NaN."""
    out = poisoned(rows, columns or rows)
    _C.matmul(a, b, out)
    return out


# --- NumPy ------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "fortran": np.asfortranarray,
    "reversed rows": lambda a: a[::-1].copy()[::-1],
    "reversed columns": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "every second": lambda a: np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3],
    "offset": lambda a: np.pad(a, 2)[2:-2, 2:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layouts_of_inputs(layout, dtype):
    plain = random_array(5, 7, dtype=dtype)
    a = LAYOUTS[layout](plain)
    np.testing.assert_array_equal(a, plain)
    out = poisoned(5, 5, dtype=dtype)
    _C.matmul(a, a.T, out)
    close(out, plain @ plain.T, 1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_outputs(layout):
    """An output is written in place or rejected; gaps between its elements are unchanged."""
    a = random_array(5, 7)
    out = LAYOUTS[layout](poisoned(5, 5))
    around = out.base if out.base is not None else out
    before = np.isnan(around).sum()
    try:
        _C.matmul(a, a.T, out)
    except ValueError as error:
        assert "out" in str(error)
        assert np.isnan(out).all()
    else:
        close(out, a @ a.T)
        assert before - np.isnan(around).sum() == out.size


NO_ARRAY = r"^a \(of type .*\) (is not an array|does not tell its device)"
# The argument a, the exception, and words of its message.
REFUSED = [
    *[(x, (TypeError, ValueError), r"\ba\b") for x in (np.float64(3.0), np.array(3.0), np.ones(3))],
    (np.zeros(9 * 8 + 1, np.uint8)[1:].view(np.float64).reshape(3, 3), ValueError, r"\ba\b.*not aligned"),
    (np.zeros((1,) * 9), ValueError, "a has 9 dimensions, expected at most 8"),
    *[(np.ones((3, 3), d), TypeError, f"a has dtype {d}, ") for d in ("bool", "int8", "uint8", "int16", "uint64")],
    *[(np.ones((3, 3), d), TypeError, rf"\ba\b.*{d}") for d in ("int32", "int64")],
    (
        np.ones((3, 3), "complex64"),
        TypeError,
        "a has dtype complex64: complex numbers are not supported, .* or float64$",
    ),
    (np.ones((3, 3), "complex128"), TypeError, "a has dtype complex128: complex numbers are not supported"),
    (np.array([["x", "y"]]), (TypeError, ValueError), r"^a \(of type numpy.ndarray\)"),
    (np.array([[None, 1]]), (TypeError, ValueError), r"^a \(of type numpy.ndarray\)"),
    (np.ones((2, 2), ">f8"), (TypeError, ValueError), r"^a \(of type numpy.ndarray\)"),
    *[(x, TypeError, NO_ARRAY) for x in (3, 2.5, "text", b"bytes", [[1.0]], {}, object(), np.ndarray, np, lambda: 0)],
    (None, TypeError, "^a must be an array, got None"),
]


@pytest.mark.parametrize(("array", "error", "words"), REFUSED, ids=lambda value: type(value).__name__)
def test_arrays_that_are_refused(array, error, words):
    plain, out = np.ones((3, 3)), poisoned(3, 3)
    with pytest.raises(error, match=words):
        _C.matmul(array, plain, out)
    with pytest.raises(error, match=words.replace(r"\ba\b", r"\bb\b").replace("^a ", "^b ").replace("a has", "b has")):
        _C.matmul(plain, array, out)
    if array is None:
        with pytest.raises(TypeError, match=r"^out must be an array, got None"):
            _C.matmul(plain, plain, array)
    assert np.isnan(out).all()


def test_output_that_repeats_itself_is_refused():
    out = np.lib.stride_tricks.as_strided(np.zeros(4), (4, 4), (0, 8))
    with pytest.raises(ValueError, match="out"):
        _C.matmul(random_array(4, 4), random_array(4, 4), out)


def test_read_only():
    a = random_array(3, 3)
    a.flags.writeable = False
    out = product(a, a, 3)
    close(out, a @ a)
    out.flags.writeable = False
    before = out.copy()
    with pytest.raises(ValueError, match=r"^out \(of type numpy.ndarray\)"):
        _C.matmul(a, a, out)
    np.testing.assert_array_equal(out, before)


# --- producers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"deleter": False}, {"version": (1, 99)}])
@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_capsules_are_opened_renamed_and_given_back(kind, options):
    a, b, out = (kind(x, **options) for x in (random_array(3, 4), random_array(4, 2), poisoned(3, 2)))
    _C.matmul(a, b, out)
    close(out.array, a.array @ b.array)
    for producer in (a, b, out):
        assert producer.deleted == options.get("deleter", 1)
        assert producer.was_taken()


def test_what_producers_are_asked():
    new, old = Producer(random_array(2, 2)), OldProducer(random_array(2, 2))
    product(new, old)
    assert new.asked == [{"max_version": (1, 0)}]
    assert old.asked == [{"stream": None}]


def test_strides_may_be_missing_and_offsets_count():
    memory = random_array(10)
    a = Producer(memory[1:].reshape(3, 3), strides=None)
    b = Producer(memory[:9].reshape(3, 3), byte_offset=8)
    close(product(a, b, 3), a.array @ a.array)


def test_missing_strides_are_those_of_a_contiguous_array():
    """An optimizer's parameter whose strides are given at first, and NULL at the step, is the same tensor."""
    array = random_array(3, 2)
    expected = array - 0.5
    optimizer = _C.Optimizer("cpu")
    optimizer.add_group({"kind": "sgd", "lr": 0.5}, [Producer(array)], ["a"], [True])
    assert optimizer.step([Producer(array, strides=None)], [np.ones((3, 2))]) is None
    close(array, expected)


@pytest.mark.parametrize("version", [(0, 8), (2, 0), (4000000000, 0)])
def test_another_major_version_is_given_back_unopened(version):
    a = Producer(random_array(2, 2), version=version, data=8, ndim=-5)
    with pytest.raises(TypeError, match=r"^a \(of type producers.Producer\) gave a capsule of another DLPack"):
        product(a, random_array(2, 2))
    assert a.deleted == 1


@pytest.mark.parametrize("flag", [READ_ONLY, IS_COPIED])
def test_flags(flag):
    a = Producer(random_array(2, 2), flags=flag)
    out = Producer(poisoned(2, 2), flags=flag)
    with pytest.raises(ValueError, match=r"^out \(of type producers.Producer\).*would be written to"):
        _C.matmul(a, a.array, out)
    assert np.isnan(out.array).all()
    assert (a.deleted, out.deleted) == (1, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ndim": -1},
        {"ndim": 9},
        {"ndim": 2**31 - 1},
        {"shape": None},
        {"data": None},
        {"lanes": 4},
        {"lanes": 0},
        {"code": 99},
        {"bits": 24},
        {"bits": 0},
        {"byte_offset": 3},
        {"device_type": 14},
        {"device": (CUDA, 99)},
    ],
)
@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_wrong_descriptions(kind, wrong):
    a = random_array(2, 2)
    producer, out = kind(random_array(2, 2), **wrong), poisoned(2, 2)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        _C.matmul(a, producer, out)
    assert producer.deleted == 1
    assert np.isnan(out).all()


def test_a_capsule_serves_once():
    a = Producer(random_array(2, 2))
    a.__dlpack__()
    used = a.capsule

    class Again:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **keywords):
            return used

    product(Again(), a.array)
    assert a.deleted == 1
    with pytest.raises(TypeError, match=r"a \(of type .*Again\) gave a capsule that was used before"):
        product(Again(), a.array)
    assert a.deleted == 1


def test_other_capsules_stay_closed():
    a = Producer(random_array(2, 2), name=b"something else")
    with pytest.raises(TypeError, match="gave something else than a DLPack capsule"):
        product(a, a.array)
    assert a.deleted == 0
    assert api.PyCapsule_IsValid(a.capsule, b"something else")


class Answers:
    """Returns the given value, or raises it."""

    def __init__(self, capsule=None, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        if isinstance(self.device, BaseException):
            raise self.device
        return self.device

    def __dlpack__(self, **keywords):
        if isinstance(self.capsule, BaseException):
            raise self.capsule
        return self.capsule


WHO = r"^a \(of type test_dlpack.Answers\) "
ANSWERS = [
    *[(Answers(x), TypeError, WHO + "gave something else") for x in (None, 3, "dltensor", object(), sys.modules)],
    *[
        (Answers(device=x), TypeError, WHO + "does not tell its device")
        for x in (None, 1, (), (1,), (1, 0, 0), ("cpu", 0), (1.5, 0), [1, 0], (2**80, 0))
    ],
    *[
        (answers, TypeError, WHO + ".*: '?no'?$")
        for error in (TypeError("no\nwhere"), RuntimeError("no"), KeyError("no"), AttributeError("no"))
        for answers in (Answers(error), Answers(device=error))
    ],
    (Answers(BufferError("no")), ValueError, WHO + ".*: no$"),
    # Exceptions that are not about the array propagate.
    *[(Answers(error()), error, "") for error in (KeyboardInterrupt, SystemExit, MemoryError)],
    *[(Answers(device=error()), error, "") for error in (KeyboardInterrupt, SystemExit, MemoryError)],
]


@pytest.mark.parametrize(("producer", "error", "words"), ANSWERS)
def test_producers_that_answer_wrongly(producer, error, words):
    with pytest.raises(error, match=words):
        product(producer, random_array(2, 2))


def test_errors_give_back_what_was_taken_before_them():
    a, b = Producer(random_array(2, 2)), OldProducer(random_array(2, 2))
    with pytest.raises(TypeError, match=r"^out"):
        _C.matmul(a, b, "not an array")
    assert (a.deleted, b.deleted) == (1, 1)
    a, b, out = Producer(random_array(2, 3)), Producer(random_array(2, 3)), Producer(poisoned(2, 3))
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        _C.matmul(a, b, out)
    assert (a.deleted, b.deleted, out.deleted) == (1, 1, 1)
    assert np.isnan(out.array).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_deleter_that_raises_harms_nobody():
    class Clumsy(Producer):
        def delete(self, pointer):
            super().delete(pointer)
            raise ValueError("clumsy")

    a = Clumsy(random_array(2, 2))
    close(product(a, a.array), a.array @ a.array)
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        _C.matmul(Clumsy(random_array(2, 2)), a.array, poisoned(3, 3))


@pytest.mark.parametrize("module", ["jax", "jaxlib._jax", "jaxlib.xla_extension", "tensorflow.python"])
def test_immutable_libraries_are_read_and_never_written(module):
    kind = type("ArrayImpl", (Producer,), {"__module__": module})
    a, out = kind(random_array(2, 2)), kind(poisoned(2, 2))
    with pytest.raises(ValueError, match=rf"^out \(of type {module}.ArrayImpl\) is of a library"):
        _C.matmul(a, a.array, out)
    assert out.asked == []
    close(product(a, a.array), a.array @ a.array)


def test_jax():
    jax = pytest.importorskip("jax")
    plain = random_array(4, 4, dtype=np.float32)
    a = jax.device_put(plain, jax.devices("cpu")[0])  # not JAX's default device
    out = poisoned(4, 4, dtype=np.float32)
    _C.matmul(a, a, out)
    close(out, plain @ plain, 1e-5)
    result = jax.device_put(np.zeros((4, 4), np.float32), jax.devices("cpu")[0])
    with pytest.raises(ValueError, match=r"^out"):
        _C.matmul(a, a, result)
    assert not np.asarray(result).any()


# --- a library's table on its type ------------------------------------------------------------------------------------


ANOTHER = b"another"  # a capsule does not keep its name alive


@pytest.mark.parametrize("table", [None, 3, "text", api.PyCapsule_New(8, ANOTHER, None)])
def test_a_table_that_is_none_is_as_good_as_absent(table):
    kind = type("Tabled", (Producer,), {"__dlpack_c_exchange_api__": table})
    a = kind(random_array(2, 2))
    close(product(a, a.array), a.array @ a.array)
    assert a.deleted == 1


def test_the_table_of_another_library_refuses():
    torch = pytest.importorskip("torch")
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        pytest.skip("this PyTorch has no table")
    kind = type("Liar", (Producer,), {"__dlpack_c_exchange_api__": table})
    with pytest.raises(TypeError, match=r"^a "):
        product(kind(random_array(2, 2)), random_array(2, 2))


def test_types_are_not_kept_for_ever():
    def pass_by():
        kind = type("Passing", (Producer,), {})
        product(kind(random_array(2, 2)), random_array(2, 2))
        return weakref.ref(kind)

    types = [pass_by() for _ in range(100)]
    gc.collect()
    assert sum(kind() is not None for kind in types) <= 16


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def check_against_torch(torch, a, b, tolerance):
    out = torch.full(
        (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]),
        float("nan"),
        dtype=a.dtype,
        device=a.device,
    )
    _C.matmul(a, b, out)
    expected = a.detach().double() @ b.detach().double()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "dtype, tolerance", [("float16", 4e-3), ("bfloat16", 3e-2), ("float32", 1e-5), ("float64", 1e-12)]
)
def test_tensors_of_torch(torch, device, dtype, tolerance):
    a = torch.randn(2, 5, 7, device=device).to(getattr(torch, dtype))
    check_against_torch(torch, a, a.mT, tolerance)
    check_against_torch(torch, a[:, ::2, 1:], a[0, :3, :6].T, tolerance)
    check_against_torch(torch, a[:1].expand(3, 5, 7), a[1:].mT, tolerance)
    check_against_torch(torch, torch.nn.Parameter(a), (a * 2).requires_grad_().mT, tolerance)


def test_outputs_of_torch(torch, device):
    a = torch.randn(3, 3, dtype=torch.float64, device=device)
    out = torch.nn.Parameter(torch.empty_like(a))
    _C.matmul(a, a, out)
    torch.testing.assert_close(out.detach(), a @ a)
    with pytest.raises(ValueError, match="out"):
        _C.matmul(a, a, torch.zeros(3, dtype=torch.float64, device=device).expand(3, 3))


def test_importing_may_change_what_was_borrowed(torch):
    """A producer that frees another argument's memory during the call."""
    a = torch.randn(3, 3, dtype=torch.float64)

    class Thief(Producer):
        def __dlpack__(self, **keywords):
            a.set_(torch.zeros(0, dtype=torch.float64))
            return super().__dlpack__(**keywords)

    with pytest.raises(ValueError, match=r"\ba\b"):
        _C.matmul(a, Thief(random_array(3, 3)), poisoned(3, 3))


def strange_tensors(torch):
    yield "complex", torch.randn(2, 2, dtype=torch.complex64)
    yield "conjugated", torch.randn(2, 2, dtype=torch.complex64).conj()
    yield "negated", torch.randn(2, 2, dtype=torch.complex64).conj().imag
    yield "sparse", torch.eye(2).to_sparse()
    yield "compressed", torch.eye(2).to_sparse_csr()
    yield "meta", torch.empty(2, 2, device="meta")
    yield "bool", torch.ones(2, 2, dtype=torch.bool)
    yield "byte", torch.ones(2, 2, dtype=torch.uint8)
    if torch.backends.mkldnn.is_available():
        yield "mkldnn", torch.ones(2, 2).to_mkldnn()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield "fake", torch.empty(2, 2)


def test_strange_tensors_are_refused_by_name(torch):
    plain, out = torch.ones(2, 2), torch.full((2, 2), float("nan"))
    for what, tensor in strange_tensors(torch):
        with pytest.raises(TypeError, match=r"^b ") as caught:
            _C.matmul(plain, tensor, out)
        assert "\n" not in str(caught.value), what
        with pytest.raises(TypeError, match=r"^out "):
            _C.matmul(plain, plain, tensor)
    assert out.isnan().all()


def test_vmap_is_refused(torch):
    with pytest.raises(TypeError, match=r"^a "):
        torch.vmap(lambda x: _C.matmul(x, torch.ones(2, 2), torch.empty(2, 2)))(torch.ones(3, 2, 2))


def test_torch_without_the_table(torch):
    """PyTorch before 2.10 exports by __dlpack__ only, and not if gradients are required."""

    class Old(torch.Tensor):
        __dlpack_c_exchange_api__ = None

    a = torch.randn(3, 3, dtype=torch.float64).as_subclass(Old).requires_grad_()
    out = torch.empty(3, 3, dtype=torch.float64).as_subclass(Old).requires_grad_()
    _C.matmul(a, a, out)
    torch.testing.assert_close(out.detach().as_subclass(torch.Tensor), (a @ a).detach().as_subclass(torch.Tensor))
    with pytest.raises((TypeError, ValueError), match=r"^a \(of type .*Old\)"):
        _C.matmul(torch.randn(3, 3, dtype=torch.complex64).conj().as_subclass(Old), a, out)


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_memory_on_torch(torch, device):
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    for dtype in (torch.float32, torch.bfloat16):
        memory = _C.Memory((4, 5), str(dtype).removeprefix("torch."), device, stream=stream)
        tensor = torch.from_dlpack(memory)
        del memory
        assert tensor.dtype == dtype
        assert tensor.device.type == device
        assert not tensor.any()
        assert (tensor.fill_(3) == 3).all()


def test_memory_is_an_argument_too():
    a, memory = random_array(3, 3), _C.Memory((3, 3), "float64", "cpu")
    _C.matmul(a, a, memory)
    close(np.from_dlpack(memory), a @ a)


def allocated():
    return _C.memory_info("cpu")["allocated"]


def test_memory_lives_as_long_as_its_last_user():
    gc.collect()
    before = allocated()
    memory = _C.Memory((1000, 1000), "float64", "cpu")
    assert allocated() >= before + 8_000_000
    first, second = np.from_dlpack(memory), np.from_dlpack(memory)
    first[3, 3] = 7.0
    del memory, first
    assert second[3, 3] == 7.0
    assert allocated() >= before + 8_000_000
    del second
    assert allocated() == before


def test_capsules_that_nobody_opens():
    before = allocated()
    memory = _C.Memory((1000, 1000), "float64", "cpu")
    capsules = [memory.__dlpack__(), memory.__dlpack__(max_version=(1, 0))]
    assert api.PyCapsule_IsValid(capsules[0], b"dltensor")
    assert api.PyCapsule_IsValid(capsules[1], b"dltensor_versioned")
    del memory
    assert allocated() > before
    capsules.clear()
    assert allocated() == before


def test_memory_is_released_by_any_thread():
    before = allocated()
    arrays = [np.from_dlpack(_C.Memory((100, 100), "float64", "cpu")) for _ in range(64)]

    def drop():
        while arrays:
            try:
                arrays.pop()[:] = 1.0
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allocated() == before


def test_what_memory_is_asked():
    memory = _C.Memory((2,), "float32", "cpu")
    assert memory.__dlpack_device__() == (1, 0)
    memory.__dlpack__(stream=None, max_version=(1, 3), dl_device=(1, 0), copy=False)
    for wrong in ({"copy": True}, {"dl_device": (2, 0)}, {"dl_device": (1, 1)}):
        with pytest.raises(BufferError, match=next(iter(wrong))):
            memory.__dlpack__(**wrong)
    for wrong in ({"max_version": 1}, {"max_version": ("a", 0)}, {"dl_device": "cpu"}, {"stream": "s"}, {"other": 1}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            memory.__dlpack__(**wrong)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (((2, -1), "float32", "cpu"), ValueError, r"shape\[1\] must be between"),
        (((2, 2**70), "float32", "cpu"), ValueError, r"shape\[1\] must be between"),
        (((2**40, 2**40), "float32", "cpu"), ValueError, "shape"),
        (((2**50,), "float64", "cpu"), MemoryError, "memory"),
        (((1,) * 9, "float32", "cpu"), ValueError, "shape must have 0 to 8 numbers"),
        (((2.5,), "float32", "cpu"), TypeError, r"shape\[0\] must be an integer"),
        ((3, "float32", "cpu"), TypeError, "shape must be a sequence of integers"),
        (((2,), "float33", "cpu"), ValueError, "dtype must be 'float64'"),
        (((2,), None, "cpu"), TypeError, "dtype must be a string"),
        (((2,), "float32", "gpu"), ValueError, "device must be 'cpu'"),
        (((2,), "float32", "cuda:99"), RuntimeError, "cuda"),
        (((2,), "float32", "cpu", 1), TypeError, "channels_last must be True or False"),
        (((2,), "float32", "cpu", False, "s"), TypeError, "stream must be an integer"),
        (((2,), "float32"), TypeError, "Memory"),
    ],
)
def test_memory_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        _C.Memory(*arguments)
