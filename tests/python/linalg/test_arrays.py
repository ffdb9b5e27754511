"""The functions of torchium.linalg on PyTorch, NumPy and JAX arrays: results have the same library and dtype, and agree
with NumPy in float64, with broadcast batches. Parts are skipped if a library is missing. Values for every size,
condition and method are compared in C (tests/linalg).

Errors are in Frobenius norms relative to the result. A backward stable algorithm in float64 or float32 has n u times
the condition of the function, here at most 100; half types are computed in float32 and rounded once, which is u of each
element; the reference uses the rounded inputs.
"""

import pytest

numpy = pytest.importorskip("numpy")

import conftest  # noqa: E402
import torchium.linalg as linalg  # noqa: E402
from linalg_cases import BOUND, FUNCTIONS, ROOT, arguments, close, positive, power_of, transposed, wide  # noqa: E402
from processes import run_python  # noqa: E402


def jax_array(x, dtype):
    return pytest.importorskip("jax").numpy.asarray(x, dtype=dtype)


def torch_array(x, dtype, device="cpu"):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(numpy.ascontiguousarray(x)).to(device, getattr(torch, dtype))


KINDS = {"numpy": lambda x, dtype: x.astype(dtype), "jax": jax_array, "torch": torch_array}
TYPES = [("numpy", d) for d in ("float64", "float32", "float16")]
TYPES += [("jax", d) for d in ("float32", "float16", "bfloat16")]  # JAX computes in float32 unless told otherwise
TYPES += [("torch", d) for d in BOUND]
TYPES += [pytest.param(("cuda", d), marks=pytest.mark.gpu) for d in BOUND]


@pytest.fixture(params=TYPES, ids=lambda p: "-".join(p))
def make(request):
    """Creates arrays of one library and dtype from float64; `close` compares with their rounded values. Memory that
    PyTorch allocates for a result is filled with NaN, to detect unwritten elements."""
    kind, dtype = request.param
    if kind == "cuda" and conftest.why_no_gpu() is not None:
        pytest.skip(conftest.why_no_gpu())

    def made(x):
        return torch_array(x, dtype, "cuda") if kind == "cuda" else KINDS[kind](x, dtype)

    made.dtype = dtype
    here = made(numpy.eye(2))  # skips if the library is missing
    made.on_gpu = not isinstance(here, numpy.ndarray) and here.__dlpack_device__()[0] != 1  # kDLCPU; JAX decides itself
    if kind not in ("torch", "cuda"):
        yield made
        return
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield made
    torch.use_deterministic_algorithms(False)


# Leading dimensions of the first, second and third argument.
BATCHES = [((), (), ()), ((3,), (3,), (3,)), ((), (2, 1), (3,)), ((2, 1, 3), (), ()), ((0,), (), ()), ((2, 0),) * 3]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(make, name, batches):
    case = FUNCTIONS[name]
    given = [make(x) for x in arguments(case, batches)]
    before = [(wide(x), getattr(x, "_version", 0)) for x in given]
    close(case.function(*given), given[0], case.reference(*map(wide, given)), case.scale, case.bounds)
    for x, (numbers, version) in zip(given, before, strict=True):  # arguments are not changed
        assert numpy.array_equal(wide(x), numbers) and getattr(x, "_version", 0) == version


@pytest.mark.parametrize("method", ["auto", "eigen", "newton", "rational"])
@pytest.mark.parametrize("batch", [(), (2, 1), (0,)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 9])
def test_inverse_roots(make, batch, n, method):
    a = make(positive(*batch, n, n))
    if make.on_gpu and method == "rational" and n and 0 not in batch:
        with pytest.raises(RuntimeError, match="method rational is not offered by the cuda backend"):
            linalg.inverse_root(a, 2, eps=0.1, method=method)
        return
    largest = numpy.linalg.eigvalsh(wide(a))[..., -1:, None] if n else 0.0
    for options, damping in (({"eps": 0.1}, 0.1), ({"relative_eps": 1e-2}, 1e-2 * largest)):
        x, residual = linalg.inverse_root(a, 4, method=method, return_residual=True, **options)
        close(x, a, power_of(wide(a) + damping * numpy.eye(n), -0.25, 0.0), bounds=ROOT)
        assert residual.shape == batch and type(residual) is type(a) and (wide(residual) <= 0.1).all()
        assert numpy.array_equal(wide(linalg.inverse_root(a, 4, method=method, **options)), wide(x))


@pytest.mark.parametrize("batch", [(), (2, 1, 3), (0,)], ids=str)
def test_eigh(make, batch):
    a = make(positive(*batch, 6, 6))
    w, v = linalg.eigh(a)
    close(v, a, wide(v) @ transposed(wide(v)) @ wide(v), 10)
    assert numpy.linalg.norm(wide(a) @ wide(v) - wide(v) * wide(w)[..., None, :]) < 20 * BOUND[make.dtype]


@pytest.mark.parametrize("method", ["polar_express", "muon", "minimax"])
@pytest.mark.parametrize("shape", [(9, 4), (2, 3, 4, 9), (0, 5), (0, 4, 4)], ids=str)
def test_orthogonalize(make, shape, method):
    a = make(numpy.random.randn(*shape))
    x = linalg.orthogonalize(a, steps=8, method=method)
    assert x.shape == shape and type(x) is type(a) and x.dtype == a.dtype
    u, _, vh = numpy.linalg.svd(wide(a), full_matrices=False)
    assert numpy.linalg.norm(wide(x) - u @ vh) <= 0.4 * numpy.linalg.norm(u @ vh)


@pytest.mark.parametrize("batch", [(), (2, 1), (0,)], ids=str)
def test_nearest_kronecker(make, batch):
    """The optimum is the leading singular triple of M with a row for each element of A and a column for each of B."""
    m = make(numpy.random.randn(*batch, 6, 12))
    a, b, error = linalg.nearest_kronecker(m, (2, 4), (3, 3), return_error=True)
    assert a.shape == (*batch, 2, 4) and b.shape == (*batch, 3, 3) and error.shape == batch
    rows = wide(m).reshape(*batch, 2, 3, 4, 3).swapaxes(-3, -2).reshape(*batch, 8, 9)
    u, s, vh = numpy.linalg.svd(rows)
    best = s[..., :1, None] * u[..., :, :1] @ vh[..., :1, :]
    expected = best.reshape(*batch, 2, 4, 3, 3).swapaxes(-3, -2).reshape(*batch, 6, 12)
    close(linalg.kronecker_product(a, b), m, expected, 4.0)
    off = numpy.linalg.norm(rows - best, axis=(-2, -1)) / numpy.linalg.norm(rows, axis=(-2, -1))
    assert numpy.allclose(wide(error), off, atol=1e-3)
    assert len(linalg.nearest_kronecker(m, (2, 4), (3, 3))) == 2


# --- NumPy's layouts and flags


def test_numpy_views():
    a = positive(3, 6, 6)
    wider = numpy.full((3, 8, 20), numpy.nan)
    wider[:, 1:7, 3:15:2] = a
    expected = power_of(a, -0.5, 0.1)
    frozen = a.copy()
    frozen.flags.writeable = False
    backwards = numpy.ascontiguousarray(a[:, ::-1, ::-1])[:, ::-1, ::-1]
    for view in (numpy.asfortranarray(a), wider[:, 1:7, 3:15:2], a[::-1][::-1], backwards, frozen):
        close(linalg.matrix_power(view, -0.5, 0.1), a, expected)
    assert not frozen.flags.writeable and numpy.array_equal(frozen, a)
    close(linalg.matrix_power(numpy.broadcast_to(a[0], (4, 6, 6)), 0.5), a, power_of(a[:1].repeat(4, 0), 0.5, 0.0))


def test_numpy_scalars_as_numbers():
    a = positive(4, 4)
    assert numpy.array_equal(
        linalg.matrix_power(a, numpy.float64(-0.5), numpy.float32(0.5)), linalg.matrix_power(a, -0.5, 0.5)
    )
    assert numpy.array_equal(linalg.inverse_root(a, numpy.int64(4)), linalg.inverse_root(a, 4))


# --- bad input


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda: linalg.matrix_power([[1.0]], 1.0), TypeError, "a must be .* got list; numpy.asarray"),
        (lambda: linalg.matrix_power(numpy.float64(1.0), 1.0), TypeError, "a must be"),
        (lambda: linalg.matmul(numpy.eye(2), [[1.0]]), TypeError, "b must be a NumPy array like a, got list"),
        (lambda: linalg.matmul(numpy.eye(2), numpy.eye(2, dtype="float32")), TypeError, "b has dtype float32.*like a"),
        (lambda: linalg.matmul(numpy.eye(2), numpy.eye(3)), ValueError, "b has shape"),
        (lambda: linalg.matrix_power(numpy.eye(2, dtype="int64"), 1.0), TypeError, "int64"),
        (lambda: linalg.matrix_power(numpy.eye(2, dtype="complex128"), 1.0), TypeError, "a"),
        (lambda: linalg.matrix_power(numpy.array([["x"]]), 1.0), TypeError, "a"),
        (lambda: linalg.matrix_power(numpy.ones(3), 1.0), ValueError, "a"),
        (lambda: linalg.matrix_power(numpy.full((2, 3, 3), numpy.nan), 1.0), RuntimeError, "matrix 0 of a"),
        (lambda: linalg.kronecker_apply(numpy.eye(2), numpy.eye(3), numpy.eye(2)), ValueError, "x has shape"),
        (lambda: linalg.nearest_kronecker(numpy.eye(4), (2, 2), (3, 2)), ValueError, "m has shape"),
    ],
)
def test_wrong_arguments_are_named(function, error, words):
    with pytest.raises(error, match=words):
        function()


def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="a has dtype bfloat16, which NumPy cannot hand over"):
        linalg.matrix_power(numpy.eye(3).astype(ml_dtypes.bfloat16), 1.0)


def test_kinds_are_not_mixed():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="b must be a NumPy array like a, got Tensor"):
        linalg.matmul(numpy.eye(2), torch.eye(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="b must be a torch tensor, got ndarray"):
        linalg.matmul(torch.eye(2, dtype=torch.float64), numpy.eye(2))


def test_jax_tracers():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="a is being traced by JAX"):
        jax.jit(lambda a: linalg.matrix_power(a, 0.5))(jax.numpy.eye(3))
    shape = jax.ShapeDtypeStruct((3, 3), "float32")

    def root(a):
        return jax.pure_callback(lambda x: numpy.asarray(linalg.matrix_power(numpy.asarray(x), 0.5)), shape, a)

    assert numpy.allclose(jax.jit(root)(4 * jax.numpy.eye(3)), 2 * numpy.eye(3))


def test_jax_results_last():
    """A result's memory is not shared with other arrays."""
    jax = pytest.importorskip("jax")
    a = jax.numpy.asarray(positive(8, 8), "float32")
    results = [linalg.matrix_power(a, -0.5, 0.01 * k) for k in range(1, 40)]
    for k, x in enumerate(results, 1):
        close(x, a, power_of(a, -0.5, 0.01 * k))


def test_pytorch_is_not_imported():
    program = """
import sys, numpy, torchium.linalg as linalg
assert numpy.allclose(linalg.matrix_power(4.0 * numpy.eye(3), 0.5), 2.0 * numpy.eye(3))
assert "torch" not in sys.modules, "PyTorch was imported"
"""
    run_python("-c", program)
