"""The functions of torchium.linalg on NumPy and JAX arrays, against NumPy in float64: the same results as for tensors,
of the same kind as the arguments. Runs where PyTorch is not installed; JAX's part is skipped where JAX is not.
"""

import subprocess
import sys

import pytest

numpy = pytest.importorskip("numpy")

import torchium.linalg as linalg  # noqa: E402

BOUND = {"float64": 1e-12, "float32": 3e-4, "float16": 2e-3, "bfloat16": 8e-3}


def numpy_array(x, dtype):
    return x.astype(dtype)


def jax_array(x, dtype):
    jax = pytest.importorskip("jax")
    if dtype == "float64":
        pytest.skip("JAX computes in float32 unless told otherwise")
    return jax.numpy.asarray(x, dtype=dtype)


KINDS = {"numpy": numpy_array, "jax": jax_array}
TYPES = [("numpy", d) for d in ("float64", "float32", "float16")]
TYPES += [("jax", d) for d in ("float32", "float16", "bfloat16")]


@pytest.fixture(params=TYPES, ids=lambda p: "-".join(p))
def make(request):
    """Makes arrays of one kind and dtype from float64; `close` compares with what they then hold."""
    kind, dtype = request.param

    def made(x):
        return KINDS[kind](x, dtype)

    made.dtype = dtype
    made(numpy.eye(2))  # skips where the library is missing
    return made


def wide(x):
    return numpy.asarray(x).astype("float64")


def close(got, like, expected, scale=1.0):
    assert type(got) is type(like) and got.dtype == like.dtype and got.shape == expected.shape
    assert numpy.isfinite(wide(got)).all()
    error = numpy.linalg.norm(wide(got) - expected)
    assert error <= scale * BOUND[str(like.dtype)] * numpy.linalg.norm(expected), f"off by {error:.3g}"


def positive(*shape):
    a = numpy.random.randn(*shape)
    return a @ a.swapaxes(-1, -2) / shape[-1] + 0.1 * numpy.eye(shape[-1])


def turned(x):
    return numpy.swapaxes(x, -1, -2)


def power_of(a, power, eps):
    w, v = numpy.linalg.eigh(wide(a))
    return v * numpy.maximum(w + eps, eps)[..., None, :] ** power @ turned(v)


def kron(a, b):
    product = numpy.einsum("...ij,...kl->...ikjl", a, b)
    return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3), (0,)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_powers_and_roots(make, batch, n):
    a = make(positive(*batch, n, n) if n else numpy.zeros((*batch, 0, 0)))
    close(linalg.matrix_power(a, -0.5, 0.1), a, power_of(a, -0.5, 0.1))
    damped = wide(a) + 0.1 * numpy.eye(n)
    x, residual = linalg.inverse_root(a, 4, eps=0.1, return_residual=True)
    close(x, a, power_of(damped, -0.25, 0.0), 5.0)
    close(linalg.inverse_root(a, 4, eps=0.1), a, power_of(damped, -0.25, 0.0), 5.0)
    assert residual.shape == batch and type(residual) is type(a) and (wide(residual) < 0.1).all()


def test_eigh(make):
    a = make(positive(2, 6, 6))
    w, v = linalg.eigh(a)
    close(w, a, numpy.linalg.eigvalsh(wide(a)))
    close(v, a, wide(v))
    assert numpy.linalg.norm(wide(a) @ wide(v) - wide(v) * wide(w)[:, None]) < 20 * BOUND[make.dtype]


def test_products(make):
    a, b = make(numpy.random.randn(2, 1, 5, 4)), make(numpy.random.randn(3, 4, 6))
    close(linalg.matmul(a, b), a, wide(a) @ wide(b))
    close(linalg.gram(a), a, wide(a) @ turned(wide(a)))
    close(linalg.gram(a, transpose=True, alpha=0.5), a, 0.5 * turned(wide(a)) @ wide(a))
    s = make(positive(3, 5, 5))
    close(linalg.symmetric_product(s, s), s, wide(s) @ wide(s))


def test_orthogonalize(make):
    a = make(numpy.random.randn(2, 9, 5))
    x = wide(linalg.orthogonalize(a, steps=8, method="muon"))
    assert numpy.abs(numpy.linalg.svd(x, compute_uv=False) - 1.0).max() < 0.4


@pytest.mark.parametrize("batches", [((), ()), ((3,), (3,)), ((), (4,)), ((2, 1), (3,))], ids=str)
def test_kronecker(make, batches):
    leading = numpy.broadcast_shapes(*batches)
    a, b = make(numpy.random.randn(*batches[0], 2, 3)), make(numpy.random.randn(*batches[1], 5, 4))
    x, y = make(numpy.random.randn(*leading, 12, 2)), make(numpy.random.randn(*leading, 3, 4))
    product = kron(wide(a), wide(b))
    close(linalg.kronecker_product(a, b), a, product)
    close(linalg.kronecker_matmul(a, b, x), a, product @ wide(x), 2.0)
    close(linalg.kronecker_apply(a, b, y), a, wide(a) @ wide(y) @ turned(wide(b)), 2.0)


@pytest.mark.parametrize("batches", [((), (), ()), ((3,), (3,), (3,)), ((), (2, 1), (3,))], ids=str)
def test_kronecker_solve(make, batches):
    a, b = make(positive(*batches[0], 5, 5)), make(positive(*batches[1], 4, 4))
    x = make(numpy.random.randn(*batches[2], 5, 4))
    pi = numpy.sqrt(numpy.trace(wide(a), axis1=-2, axis2=-1) / 5 / (numpy.trace(wide(b), axis1=-2, axis2=-1) / 4))
    left = wide(a) + (pi * 0.2)[..., None, None] * numpy.eye(5)
    right = wide(b) + (0.2 / pi)[..., None, None] * numpy.eye(4)
    close(linalg.kronecker_solve(a, b, x, 0.04), a, numpy.linalg.inv(left) @ wide(x) @ numpy.linalg.inv(right), 2.0)


def test_nearest_kronecker(make):
    m = make(kron(numpy.random.randn(2, 2, 3), numpy.random.randn(2, 4, 2)))
    a, b, error = linalg.nearest_kronecker(m, (2, 3), (4, 2), return_error=True)
    close(linalg.kronecker_product(a, b), m, wide(m), 4.0)
    assert a.shape == (2, 2, 3) and b.shape == (2, 4, 2) and (wide(error) < 0.05).all()
    assert len(linalg.nearest_kronecker(m, (2, 3), (4, 2))) == 2


# --- NumPy's layouts and flags


def test_numpy_views():
    a = positive(3, 6, 6)
    wider = numpy.full((3, 8, 20), numpy.nan)
    wider[:, 1:7, 3:15:2] = a
    expected = power_of(a, -0.5, 0.1)
    frozen = a.copy()
    frozen.flags.writeable = False
    for view in (
        numpy.asfortranarray(a),
        turned(turned(a).copy()),
        wider[:, 1:7, 3:15:2],
        a[::-1][::-1],
        numpy.ascontiguousarray(a[:, ::-1, ::-1])[:, ::-1, ::-1],
        frozen,
    ):
        close(linalg.matrix_power(view, -0.5, 0.1), a, expected)
    assert not frozen.flags.writeable and numpy.array_equal(frozen, a)
    close(linalg.matrix_power(numpy.broadcast_to(a[0], (4, 6, 6)), 0.5), a, power_of(a[:1].repeat(4, 0), 0.5, 0.0))


def test_inputs_are_not_changed(make):
    a = make(positive(3, 5, 5))
    before = wide(a)
    linalg.matrix_power(a, -0.5)
    linalg.inverse_root(a, 2)
    linalg.eigh(a)
    linalg.orthogonalize(a)
    linalg.kronecker_solve(a, a, a, 0.1)
    assert numpy.array_equal(wide(a), before)


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
        (lambda: linalg.matrix_power(None, 1.0), TypeError, "a must be"),
        (lambda: linalg.matrix_power(numpy.float64(1.0), 1.0), TypeError, "a must be"),
        (lambda: linalg.matmul(numpy.eye(2), [[1.0]]), TypeError, "b must be a NumPy array like a, got list"),
        (lambda: linalg.matmul(numpy.eye(2), numpy.eye(2, dtype="float32")), TypeError, "b has dtype float32.*like a"),
        (lambda: linalg.matmul(numpy.eye(2), numpy.eye(3)), ValueError, "b has shape"),
        (lambda: linalg.matrix_power(numpy.eye(2, dtype="int64"), 1.0), TypeError, "int64"),
        (lambda: linalg.matrix_power(numpy.eye(2, dtype="complex128"), 1.0), TypeError, "a"),
        (lambda: linalg.matrix_power(numpy.array([["x"]]), 1.0), TypeError, "a"),
        (lambda: linalg.matrix_power(numpy.array([[None]]), 1.0), TypeError, "a"),
        (lambda: linalg.matrix_power(numpy.ones(3), 1.0), ValueError, "a"),
        (lambda: linalg.matrix_power(numpy.full((2, 3, 3), numpy.nan), 1.0), RuntimeError, "matrix 0 of a"),
        (lambda: linalg.inverse_root(-numpy.eye(3), 2), RuntimeError, "matrix 0 of a is not positive"),
        (lambda: linalg.eigh(numpy.triu(numpy.ones((3, 3)))), RuntimeError, "matrix 0 of a is not symmetric"),
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
    """Memory of a result belongs to its array alone."""
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
