"""The extension module: arguments, results it creates, exceptions, threads, leaks. linalg/test_arrays.py compares
computed values."""

import ast
import gc
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from producers import Producer, random_array  # noqa: E402
from torchium import _C  # noqa: E402


def poisoned(*shape):
    return np.full(shape, np.nan)


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def transposed(a):
    return np.swapaxes(a, -1, -2)


def positive(*batch, n=5):
    """Symmetric matrices with eigenvalues between 0.5 and 2."""
    q = np.linalg.qr(random_array(*batch, n, n))[0]
    a = q * np.random.uniform(0.5, 2.0, (*batch, 1, n)) @ transposed(q)
    return (a + transposed(a)) / 2


# --- the functions ----------------------------------------------------------------------------------------------------


def test_on_a_device(device):
    """On a GPU with torch's stream: ordered after work queued before the call, and before later work."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.cuda.stream(stream):
        for n in (3, 64, 300):
            a = torch.randn(4, n, n, dtype=torch.float64, device=device)
            a = a @ a.mT / n + torch.eye(n, dtype=torch.float64, device=device)
            out = torch.full_like(a, float("nan"))
            _C.inverse_root(a, 2, 0.0, 1e-6, "auto", 0.0, out, None, None)
            identity = out @ a @ out
            assert (identity - torch.eye(n, dtype=torch.float64, device=device)).abs().max() < 1e-3
            given = None if stream is None else stream.cuda_stream
            _C.matmul(a, out, out := torch.full_like(a, float("nan")), stream=given)
            assert not out.isnan().any()


# --- results that a call makes itself ---------------------------------------------------------------------------------

# Calls with the index of their result, which is replaced by None, and its shape.
MAKERS = {
    "matmul": (lambda t, out: _C.matmul(t(3, 4), t(4, 5), out), (3, 5)),
    "matmul, broadcast": (lambda t, out: _C.matmul(t(2, 1, 3, 4), t(6, 4, 5), out), (2, 6, 3, 5)),
    "matmul, transposed": (lambda t, out: _C.matmul(t(4, 3).T, t(5, 4).T, out), (3, 5)),
    "matmul_chunked": (lambda t, out: _C.matmul_chunked(t(2, 3, 4), t(4, 5), 0, out), (2, 3, 5)),
    "gram": (lambda t, out: _C.gram(t(2, 3, 4), False, 2.0, out), (2, 3, 3)),
    "matrix_power": (lambda t, out: _C.matrix_power(t.s(2, 4), 0.5, 0.1, out, None), (2, 4, 4)),
    "inverse_root": (lambda t, out: _C.inverse_root(t.s(4), 2, 0.1, 0.0, "eigen", 0.0, out, None, None), (4, 4)),
    "orthogonalize": (lambda t, out: _C.orthogonalize(t(2, 3, 4), 5, "muon", out), (2, 3, 4)),
    "kronecker_product": (lambda t, out: _C.kronecker_product(t(2, 3), t(6, 4, 5), out), (6, 8, 15)),
    "kronecker_apply": (lambda t, out: _C.kronecker_apply(t(2, 3), t(4, 5), t(6, 3, 5), out), (6, 2, 4)),
    "kronecker_solve": (lambda t, out: _C.kronecker_solve(t.s(3), t.s(4), t(3, 4), 0.1, out, None), (3, 4)),
}


class Numbers:
    """The same tensors for each object created with one seed."""

    def __init__(self, torch, device, seed):
        self.torch, self.device = torch, device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        numbers = self.torch.randn(*shape, generator=self.generator, dtype=self.torch.float64)
        return numbers.to(self.device)

    def s(self, *shape):
        """Symmetric and positive."""
        a = self(*shape, shape[-1])
        return a @ a.mT + self.torch.eye(shape[-1], dtype=a.dtype, device=self.device)


@pytest.mark.parametrize("name", MAKERS)
def test_made_results(name, device):
    torch = pytest.importorskip("torch")
    call, shape = MAKERS[name]
    given = torch.full(shape, float("nan"), dtype=torch.float64, device=device)
    assert call(Numbers(torch, device, 1), given) is None
    made = call(Numbers(torch, device, 1), None)
    assert type(made) is torch.Tensor
    assert made.is_contiguous()
    assert not made.requires_grad
    torch.testing.assert_close(made, given, rtol=1e-12, atol=1e-12)


def test_made_eigenvectors(device):
    torch = pytest.importorskip("torch")
    a = Numbers(torch, device, 2).s(3, 4)
    w, v = _C.eigh(a, None, None, None)
    torch.testing.assert_close(v * w[:, None] @ v.mT, a)
    given = torch.empty_like(a)
    alone = _C.eigh(torch.nn.Parameter(a), None, given, None)
    torch.testing.assert_close(alone, w)
    torch.testing.assert_close(given * w[:, None] @ given.mT, a)


@pytest.mark.gpu
def test_graph_capture():
    """Calls captured in PyTorch's graph, after a first run on another stream, as PyTorch's manual recommends."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or _C.device_count("cuda") == 0:
        pytest.skip("no GPU")
    graphs = []
    for n in (32, 96):  # the second needs more memory than the first was captured with
        a = torch.randn(8, n, n, device="cuda")
        out, report = torch.empty_like(a), torch.empty(8, dtype=torch.int32, device="cuda")

        def work(a=a, out=out, report=report):
            gram = torch.einsum("bij,bkj->bik", a, a)
            _C.inverse_root(gram, 4, 0.0, 1e-3, "newton", 0.0, out, None, report)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graphs.append((graph, a, out, work))
    for graph, a, out, work in graphs:
        a.normal_()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        work()
        torch.testing.assert_close(replayed, out)


# --- the module -------------------------------------------------------------------------------------------------------


def test_what_there_is():
    assert _C.version.count(".") == 2
    assert Path(_C.library_path()).is_file()


def test_time_in_the_library_is_counted_and_is_less_than_that_of_the_call():
    a = np.random.default_rng(3).standard_normal((200, 200))
    out = np.full_like(a, np.nan)
    before, start = _C.library_time(), time.perf_counter_ns()
    _C.matmul(a, a, out)
    whole, inside = time.perf_counter_ns() - start, _C.library_time() - before
    assert 0 < inside < whole
    assert _C.library_time() == before + inside
    assert _C.device_count("cpu") == 1
    assert _C.device_count("cuda") >= 0
    cpu = _C.devices()[0]
    assert (cpu["device"], cpu["capability"]) == ("cpu", (0, 0))
    assert cpu["total_memory"] >= cpu["free_memory"] > 0
    assert cpu["processors"] >= 1
    names = {backend["name"]: backend for backend in _C.backends()}
    assert names["cpu"]["available"] is True
    assert "cuda" not in names or names["cuda"]["available"] or names["cuda"]["reason"]
    info = _C.memory_info("cpu")
    assert set(info) == {"total", "free", "allocated", "reserved", "peak", "requests", "misses"}
    _C.synchronize("cpu")


def test_the_stub_tells_the_truth():
    """_C.pyi has exactly the module's names, and the names of its arguments."""
    stub = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
    functions = {node.name: node.args for node in stub.body if isinstance(node, ast.FunctionDef)}
    names = functions.keys() | {node.name for node in stub.body if isinstance(node, ast.ClassDef)} | {"version"}
    assert names == {name for name in dir(_C) if not name.startswith("_")}
    for name, arguments in functions.items():
        keywords = {argument.arg: None for argument in arguments.args}
        if len(keywords) > 1:
            with pytest.raises((TypeError, ValueError)) as caught:
                getattr(_C, name)(**keywords)
            assert "argument named" not in str(caught.value)


def test_import_takes_nothing_else_along():
    program = (
        "import sys, torchium._C as C; assert not {'torch', 'numpy'} & set(sys.modules); print(C.device_count('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_import_again():
    before = _C.NumericError
    del sys.modules["torchium._C"]
    try:
        import torchium._C as again

        assert again.NumericError is before
        out = poisoned(2, 2)
        again.matmul(np.eye(2), np.eye(2), out)
        close(out, np.eye(2))
    finally:
        sys.modules["torchium._C"] = _C


def test_stable_abi():
    """One binary for every Python from 3.10 on: it uses only the stable ABI."""
    try:
        listing = subprocess.run(["nm", "-D", "--undefined-only", _C.__file__], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no nm on this machine")
    used = {line.split()[-1] for line in listing.stdout.splitlines()}
    header = "#define PY_SSIZE_T_CLEAN\n#define Py_LIMITED_API 0x030A0000\n#include <Python.h>\n"
    include = f"-I{sysconfig.get_path('include')}"
    command = [os.environ.get("CC", "cc"), "-E", "-x", "c", include, "-"]
    declared = subprocess.run(command, input=header, capture_output=True, text=True, check=True).stdout
    stable = set(re.findall(r"\b_?Py\w+", declared))
    assert "PyModuleDef_Init" in used & stable
    assert {name for name in used if name.startswith(("Py", "_Py"))} <= stable


# --- arguments --------------------------------------------------------------------------------------------------------


class Number:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value

    def __index__(self):
        return self.value


def ones(*shape, dtype="float32"):
    torch = pytest.importorskip("torch")
    return torch.ones(shape, dtype=getattr(torch, dtype))


def power(number):
    return lambda: _C.matrix_power(np.eye(2), number, 0.0, poisoned(2, 2), None)


def steps(number):
    return lambda: _C.orthogonalize(np.eye(2), number, "muon", poisoned(2, 2))


def method(word):
    return lambda: _C.inverse_root(np.eye(2), 2, 0.0, 0.0, word, 0.0, poisoned(2, 2), None, None)


def product(*arguments, **keywords):
    return lambda: _C.matmul(*arguments, **keywords)


def made(first, second, dtype="float32"):
    return lambda: _C.matmul(ones(*first), ones(*second, dtype=dtype), None)


def into(out, **keywords):
    return lambda: _C.matmul(np.eye(2), np.eye(2), out, **keywords)


REFUSED = [
    (product(), TypeError, r"matmul\(\) needs the argument 'a'"),
    (product(1, 2), TypeError, r"matmul\(\) needs the argument 'out'"),
    (product(1, 2, 3, None, 5), TypeError, r"matmul\(\) takes at most 4 arguments, got 5"),
    (product(1, 2, 3, b=2), TypeError, r"matmul\(\) got two values for argument 'b'"),
    (product(1, 2, 3, c=2), TypeError, r"matmul\(\) has no argument named 'c'"),
    (product(1, 2, **{"o\N{LATIN SMALL LETTER U WITH DIAERESIS}t": 2}), TypeError, "has no argument named 'oüt'"),
    (power(None), TypeError, "power must be a real number, got an object of type NoneType"),
    (power(Number("1")), TypeError, "power must be a real number, got an object of type test_extension.Number"),
    (power(float("nan")), ValueError, "power must be a number, got nan"),
    (power(10**400), OverflowError, "too large"),
    (steps(2.0), TypeError, "steps must be an integer, got an object of type float"),
    (steps(2**31), ValueError, "steps must be between -2147483648 and 2147483647, got 2147483648"),
    (steps(-(10**5000)), ValueError, "steps must be between .* got a number beyond 64 bits"),
    (steps(0), ValueError, "steps is 0"),
    (steps(Number("2")), TypeError, "__index__ returned non-int"),
    (method("magic"), ValueError, "method must be 'auto', 'eigen', 'newton' or 'rational', got 'magic'"),
    (method("eigen\0"), ValueError, "method must not contain null characters"),
    (method("\ud800"), ValueError, "surrogates"),
    (method(b"eigen"), TypeError, "method must be a string, got an object of type bytes"),
    (lambda: _C.gram(np.eye(2), 1, 1.0, poisoned(2, 2)), TypeError, "transpose must be True or False, got .* int"),
    (
        lambda: _C.matmul_chunked(np.eye(2), np.eye(2), -1, poisoned(2, 2)),
        ValueError,
        "memory_budget must be between 0",
    ),
    (lambda: _C.device_count("tpu"), ValueError, "kind must be 'cpu' or 'cuda', got 'tpu'"),
    (into(poisoned(2, 2), stream=0), ValueError, "stream was given for arrays on the CPU"),
    (into(poisoned(2, 2), stream="default"), TypeError, "stream must be an integer"),
    (into(poisoned(3, 3)), ValueError, r"\[2, 2\].*\[3, 3\]|\[3, 3\].*\[2, 2\]"),
    (into(np.ones((2, 2), "float32")), TypeError, r"\bout\b.*float"),
    (lambda: _C.matmul(a := np.eye(3), np.eye(3), a), ValueError, "overlap"),
    (lambda: _C.memory_info("cuda:1000"), RuntimeError, "cuda"),
    # Results that cannot be made:
    (made((3, 4), (5, 6)), ValueError, r"a \[3, 4\] and b \[5, 6\] do not fit: the inner sizes"),
    (made((2, 3, 4), (3, 4, 5)), ValueError, r"leading dimensions of a \[2, 3, 4\] and b \[3, 4, 5\] do not"),
    (made((4,), (4, 5)), ValueError, r"a has shape \[4\], expected a matrix or a batch"),
    (made((3, 4), ()), ValueError, r"b has shape \[\], expected a matrix or a batch"),
    (made((2, 2), (2, 2), "bool"), TypeError, "b has dtype bool"),
    (lambda: _C.gram(np.eye(2), False, 1.0, None), TypeError, "got None: it is made only for torch tensors"),
    (lambda: _C.kronecker_product(*[ones(1, 1).expand(1 << 40, 1 << 40)] * 2, None), (RuntimeError, ValueError), ""),
]
for _shape in ((), (3,), (3, 4)):
    REFUSED.append((lambda s=_shape: _C.matrix_power(ones(*s), 0.5, 0.0, None, None), ValueError, r"\ba\b"))
    REFUSED.append((lambda s=_shape: _C.eigh(ones(*s), None, None, None), ValueError, r"\ba\b"))
for _device in ("gpu", "cpu:x", "", "cuda:-1"):
    _call = lambda d=_device: _C.matmul_chunked(np.eye(2), np.eye(2), 0, poisoned(2, 2), d)  # noqa: E731
    REFUSED.append((_call, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got"))


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_what_python_takes_for_a_number():
    for power in (2, 2.0, np.float32(2), np.int64(2), True + True, Number(2.0)):
        out = poisoned(2, 2)
        _C.matrix_power(np.diag([1.0, 3.0]), power, 0.0, out, None)
        close(out, np.diag([1.0, 9.0]))


# --- exceptions -------------------------------------------------------------------------------------------------------


def test_exceptions():
    assert issubclass(_C.NumericError, RuntimeError)
    assert issubclass(_C.OutOfMemoryError, MemoryError)
    with pytest.raises(_C.OutOfMemoryError, match="memory"):
        _C.Memory((1 << 45,), "float64", "cpu")
    a = positive(3)
    a[1, 2, 2] = np.inf
    with pytest.raises(_C.NumericError, match=r"matrix 1\b"):
        _C.matrix_power(a, 0.5, 0.0, poisoned(3, 5, 5), None)
    before = sys.getrefcount(a)
    with pytest.raises(TypeError, match="it is made only for torch"):
        _C.matrix_power(a, 0.5, 0.0, None, None)
    assert sys.getrefcount(a) == before


def test_reports_instead_of_exceptions():
    a = positive(3)
    a[1, 2, 2] = np.nan
    out, report = poisoned(3, 5, 5), np.full(3, -1, np.int32)
    _C.matrix_power(a, 2.0, 0.0, out, report)
    np.testing.assert_array_equal(report, [0, 1, 0])
    close(out[::2], a[::2] @ a[::2])
    assert np.isnan(out[1]).all()


def test_each_thread_has_its_own_message():
    """While other threads fail continuously, a failing call reports its own error."""
    wrong = []

    def fail(n):
        for _ in range(300):
            try:
                _C.matmul(np.eye(n), np.eye(n), poisoned(1, 1))
            except ValueError as error:
                wrong.extend([str(error)] if f"[{n}, {n}]" not in str(error) else [])

    run_threads([lambda n=n: fail(n) for n in range(2, 8)])
    assert wrong == []


# --- threads, processes -----------------------------------------------------------------------------------------------


def run_threads(functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def eager_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_many_threads(eager_switching):
    def work():
        for i in range(300):
            n = 2 + i % 7
            a = positive(n=n)
            out = poisoned(n, n)
            _C.matmul(a, a, out)
            close(out, a @ a)
            _C.matrix_power(Producer(a), 0.5, 0.0, out, None)
            close(out @ out, a)
            memory = np.from_dlpack(_C.Memory((n, n), "float64", "cpu"))
            assert not memory.any()
            memory[:] = np.nan  # the next user of the memory must see zeros again
            with pytest.raises(ValueError, match="out"):
                _C.matmul(a, a, poisoned(n + 1, n))

    run_threads([work] * 8)


def test_the_gil_is_released():
    """While one thread is in C, another one runs."""
    a, w = positive(n=400), poisoned(400)
    started, done = threading.Event(), threading.Event()

    def work():
        started.set()
        _C.eigh(a, w, None, None)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.0005)
    thread.join()
    assert turns > 3


def test_the_end_of_a_process():
    """Work and memory pending at interpreter exit."""
    program = """
import threading, numpy as np
from torchium import _C
kept = [np.from_dlpack(_C.Memory((100,), "float32", "cpu")), _C.Memory((3,), "float32", "cpu").__dlpack__()]
def work():
    while True:
        _C.matmul(np.eye(50), np.eye(50), np.empty((50, 50)))
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- leaks ------------------------------------------------------------------------------------------------------------


frees_at_once = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory for a while"
)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def swallow(error, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except error:
        return
    raise AssertionError("no exception")


def every_kind_of_call(arrays):
    for a, out in arrays:
        _C.matmul(a, a, out)
        _C.matmul(a, a, out=out, stream=None)
        swallow(ValueError, _C.matmul, a, a, np.zeros((1, 2)))
        swallow(TypeError, _C.matmul, a, a, "text")
        swallow(TypeError, _C.matmul, a, b=a, wrong=out)
    if len(arrays) == 3:  # torch's, allocated if not given
        a = arrays[2][0]
        assert _C.matmul(a, a, None).shape == (2, 2)
        assert len(_C.eigh(a, None, None, None)) == 2
        swallow(ValueError, _C.matmul, a, a[:1], None)
        swallow(ValueError, _C.symmetric_product, a[:1], a[:1], None)
    swallow(_C.NumericError, _C.matrix_power, np.full((2, 2), np.nan), 0.5, 0.0, arrays[0][1], None)
    swallow(ValueError, _C.inverse_root, np.eye(2), 2, 0.0, 0.0, "magic", 0.0, arrays[0][1], None, None)
    memory = _C.Memory((4, 4), "float64", "cpu")
    np.from_dlpack(memory)
    memory.__dlpack__()
    swallow(BufferError, memory.__dlpack__, copy=True)
    swallow(TypeError, _C.Memory, (4.5,), "float64", "cpu")
    swallow(MemoryError, _C.Memory, (1 << 50,), "float64", "cpu")
    _C.devices()
    _C.memory_info("cpu")


@frees_at_once
def test_leaks():
    arrays = [(np.eye(2), np.eye(2) * 2), (Producer(np.eye(2)), Producer(np.eye(2) * 2))]
    torch = sys.modules.get("torch")
    if torch is not None:
        arrays.append((torch.eye(2, dtype=torch.float64), torch.empty(2, 2, dtype=torch.float64)))
    for _ in range(200):
        every_kind_of_call(arrays)
    for producer in arrays[1]:
        producer.asked.clear()
    gc.collect()
    counts = [sys.getrefcount(x) for pair in arrays for x in pair] + [sys.getrefcount(None)]
    size = resident()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rounds = 2000
    for _ in range(rounds):
        every_kind_of_call(arrays)
        for producer in arrays[1]:
            producer.asked.clear()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    after = [sys.getrefcount(x) for pair in arrays for x in pair] + [sys.getrefcount(None)]
    assert after[:-1] == counts[:-1]
    assert abs(after[-1] - counts[-1]) < 1000  # None, which every call returns
    assert grown / rounds < 25  # bytes; less than any object
    assert resident() - size < 8 << 20
