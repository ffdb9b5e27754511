"""KFAC in training loops: accumulation, loss scaling, half precision, passes other than the loss's, sampled labels,
resume."""

import contextlib
import copy
import gc
import itertools
import math
import pickle
import warnings

import pytest
import torch
from kfac_cases import METHODS, assert_close, assert_same, batch, draw, factors_of_samples, mlp, mse, train, twin
from optim_cases import through_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint
from torchium.optim import KFAC, KFACPreconditioner, NaturalGradient

# --- what a training loop may do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_is_one_big_batch(device, method):
    """Losses of four micro-batches, each divided by four."""
    first = mlp(device)
    second = copy.deepcopy(first)
    whole = KFAC(first, lr=0.05, method=method, damping=0.01, factor_update_steps=1, inv_update_steps=2)
    parts = KFAC(
        second, lr=0.05, method=method, damping=0.01, factor_update_steps=1, inv_update_steps=2, accumulation_steps=4
    )
    for step in range(6):
        x, y = batch(first, 12, step)
        whole.zero_grad()
        mse(first(x), y).backward()
        whole.step()
        parts.zero_grad()
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse(second(a), b) / 4).backward()
        parts.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert_close(q, p.detach().cpu(), 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_may_be_a_mean_or_a_sum(device, reduction):
    """Factors are those of single samples in both cases."""
    model = mlp(device)
    kfac = KFACPreconditioner(model, loss_reduction=reduction)
    x, y = batch(model, 6)
    each = (model(x) - y).square().mean(1)
    getattr(each, reduction)().backward()
    kfac.step()
    for name, (a, g) in factors_of_samples(twin(model), x.cpu(), y.cpu()).items():
        state = kfac.state_dict()["layers"][name]
        assert_close(state["input_factor"], a, 1e-12)
        assert_close(state["output_factor"], g, 1e-12)


SCALED = [(KFAC, {"damping": 0.01, "factor_update_steps": 1, "inv_update_steps": 1})]
SCALED += [(NaturalGradient, {"damping": 0.1, "update_freq": freq}) for freq in (1, 2)]


@pytest.mark.parametrize("growth", [1, 2000])
@pytest.mark.parametrize(("cls", "options"), SCALED)
def test_loss_scaling(device, cls, options, growth):
    """A loss scale does not change training; powers of two are exact."""
    first = mlp(device, torch.float32)
    second = copy.deepcopy(first)
    plain = cls(first, lr=0.05, **options)
    scaler = torch.amp.GradScaler(device, init_scale=65536.0, growth_interval=growth)
    scaled = cls(second, lr=0.05, grad_scaler=scaler, **options)
    for step in range(5):
        x, y = batch(first, 8, step)
        plain.zero_grad()
        mse(first(x), y).backward()
        plain.step()
        scaled.zero_grad()
        scaler.scale(mse(second(x), y)).backward()
        if step % 2:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert_close(q, p.detach().double().cpu(), 1e-5 if cls is KFAC else 1e-4)


def test_a_scaler_that_it_does_not_know_is_refused():
    model = mlp(dtype=torch.float32)
    optimizer = KFAC(model)
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(model, 4)
    scaler.scale(mse(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [lambda m: KFAC(m, lr=0.05, factor_update_steps=1, inv_update_steps=1), NaturalGradient],
    ids=["kfac", "natural"],
)
def test_a_gradient_that_is_not_finite_reaches_nothing(device, make, value):
    model = mlp(device)
    optimizer = make(model)
    train(model, optimizer, 2)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(model, 8)
    x[3, 2] = value
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
    assert_same(before, [p.detach() for p in model.parameters()])
    assert optimizer.stats()["skipped"] == 1
    after = train(model, optimizer, 2)
    assert all(p.isfinite().all() for p in after)


def test_a_closure_and_a_schedule(device):
    model = mlp(device)
    optimizer = KFAC(model, lr=0.05, factor_update_steps=1, inv_update_steps=1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x, y = batch(model, 8)

    def closure():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        return loss

    losses = []
    for _ in range(5):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[-1] < losses[0] and optimizer.param_groups[0]["lr"] == 0.05 * 0.5**5
    assert optimizer.stats()["steps"] == 5 and optimizer.stats()["observations"] == 15


def test_passes_that_are_not_looked_at(device):
    """Without gradients, in evaluation mode, paused, or in a step that does not update factors."""
    model = mlp(device)
    kfac = KFACPreconditioner(model, factor_update_steps=2, inv_update_steps=2)
    x, y = batch(model, 8)
    with torch.no_grad():
        model(x)
    model.eval()
    mse(model(x), y).backward()
    model.train()
    with kfac.paused():
        mse(model(x), y).backward()
    assert kfac.stats()["observations"] == 0
    for step in range(4):
        mse(model(x), y).backward()
        kfac.step()
        assert kfac.stats()["observations"] == 3 * (1 + step // 2)


@pytest.mark.parametrize("cls", [KFACPreconditioner, NaturalGradient])
def test_a_second_backward_pass_is_refused_by_name(cls):
    model = mlp()
    optimizer = cls(model)
    optimizer.step()  # nothing requires gradients
    x, y = batch(model, 4)
    loss = mse(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward pass .* layer '4'"):
        loss.backward(retain_graph=True)
    with optimizer.paused():
        loss.backward()


@pytest.mark.parametrize("declared", [1, 3])
@pytest.mark.parametrize("cls", [KFAC, KFACPreconditioner, NaturalGradient])
def test_accumulation_that_was_not_declared_is_refused(device, cls, declared):
    """Factors would be too small by the squared number of passes."""
    model = mlp(device)
    optimizer = cls(model, accumulation_steps=declared)
    message = rf"{declared + 1} backward passes .* layer '4' .* accumulation_steps = {declared}:"
    for passes in (4, declared):
        getattr(optimizer, "zero_grad", model.zero_grad)()
        for k, (x, y) in enumerate(zip(*(t.chunk(4)[:passes] for t in batch(model, 8)), strict=True)):
            with pytest.raises(RuntimeError, match=message) if k == declared else contextlib.nullcontext():
                (mse(model(x), y) / 4).backward()
            if k == declared:
                break
    optimizer.step()


def cleared(clear):
    return 1, lambda model, kfac, loss: [clear(model, kfac) or loss().backward() for _ in range(3)]


def cleared_in_the_middle(model, kfac, loss):
    for zero_grad in (model.zero_grad, lambda: kfac.zero_grad(set_to_none=False)):
        loss().backward()
        zero_grad()
    loss().backward()
    loss().backward()


def evaluated(model, kfac, loss):
    loss().backward()
    with torch.no_grad():
        loss()
    with kfac.paused():
        loss().backward()
    model.eval()
    loss().backward()
    model.train()


# Before a step: accumulation_steps, and the passes.
LOOPS = {
    "cleared": cleared(lambda model, kfac: kfac.zero_grad()),
    "cleared to 0": cleared(lambda model, kfac: kfac.zero_grad(set_to_none=False)),
    "model cleared": cleared(lambda model, kfac: model.zero_grad()),
    "model cleared to 0": cleared(lambda model, kfac: model.zero_grad(set_to_none=False)),
    "cleared in the middle": (2, cleared_in_the_middle),
    "two forwards, one backward": (1, lambda model, kfac, loss: (loss() + loss()).backward()),
    "returned": (1, lambda model, kfac, loss: torch.autograd.grad(loss(), model.out.weight) and loss().backward()),
    "evaluated": (1, evaluated),
}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_passes_that_are_no_accumulation(device, loop, reentrant):
    """Also with a layer used outside of checkpoints and in two of them, whose gradients come in several nested passes
    if these are reentrant."""
    accumulation, passes = loop
    model = CheckpointedTwice(reentrant).double().to(device)
    optimizer = KFAC(model, lr=0.01, factor_update_steps=1, inv_update_steps=1, accumulation_steps=accumulation)
    x, y = batch(model, 6)
    for _ in range(2):
        optimizer.zero_grad()
        passes(model, optimizer, lambda: mse(model(x), y))
        optimizer.step()
        assert optimizer.preconditioner.stats()["observations"] > 0


class CheckpointedTwice(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.into, self.step, self.out = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.step(self.into(x))
        for _ in range(2):
            x = self.step(x) if self.reentrant is None else checkpoint(self.step, x, use_reentrant=self.reentrant)
        return self.out(x)


def test_a_step_without_observations(device):
    """In eval() mode, for instance: an error if there are no factors, else a warning that they are stale."""
    model = mlp(device).eval()
    kfac = KFACPreconditioner(model, factor_update_steps=2)
    kfac.step()  # without gradients either
    kfac.load_state_dict({"steps": 0, "layers": {}})
    x, y = batch(model, 4)
    mse(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"observed no backward pass .* eval\(\) .* model\.train\(\)"):
        kfac.step()
    assert not kfac.stats()["steps"]
    train(model.train(), optimizer := KFAC(model, factor_update_steps=2), 2)
    model.eval()
    with pytest.warns(UserWarning, match=r"eval\(\).*The step uses the factors of earlier steps"):
        train(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1)  # does not update factors
    assert optimizer.stats()["steps"] == 4 and optimizer.stats()["observations"] == 3


@pytest.mark.parametrize("cls", [KFAC, KFACPreconditioner, NaturalGradient])
def test_data_parallel_is_refused(cls):
    for model in (nn.DataParallel(mlp()), nn.Sequential(nn.DataParallel(nn.Linear(3, 3)))):
        with pytest.raises(NotImplementedError, match=r"model is run by DataParallel.*DistributedDataParallel"):
            cls(model)
    model = mlp()
    optimizer = cls(model)
    replica = model[0]._replicate_for_data_parallel()
    replica._parameters = dict(model[0]._parameters)
    with pytest.raises(NotImplementedError, match="layer '0' is run by DataParallel"):
        replica(batch(model, 2)[0])
    optimizer.remove()


def test_gradient_checkpointing(device):
    first = mlp(device)
    second = copy.deepcopy(first)
    x, y = batch(first, 6)
    for reentrant in (False, True):
        a, b = KFACPreconditioner(first), KFACPreconditioner(second)
        first.zero_grad()
        second.zero_grad()
        mse(first(x), y).backward()
        mse(checkpoint(second, x.clone().requires_grad_(), use_reentrant=reentrant), y).backward()
        a.step()
        b.step()
        for p, q in zip(first.parameters(), second.parameters(), strict=True):
            assert_close(q.grad, p.grad.cpu(), 1e-12)
        a.remove()
        b.remove()


def test_a_parameter_frozen_in_the_middle(device):
    """Its bias changes: that factor is reset; the rest is kept."""
    model = mlp(device)
    optimizer = KFAC(model, lr=0.05, factor_update_steps=1, inv_update_steps=1)
    train(model, optimizer, 3)
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = None
    before = model[0].bias.detach().clone()
    train(model, optimizer, 3)
    layers = optimizer.preconditioner.state_dict()["layers"]
    assert layers["0"]["counts"][0] == 3 and layers["2"]["counts"][0] == 6
    assert layers["0"]["input_factor"].shape == (5, 5)
    assert torch.equal(before, model[0].bias)


# --- sampled labels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "labels"), [("cross_entropy", 1), ("mse", 1), ("cross_entropy", 8)])
def test_the_sampled_fisher_is_the_gauss_newton_matrix(device, loss, labels):
    """For one layer the expectation of its factor G over labels is that of the loss's Hessian by the outputs: summed
    over the labels of a sample, whose loss is their mean. A factor is a mean of 40 000 draws: five standard errors of
    its entries are below 0.03 of the largest."""
    layer = nn.Linear(4, 3, bias=False) if labels == 1 else nn.Conv1d(4, 3, 1, bias=False)
    model = layer.double().to(device)
    kfac = KFACPreconditioner(model, fisher="sampled", factor_update_steps=1)
    one = draw(1, 4, device=device)
    x = one.repeat(40_000, 1) if labels == 1 else one[:, :, None].repeat(40_000 // labels, 1, labels)
    outputs = model(x)
    kfac.observe_sampled(outputs, loss)
    assert model.weight.grad is None
    outputs.square().mean().backward()  # the graph is still there
    before = kfac.stats()["observations"]
    kfac.step()
    got = kfac.state_dict()["layers"][type(model).__name__]["output_factor"].cpu()
    p = outputs.detach().cpu().reshape(len(x), 3, labels)[0, :, 0].softmax(0)
    expected = torch.diag(p) - torch.outer(p, p) if loss == "cross_entropy" else 2 / 3 * torch.eye(3).double()
    assert before == 1 and (got - expected).abs().max() < 0.03 * expected.abs().max()


def test_sampling_wants_to_be_asked():
    model = mlp()
    x, y = batch(model, 4)
    kfac = KFACPreconditioner(model, fisher="sampled", factor_update_steps=2)
    mse(model(x), y).backward()
    with pytest.raises(RuntimeError, match="observe_sampled"):
        kfac.step()
    kfac.observe_sampled(model(x), "mse")
    kfac.step()
    kfac.step()  # does not update factors
    with pytest.raises(RuntimeError, match="fisher='sampled'"):
        KFACPreconditioner(mlp()).observe_sampled(model(x))
    with pytest.raises(ValueError, match="expected \\[samples, classes"):
        kfac.observe_sampled(model(x).sum(1))
    with pytest.raises(ValueError, match="loss must be one of"):
        kfac.observe_sampled(model(x), "hinge")
    with pytest.raises(ValueError, match="gradients can be computed"):
        kfac.observe_sampled(model(x).detach())


# --- state ------------------------------------------------------------------------------------------------------------


RESTARTED = [
    (KFAC, {"method": method, "factor_update_steps": 2, "inv_update_steps": 3, "damping": 0.01}) for method in METHODS
]
RESTARTED += [(NaturalGradient, {"momentum": 0.9, "damping": 0.01})]


@pytest.mark.parametrize(("cls", "options"), RESTARTED)
def test_a_restart_goes_on_to_the_bit(device, cls, options):
    first = mlp(device, torch.float32)
    optimizer = cls(first, lr=0.05, **options)
    train(first, optimizer, 7)
    saved = through_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    second = mlp(device, torch.float32)
    second.load_state_dict(saved["model"])
    other = cls(second, lr=0.9, **(options | {"damping": 0.5}))
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups[0]["damping"] == 0.01
    assert_same(train(first, optimizer, 6, first=7), train(second, other, 6, first=7))
    with pytest.raises((KeyError, ValueError), match=r"'kfac'|'natural'"):
        other.load_state_dict(torch.optim.SGD(second.parameters()).state_dict())


def test_state_inside_another_default_device():
    """Counts stay on the host, as tensors for torch.distributed.checkpoint."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = KFAC(model)
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()
    with torch.device("meta"):
        state = get_optimizer_state_dict(model, optimizer)["state"]["weight"]["kfac"]
        optimizer.load_state_dict(optimizer.state_dict())
    assert int(state["steps"]) == 1
    assert all(value.device.type == "cpu" for value in state.values())


def layer(name, **values):
    return lambda s: s["kfac"]["layers"][name].update(values)


WRONG = {
    "no groups": (lambda s: s.pop("param_groups"), "param_groups"),
    "other groups": (lambda s: s["param_groups"].append(s["param_groups"][0]), "parameter groups"),
    "other parameters": (lambda s: s["param_groups"][0]["params"].pop(), "parameter group"),
    "a negative lr": (lambda s: s["param_groups"][0].update(lr=-1.0), "lr"),
    "momenta that are a list": (lambda s: s["state"].update({0: [1]}), "is a list"),
    "momenta of another shape": (lambda s: s["state"][0].update(momentum_buffer=torch.ones(3)), "momentum_buffer"),
    "no layers": (lambda s: s["kfac"].pop("layers"), "must have 'steps' and 'layers'"),
    "steps before the first": (lambda s: s["kfac"].update(steps=-1), "'steps' has -1"),
    "too many steps": (lambda s: s["kfac"].update(steps=2**63), "'steps' has 9223372036854775808"),
    "a layer less": (lambda s: s["kfac"]["layers"].pop("2"), "of other layers: '2' missing"),
    "no counts": (lambda s: s["kfac"]["layers"]["2"].pop("counts"), "layer '2' must have"),
    "a factor of another shape": (
        layer("2", input_factor=torch.ones(2, 2)),
        r"'input_factor' of layer '2' is \[2, 2\]",
    ),
    "a factor of integers": (layer("4", output_factor=torch.ones(3, 3).int()), "int32 .* expected floating-point"),
    "a factor without storage": (layer("4", output_factor=torch.ones(3, 3, device="meta")), "on meta"),
    "a factor that is a list": (layer("4", output_factor=[1.0]), "'output_factor' of layer '4' is list"),
}
COUNTS = ([-5, 0, 0, 0], [1, 0, 1, 2**63 - 1], [1, float("nan"), 0, 0], [1, 0.5, 0, 0], [0, 1, 0, 0], [1, 0])
WRONG |= {f"counts {counts}": (layer("2", counts=counts), "'counts' of layer '2'") for counts in COUNTS}


@pytest.mark.parametrize(("wrong", "steps"), zip(WRONG.values(), itertools.cycle((0, 3))), ids=WRONG)
def test_a_state_that_is_refused_changes_nothing(wrong, steps):
    damage, message = wrong
    models = [mlp()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    options = {"lr": 0.05, "factor_update_steps": 1, "inv_update_steps": 2}
    loaded, untouched, giver = (KFAC(model, **options) for model in models)
    for model, optimizer in zip(models, (loaded, untouched, giver), strict=True):
        train(model, optimizer, 2 if optimizer is giver else steps, first=7 if optimizer is giver else 0)
    state = copy.deepcopy(giver.state_dict())
    state["param_groups"][0]["damping"] = 0.5
    damage(state)
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        loaded.load_state_dict(state)
    first, second = loaded.state_dict(), untouched.state_dict()
    assert first["param_groups"] == second["param_groups"] and first["kfac"]["steps"] == second["kfac"]["steps"]
    flat = [
        torch.utils._pytree.tree_flatten(s)[0]
        for s in ((first["state"], first["kfac"]), (second["state"], second["kfac"]))
    ]
    assert_same(*([torch.as_tensor(t) for t in leaves] for leaves in flat))
    assert_same(train(models[0], loaded, 3, first=steps), train(models[1], untouched, 3, first=steps))


def test_a_state_of_the_beginning_begins_anew():
    model = mlp()
    optimizer, start = KFAC(model, factor_update_steps=1, inv_update_steps=1), copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 3)
    model.load_state_dict(start)
    optimizer.load_state_dict(saved)
    assert_same(expected, train(model, optimizer, 3))


@pytest.mark.parametrize("cls", [KFAC, KFACPreconditioner, NaturalGradient])
def test_copies_and_hooks(cls):
    """A copy of the model is not attached; copying the optimizer raises. Hooks are removed at the end."""
    model = mlp()
    x, y = batch(model, 4)
    for removed in (True, False):
        optimizer = cls(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            mse(other(x), y).backward()
            assert cls is NaturalGradient or optimizer.stats()["observations"] == 0
        for copier in (copy.deepcopy, pickle.dumps):
            for thing in (optimizer, getattr(optimizer, "preconditioner", optimizer)):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    copier(thing)
        assert any(m._forward_hooks for m in model.modules())
        if removed:
            optimizer.remove()
        thing = optimizer = None
        gc.collect()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_memory_report(device):
    model = mlp(device)
    optimizer = KFAC(model, factor_update_steps=1, inv_update_steps=1, momentum=0.9)
    before = optimizer.memory_report()
    train(model, optimizer, 1)
    after = optimizer.memory_report()
    assert before.forecast and not after.forecast
    assert before["state"] == after["state"] and after["blocks"] >= 3
    states = [
        t for s in optimizer.preconditioner.state_dict()["layers"].values() for k, t in s.items() if k != "counts"
    ]
    least = sum(t.numel() * t.element_size() for t in states)
    assert least <= optimizer.preconditioner.memory_report()["state"] < least + 2**16


@pytest.mark.gpu
def test_a_model_that_is_moved_keeps_its_factors(gpu):
    model = mlp()
    optimizer = KFAC(model, factor_update_steps=1, inv_update_steps=1)
    train(model, optimizer, 3)
    model.cuda()
    train(model, optimizer, 3)
    state = optimizer.preconditioner.state_dict()["layers"]["0"]
    assert state["counts"][0] == 6 and state["input_factor"].is_cuda
