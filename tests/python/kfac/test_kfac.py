"""KFAC and its preconditioner vs the definition with per-sample factors; supported layers, and errors. Methods,
averages and types are compared with float64 references in C (tests/kfac)."""

import copy
import math

import pytest
import torch
from grad_cases import Parts
from kfac_cases import METHODS, assert_close, assert_same, batch, draw, factors_of_samples, mlp, mse, train, twin
from torch import nn
from torchium.optim import KFAC, KFACPreconditioner, NaturalGradient

# --- against the definition -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_step_follows_the_definition(device, bias):
    """Each layer's gradient is multiplied by the inverse of G (x) A + damping, and all are scaled by kl_clip."""
    model = mlp(device, bias=bias)
    plain = twin(model)
    kfac = KFACPreconditioner(model, damping=0.01, lr=0.1)
    x, y = batch(model, 6)
    mse(model(x), y).backward()
    kfac.step()
    expected, total = {}, 0.0
    factors = factors_of_samples(plain, x.cpu(), y.cpu())
    mse(plain(x.cpu()), y.cpu()).backward()
    for name, (a, g) in factors.items():
        layer = plain.get_submodule(name)
        grad = torch.cat([layer.weight.grad] + ([layer.bias.grad[:, None]] if bias else []), 1)
        matrix = torch.kron(g, a) + 0.01 * torch.eye(grad.numel(), dtype=grad.dtype)
        expected[name] = torch.linalg.solve(matrix, grad.flatten()).reshape(grad.shape)
        total += 0.1**2 * (expected[name] * grad).sum()
    scale = min(1.0, math.sqrt(1e-3 / total))
    for name, values in expected.items():
        layer = model.get_submodule(name)
        assert_close(layer.weight.grad, scale * values[:, : layer.in_features], 1e-9)
        assert not bias or assert_close(layer.bias.grad, scale * values[:, -1], 1e-9) is None
    stats = kfac.stats()
    assert stats["steps"] == 1 and stats["observations"] == stats["refreshes"] == stats["layers"] == 3
    assert stats["scale"] == pytest.approx(scale) and stats["failed"] == stats["rejected"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"kl_clip": 0.0}, {"factor_update_steps": 2, "inv_update_steps": 4}], ids=str)
def test_kfac_is_its_preconditioner_before_sgd(device, dtype, method, options):
    first = mlp(device, dtype)
    second = copy.deepcopy(first)
    options = {"factor_update_steps": 1, "inv_update_steps": 3, "damping": 0.03, "lr": 0.05} | options
    preconditioner = KFACPreconditioner(second, compute_method=method, factor_decay=0.9, **options)
    plan = {
        "factor_update_steps": options.pop("factor_update_steps"),
        "inv_update_steps": options.pop("inv_update_steps"),
    }
    for_sgd = {"momentum": 0.9, "weight_decay": 0.01}
    whole = KFAC(first, method=method, factor_decay=0.9, **plan, **options, **for_sgd)
    sgd = torch.optim.SGD(second.parameters(), lr=0.05, **for_sgd)
    train(first, whole, 8)
    for step in range(8):
        x, y = batch(second, 8, step)
        sgd.zero_grad()
        mse(second(x), y).backward()
        preconditioner.step()
        sgd.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert_close(p, q.detach().double().cpu(), 1e-9 if dtype == torch.float64 else 1e-4)


def test_numbers_may_be_functions_of_the_step(device):
    plans = {"damping": lambda step: 0.1 / (1 + step), "factor_decay": lambda step: 0.5 + 0.1 * step}
    plans |= {"lr": lambda step: 0.1 * 0.5**step, "kl_clip": lambda step: 1e-3 * (1 + step)}
    plans |= {"factor_update_steps": lambda step: 1 if step < 2 else 2, "inv_update_steps": lambda step: 1 + step % 2}
    first, second = mlp(device), None
    second = copy.deepcopy(first)
    planned = KFACPreconditioner(first, **plans)
    by_hand = KFACPreconditioner(second)
    for step in range(6):
        by_hand._numbers = {name: plan(step) for name, plan in plans.items()}
        for model, kfac in ((first, planned), (second, by_hand)):
            x, y = batch(model, 6, step)
            model.zero_grad()
            mse(model(x), y).backward()
            kfac.step()
        assert_same([p.grad for p in first.parameters()], [p.grad for p in second.parameters()])


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_positions_and_groups(device, sharing):
    """Patches of kernels are those of per-sample gradients, which test_grad_sample.py compares."""
    model = nn.Conv1d(4, 6, 1, groups=2).double().to(device)
    x = draw(5, 4, 7, device=device)
    kfac = KFACPreconditioner(model, sharing=sharing)
    output = model(x)
    output.retain_grad()
    output.square().mean().backward()
    kfac.step()
    a = x.cpu().reshape(5, 2, 2, 7).permute(0, 3, 1, 2)  # samples, positions, groups, channels
    a = torch.cat([a, torch.ones(5, 7, 2, 1, dtype=a.dtype)], -1)
    g = 5 * output.grad.cpu().reshape(5, 2, 3, 7)
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(-1, keepdim=True)
    state = kfac.state_dict()["layers"]["Conv1d"]
    assert_close(state["input_factor"], torch.einsum("btgi,btgj->gij", a, a) / a.shape[:2].numel(), 1e-12)
    assert_close(state["output_factor"], torch.einsum("bgit,bgjt->gij", g, g) / 5, 1e-12)


class Mixed(nn.Module):
    """Supported layers, and others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.shared = nn.Linear(6, 6, bias=False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.shared.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.again(self.shared(self.frozen(self.norm(self.first(x)))))) * self.scale


def test_other_layers_are_named_and_left_alone(device):
    model = Mixed().double().to(device)
    kfac = KFACPreconditioner(model)
    assert kfac.layers == ["first", "out"]
    assert set(kfac.left_out) == {"Mixed", "norm", "frozen", "shared", "again"}
    assert "frozen" in kfac.left_out["frozen"] and "shares" in kfac.left_out["again"]
    assert "norm: left out" in repr(kfac) and kfac.stats()["left_out"] == 5
    x, y = batch(model, 8)
    mse(model(x), y).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    kfac.step()
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert torch.equal(p.grad, before[name]) == (not name.startswith(("first", "out"))), name


@pytest.mark.parametrize("skip, left", [("0", ["2", "4"]), (["^2$", "4"], ["0"]), (r"[24]", ["0"])])
def test_skip_layers(skip, left):
    assert KFACPreconditioner(mlp(), skip_layers=skip).layers == left


@pytest.mark.parametrize(
    "skip, message", [("conv", "matches no"), ("(", "not a valid regular expression"), ("Linear", "no layer")]
)
def test_skip_layers_refused(skip, message):
    with pytest.raises(ValueError, match=message):
        KFACPreconditioner(mlp(), skip_layers=skip)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(5, 4)
        self.step = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x, times=2):
        x = torch.tanh(self.into(x))
        for _ in range(times):
            x = torch.tanh(self.step(x))
        return self.out(x)


def test_a_module_used_twice_has_more_positions(device):
    model = Twice().double().to(device)
    kfac = KFACPreconditioner(model)
    x, y = batch(model, 7)
    seen = []
    model.step.register_forward_hook(
        lambda m, args, out: out.register_hook(lambda g: seen.append((args[0].detach(), g))) and None
    )
    mse(model(x), y).backward()
    kfac.step()
    a = torch.cat([torch.cat([x, torch.ones(7, 1, device=device)], 1) for x, _ in seen]).cpu()
    g = 7 * torch.cat([g for _, g in seen]).cpu()
    state = kfac.state_dict()["layers"]["step"]
    assert_close(state["input_factor"], a.T @ a / 14, 1e-12)
    assert_close(state["output_factor"], g.T @ g / 7, 1e-12)
    assert state["counts"][0] == 1


def test_an_output_that_gets_no_gradient():
    """Of two uses one is discarded: the other counts."""
    model = Twice().double()
    kfac = KFACPreconditioner(model, kl_clip=None)
    x, y = batch(model, 7)
    unused = model.step(model.into(x))
    mse(model(x, times=1), y).backward()
    kfac.step()
    assert all(state["counts"][0] == 1 for state in kfac.state_dict()["layers"].values())
    del unused


@pytest.mark.parametrize("shape", [(), (1,), (7,), (7, 2), (7, 2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_single_samples_and_operations_in_place(device, shape, bias):
    """Also if PyTorch's layer returns a view, and without a sample dimension."""
    middle = nn.Linear(5, 4, bias=bias), nn.ReLU(inplace=True), nn.Linear(4, 3, bias=bias)
    model = nn.Sequential(*middle).double().to(device)
    plain = copy.deepcopy(model)
    plain[1] = nn.ReLU()
    x = draw(*shape, 5, device=device)
    for one, inputs in ((model, x), (plain, x if shape else x[None])):
        kfac = KFACPreconditioner(one, kl_clip=None)
        one(inputs).square().mean().backward()
        kfac.step()
        assert kfac.stats()["observations"] == 2
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad.cpu(), 1e-9)


# --- refused ----------------------------------------------------------------------------------------------------------


USES = [
    (KFACPreconditioner, Parts(lambda m, x: m.blur(m.blur(x)), blur=nn.Conv1d(2, 2, 3, padding=1)), (3, 2, 5),
     NotImplementedError, "'blur', a Conv1d, was used 2 times"),
    (KFACPreconditioner, Parts(lambda m, x: m.part(x).sum() + m.part(x[1:]).sum(), part=nn.Linear(3, 3)), (4, 3),
     RuntimeError, r"'part' was used 2 times .* for \[3, 4\] samples"),
    (NaturalGradient, Parts(lambda m, x: m.norm(m.norm(x) + 1), norm=nn.GroupNorm(1, 2)), (3, 2, 4),
     NotImplementedError, "'norm', a GroupNorm, was used 2 times"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "model", "shape", "error", "words"), USES)
def test_uses_that_are_refused_by_name(cls, model, shape, error, words):
    watching = cls(model)
    with pytest.raises(error, match=words):
        model(torch.randn(shape)).square().sum().backward()
    watching.remove()


OPTIONS = [
    ({"damping": 0.0}, "damping"),
    ({"compute_method": "newton"}, "compute_method"),
    ({"sharing": "all"}, "sharing"),
    ({"fisher": "true"}, "fisher must be one of"),
    ({"loss_reduction": "none"}, "loss_reduction must be one of"),
    ({"precision": "low"}, "precision must be one of"),
    ({"accumulation_steps": 0}, "accumulation_steps must be a whole number"),
    ({"factor_dtype": torch.float16}, "factor_dtype must be"),
]
NATURAL = [({"damping": x}, "damping must be a positive number") for x in (0.0, -1.0, math.nan, math.inf, None, "1")]
NATURAL += [({"update_freq": 0}, "update_freq"), ({"accumulation_steps": 1.5}, "accumulation_steps")]
NATURAL += [({"loss_reduction": "none"}, "loss_reduction")]
OPTIONS = [(KFACPreconditioner, *row) for row in OPTIONS] + [(NaturalGradient, *row) for row in NATURAL]


@pytest.mark.parametrize(("cls", "options", "message"), OPTIONS)
def test_options_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(mlp(), **options)


def test_numbers_that_go_wrong_later_are_refused_by_name():
    model = mlp()
    optimizer = KFAC(model, factor_update_steps=1, inv_update_steps=1)
    train(model, optimizer, 1)
    for name, value in (("damping", 0.0), ("factor_update_steps", 0), ("inv_update_steps", 1.5), ("kl_clip", -1.0)):
        good = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=name):
            train(model, optimizer, 1)
        optimizer.param_groups[0][name] = good
    train(model, optimizer, 1)


@pytest.mark.parametrize("model", [nn.Identity(), nn.LayerNorm(3), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_without_a_layer_to_take_is_refused(model):
    with pytest.raises(ValueError, match=r"no layer|without parameters"):
        KFAC(model)


@pytest.mark.parametrize("model", [None, [torch.ones(2, requires_grad=True)], "model"], ids=["none", "list", "str"])
def test_what_is_no_model_is_refused(model):
    for cls in (KFAC, KFACPreconditioner):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            cls(model)
