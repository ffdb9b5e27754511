"""Streams and contexts of calls on a GPU, and when they synchronize, on a fake CUDA module.

Its memory is host memory and it keeps a log (tests/support/backend/pretend_cuda.c). ctest sets TORCHIUM_BACKEND_PATH to
the module's folder; without it the tests are skipped.
"""

import ctypes
import sys
import threading
import types

import pytest

np = pytest.importorskip("numpy")

import producers  # noqa: E402
from producers import CPU, CUDA, Producer, random_array  # noqa: E402
from torchium import _C  # noqa: E402

module = next((b["library"] for b in _C.backends() if b["name"] == "cuda"), "")
if "pretend" not in module:
    pytest.skip("the module that pretends to be CUDA's is not in use", allow_module_level=True)

library = ctypes.CDLL(module)


def diary():
    """Log entries since the last call: ("made" | "stream" | "wait" | "gemm", context, device or stream)."""
    text = ctypes.create_string_buffer(1 << 16)
    library.pretend_take_diary(text, ctypes.c_size_t(len(text)))
    lines = map(str.split, text.value.decode().splitlines())
    return [(what, int(number), int(detail)) for what, number, detail in lines]


# --- a library with a table, as PyTorch is one ------------------------------------------------------------------------

Borrow = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(producers.Tensor))
CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("object_from_managed", ctypes.c_void_p),
        ("borrow", Borrow),
        ("current_stream", CurrentStream),
    )


current = types.SimpleNamespace(stream=0, asked=[])


@Borrow
def borrow(tensor, out):
    out[0] = tensor.description
    return 0


@CurrentStream
def current_stream(device_type, device_index, out):
    current.asked.append((device_type, device_index))
    out[0] = current.stream
    return 0


tables = {
    "known": Table(1, 3, None, None, None, None, borrow, current_stream),
    "newer": Table(2, 0, None, None, None, None, Borrow(), CurrentStream()),
}
tables["newer"].previous = ctypes.addressof(tables["known"])


def capsule(table):
    return producers.api.PyCapsule_New(ctypes.addressof(table), b"dlpack_exchange_api", None)


class Tensor:
    """An array on a fake GPU, of a library with a table on its type."""

    __dlpack_c_exchange_api__ = capsule(tables["known"])

    def __init__(self, array, device=(CUDA, 0)):
        self.array = array
        self.description = producers.describe(array, device)


class TensorOfNewerLibrary(Tensor):
    __dlpack_c_exchange_api__ = capsule(tables["newer"])


def multiply(*, kind=Tensor, device=(CUDA, 0), **keywords):
    """A product whose result is checked. Returns its log entries."""
    a, out = kind(random_array(3, 3), device=device), kind(np.full((3, 3), np.nan), device=device)
    _C.matmul(a, a, out, **keywords)
    np.testing.assert_allclose(out.array, a.array @ a.array)
    return diary()


@pytest.fixture(autouse=True)
def clean():
    current.stream = 0
    current.asked.clear()
    diary()


def gemm_of(entries):
    """The (context, stream) of the only product in the log."""
    [(_, context, stream)] = [entry for entry in entries if entry[0] == "gemm"]
    return context, stream


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Tensor, TensorOfNewerLibrary])
def test_a_call_runs_on_the_stream_of_its_arrays(kind):
    current.stream = 7000
    context, stream = gemm_of(multiply(kind=kind))
    assert stream == 7000
    assert current.asked == [(CUDA, 0)]
    assert multiply(kind=kind) == [("gemm", context, 7000)]  # no creation, synchronization or change of stream


def test_streams_have_contexts_of_their_own_up_to_a_handful():
    contexts = set()
    for stream in (100, 200, 300, 400, 500, 600):
        current.stream = stream
        context, used = gemm_of(multiply())
        assert used == stream
        contexts.add(context)
    assert 1 < len(contexts) <= 5
    current.stream = 600
    assert len(multiply()) == 1
    current.stream = 100  # least recently used, so its context has moved
    entries = multiply()
    assert [what for what, _, _ in entries] == ["stream", "gemm"]


def test_a_given_stream_comes_first():
    current.stream = 100
    assert gemm_of(multiply(stream=0))[1] == 0
    assert gemm_of(multiply(stream=600))[1] == 600
    assert current.asked == []


def test_devices_have_contexts_of_their_own():
    first = gemm_of(multiply(device=(CUDA, 0)))
    second = gemm_of(multiply(device=(CUDA, 1)))
    assert first[0] != second[0]
    assert current.asked == [(CUDA, 0), (CUDA, 1)]


@pytest.mark.parametrize(("kind", "stream", "told"), [(Producer, 0, 1), (Tensor, 100, 100)])
def test_unknown_libraries_are_waited_for(kind, stream, told):
    """A capsule's producer gets the call's stream, but is not notified of its end: so the call synchronizes."""
    current.stream = 100
    a, out = Producer(random_array(3, 3), device=(CUDA, 0)), kind(np.full((3, 3), np.nan), device=(CUDA, 0))
    _C.matmul(a, a, out)
    np.testing.assert_allclose(out.array, a.array @ a.array)
    assert a.asked == [{"max_version": (1, 0), "stream": told}] * 2
    entries = diary()
    context, used = gemm_of(entries)
    assert used == stream
    assert entries[-1] == ("wait", context, 0)
    assert (a.deleted, getattr(out, "deleted", 1)) == (2, 1)


def test_a_given_stream_is_left_again():
    """Its owner may destroy it after the call: no context stays on it."""
    multiply(kind=Producer, stream=0)
    entries = multiply(kind=Producer, stream=77)
    context, stream = gemm_of(entries)
    assert stream == 77
    assert entries == [("stream", context, 77), ("gemm", context, 77), ("stream", context, 0)]


def test_errors_wait_too():
    """Work queued before the error must be complete when the arrays are released."""
    a, out = Producer(random_array(3, 3), device=(CUDA, 0)), Producer(np.zeros((4, 4)), device=(CUDA, 0))
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        _C.matmul(a, a, out)
    assert diary()[-1][0] == "wait"
    assert (a.deleted, out.deleted) == (2, 1)


def test_devices_do_not_mix():
    a = Tensor(random_array(3, 3))
    with pytest.raises(ValueError, match=r"b is float64 \[3, 3\] on cpu:0, the context is on cuda:0"):
        _C.matmul(a, random_array(3, 3), a)
    with pytest.raises(ValueError, match=r"b is float64 \[3, 3\] on cuda:1, the context is on cuda:0"):
        _C.matmul(a, Tensor(random_array(3, 3), (CUDA, 1)), a)
    with pytest.raises(RuntimeError, match="cuda:5"):
        multiply(device=(CUDA, 5))


@pytest.mark.parametrize("device", [(3, 0), (CPU, 3)])
def test_page_locked_memory_and_that_of_several_processors_are_the_cpus(device):
    out = np.full((3, 3), np.nan)
    a = Producer(random_array(3, 3), device=device)
    _C.matmul(a, a, out)
    np.testing.assert_allclose(out, a.array @ a.array)
    assert diary() == []


def test_threads_do_not_share_a_context():
    """Every product is right while eight threads use one stream, with as many contexts as were needed at once."""
    current.stream = 100

    def work():
        for _ in range(50):
            a, out = Tensor(positive := random_array(40, 40)), Tensor(np.full((40, 40), np.nan))
            _C.matmul(a, a, out)
            np.testing.assert_allclose(out.array, positive @ positive, rtol=1e-9, atol=1e-9)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = diary()
    assert sum(what == "gemm" for what, _, _ in entries) == 400
    assert sum(what == "made" for what, _, _ in entries) <= 8


@pytest.fixture
def capture(monkeypatch):
    """A PyTorch that captures a graph while `capture.on`."""
    state = types.SimpleNamespace(on=False)
    torch_cuda = types.ModuleType("torch.cuda")
    torch_cuda.is_current_stream_capturing = lambda: state.on
    monkeypatch.setitem(sys.modules, "torch.cuda", torch_cuda)
    return state


def test_captures_take_the_context_that_has_just_worked(capture):
    current.stream = 8100  # warm-up, as PyTorch requires
    warm, _ = gemm_of(multiply())
    current.stream = 8200  # the captured call
    capture.on = True
    assert gemm_of(multiply()) == (warm, 8200)
    assert gemm_of(multiply()) == (warm, 8200)
    capture.on = False
    current.stream = 8200
    assert gemm_of(multiply())[0] != warm  # a graph may use its memory from now on
    current.stream = 8100
    second, _ = gemm_of(multiply())
    assert second != warm
    current.stream = 8200
    capture.on = True
    assert gemm_of(multiply()) == (second, 8200)  # the next graph's warm-up was there


def test_the_default_stream_is_never_recorded(capture):
    """Capture is not queried there: a context that a graph may use would no longer serve ordinary calls."""
    current.stream = 0
    context, _ = gemm_of(multiply())
    capture.on = True
    assert gemm_of(multiply()) == (context, 0)
    capture.on = False
    assert gemm_of(multiply()) == (context, 0)


def test_memory_and_streams():
    memory = _C.Memory((4,), "float32", "cuda:1", stream=100)
    assert memory.__dlpack_device__() == (CUDA, 1)
    diary()
    memory.__dlpack__(stream=100, max_version=(1, 0))
    memory.__dlpack__(stream=-1)
    assert diary() == []
    for stream in (None, 1, 2, 300):
        memory.__dlpack__(stream=stream)
        assert diary()[-1][0] == "wait", stream
    default = _C.Memory((4,), "float32", "cuda:1")
    diary()
    for stream in (None, 1):
        default.__dlpack__(stream=stream)
    assert diary() == []
    default.__dlpack__(stream=100)
    assert diary()[-1][0] == "wait"


def test_memory_keeps_its_context_on_its_stream():
    """Allocated memory is freed in the order of its context's stream, so that context does not move."""
    memory = _C.Memory((4,), "float32", "cuda:1", stream=9000)
    current.stream = 9000
    context, _ = gemm_of(multiply(device=(CUDA, 1)))
    for stream in range(9001, 9010):
        current.stream = stream
        assert gemm_of(multiply(device=(CUDA, 1)))[0] != context
    current.stream = 9000
    assert multiply(device=(CUDA, 1)) == [("gemm", context, 9000)]
    del memory
    for stream in range(9001, 9010):
        current.stream = stream
        multiply(device=(CUDA, 1))
    current.stream = 9000
    assert len(multiply(device=(CUDA, 1))) > 1


def test_memory_figures():
    before = _C.memory_info("cuda:1")["allocated"]
    memory = _C.Memory((1000, 1000), "float64", "cuda:1", stream=100)
    assert _C.memory_info("cuda:1")["allocated"] >= before + 8_000_000
    del memory
    assert _C.memory_info("cuda:1")["allocated"] == before
    _C.trim_pool("cuda:1")
    _C.synchronize("cuda:1")
    assert any(what == "wait" for what, _, _ in diary())
