"""The matrix functions as operators: torch.library.opcheck, torch.compile without graph breaks, make_fx, export, fake
and meta tensors. Compiled code must agree with eager code, gradients included."""

import pytest
import torch
import torchium.linalg as linalg
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torchium import _C
from torchium.utils.cuda_kernels import CUDAMatrixOps, CUDAMemoryOps


def positive(*shape, device):
    a = torch.randn(*shape, dtype=torch.float64)
    return (a @ a.mT / shape[-1] + 0.3 * torch.eye(shape[-1], dtype=torch.float64)).to(device)


def random(*shape, device):
    return torch.randn(*shape, dtype=torch.float64).to(device)


def wanted(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def operator_samples(device):
    """Arguments for each operator, requiring gradients if it has one."""
    a = positive(2, 4, 4, device=device)
    grad = random(2, 4, 4, device=device)
    left, right = random(2, 1, 3, 4, device=device), random(5, 4, 2, device=device)
    p, q = random(2, 3, device=device), random(6, 4, 5, device=device)
    return {
        "matrix_power": (*wanted(a), -0.5, 0.1),
        "matrix_power_backward": (a, -0.5, 0.1, grad),
        "inverse_root": (*wanted(a), 4, 0.0, 0.1, "auto", 0.0),
        "inverse_root_backward": (a, 4, 0.0, 0.1, grad),
        "eigh": (a,),
        "matmul": tuple(wanted(left, right)),
        "matmul_chunked": (*wanted(left, right), 0, ""),
        "matmul_into": (left, right, 0, "", left.new_empty(2, 5, 3, 2)),
        "gram": (*wanted(left), True, 0.5),
        "symmetric_product": tuple(wanted(a, a)),
        "orthogonalize": (grad, 5, "muon"),
        "kronecker_product": tuple(wanted(p, q)),
        "kronecker_matmul": tuple(wanted(p, q, random(15, 2, device=device))),
        "kronecker_apply": tuple(wanted(p, q, random(3, 5, device=device))),
        "kronecker_solve": (positive(3, 3, device=device), a, random(2, 3, 4, device=device), 0.1),
        "nearest_kronecker": (random(2, 6, 8, device=device), [2, 4], [3, 2]),
    }


OPERATORS = list(operator_samples("cpu"))


def test_every_operator_has_a_sample():
    from torchium._functions import operators

    declared = {schema.partition("(")[0] for schema, *_ in operators._TABLE} | {"matmul_into"}
    assert declared == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(device, name):
    torch.library.opcheck(getattr(torch.ops.torchium, name).default, operator_samples(device)[name])


def test_opcheck_of_views(device):
    a = positive(2, 3, 5, 5, device=device)
    for view in (a.mT, a.transpose(0, 1), a[:, ::2], positive(4, 4, device=device).expand(3, 4, 4)):
        torch.library.opcheck(torch.ops.torchium.matrix_power.default, (view, -0.5, 0.1))
        torch.library.opcheck(torch.ops.torchium.orthogonalize.default, (view, 3, "muon"))


# --- torch.compile


def everything(a, b, x):
    """Every public function, in one graph."""
    root, residual = linalg.inverse_root(a, 4, relative_eps=0.1, return_residual=True)
    first, second = CUDAMatrixOps.nearest_kronecker(x, (2, 2), (2, 2))
    w, v = linalg.eigh(a)
    return (
        CUDAMatrixOps.matrix_sqrt_inv_eigen(a) + 1.0,
        root * residual.unsqueeze(-1).unsqueeze(-1),
        linalg.matmul(a, x) + linalg.symmetric_product(a, a),
        linalg.gram(x, transpose=True),
        CUDAMatrixOps.orthogonalize(x),
        CUDAMatrixOps.kronecker_product_approx(a, b),
        CUDAMatrixOps.kronecker_matmul(a, b, linalg.kronecker_product(x, b)),
        linalg.kronecker_apply(a, b, x[..., :3]),
        CUDAMatrixOps.kronecker_solve(a, a, x, 0.1),
        linalg.kronecker_product(first, second),
        w,
        v,
        CUDAMemoryOps.memory_efficient_matmul(a, x),
        CUDAMemoryOps.memory_efficient_matmul(a, x, out=torch.empty_like(x)) * 2.0,
    )


def everything_samples(device, batch=2):
    return (
        positive(batch, 4, 4, device=device),
        positive(batch, 3, 3, device=device),
        random(batch, 4, 4, device=device),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(device, backend):
    torch._dynamo.reset()
    samples = everything_samples(device)
    compiled = torch.compile(everything, backend=backend, fullgraph=True)
    for got, expected in zip(compiled(*samples), everything(*samples), strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_no_recompilation_by_batch(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(everything, backend=counter, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5, 7):
        samples = everything_samples(device, batch)
        for got, expected in zip(compiled(*samples), everything(*samples), strict=True):
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


def loss(a, b, x):
    power = linalg.matrix_power(a, -0.5, 0.1)
    root = linalg.inverse_root(linalg.gram(x, alpha=0.25) + a, 4, relative_eps=0.1)
    y = linalg.kronecker_apply(power, b, linalg.matmul(root, x)[..., :3])
    return y.square().sum() + CUDAMatrixOps.kronecker_matmul(b, b, linalg.kronecker_product(b, b)).mean()


def test_compiled_gradients(device):
    torch._dynamo.reset()
    expected_inputs = wanted(*everything_samples(device))
    inputs = wanted(*expected_inputs)
    expected = torch.autograd.grad(loss(*expected_inputs), expected_inputs)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_compiled_by_inductor(device):
    """Operators and views only: anything elementwise would run a compiler for 15 seconds."""
    if device == "cuda":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    a = positive(2, 4, 4, device=device)

    def step(a):
        return linalg.matmul(linalg.matrix_power(a[:, 1:, 1:], -0.5, 0.1).mT, a[:, :3])

    assert torch.allclose(torch.compile(step, fullgraph=True)(a), step(a), rtol=1e-12, atol=1e-12)


def test_compiled_refusals(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: linalg.orthogonalize(a), backend="eager")
    with pytest.raises(Exception, match="orthogonalize has no gradient"):
        compiled(torch.eye(3, device=device, requires_grad=True))


def test_torch_that_comes_after_the_package():
    """The very first call is inside torch.compile."""
    program = """
import torchium.linalg as linalg, sys
assert "torch" not in sys.modules
import torch
compiled = torch.compile(lambda a: linalg.matrix_power(a, 2.0) + 1, backend="eager", fullgraph=True)
a = 3 * torch.eye(3)
assert torch.allclose(compiled(a), 9 * torch.eye(3) + 1)
assert torch.allclose(linalg.matrix_power(a, 2.0), 9 * torch.eye(3))
"""
    run_python("-c", program)


# --- tracing


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(device, mode):
    samples = everything_samples(device)
    traced = make_fx(everything, tracing_mode=mode)(*samples)
    names = {str(node.target) for node in traced.graph.nodes if "torchium" in str(node.target)}
    expected_names = set(OPERATORS) - {"matrix_power_backward", "inverse_root_backward"}
    assert {name.split(".")[1] for name in names} == expected_names
    others = everything_samples(device)
    for got, expected in zip(traced(*others), everything(*others), strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_export(device):
    class Module(torch.nn.Module):
        def forward(self, a, b, x):
            return loss(a, b, x)

    samples = everything_samples(device)
    for strict in (False, True):
        program = torch.export.export(Module(), samples, strict=strict)
        others = everything_samples(device)
        assert torch.allclose(program.module()(*others), loss(*others))


def test_fake_and_meta_tensors():
    samples = everything_samples("cpu")
    real = everything(*samples)
    with FakeTensorMode() as mode:
        fake = everything(*(mode.from_tensor(x) for x in samples))
    meta = everything(*(x.to("meta") for x in samples))
    for one, other, third in zip(real, fake, meta, strict=True):
        assert one.shape == other.shape == third.shape
        assert one.dtype == other.dtype == third.dtype
        assert one.stride() == other.stride() == third.stride()
    with pytest.raises(ValueError, match="b has shape"):
        linalg.matmul(torch.ones(2, 3, device="meta"), torch.ones(2, 3, device="meta"))
    with pytest.raises(TypeError, match="b has dtype"):
        linalg.matmul(torch.ones(2, 3, device="meta"), torch.ones(3, 2, device="meta", dtype=torch.float64))


def test_subclasses_and_dispatch_modes_see_the_operator():
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    assert isinstance(linalg.matrix_power(torch.eye(3).as_subclass(Watched), -0.5, 0.1), Watched)
    with Counting():
        linalg.matmul(torch.eye(3), torch.eye(3))
    assert any("matrix_power" in name for name in seen) and "torchium.matmul.default" in seen


def test_profilers_see_the_name(device):
    a = positive(2, 4, 4, device=device)
    with torch.profiler.profile() as profile:
        linalg.matmul(a, a)
        linalg.inverse_root(a, 4, relative_eps=0.1)
    names = {event.key for event in profile.key_averages()}
    assert {"torchium::matmul", "torchium::inverse_root"} <= names


# --- the short way


def test_ordinary_calls_take_the_short_way(device):
    a, b = torch.eye(3, device=device), torch.eye(3, device=device, requires_grad=True)
    assert _C.recorded(a, a) is False
    assert _C.recorded(a, b) is True
    assert _C.recorded(torch.nn.Parameter(a)) is True
    with torch.no_grad():
        assert _C.recorded(a, b) is False
    with torch.inference_mode():
        assert _C.recorded(a, b) is False


def test_calls_that_somebody_sees_do_not():
    a = torch.eye(3)

    def ways():
        return {_C.recorded(a), _C.recorded(a, a.clone().requires_grad_())}

    for other in (torch.eye(3, device="meta"), torch.eye(3).as_subclass(type("Other", (torch.Tensor,), {})), None, 3):
        assert _C.recorded(a, other) is None
    with torch.autograd.forward_ad.dual_level():
        assert ways() == {None}
    with torch.profiler.profile():
        assert ways() == {None}
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert _C.recorded(a) is None
    seen = []
    torch.vmap(lambda x: (seen.append(_C.recorded(x)), x)[1])(a)
    torch.func.grad(lambda x: (seen.append(_C.recorded(x)), x.sum())[1])(a)
    torch.jit.trace(lambda x: (seen.append(_C.recorded(x)), x + 1)[1], a, check_trace=False)
    assert set(seen) == {None}
    assert ways() == {False, True}
