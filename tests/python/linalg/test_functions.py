"""The matrix functions on PyTorch tensors, each against its formula in float64 on the CPU: sizes 0 and 1, odd shapes,
batches, strided views, all dtypes. Memory that a function gets for its result is full of NaN, so that an element left
out shows. Gradients, compilation and other arrays have files of their own.

Errors are in Frobenius norms relative to the result. A backward stable algorithm in float64 or float32 has n u times
the condition of the function, here at most 100 for n at most 24; half types are computed in float32 and rounded once,
which is u of each element, and their inputs are taken as they are after rounding.
"""

import math

import pytest

torch = pytest.importorskip("torch")

import torchium  # noqa: E402
import torchium.linalg as linalg  # noqa: E402
from torchium.utils import cuda_kernels  # noqa: E402
from torchium.utils.cuda_kernels import CUDAMatrixOps, CUDAMemoryOps  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BOUND = {torch.float64: 1e-12, torch.float32: 3e-4, torch.float16: 2e-3, torch.bfloat16: 8e-3}
# Products have no condition to magnify anything.
PRODUCT_BOUND = {**BOUND, torch.float64: 1e-14, torch.float32: 1e-5}
BATCHES = [(), (3,), (2, 1, 3), (0,), (2, 0)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory comes filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.eye(2).new_empty(3, 3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def wide(x):
    return x.detach().cpu().double()


def close(got, expected, bound):
    assert got.shape == expected.shape
    assert got.is_contiguous()
    error = (wide(got) - expected).norm()
    assert torch.isfinite(wide(got)).all()
    assert error <= bound * expected.norm(), f"off by {error:.3g} of {expected.norm():.3g}"


def random(*shape, dtype, device):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(device)


def positive(*shape, dtype, device):
    """Symmetric, eigenvalues from 0.1 to about 10."""
    a = torch.randn(*shape, dtype=torch.float64)
    a = a @ a.mT / max(1, shape[-1]) + 0.1 * torch.eye(shape[-1], dtype=torch.float64)
    return ((a + a.mT) / 2).to(dtype).to(device)


def power_of(a, power, eps):
    w, v = torch.linalg.eigh(wide(a))
    w = torch.clamp(w + eps, min=eps)
    return (v * w.pow(power).unsqueeze(-2)) @ v.mT


def kron(a, b):
    product = torch.einsum("...ij,...kl->...ikjl", a, b)
    return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])


def views(x):
    """The same elements, and batch, in every layout that a tensor may come in."""
    rows, columns = x.shape[-2:]
    yield "contiguous", x.contiguous()
    yield "transposed", x.mT.contiguous().mT
    wider = x.new_zeros(*x.shape[:-2], rows + 2, columns + 3)
    wider[..., 1 : rows + 1, 2 : columns + 2] = x
    yield "sliced", wider[..., 1 : rows + 1, 2 : columns + 2]
    stepped = x.new_zeros(*x.shape[:-1], 2 * columns)
    stepped[..., ::2] = x
    yield "stepped", stepped[..., ::2]


# --- powers and roots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 24])
def test_power(device, dtype, batch, n):
    a = positive(*batch, n, n, dtype=dtype, device=device)
    for power, eps in [(-0.25, 1e-3), (-1.0, 0.1), (0.5, 0.0), (1.7, 0.3), (0.0, 0.1)]:
        close(linalg.matrix_power(a, power, eps), power_of(a, power, eps), BOUND[dtype])


def test_power_has_the_defaults_people_know(device):
    a = positive(2, 6, 6, dtype=torch.float64, device=device)
    expected = power_of(a, -0.25, 1e-8)
    close(CUDAMatrixOps.matrix_sqrt_inv_eigen(a), expected, 1e-12)
    close(CUDAMatrixOps().matrix_sqrt_inv_eigen(a, -0.25, 1e-8), expected, 1e-12)
    close(CUDAMatrixOps.matrix_sqrt_inv_eigen(matrix=a, power=-0.5, eps=0.5), power_of(a, -0.5, 0.5), 1e-12)


def test_power_raises_what_is_below_eps(device):
    a = torch.diag(torch.tensor([4.0, -3.0, 0.0], dtype=torch.float64, device=device))
    expected = torch.tensor([5.0, 1.0, 1.0], dtype=torch.float64).pow(-0.5).diag()
    close(linalg.matrix_power(a, -0.5, 1.0), expected, 1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-3, 0.25, 2.0])
def test_power_of_what_is_not_positive(device, dtype, eps):
    """Without a positive eigenvalue it is eps^power I, whatever the others of the batch are."""
    for special in (-torch.eye(3), torch.zeros(3, 3), -torch.ones(3, 3), torch.diag(torch.tensor([1.0, -1.0, 0.0]))):
        a = positive(3, 3, 3, dtype=dtype, device=device)
        a[1] = special.to(dtype).to(device)
        for power in (-1.0, -0.5, 0.0, 0.5, 1.0):
            close(linalg.matrix_power(a, power, eps), power_of(a, power, eps), BOUND[dtype])
            close(linalg.matrix_power(a[1], power, eps), power_of(a[1], power, eps), BOUND[dtype])
    a = -torch.eye(3, dtype=dtype, device=device)
    a.requires_grad_()
    linalg.matrix_power(a, -0.5, eps).sum().backward()
    assert not a.grad.any()  # flat


@pytest.mark.parametrize("layout", range(4))
def test_views_give_the_same_result(device, layout):
    a = positive(2, 3, 5, 5, dtype=torch.float32, device=device)
    name, view = list(views(a))[layout]
    before = view.clone()
    for function in (
        lambda x: linalg.matrix_power(x, -0.5, 0.1),
        lambda x: linalg.inverse_root(x, 4, relative_eps=0.01),
        lambda x: linalg.matmul(x, x),
        lambda x: linalg.gram(x),
        lambda x: linalg.orthogonalize(x),
        lambda x: linalg.eigh(x)[0],
        lambda x: linalg.kronecker_apply(x, x, x),
        lambda x: linalg.kronecker_solve(x, x, x, 0.1),
        lambda x: linalg.nearest_kronecker(x[..., :4, :4], (2, 2), (2, 2))[0],
    ):
        close(function(view), wide(function(a.contiguous())), 1e-5)
    assert torch.equal(view, before), name


def test_expanded_batches(device):
    a = positive(6, 6, dtype=torch.float64, device=device).expand(3, 2, 6, 6)
    close(linalg.matrix_power(a, -0.5, 0.1), power_of(a, -0.5, 0.1), 1e-12)
    close(linalg.matmul(a, a[:, :1]), wide(a) @ wide(a), 1e-14)
    close(linalg.kronecker_product(a, a[0, 0]), kron(wide(a), wide(a[0, 0])), 1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", ["auto", "eigen", "newton", "rational"])
@pytest.mark.parametrize("root", [1, 2, 3, 4, 6, 8])
def test_inverse_root(device, dtype, method, root):
    if device == "cuda" and method == "rational":
        pytest.skip("not offered on a GPU")
    a = positive(2, 1, 3, 9, 9, dtype=dtype, device=device)
    x, residual = CUDAMatrixOps.inverse_root(a, root, relative_eps=1e-2, method=method, return_residual=True)
    largest = torch.linalg.eigvalsh(wide(a))[..., -1:]
    damped = wide(a) + 1e-2 * largest.unsqueeze(-1) * torch.eye(9, dtype=torch.float64)
    close(x, power_of(damped, -1.0 / root, 0.0), max(BOUND[dtype], 1e-9 if dtype == torch.float64 else 2e-3))
    assert residual.shape == (2, 1, 3) and residual.dtype == torch.float64 and residual.device == x.device
    assert (residual >= 0).all() and (residual <= 0.1).all()
    assert torch.equal(x, linalg.inverse_root(a, root, relative_eps=1e-2, method=method))


def test_damping_is_the_larger_of_both(device):
    a = torch.diag(torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64, device=device))
    for eps, relative in [(1.0, 0.0), (1.0, 0.1), (0.1, 0.25)]:
        expected = (wide(a).diagonal() + 1.0).pow(-0.5).diag()
        close(linalg.inverse_root(a, 2, eps, relative), expected, 1e-9)


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_small_inverse_roots(device, batch, n):
    a = positive(*batch, n, n, dtype=torch.float64, device=device)
    x, residual = linalg.inverse_root(a, 4, eps=0.1, return_residual=True)
    close(x, power_of(wide(a) + 0.1 * torch.eye(n, dtype=torch.float64), -0.25, 0.0), 1e-9)
    assert residual.shape == batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eigh(device, dtype):
    a = random(3, 2, 8, 8, dtype=torch.float64, device="cpu")
    a = (a + a.mT).to(dtype).to(device)
    w, v = linalg.eigh(a)
    assert w.dtype == v.dtype == dtype and w.shape == (3, 2, 8)
    assert (wide(w).diff(dim=-1) >= 0).all()
    close(w, torch.linalg.eigvalsh(wide(a)), BOUND[dtype])
    assert (wide(v).mT @ wide(v) - torch.eye(8, dtype=torch.float64)).norm(dim=(-2, -1)).max() < 10 * BOUND[dtype]
    assert (wide(a) @ wide(v) - wide(v) * wide(w).unsqueeze(-2)).norm() < 4 * BOUND[dtype] * wide(a).norm()


# --- products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (4, 5)),
        ((7, 3, 4), (7, 4, 5)),
        ((7, 3, 4), (4, 5)),
        ((3, 4), (7, 4, 5)),
        ((2, 1, 3, 1, 4), (5, 3, 4, 2)),
        ((1, 3, 4), (6, 4, 1)),
        ((0, 3, 4), (4, 5)),
        ((3, 0), (0, 5)),
        ((0, 4), (4, 5)),
    ],
    ids=str,
)
def test_matmul(device, dtype, left, right):
    a, b = random(*left, dtype=dtype, device=device), random(*right, dtype=dtype, device=device)
    close(CUDAMatrixOps.batch_matrix_multiply(a, b), wide(a) @ wide(b), PRODUCT_BOUND[dtype])
    close(CUDAMemoryOps.memory_efficient_matmul(a, b), wide(a) @ wide(b), PRODUCT_BOUND[dtype])
    close(CUDAMemoryOps.memory_efficient_matmul(a, b, 1 << 16), wide(a) @ wide(b), PRODUCT_BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gram(device, dtype):
    a = random(2, 3, 5, 4, dtype=dtype, device=device)
    close(linalg.gram(a), wide(a) @ wide(a).mT, PRODUCT_BOUND[dtype])
    got = linalg.gram(a, transpose=True, alpha=0.5)
    close(got, 0.5 * wide(a).mT @ wide(a), PRODUCT_BOUND[dtype])
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_symmetric_product(device, dtype):
    a = positive(3, 8, 8, dtype=dtype, device=device)
    got = linalg.symmetric_product(a, a)
    close(got, wide(a) @ wide(a), PRODUCT_BOUND[dtype])
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("method", ["polar_express", "muon", "minimax"])
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (2, 3, 4, 9), (1, 1), (0, 5), (0, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_orthogonalize(device, dtype, shape, method):
    a = random(*shape, dtype=dtype, device=device)
    x = wide(CUDAMatrixOps.orthogonalize(a, 8, method))
    assert x.shape == shape
    if x.numel() == 0:
        return
    u, s, vh = torch.linalg.svd(wide(a), full_matrices=False)
    # The same singular vectors: U' X V is diagonal, and its diagonal near 1 where A had something to go by.
    turned = u.mT @ x @ vh.mT
    grown = torch.diagonal(turned, dim1=-2, dim2=-1)[s > 0.02 * s.max()]
    assert (grown > 0.6).all() and (grown < 1.3).all()
    off = turned - torch.diag_embed(torch.diagonal(turned, dim1=-2, dim2=-1))
    rounding = 1e-11 if dtype == torch.float64 else 0.2 if device == "cuda" or dtype == torch.bfloat16 else 0.03
    assert off.abs().max() < rounding


# --- Kronecker products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batches", [((), ()), ((4,), (4,)), ((), (3,)), ((2, 1), (3,)), ((0,), (0,))], ids=str)
def test_kronecker(device, dtype, batches):
    first, second = batches
    leading = torch.broadcast_shapes(first, second)
    a = random(*first, 2, 3, dtype=dtype, device=device)
    b = random(*second, 5, 4, dtype=dtype, device=device)
    x = random(*leading, 12, 7, dtype=dtype, device=device)
    y = random(*leading, 3, 4, dtype=dtype, device=device)
    product = kron(wide(a), wide(b))
    close(CUDAMatrixOps.kronecker_product_approx(a, b), product, PRODUCT_BOUND[dtype])
    close(CUDAMatrixOps.kronecker_matmul(a, b, x), product @ wide(x), 2 * PRODUCT_BOUND[dtype])
    close(linalg.kronecker_apply(a, b, y), wide(a) @ wide(y) @ wide(b).mT, 2 * PRODUCT_BOUND[dtype])


def test_kronecker_against_torch(device):
    a, b = (random(*shape, dtype=torch.float64, device=device) for shape in [(3, 2), (4, 5)])
    close(linalg.kronecker_product(a, b), torch.kron(wide(a), wide(b)), 1e-15)
    x = random(2, 5, dtype=torch.float64, device=device)
    flat = linalg.kronecker_matmul(a, b, x.reshape(10, 1)).reshape(3, 4)
    close(linalg.kronecker_apply(a, b, x), wide(flat), 1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batches", [((), (), ()), ((3,), (3,), (3,)), ((), (2, 1), (3,))], ids=str)
def test_kronecker_solve(device, dtype, batches):
    m, n, damping = 5, 4, 0.04
    a = positive(*batches[0], m, m, dtype=dtype, device=device)
    b = positive(*batches[1], n, n, dtype=dtype, device=device)
    x = random(*batches[2], m, n, dtype=dtype, device=device)
    pi = (wide(a).diagonal(dim1=-2, dim2=-1).mean(-1) / wide(b).diagonal(dim1=-2, dim2=-1).mean(-1)).sqrt()
    left = wide(a) + (pi * math.sqrt(damping))[..., None, None] * torch.eye(m, dtype=torch.float64)
    right = wide(b) + (math.sqrt(damping) / pi)[..., None, None] * torch.eye(n, dtype=torch.float64)
    expected = torch.linalg.inv(left) @ wide(x) @ torch.linalg.inv(right)
    close(CUDAMatrixOps.kronecker_solve(a, b, x, damping), expected, BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nearest_kronecker(device, dtype):
    m = random(2, 1, 6, 12, dtype=dtype, device=device)
    a, b = CUDAMatrixOps.nearest_kronecker(m, (2, 4), (3, 3))
    assert a.shape == (2, 1, 2, 4) and b.shape == (2, 1, 3, 3) and a.dtype == b.dtype == dtype
    # The best is the leading singular triple of M with a row for each element of A and a column for each of B.
    turned = wide(m).reshape(2, 1, 2, 3, 4, 3).transpose(-3, -2).reshape(2, 1, 8, 9)
    u, s, vh = torch.linalg.svd(turned)
    best = s[..., :1, None] * u[..., :, :1] @ vh[..., :1, :]
    got = wide(a).reshape(2, 1, 8, 1) @ wide(b).reshape(2, 1, 1, 9)
    close(got.contiguous(), best, 3 * BOUND[dtype])
    error = linalg.nearest_kronecker(m, (2, 4), (3, 3), return_error=True)[2]
    expected = (turned - best).norm(dim=(-2, -1)) / turned.norm(dim=(-2, -1))
    assert error.dtype == torch.float64 and torch.allclose(wide(error), expected, atol=1e-3)
    assert torch.allclose(wide(a).norm(dim=(-2, -1)), wide(b).norm(dim=(-2, -1)), rtol=1e-2)


def test_nearest_kronecker_of_a_product(device):
    a, b = (random(*shape, dtype=torch.float64, device=device) for shape in [(3, 2), (2, 4)])
    m = linalg.kronecker_product(a, b)
    first, second, error = linalg.nearest_kronecker(m, [3, 2], [2, 4], return_error=True)
    close(linalg.kronecker_product(first, second), wide(m), 1e-12)
    assert error < 1e-7


# --- tensors as training has them


def test_parameters_that_require_gradients(device):
    a = torch.nn.Parameter(positive(3, 4, 4, dtype=torch.float64, device=device))
    with torch.no_grad():
        x = CUDAMatrixOps.matrix_sqrt_inv_eigen(a)
        assert not x.requires_grad
        for y in (
            CUDAMatrixOps.orthogonalize(a),
            CUDAMatrixOps.kronecker_solve(a, a, a, 0.1),
            CUDAMatrixOps.nearest_kronecker(a, (2, 2), (2, 2))[0],
            CUDAMemoryOps.memory_efficient_matmul(a, a),
        ):
            assert not y.requires_grad and torch.isfinite(y).all()
    close(x, power_of(a, -0.25, 1e-8), 1e-12)


def test_inputs_are_not_changed(device):
    a = positive(3, 4, 4, dtype=torch.float32, device=device)
    before, version = a.clone(), a._version
    linalg.matrix_power(a, -0.5)
    linalg.inverse_root(a, 2)
    linalg.orthogonalize(a)
    linalg.eigh(a)
    assert torch.equal(a, before) and a._version == version


# --- bad input


def spoiled(value, device):
    a = torch.eye(4, device=device).repeat(3, 1, 1)
    a[2, 1, 1] = value
    return a


@pytest.mark.parametrize(
    "function",
    [
        lambda a: CUDAMatrixOps.matrix_sqrt_inv_eigen(a),
        lambda a: CUDAMatrixOps.inverse_root(a, 4, relative_eps=1e-3),
        lambda a: CUDAMatrixOps.kronecker_solve(a, torch.eye(4, device=a.device).repeat(3, 1, 1), a, 0.1),
        lambda a: linalg.eigh(a),
    ],
)
def test_bad_matrices_are_named(device, function):
    for value in (math.nan, math.inf):
        with pytest.raises(
            torchium.NumericError, match=r"matrix 2 of a(, b or x)? has entries that are infinite or NaN"
        ):
            function(spoiled(value, device))
    skewed = torch.eye(4, device=device).repeat(3, 1, 1)
    skewed[1, 0, 3] = 0.5
    with pytest.raises(torchium.NumericError, match=r"matrix 1 of a(, b or x)? is not symmetric"):
        function(skewed)


def test_matrices_that_are_not_positive(device):
    a = torch.diag(torch.tensor([1.0, 2.0, -3.0], device=device)).repeat(2, 1, 1)
    with pytest.raises(torchium.NumericError, match=r"matrix 0 of a is not positive definite"):
        CUDAMatrixOps.inverse_root(a, 4, relative_eps=1e-3, method="eigen")
    with pytest.raises(torchium.NumericError, match=r"matrix 0 of a is not positive definite"):
        CUDAMatrixOps.matrix_sqrt_inv_eigen(torch.zeros(1, 3, 3, device=device), -1.0, 0.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: linalg.matrix_power(a, -20),
        lambda a: linalg.matrix_power(a.half(), -4),
        lambda a: linalg.inverse_root(0.1 * a.half(), 1),
        lambda a: linalg.inverse_root(1e-36 * a, 1),
        lambda a: linalg.kronecker_solve(1e-16 * a, 1e-20 * a, a, 0.0),
        lambda a: linalg.eigh(torch.full_like(a, 3e38)),
    ],
)
def test_results_too_large_are_an_error(device, function):
    a = torch.diag(torch.tensor([1.0, 1e-4], device=device))
    with pytest.raises(torchium.NumericError, match=r"matrix 0 of a.* too large for its type.*eps.*float64"):
        function(a)


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_gives_nothing(device, dtype, batch, n):
    if n > 0 and 0 not in batch:
        return
    a = torch.empty(*batch, n, n, dtype=dtype, device=device)
    for method in ("auto", "eigen", "newton", "rational") if device == "cpu" else ("auto", "eigen", "newton"):
        for damping in ({}, {"eps": 1e-3}, {"relative_eps": 1e-3}):
            for root in (1, 2, 4):
                x, residual = linalg.inverse_root(a, root, method=method, return_residual=True, **damping)
                assert x.shape == a.shape
                assert residual.shape == a.shape[:-2]
                assert not residual.any()
    for method in ("polar_express", "muon", "minimax"):
        assert linalg.orthogonalize(a, method=method).shape == a.shape
    results = [linalg.matrix_power(a, -0.5), linalg.matmul(a, a), linalg.gram(a), linalg.symmetric_product(a, a)]
    results += [linalg.eigh(a)[1], linalg.kronecker_apply(a, a, a), linalg.kronecker_solve(a, a, a, 0.1)]
    assert all(x.shape == a.shape for x in results)
    assert linalg.eigh(a)[0].shape == a.shape[:-1]
    assert linalg.kronecker_product(a, a).shape == (*batch, n * n, n * n)
    assert linalg.kronecker_matmul(a, a, linalg.kronecker_product(a, a)).shape == (*batch, n * n, n * n)
    left, right, error = linalg.nearest_kronecker(linalg.kronecker_product(a, a), (n, n), (n, n), return_error=True)
    assert left.shape == right.shape == a.shape
    assert error.shape == tuple(batch)
    assert not error.any()
    a.requires_grad_()
    roots = linalg.inverse_root(a, 2, eps=0.1, method="newton")
    (linalg.matrix_power(a, -0.5, 0.1) + roots + linalg.matmul(a, a) + linalg.gram(a)).sum().backward()
    assert a.grad.shape == a.shape


def test_mixed_dtypes_are_refused():
    a, b = torch.eye(3), torch.eye(3, dtype=torch.float64)
    for function in (
        lambda: CUDAMatrixOps.batch_matrix_multiply(a, b),
        lambda: CUDAMatrixOps.kronecker_product_approx(a, b),
        lambda: CUDAMatrixOps.kronecker_matmul(a, b, torch.eye(9)),
        lambda: CUDAMatrixOps.kronecker_solve(a, b, a, 0.1),
        lambda: CUDAMemoryOps.memory_efficient_matmul(a, b),
        lambda: linalg.symmetric_product(a, b),
    ):
        with pytest.raises(TypeError, match=r"\bb\b.*float64.*float32.*\ba\b"):
            function()


@pytest.mark.gpu
def test_mixed_devices_are_refused(device):
    if device == "cpu":
        pytest.skip("wants two devices")
    a, b = torch.eye(3), torch.eye(3, device=device)
    for function in (
        lambda: CUDAMatrixOps.batch_matrix_multiply(a, b),
        lambda: CUDAMatrixOps.kronecker_product_approx(b, a),
        lambda: CUDAMatrixOps.kronecker_solve(a, b, a, 0.1),
    ):
        with pytest.raises((ValueError, TypeError), match=r"\b[ab]\b.*cuda"):
            function()


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda: linalg.matrix_power(torch.ones(3), 1.0), ValueError, "a"),
        (lambda: linalg.matrix_power(torch.ones(3, 4), 1.0), ValueError, "square"),
        (lambda: linalg.matrix_power(torch.eye(3, dtype=torch.int64), 1.0), TypeError, "int64"),
        (
            lambda: linalg.matrix_power(torch.eye(3, dtype=torch.complex64), 1.0),
            TypeError,
            "^a has dtype complex64: complex numbers are not supported, "
            "expected float16, bfloat16, float32 or float64$",
        ),
        (lambda: linalg.matrix_power(torch.eye(3), "half"), TypeError, "power"),
        (lambda: linalg.matrix_power(torch.eye(3), math.nan), ValueError, "power.*nan"),
        (lambda: linalg.matrix_power(torch.eye(3), 1.0, -1.0), ValueError, "eps is -1"),
        (lambda: linalg.matrix_power(torch.eye(3).to_sparse(), 1.0), TypeError, "a"),
        (
            lambda: linalg.inverse_root(torch.eye(3), 5),
            ValueError,
            "^root is 5, expected 1, 2, 3, 4, 6 or 8; matrix_power takes any power$",
        ),
        (lambda: linalg.inverse_root(torch.eye(3), 2.5), TypeError, "root"),
        (lambda: linalg.inverse_root(torch.eye(3), 2, method="magic"), ValueError, "method"),
        (lambda: linalg.inverse_root(torch.ones(3), 2, return_residual=True), ValueError, "a"),
        (lambda: linalg.orthogonalize(torch.eye(3), 0), ValueError, "steps is 0"),
        (lambda: linalg.orthogonalize(torch.eye(3), method="magic"), ValueError, "method"),
        (lambda: linalg.eigh(torch.ones(4)), ValueError, "a"),
        (lambda: linalg.gram(torch.ones(4)), ValueError, "a"),
        (lambda: linalg.matmul(torch.ones(3, 4), torch.ones(3, 4)), ValueError, "b has shape"),
        (lambda: linalg.matmul(torch.ones(4), torch.ones(4, 3)), ValueError, "a has shape"),
        (lambda: linalg.matmul(torch.ones(2, 3, 4), torch.ones(3, 4, 5)), ValueError, "leading"),
        (lambda: linalg.matmul(torch.ones(3, 4), None), TypeError, "b"),
        (lambda: linalg.matmul(torch.ones(3, 4), [[1.0]]), TypeError, "b"),
        (lambda: CUDAMatrixOps.batch_matrix_multiply([[1.0]], torch.ones(1, 1)), TypeError, "a must be a torch tensor"),
        (lambda: CUDAMatrixOps.matrix_sqrt_inv_eigen(None), TypeError, "a must be a torch tensor"),
        (lambda: linalg.kronecker_matmul(torch.eye(2), torch.eye(3), torch.ones(5, 1)), ValueError, "x has shape.*6"),
        (lambda: linalg.kronecker_apply(torch.eye(2), torch.eye(3), torch.ones(3, 2)), ValueError, "x has shape"),
        (lambda: linalg.kronecker_solve(torch.ones(2, 3), torch.eye(3), torch.ones(3, 3), 0.1), ValueError, "a has"),
        (lambda: linalg.kronecker_solve(torch.eye(3), torch.eye(3), torch.eye(3), -1.0), ValueError, "damping"),
        (lambda: linalg.nearest_kronecker(torch.ones(6, 6), (2, 2), (2, 3)), ValueError, "m has shape"),
        (lambda: linalg.nearest_kronecker(torch.ones(6, 6), 6, (2, 3)), TypeError, "shape_a"),
        (lambda: linalg.nearest_kronecker(torch.ones(6, 6), (-2, -3), (-3, -2)), ValueError, "shape_a"),
        (lambda: CUDAMemoryOps.memory_efficient_matmul(torch.eye(3), torch.eye(3), -5), ValueError, "memory_budget"),
        (lambda: CUDAMemoryOps.memory_efficient_matmul(torch.eye(3), torch.eye(3), 2.5), TypeError, "memory_budget"),
        (
            lambda: CUDAMemoryOps.memory_efficient_matmul(torch.eye(3), torch.eye(3), out=torch.ones(2, 2)),
            ValueError,
            "out",
        ),
        (lambda: CUDAMemoryOps.memory_efficient_matmul(torch.eye(3), torch.eye(3), out=[0]), TypeError, "out"),
    ],
)
def test_wrong_arguments_are_named(function, error, words):
    with pytest.raises(error, match=words):
        function()


# --- memory


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_tensors_from_the_pool(device, dtype, shape):
    t = CUDAMemoryOps.efficient_tensor_creation(shape, device, dtype)
    assert t.shape == shape and t.dtype == dtype and t.device.type == device and t.is_contiguous()
    assert torch.equal(t, torch.zeros(shape, dtype=dtype, device=device))
    t.add_(1)
    again = CUDAMemoryOps.efficient_tensor_creation(torch.Size(shape), torch.device(device), dtype)
    assert not again.any()


def test_channels_last(device):
    t = CUDAMemoryOps.efficient_tensor_creation((2, 3, 4, 5), device, torch.float32, torch.channels_last)
    assert t.shape == (2, 3, 4, 5) and t.is_contiguous(memory_format=torch.channels_last) and not t.any()
    t = CUDAMemoryOps.efficient_tensor_creation(
        (2, 3, 4, 5, 6), device, torch.float32, memory_format=torch.channels_last_3d
    )
    assert t.is_contiguous(memory_format=torch.channels_last_3d) and not t.any()
    with pytest.raises(ValueError, match="rank 4"):
        CUDAMemoryOps.efficient_tensor_creation((2, 3), device, torch.float32, torch.channels_last)


def test_pool_takes_memory_back(device):
    before = CUDAMemoryOps.pool_stats()
    name = next(key for key in before if key.startswith(device))
    t = CUDAMemoryOps.efficient_tensor_creation(1 << 20, device, torch.float32)
    held = CUDAMemoryOps.pool_stats()[name]["allocated"] - before[name]["allocated"]
    assert held >= 4 << 20
    part = t[5:7]
    del t
    assert CUDAMemoryOps.pool_stats()[name]["allocated"] - before[name]["allocated"] >= 4 << 20
    del part
    assert CUDAMemoryOps.pool_stats()[name]["allocated"] == before[name]["allocated"]
    CUDAMemoryOps.trim_pool()
    assert CUDAMemoryOps.pool_stats()[name]["reserved"] <= before[name]["reserved"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (((2, -3), "cpu", torch.float32), ValueError, "shape"),
        (((2, 1.5), "cpu", torch.float32), TypeError, "integer"),
        (((2, 3), "cpu", "float32"), TypeError, "dtype"),
        (((2, 3), "cpu", torch.complex64), ValueError, "dtype"),
        (((2, 3), "cpu", torch.float32, "channels_last"), TypeError, "memory_format"),
        (((2, 3), "nowhere", torch.float32), RuntimeError, "device"),
        (((1 << 47,), "cpu", torch.float32), MemoryError, "bytes"),
    ],
)
def test_tensors_that_cannot_be(arguments, error, words):
    with pytest.raises(error, match=words):
        CUDAMemoryOps.efficient_tensor_creation(*arguments)


def test_matmul_into(device):
    a, b = (random(*shape, dtype=torch.float32, device=device) for shape in [(300, 200), (200, 100)])
    out = torch.full((100, 300), math.nan, device=device).mT
    result = CUDAMemoryOps.memory_efficient_matmul(a, b, memory_budget=1 << 16, out=out)
    assert result is out
    close(out.contiguous(), wide(a) @ wide(b), 1e-5)
    with pytest.raises(ValueError, match="out"):
        CUDAMemoryOps.memory_efficient_matmul(a, a.mT, out=torch.as_strided(a, (300, 300), (1, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_matmul_streamed_through_a_gpu(device, pinned):
    if device == "cpu":
        pytest.skip("wants a GPU")
    a, b = torch.randn(1000, 700), torch.randn(700, 500)
    if pinned:
        a, b = a.pin_memory(), b.pin_memory()
    expected = wide(a) @ wide(b)
    c = CUDAMemoryOps.memory_efficient_matmul(a, b, memory_budget=1 << 20, device=device)
    assert c.device.type == "cpu"
    close(c, expected, 1e-5)
    c = CUDAMemoryOps.memory_efficient_matmul(a, b.to(device), memory_budget=1 << 20)
    assert c.device.type == "cpu"
    close(c, expected, 1e-5)
    c = CUDAMemoryOps.memory_efficient_matmul(a.to(device), b, memory_budget=1 << 20)
    assert c.device.type == "cuda"
    close(c, expected, 1e-5)


# --- what there is


def test_devices():
    count = cuda_kernels.get_cuda_device_count()
    assert cuda_kernels.is_cuda_available() == (count > 0)
    best = cuda_kernels.get_optimal_device()
    assert isinstance(best, torch.device)
    info = cuda_kernels.cuda_memory_info()
    if count == 0:
        assert best.type == "cpu"
        assert info["available"] is False and info["reason"]
        return
    assert set(info) == {
        "available",
        "device",
        "total_memory",
        "allocated_memory",
        "cached_memory",
        "free_memory",
    }
    assert 0 < info["free_memory"] <= info["total_memory"]
    assert info["allocated_memory"] <= info["cached_memory"]
    same = {**info, **cuda_kernels.cuda_memory_info("cuda:0")}
    again = cuda_kernels.cuda_memory_info(0)
    assert again | {"free_memory": 0} == same | {"free_memory": 0}  # which others of the machine change
    with pytest.raises(ValueError, match="cuda:99"):
        cuda_kernels.cuda_memory_info(99)
    with pytest.raises(ValueError, match="cpu"):
        cuda_kernels.cuda_memory_info("cpu")


def test_numbers_without_memory():
    """PyTorch prints what does not fit an operator's schema, and reads a storage that is gone."""
    hollow = torch.ones(3, 3)
    hollow.untyped_storage().resize_(0)
    meta = torch.empty(3, 3, device="meta")  # which goes by the operator
    for numbers in (hollow, [3, hollow]):
        with pytest.raises(TypeError, match=r"shape_a must be a List.* got a tensor that has no memory"):
            torchium.linalg.nearest_kronecker(meta, numbers, [1, 3])
