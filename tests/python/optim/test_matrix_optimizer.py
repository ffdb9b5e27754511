"""Optimizers written in Python on MatrixOptimizer: the trajectory of a plain loop, the contract of
torch.optim.Optimizer, and messages for methods that return something else than they should.
"""

import copy
import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torchium  # noqa: E402
from optim_cases import assert_same_bits, copies, through_file  # noqa: E402
from torchium.optim import AdamW, MatrixOptimizer  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python" / "matrix_optimizer.py"
# Wide and tall, two of one shape, a convolution, dimensions of size 1, a vector, a row, a scalar, and empty ones.
SHAPES = [(3, 5), (5, 3), (3, 5), (4, 2, 3), (1, 3, 5), (7,), (1, 6), (), (0, 3), (0, 3, 4)]
MATRICES = 5


class Momentum(MatrixOptimizer):
    """B <- beta B + G, of which each row is a step of length 1."""

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


def plain_step(p, gradient, buffer, lr, beta=0.9, weight_decay=0.0, sign=1.0):
    """The same for one matrix, in float64."""
    rows = next((size for size in p.shape if size != 1), 1)
    buffer.mul_(beta).add_(sign * gradient.double())
    flat = buffer.reshape(rows, -1)
    turned = flat / (1e-3 + flat.norm(dim=1, keepdim=True))
    return p * (1 - lr * weight_decay) - lr * turned.reshape(p.shape)


# --- trajectories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, bound",
    # Ten steps, each with a few roundings of numbers below 4; a half type rounds the parameter once a step.
    [(torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 10 * 2**-8), (torch.float16, 10 * 2**-10)],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_trajectory(device, dtype, bound, maximize):
    params = tensors(dtype=dtype, device=device)
    ours, others = params[:MATRICES], params[MATRICES:]
    expected = [p.detach().double() for p in ours]
    buffers = [torch.zeros_like(p) for p in expected]
    twins = [p.detach().clone().requires_grad_() for p in others]
    optimizer = Momentum(params, lr=0.1, weight_decay=0.2, adamw_lr=0.01, adamw_betas=(0.8, 0.9), maximize=maximize)
    adamw = AdamW(twins, lr=0.01, betas=(0.8, 0.9), weight_decay=0.2, maximize=maximize)
    sign = -1.0 if maximize else 1.0
    for step in range(10):
        set_gradients(params, step)
        for i, p in enumerate(ours):
            expected[i] = plain_step(expected[i], p.grad, buffers[i], 0.1, weight_decay=0.2, sign=sign)
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
    """The optimizer of the example, by its kernel and by the library, beside Shampoo in float64."""
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
            # Eight steps of 0.1 |g| with |g| below 15, by roots of error 1e-3 (the library's tolerance) at most.
            assert (p.detach().double().reshape(e.shape) - e).norm() <= 8 * 0.1 * 15 * 1e-3 * (0.02 if compiles else 1)


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
    steps(optimizer, params, 4, first=3)  # neither must write to the state of the other
    steps(twin, twins, 4, first=3)
    assert_same_bits(params, twins)
    for p, q in zip(params[:MATRICES], twins[:MATRICES], strict=True):
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
        assert_same_bits(optimizer.state[p].values(), twin.state[q].values())


def test_state_is_of_parameters():
    """Whatever order they are stacked in, also after one has left or begun anew."""
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


def test_steps_reuse_the_stack():
    params = tensors([(3, 5)] * 3)
    memory = []

    class InPlace(Momentum):
        def direction(self, gradients, state, group):
            memory.append(state["momentum_buffer"].data_ptr())
            return state["momentum_buffer"].add_(gradients)

    steps(InPlace(params), params, 3)
    assert len(set(memory)) == 1


def test_groups_and_schedule():
    params = tensors([(3, 5), (3, 5), (4, 4)])
    expected = [p.detach().double() for p in params]
    buffers = [torch.zeros_like(p) for p in expected]
    optimizer = Momentum([{"params": params[:1]}, {"params": params[1:2], "lr": 0.01, "beta": 0.5}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    rates = [0.1, 0.1, 0.01, 0.01]
    for step, rate in enumerate(rates):
        if step == 2:
            optimizer.add_param_group({"params": params[2:], "lr": torch.tensor(0.2)})
        set_gradients(params, step)
        for i, (lr, beta) in enumerate([(rate, 0.9), (0.1 * rate, 0.5), (0.2, 0.9)][: 2 + (step >= 2)]):
            expected[i] = plain_step(expected[i], params[i].grad, buffers[i], lr, beta)
        optimizer.step()
        if step < 2:
            schedule.step()
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e.float())
    assert [group["step"] for group in optimizer.param_groups] == [4, 4, 2]


def test_closure_hooks_and_zero_grad():
    (p,) = tensors([(3, 5)])
    optimizer = Momentum([p])
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = copies([p])[0]
    assert optimizer.step(closure).item() == before.square().sum().item() and heard == [1]
    assert not torch.equal(p.detach(), before)
    optimizer.zero_grad()
    assert p.grad is None


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
    assert optimizer.memory_report()["state"] >= 4 * (15 + 1 + 2 * 15 + 2 * 6)


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
    assert after["param_groups"] == state["param_groups"]
    for k, saved in state["state"].items():
        assert_same_bits(saved.values(), after["state"][k].values())
    optimizer.param_groups[0]["nonfinite"] = "raise"
    with pytest.raises(torchium.NumericError, match=f"Momentum: the gradient of 'parameter {where} of group 0'"):
        optimizer.step()
    assert_same_bits(params, before)
    optimizer.param_groups[0]["nonfinite"] = "ignore"
    optimizer.step()
    assert params[where].isnan().any()


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
        (returning(state=lambda g: g), TypeError, "Wrong.init_state returned 'Tensor', expected a dictionary"),
        (
            returning(left=lambda state: state.update(b=torch.zeros(2))),
            ValueError,
            r"Wrong.direction left the state \['b'\], expected \[\] as of init_state",
        ),
        (
            returning(state=lambda g: {"b": g}, left=lambda state: state.update(b=torch.zeros(3, 1))),
            ValueError,
            r"Wrong.direction: expected a state 'b' of shape \[2, ...\], got shape \[3, 1\]",
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
    with pytest.raises(NotImplementedError, match="Momentum: a MatrixOptimizer does not support batch_dims and cuts"):
        Momentum([{"params": params[3:4], "batch_dims": 1}])
    params[0].grad = torch.zeros(3, 5).to_sparse()
    with pytest.raises(RuntimeError, match="Momentum does not support sparse gradients: that of 'parameter 0"):
        Momentum(params).step()


def test_dtensors_are_refused():
    class Sharded(torch.nn.Parameter):
        device_mesh = placements = ()

    with pytest.raises(NotImplementedError, match="Momentum: group 0 has DTensors"):
        Momentum([Sharded(torch.zeros(3, 5))])


def test_state_of_another():
    params = tensors([(3, 5), (3, 5)])
    optimizer = Momentum(params)
    steps(optimizer, params, 1)
    with pytest.raises(ValueError, match="the state_dict is of 'Momentum', and Wrong cannot continue"):
        returning()(params).load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()
    saved["state"][1] = {"momentum_buffer": torch.zeros(5, 3), "counts": torch.zeros(())}
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="Momentum: parameters of one shape have different states"):
        optimizer.step()
