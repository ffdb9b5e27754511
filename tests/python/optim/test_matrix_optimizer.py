"""Optimizers written in Python on MatrixOptimizer: the trajectory of a plain loop, the contract of
torch.optim.Optimizer, and messages for methods with wrong results."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torchium  # noqa: E402
from optim_cases import assert_same_bits, copies, through_file  # noqa: E402
from test_optim_matrices import CASES  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torchium.optim import AdamW, MatrixOptimizer  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "python" / "matrix_optimizer.py"
PAGE = ROOT / "docs" / "python" / "writing-an-optimizer.md"
# Wide and tall, two of one shape, a convolution, dimensions of size 1, a vector, a row, a scalar, and empty ones.
SHAPES = [(3, 5), (5, 3), (3, 5), (4, 2, 3), (1, 3, 5), (7,), (1, 6), (), (0, 3), (0, 3, 4)]
MATRICES = 5


class Momentum(MatrixOptimizer):
    """B <- beta B + G, with each row normalized."""

    def __init__(self, params, lr=0.1, beta=0.9, **options):
        super().__init__(params, lr, beta=beta, **options)
        self.seen = []

    def init_state(self, gradients, group):
        return {"momentum_buffer": torch.zeros_like(gradients), "counts": gradients.new_zeros(len(gradients))}

    def direction(self, gradients, state, group):
        self.seen.append((tuple(gradients.shape), gradients.dtype, group["step"]))
        state["momentum_buffer"] = group["beta"] * state["momentum_buffer"] + gradients
        state["counts"] += 1
        return state["momentum_buffer"] / (1e-3 + state["momentum_buffer"].norm(dim=2, keepdim=True))


def tensors(shapes=SHAPES, dtype=torch.float32, device="cpu"):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def set_gradients(params, step):
    numbers = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=numbers).to(p)


def steps(optimizer, params, count, first=0):
    for step in range(first, first + count):
        set_gradients(params, step)
        optimizer.step()


def plain_step(p, gradient, buffer, lr, beta=0.9, weight_decay=0.0, sign=1.0, cautious=False):
    """The same for one matrix, in float64."""
    rows = next((size for size in p.shape if size != 1), 1)
    buffer.mul_(beta).add_(sign * gradient.double())
    flat = buffer.reshape(rows, -1)
    turned = flat / (1e-3 + flat.norm(dim=1, keepdim=True))
    step = lr * turned.reshape(p.shape)
    return p * (1 - lr * weight_decay * ((step * p >= 0).double() if cautious else 1)) - step


# --- trajectories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, bound",
    # Ten steps, each with a few roundings of numbers below 4; a half type rounds the parameter once per step.
    [(torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 10 * 2**-8), (torch.float16, 10 * 2**-10)],
)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", ["decoupled", "cautious"])
def test_trajectory(device, dtype, bound, maximize, decay):
    params = tensors(dtype=dtype, device=device)
    ours, others = params[:MATRICES], params[MATRICES:]
    expected = [p.detach().double() for p in ours]
    buffers = [torch.zeros_like(p) for p in expected]
    twins = [p.detach().clone().requires_grad_() for p in others]
    both = {"weight_decay": 0.2, "weight_decay_type": decay, "maximize": maximize}
    optimizer = Momentum(params, lr=0.1, adamw_lr=0.01, adamw_betas=(0.8, 0.9), **both)
    adamw = AdamW(twins, lr=0.01, betas=(0.8, 0.9), **both)
    sign = -1.0 if maximize else 1.0
    for step in range(10):
        set_gradients(params, step)
        for i, p in enumerate(ours):
            expected[i] = plain_step(expected[i], p.grad, buffers[i], 0.1, 0.9, 0.2, sign, decay == "cautious")
        for twin, p in zip(twins, others, strict=True):
            twin.grad = p.grad.clone()
        optimizer.step()
        adamw.step()
    for p, e in zip(ours, expected, strict=True):
        assert (p.detach().double() - e).abs().max() <= bound * max(1.0, e.abs().max())
    assert_same_bits(others, twins)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {(shape, kind) for shape, kind, _ in optimizer.seen} == {
        ((3, 3, 5), wide),
        ((1, 5, 3), wide),
        ((1, 4, 6), wide),
    }


def test_the_documents_shampoo():
    """The example's optimizer, with its kernel and with the library, vs Shampoo in float64."""
    spec = importlib.util.spec_from_file_location("matrix_optimizer", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    start = [torch.randn(12, 7), torch.randn(12, 7), torch.randn(5, 3, 2)]

    def reference():
        expected = [p.double().reshape(len(p), -1) for p in start]
        factors = [[torch.zeros(n, n, dtype=torch.float64) for n in p.shape] for p in expected]
        roots = [[None, None] for _ in expected]
        for step in range(8):
            set_gradients(start, step)
            for i, p in enumerate(start):
                g = p.grad.double().reshape(len(p), -1)
                for side, gram in enumerate((g @ g.T, g.T @ g)):
                    factors[i][side].lerp_(gram, 0.05)
                    if step % 3 == 0:
                        values, vectors = torch.linalg.eigh(factors[i][side])
                        damped = values + 1e-2 * factors[i][side].norm()
                        roots[i][side] = vectors * damped**-0.25 @ vectors.T
                turned = roots[i][0] @ g @ roots[i][1]
                expected[i] = expected[i] - 0.1 * turned * g.norm() / turned.norm()
        return expected

    expected = reference()
    for source, compiles in ((example.NEWTON, True), (example.NEWTON.replace("powf(", "absent("), False)):
        params = [p.clone().requires_grad_() for p in start]
        optimizer = example.OptimizedShampoo(params, lr=0.1, eps=1e-2, update_freq=3, kernel=source)
        steps(optimizer, params, 8)
        assert (optimizer.reason == "") == compiles and (compiles or "absent" in optimizer.reason)
        for p, e in zip(params, expected, strict=True):
            # Eight steps of 0.1 |g| with |g| below 15, by roots with an error of 1e-3 (the library's tolerance) at
            # most.
            assert (p.detach().double().reshape(e.shape) - e).norm() <= 8 * 0.1 * 15 * 1e-3 * (0.02 if compiles else 1)


def kl_shampoo():
    """The class as printed on the page."""
    text = PAGE.read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "KLShampoo(t" in block)
    names = {}
    exec(code, names)
    return names["KLShampoo"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [Momentum, lambda groups: kl_shampoo()(groups, period=2)], ids=["momentum", "kl"])
def test_several_matrices_in_a_parameter(make, case, device):
    """As separate parameters, bitwise; also after a restart."""
    shape, options, split = CASES[case]
    whole = torch.randn(shape, device=device, requires_grad=True)
    own = [part.detach().clone().requires_grad_() for part in split(whole)]
    one, many = make([{"params": [whole], **options}]), make(own)
    for step in range(5):
        set_gradients([whole], step)
        for p, gradient in zip(own, split(whole.grad), strict=True):
            p.grad = gradient.clone()
        one.step()
        many.step()
        if step == 2:
            saved, one = one.state_dict(), make([{"params": [whole], **options}])
            one.load_state_dict(through_file(saved))
    assert_same_bits(split(whole.detach()), own)
    assert one.memory_report()["blocks"] == len(own)


# --- the contract of torch.optim.Optimizer ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy"])
def test_resume_is_bitwise(device, dtype, way):
    params = tensors(dtype=dtype, device=device)
    optimizer = Momentum(params, lr=0.05, adamw_lr=0.01)
    steps(optimizer, params, 3)
    if way == "deepcopy":
        twins, twin = copy.deepcopy((params, optimizer))
        twin.seen = []
    else:
        twins = [p.detach().clone().requires_grad_() for p in params]
        twin = Momentum(twins, lr=9.0, beta=0.1)
        saved = optimizer.state_dict()
        twin.load_state_dict(through_file(saved) if way == "file" else saved)
    assert twin.param_groups[0]["beta"] == 0.9 and twin.param_groups[0]["step"] == 3
    steps(optimizer, params, 4, first=3)  # neither may write to the state of the other
    steps(twin, twins, 4, first=3)
    assert_same_bits(params, twins)
    for p, q in zip(params[:MATRICES], twins[:MATRICES], strict=True):
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
        assert_same_bits(optimizer.state[p].values(), twin.state[q].values())


def test_state_is_of_parameters():
    """In any stacking order, also after one has left or was reset."""
    params = tensors([(3, 5)] * 4)
    twins = [p.detach().clone().requires_grad_() for p in params]
    optimizer, twin = Momentum(params), Momentum(twins[::-1])
    for step in range(6):
        set_gradients(params, step)
        for k, (p, q) in enumerate(zip(params, twins, strict=True)):
            p.grad = p.grad if (step + k) % 3 else None
            q.grad = p.grad
        optimizer.step()
        twin.step()
    assert_same_bits(params, twins)
    assert [int(optimizer.state[p]["counts"]) for p in params] == [4, 4, 4, 4]
    del optimizer.state[params[2]]
    steps(optimizer, params, 1, first=9)
    assert [int(optimizer.state[p]["counts"]) for p in params] == [5, 5, 1, 5]
    assert optimizer.state[params[0]]["momentum_buffer"].shape == (3, 5)


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_state_stays_in_its_memory(nonfinite):
    """Whether `direction` writes to it, returns another tensor, or exchanges two: a captured step reads it there."""
    params = tensors([(3, 3)] * 3)

    class Exchange(Momentum):
        def init_state(self, gradients, group):
            return super().init_state(gradients, group) | {"other": gradients.clone(), "turned": gradients.clone()}

        def direction(self, gradients, state, group):
            state["other"], state["momentum_buffer"] = state["momentum_buffer"], state["other"]
            state["turned"] = state["turned"].mT
            return state["counts"].add_(1)[:, None, None] * gradients

    optimizer = Exchange(params, nonfinite=nonfinite)
    steps(optimizer, params, 1)
    begun, memory = params[1].grad, [value.data_ptr() for value in optimizer.state[params[1]].values()]
    for step in range(1, 4):
        steps(optimizer, params, 1, step)
        state = optimizer.state[params[1]]
        assert memory == [value.data_ptr() for value in state.values()]
        assert torch.equal(state["turned"], begun if step % 2 else begun.T)
        assert torch.equal(state["other"], begun * (step % 2)) and int(state["counts"]) == step + 1


def test_without_gradients():
    params = tensors()
    before = copies(params)
    optimizer = Momentum(params)
    optimizer.step()
    assert_same_bits(params, before)
    assert optimizer.seen == [] and optimizer.param_groups[0]["step"] == 0
    set_gradients(params[1:2], 0)
    optimizer.step()
    assert [shape for shape, *_ in optimizer.seen] == [(1, 5, 3)] and optimizer.param_groups[0]["step"] == 1


def test_use_adamw():
    params = tensors([(3, 5), (3, 5), (6,)])
    named = list(zip(("embed.weight", "inner.weight", "inner.bias"), params, strict=True))
    optimizer = Momentum(named, use_adamw=("embed*",))
    steps(optimizer, params, 1)
    assert [shape for shape, *_ in optimizer.seen] == [(1, 3, 5)]
    assert "exp_avg_sq" in optimizer.state[params[0]] and "exp_avg_sq" in optimizer.state[params[2]]
    assert [(row.method, row.names) for row in optimizer.summary()] == [
        ("AdamW", ("embed.weight",)),
        ("Momentum", ("inner.weight",)),
        ("AdamW", ("inner.bias",)),
    ]
    report, forecast = optimizer.memory_report(), Momentum(params[1:]).memory_report()
    assert report["state"] >= 4 * (15 + 1 + 2 * 15 + 2 * 6) and not report.forecast and report["blocks"] == 1
    assert forecast.forecast and forecast["blocks"] == 1 and forecast["scratch"] >= 4 * (3 * 15 + 16)
    after = Momentum(params[1:])
    steps(after, params[1:], 1)
    assert after.memory_report()["state"] == forecast["state"]


# --- gradients that are not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 5])
def test_nonfinite_gradients(where):
    params = tensors()
    optimizer = Momentum(params)
    steps(optimizer, params, 2)
    before, state = copies(params), copy.deepcopy(optimizer.state_dict())
    set_gradients(params, 5)
    params[where].grad.view(-1)[-1] = float("nan")
    optimizer.step()
    assert_same_bits(params, before)
    rates = {"lr/Momentum": 0.1, "lr/AdamW": 0.1}
    assert optimizer.stats() == {"steps": 3.0, "skipped": 1.0} | rates
    after = optimizer.state_dict()
    assert after["param_groups"] == [group | {"step": 3} for group in state["param_groups"]]  # counted by the host
    for k, saved in state["state"].items():
        assert_same_bits(saved.values(), after["state"][k].values())
    optimizer.param_groups[0]["nonfinite"] = "raise"
    with pytest.raises(torchium.NumericError, match=f"Momentum: the gradient of 'parameter {where} of group 0'"):
        optimizer.step()
    assert_same_bits(params, before)
    optimizer.param_groups[0]["nonfinite"] = "ignore"
    optimizer.step()
    assert params[where].isnan().any()


def test_the_first_gradients_are_not_finite():
    """State is not initialized by them."""
    params = tensors()
    optimizer = Momentum(params)
    set_gradients(params, 0)
    params[1].grad[0, 0] = float("inf")
    optimizer.step()
    assert not optimizer.state and not optimizer.seen and optimizer.stats()["skipped"] == 1
    steps(optimizer, params, 1)
    assert all(float(optimizer.state[p]["step"]) == 1 for p in params[:MATRICES])


READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal"}


class NoReading(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert getattr(function, "__name__", "") not in READS, function
        return function(*args, **(kwargs or {}))


class NoReadingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not re.search(r"_local_scalar_dense|nonzero|is_same_size|equal\b", str(function)), function
        return function(*args, **(kwargs or {}))


def test_steps_read_no_tensor():
    """Nor by a skipped one; stats() has its counts."""
    params = tensors([(3, 5), (3, 5), (4, 6), (7,)])
    for optimizer in (Momentum(params, weight_decay=0.1), kl_shampoo()(params, period=100)):
        steps(optimizer, params, 1)
        before = copies(params)
        for bad in (True, False):
            set_gradients(params, 5)
            if bad:
                params[2].grad[0, 0] = float("nan")
            with NoReading(), NoReadingBelow():
                optimizer.step()
            assert all(torch.equal(p, b) == bad for p, b in zip(params, before, strict=True))
        assert optimizer.stats().items() >= {"steps": 3.0, "skipped": 1.0}.items()
        assert [float(optimizer.state[p]["step"]) for p in params] == [2.0] * 4
    with pytest.raises(AssertionError), NoReading():
        bool(params[0].isfinite().all())
    with pytest.raises(AssertionError), NoReadingBelow():
        params[0].sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Momentum, lambda *a, **k: kl_shampoo()(*a, period=100, **k)], ids=["momentum", "kl"])
def test_step_in_a_cuda_graph(gpu, make):
    """Replays equal calls, including a skipped step."""
    called = tensors([(12, 7), (12, 7), (5, 3, 2), (9,)], device=gpu)
    replayed = [p.detach().clone().requires_grad_() for p in called]
    for p in replayed:
        p.grad = torch.zeros_like(p)
    lr = torch.tensor(0.1, device=gpu)
    twin, optimizer, graph = make(called, lr=lr), make(replayed, lr=lr), torch.cuda.CUDAGraph()

    def draw(step):
        set_gradients(called, step)
        if step == 6:
            called[1].grad[0, 0] = float("nan")
        for p, q in zip(called, replayed, strict=True):
            q.grad.copy_(p.grad)

    for step in range(10):
        draw(step)
        twin.step()
        if step == 3:
            with torch.cuda.graph(graph):
                optimizer.step()
        graph.replay() if step >= 3 else optimizer.step()
    assert_same_bits(called, replayed)
    assert optimizer.stats().items() >= {"steps": 10.0, "skipped": 1.0}.items()


# --- what is refused --------------------------------------------------------------------------------------------------


def returning(value=None, state=None, left=None):
    class Wrong(MatrixOptimizer):
        def init_state(self, gradients, group):
            return {} if state is None else state(gradients)

        def direction(self, gradients, own, group):
            if left is not None:
                left(own)
            return gradients if value is None else value(gradients)

    return Wrong


@pytest.mark.parametrize(
    "cls, error, text",
    [
        (
            returning(lambda g: g.mT),
            ValueError,
            r"Wrong.direction: expected a tensor of shape \[2, 3, 5\], got shape \[2, 5, 3\]",
        ),
        (returning(lambda g: g[0]), ValueError, r"Wrong.direction: .*\[2, 3, 5\], got shape \[3, 5\]"),
        (returning(lambda g: list(g)), TypeError, r"Wrong.direction: .*\[2, 3, 5\], got 'list'"),
        (
            returning(state=lambda g: {"b": g[0]}),
            ValueError,
            r"Wrong.init_state: expected a state 'b' of shape \[2, ...\], got shape \[3, 5\]",
        ),
        (returning(state=lambda g: {"b": 0}), TypeError, r"Wrong.init_state: .*'b' of shape \[2, ...\], got 'int'"),
        (returning(state=lambda g: {"step": g}), TypeError, "Wrong.init_state returned a state 'step', which is taken"),
        (returning(state=lambda g: g), TypeError, "Wrong.init_state returned 'Tensor', expected a dictionary"),
        (
            returning(left=lambda state: state.update(b=torch.zeros(2))),
            ValueError,
            r"Wrong.direction left the state \['b'\], expected \[\] as of init_state",
        ),
        (
            returning(state=lambda g: {"b": g}, left=lambda state: state.update(b=torch.zeros(3, 1))),
            ValueError,
            r"Wrong.direction: expected a state 'b' of shape \[2, 3, 5\], got shape \[3, 1\]",
        ),
    ],
)
def test_wrong_returns(cls, error, text):
    params = tensors([(3, 5), (3, 5)])
    before = copies(params)
    optimizer = cls(params)
    set_gradients(params, 0)
    with pytest.raises(error, match=text):
        optimizer.step()
    assert_same_bits(params, before)


def test_wrong_arguments():
    params = tensors()
    with pytest.raises(TypeError, match=r"MatrixOptimizer must have a method direction\(self, gradients, state, group"):
        MatrixOptimizer(params)
    with pytest.raises(ValueError, match="Momentum: params is an empty parameter list"):
        Momentum([])
    with pytest.raises(ValueError, match="Momentum: lr is -1"):
        Momentum(params, lr=-1.0)
    params[0].grad = torch.zeros(3, 5).to_sparse()
    with pytest.raises(RuntimeError, match="Momentum does not support sparse gradients: that of 'parameter 0"):
        Momentum(params).step()


def test_state_of_another():
    params = tensors([(3, 5), (3, 5)])
    optimizer = Momentum(params)
    steps(optimizer, params, 1)
    with pytest.raises(ValueError, match="the state_dict is of 'Momentum', which Wrong cannot load"):
        returning()(params).load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()
    for state, text in (
        ({"momentum_buffer": torch.zeros(5, 3), "counts": torch.zeros(())}, "parameters of one shape have different"),
        ({"step": torch.ones(())}, "the state has a step but not .*: it is a part, as a rank has it"),
    ):
        saved["state"][1] = state
        optimizer.load_state_dict(saved)
        with pytest.raises(ValueError, match=f"Momentum: {text}"):
            optimizer.step()
