"""PyTorch tensors in the matrix functions: the names of torchium.utils.cuda_kernels, views, errors that name their
argument, the pool, devices. test_arrays.py compares values; gradients and compilation have their own files."""

import math

import pytest
import torch
import torchium
import torchium.linalg as linalg
from linalg_cases import FUNCTIONS, PRODUCT, Case, arguments, close, positive, wide
from torchium.utils import cuda_kernels
from torchium.utils.cuda_kernels import CUDAMatrixOps, CUDAMemoryOps

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.eye(2).new_empty(3, 3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def sliced(x):
    wider = x.new_full((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 3), math.nan)
    wider[..., 1:-1, 2:-1] = x
    return wider[..., 1:-1, 2:-1]


# Layouts of tensors.
LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": sliced,
    "stepped": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}
# For two functions the reference is the library itself, on contiguous tensors.
IN_LAYOUTS = FUNCTIONS | {
    "orthogonalize": Case(((5, 3),), linalg.orthogonalize, None, {"float64": 1e-5}),
    "nearest": Case(((4, 6),), lambda m: linalg.nearest_kronecker(m, (2, 2), (2, 3))[0], None, {"float64": 1e-5}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", IN_LAYOUTS)
def test_layouts(device, name, layout):
    case = IN_LAYOUTS[name]
    given = [LAYOUTS[layout](torch.from_numpy(x).to(device)) for x in arguments(case, [(2, 3)] * 3)]
    before = [x.clone() for x in given]
    if case.reference is None:
        expected = wide(case.function(*(x.contiguous() for x in given)))
    else:
        expected = case.reference(*map(wide, given))
    close(case.function(*given), given[0], expected, case.scale, case.bounds)
    assert all(map(torch.equal, given, before))


# --- other names


# The alias of a function, and the same by its first name.
ALIASES = [
    (CUDAMatrixOps.matrix_sqrt_inv_eigen, lambda a: linalg.matrix_power(a, -0.25, 1e-8)),
    (
        lambda a: CUDAMatrixOps().matrix_sqrt_inv_eigen(matrix=a, power=-0.5, eps=0.5),
        lambda a: linalg.matrix_power(a, -0.5, 0.5),
    ),
    (
        lambda a: CUDAMatrixOps.inverse_root(a, 4, relative_eps=0.1),
        lambda a: linalg.inverse_root(a, 4, relative_eps=0.1),
    ),
    (lambda a: CUDAMatrixOps.batch_matrix_multiply(a, a), lambda a: linalg.matmul(a, a)),
    (lambda a: CUDAMemoryOps.memory_efficient_matmul(a, a), lambda a: linalg.matmul(a, a)),
    (lambda a: CUDAMemoryOps.memory_efficient_matmul(a, a, 1 << 16), lambda a: linalg.matmul(a, a)),
    (CUDAMatrixOps.orthogonalize, linalg.orthogonalize),
    (lambda a: CUDAMatrixOps.kronecker_product_approx(a, a), lambda a: linalg.kronecker_product(a, a)),
    (
        lambda a: CUDAMatrixOps.kronecker_matmul(a, a[:1, :1, :1], a),
        lambda a: linalg.kronecker_matmul(a, a[:1, :1, :1], a),
    ),
    (lambda a: CUDAMatrixOps.kronecker_solve(a, a, a, 0.1), lambda a: linalg.kronecker_solve(a, a, a, 0.1)),
    (
        lambda a: CUDAMatrixOps.nearest_kronecker(a, (2, 2), (2, 2))[0],
        lambda a: linalg.nearest_kronecker(a, (2, 2), (2, 2))[0],
    ),
]


@pytest.mark.parametrize(("other", "first"), ALIASES)
def test_other_names(device, other, first):
    """Also of parameters, whose results require no gradient under no_grad."""
    a = torch.nn.Parameter(torch.from_numpy(positive(3, 4, 4)).to(device))
    with torch.no_grad():
        got, expected = other(a), first(a)
    assert not got.requires_grad
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# --- bad input


@pytest.mark.parametrize(
    ("function", "matrix", "words"),
    [
        (lambda a: linalg.matrix_power(a, -0.25), torch.full((4, 4), math.nan), "has entries that are infinite or NaN"),
        (lambda a: linalg.kronecker_solve(a, a, a, 0.1), torch.ones(4, 4).triu(), "is not symmetric"),
        (lambda a: linalg.inverse_root(a, 4, method="eigen"), -torch.eye(4), "is not positive definite"),
        (lambda a: linalg.matrix_power(a, -20), 0.01 * torch.eye(4), "too large for its type.*eps.*float64"),
    ],
)
def test_bad_matrices_are_named(device, function, matrix, words):
    a = torch.stack([torch.eye(4), matrix]).to(device)
    with pytest.raises(torchium.NumericError, match=rf"matrix 1 of a.* {words}"):
        function(a)


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
def test_mixed_devices_are_refused(gpu):
    a, b = torch.eye(3), torch.eye(3, device=gpu)
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
        (lambda: linalg.matrix_power(torch.ones(3, 4), 1.0), ValueError, "square"),
        (lambda: linalg.matrix_power(torch.eye(3, dtype=torch.int64), 1.0), TypeError, "int64"),
        (lambda: linalg.matrix_power(torch.eye(3).to_sparse(), 1.0), TypeError, "a"),
        (
            lambda: linalg.inverse_root(torch.eye(3), 5),
            ValueError,
            "^root is 5, expected 1, 2, 3, 4, 6 or 8; matrix_power takes any power$",
        ),
        (lambda: linalg.inverse_root(torch.eye(3), 2.5), TypeError, "root"),
        (lambda: linalg.inverse_root(torch.ones(3), 2, return_residual=True), ValueError, "a"),
        (lambda: linalg.orthogonalize(torch.eye(3), method="magic"), ValueError, "method"),
        (lambda: linalg.matmul(torch.ones(3, 4), [[1.0]]), TypeError, "b"),
        (lambda: CUDAMatrixOps.batch_matrix_multiply([[1.0]], torch.ones(1, 1)), TypeError, "a must be a torch tensor"),
        (lambda: CUDAMatrixOps.matrix_sqrt_inv_eigen(None), TypeError, "a must be a torch tensor"),
        (lambda: linalg.kronecker_matmul(torch.eye(2), torch.eye(3), torch.ones(5, 1)), ValueError, "x has shape.*6"),
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


def test_matmul_into(device):
    a, b = (torch.randn(*shape, device=device) for shape in [(300, 200), (200, 100)])
    out = torch.full((100, 300), math.nan, device=device).mT
    result = CUDAMemoryOps.memory_efficient_matmul(a, b, memory_budget=1 << 16, out=out)
    assert result is out
    close(out.contiguous(), a, wide(a) @ wide(b), bounds=PRODUCT)
    with pytest.raises(ValueError, match="out"):
        CUDAMemoryOps.memory_efficient_matmul(a, a.mT, out=torch.as_strided(a, (300, 300), (1, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_matmul_streamed_through_a_gpu(gpu, pinned):
    a, b = torch.randn(1000, 700), torch.randn(700, 500)
    if pinned:
        a, b = a.pin_memory(), b.pin_memory()
    expected = wide(a) @ wide(b)
    for left, right, options in ((a, b, {"device": gpu}), (a, b.to(gpu), {}), (a.to(gpu), b, {})):
        c = CUDAMemoryOps.memory_efficient_matmul(left, right, memory_budget=1 << 20, **options)
        assert c.device.type == left.device.type
        close(c, a, expected, bounds=PRODUCT)


# --- what there is


def test_devices():
    count = cuda_kernels.get_cuda_device_count()
    assert cuda_kernels.is_cuda_available() == (count > 0)
    best = cuda_kernels.get_optimal_device()
    assert isinstance(best, torch.device)
    info = cuda_kernels.cuda_memory_info()
    if count == 0:
        assert best.type == "cpu"
        assert info.pop("reason") and info.pop("available") is False and info.pop("device") is None
        assert info == dict.fromkeys((f"{w}_memory" for w in ("total", "allocated", "cached", "free")), 0)
        return
    assert set(info) == {"available", "device", *(f"{w}_memory" for w in ("total", "allocated", "cached", "free"))}
    assert 0 < info["free_memory"] <= info["total_memory"]
    assert info["allocated_memory"] <= info["cached_memory"]
    same = {**info, **cuda_kernels.cuda_memory_info("cuda:0")}
    again = cuda_kernels.cuda_memory_info(0)
    assert again | {"free_memory": 0} == same | {"free_memory": 0}  # changed by other processes
    with pytest.raises(ValueError, match="cuda:99"):
        cuda_kernels.cuda_memory_info(99)
    with pytest.raises(ValueError, match="cpu"):
        cuda_kernels.cuda_memory_info("cpu")


def test_numbers_without_memory():
    """PyTorch prints arguments that do not fit an operator's schema, and reads freed storage."""
    hollow = torch.ones(3, 3)
    hollow.untyped_storage().resize_(0)
    meta = torch.empty(3, 3, device="meta")  # which uses the operator
    for numbers in (hollow, [3, hollow]):
        with pytest.raises(TypeError, match=r"shape_a must be a List.* got a tensor without storage"):
            torchium.linalg.nearest_kronecker(meta, numbers, [1, 3])
