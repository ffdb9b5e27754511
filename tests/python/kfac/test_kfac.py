"""KFAC and its preconditioner against plain float64 references, which look at one sample after the other; which layers
they take, and what they refuse.
"""

import copy
import math

import pytest
import torch
from kfac_cases import (
    METHODS,
    Convolutions,
    KfacReference,
    assert_close,
    assert_same,
    batch,
    draw,
    mlp,
    mse,
    sample_gradients,
    train,
    twin,
)
from torch import nn
from torchium.optim import KFAC, KFACPreconditioner

# --- against the definition -------------------------------------------------------------------------------------------

# In float64 what is left is the rounding of eigenvectors and inverses, about 1e-16 times the largest eigenvalue over
# the damping, which twenty steps carry on; in float32 the same with 1e-7.
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"kl_clip": 0.0}, {"cov": 2, "inv": 4}, {"bias": False}], ids=str)
def test_twenty_steps_follow_the_definition(device, dtype, method, options):
    options = {"cov": 1, "inv": 3, "bias": True, "kl_clip": 1e-3} | options
    model = mlp(device, dtype, bias=options.pop("bias"))
    numbers = {"damping": 0.03, "kl_clip": options["kl_clip"], "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    plan = {"TCov": options["cov"], "TInv": options["inv"], "precision": "highest"}
    reference = KfacReference(model, method, decay=0.9, cov=options["cov"], inv=options["inv"], **numbers)
    optimizer = KFAC(model, factor_decay=0.9, method=method, **plan, **numbers)
    for step in range(20):
        x, y = batch(model, 9, step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        reference.step(x.double().cpu(), y.double().cpu(), mse)
    for (name, p), expected in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        assert_close(p, expected.detach(), BOUNDS[dtype], name)


def test_the_preconditioner_before_any_optimizer(device):
    model = mlp(device)
    reference = KfacReference(model, "eigen", damping=0.01, decay=0.95, kl_clip=1e-3, lr=0.1)
    kfac = KFACPreconditioner(model, damping=0.01, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, y = batch(model, 6, step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        kfac.step()
        optimizer.step()
        reference.step(x.cpu(), y.cpu(), mse)
    for p, expected in zip(model.parameters(), reference.model.parameters(), strict=True):
        assert_close(p, expected.detach(), 1e-9)
    stats = kfac.stats()
    assert stats["steps"] == 5 and stats["observations"] == 15 and stats["refreshes"] == 15 and stats["layers"] == 3
    assert 0 < stats["scale"] <= 1 and stats["failed"] == stats["rejected"] == 0


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


def exact_gauss_newton(model, layer, x, hessian):
    """The layer's block of the mean over samples of J' H J, for (weight, bias) as one matrix [p, d]."""
    p, d = layer.weight.shape[0], layer.weight.shape[1] + (layer.bias is not None)
    block = torch.zeros(p * d, p * d, dtype=torch.float64)
    for i in range(len(x)):
        out = model(x[i : i + 1])[0]
        rows = []
        for j in range(len(out)):
            wanted = [layer.weight] + ([layer.bias] if layer.bias is not None else [])
            parts = torch.autograd.grad(out[j], wanted, retain_graph=True)
            grad = torch.cat([parts[0]] + ([parts[1][:, None]] if len(parts) > 1 else []), 1)
            rows.append(grad.flatten())
        jacobian = torch.stack(rows)
        block += jacobian.T @ hessian @ jacobian / len(x)
    return block


@pytest.mark.parametrize("method", ["eigen", "ekfac"])
def test_exact_gauss_newton_on_a_deep_linear_network(device, method):
    """There the gradients of the outputs do not depend on the inputs, and each block is a Kronecker product. All of the
    square root of the Hessian is shown, one column for each copy of the inputs, so that G is no estimate."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 3)).double().to(device)
    x = draw(11, 5, device=device)
    p, damping = 3, 0.02
    root = math.sqrt(2.0 / p) * torch.eye(p, dtype=torch.float64)  # of the Hessian of the mean square of p numbers
    kfac = KFACPreconditioner(
        model, damping=damping, kl_clip=None, compute_method=method, loss_reduction="sum", factor_decay=0.0
    )
    weights = math.sqrt(p) * root.repeat_interleave(len(x), 0).to(device)
    (model(x.repeat(p, 1)) * weights).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        parameter.grad = draw(*parameter.shape, device=device)
        gradients[name] = parameter.grad.double().cpu().clone()
    kfac.step()
    plain = twin(model)
    for name, layer in plain.named_children():
        block = exact_gauss_newton(plain, layer, x.cpu(), root @ root)
        parts = [gradients[f"{name}.weight"]]
        if layer.bias is not None:
            parts.append(gradients[f"{name}.bias"][:, None])
        grad = torch.cat(parts, 1)
        solved = torch.linalg.solve(block + damping * torch.eye(len(block), dtype=torch.float64), grad.flatten())
        solved = solved.reshape(grad.shape)
        got = getattr(model, name)
        assert_close(got.weight.grad, solved[:, : layer.in_features], 1e-9, name)
        if layer.bias is not None:
            assert_close(got.bias.grad, solved[:, -1], 1e-9, name)


def test_ekfac_is_closer_to_the_exact_matrix(device):
    """Of all diagonals in a basis, that of the mean squares is the closest to the matrix."""
    model = mlp(device)
    x, y = batch(model, 40)
    kfac = KFACPreconditioner(model, compute_method="ekfac", factor_decay=0.0, inv_update_steps=100)
    for _ in range(2):  # the second time scales are those of the same batch in its own basis
        model.zero_grad()
        mse(model(x), y).backward()
        kfac.step()
    rows = sample_gradients(twin(model), mse, x.cpu(), y.cpu())
    for name, state in kfac.state_dict()["layers"].items():
        g = torch.cat([rows[f"{name}.weight"], rows[f"{name}.bias"][:, :, None]], 2).flatten(1)
        exact = g.T @ g / len(g)
        basis = torch.kron(state["output_basis"].cpu(), state["input_basis"].cpu())
        products = torch.outer(state["output_values"].cpu(), state["input_values"].cpu())
        far = (basis.T @ torch.diag(products.flatten()) @ basis - exact).norm()
        near = (basis.T @ torch.diag(state["scales"].cpu().flatten()) @ basis - exact).norm()
        assert near < far, f"{name}: {near:.3g} and {far:.3g}"


# --- layers -----------------------------------------------------------------------------------------------------------


def unfolded(module, x):
    """Patches of a convolution's input by PyTorch alone, [B, positions, groups, C / groups * kernel], by probing each
    element of the kernel with a convolution that picks it."""
    per_group = module.weight[0].numel()
    pick = torch.eye(per_group, dtype=x.dtype).reshape(per_group, *module.weight.shape[1:])
    probe = copy.deepcopy(module)
    probe.out_channels = per_group * module.groups
    probe.weight = nn.Parameter(pick.repeat(module.groups, *[1] * (pick.ndim - 1)))
    probe.bias = None
    patches = probe(x).flatten(2)  # (B, groups * per_group, T)
    return patches.reshape(len(x), module.groups, per_group, -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_convolutions(device, sharing):
    """Groups, dilation, stride, 'same' and circular padding, against patches picked out by PyTorch."""
    model = Convolutions().double().to(device)
    x = draw(6, 4, 8, device=device)
    kfac = KFACPreconditioner(model, sharing=sharing)
    seen = {}
    for name, module in model.named_children():

        def hook(module, args, output, name=name):
            output.register_hook(lambda g: seen.__setitem__(name, (args[0].detach(), g)))

        module.register_forward_hook(hook)
    model(x).square().mean().backward()
    kfac.step()
    states = kfac.state_dict()["layers"]
    for name, module in twin(model).named_children():
        inputs, g = (t.cpu() for t in seen[name])
        linear = isinstance(module, nn.Linear)
        a = inputs[:, None, None, :] if linear else unfolded(module, inputs)  # (B, T, groups, d)
        if module.bias is not None:
            a = torch.cat([a, torch.ones(*a.shape[:-1], 1, dtype=a.dtype)], -1)
        groups = a.shape[2]
        g = len(x) * (g[:, :, None] if linear else g.flatten(2)).reshape(len(x), groups, -1, a.shape[1])
        if sharing == "reduce":
            a, g = a.mean(1, keepdim=True), g.sum(-1, keepdim=True)
        first = torch.einsum("btgi,btgj->gij", a, a) / (a.shape[0] * a.shape[1])
        second = torch.einsum("bgit,bgjt->gij", g, g) / len(x)
        assert_close(states[name]["input_factor"].reshape(first.shape), first.detach(), 1e-12, name)
        assert_close(states[name]["output_factor"].reshape(second.shape), second.detach(), 1e-12, name)


def test_convolutions_are_trained(device):
    torch.manual_seed(0)
    model = Convolutions().to(device)
    optimizer = KFAC(model, lr=0.05, damping=0.01, TCov=1, TInv=5)
    x, y = draw(32, 4, 8, device=device, dtype=torch.float32), draw(32, 3, device=device, dtype=torch.float32)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert optimizer.stats()["failed"] == 0


class Mixed(nn.Module):
    """Layers that KFAC takes, and others."""

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
    """Of two uses one is thrown away: the other counts."""
    model = Twice().double()
    kfac = KFACPreconditioner(model, kl_clip=None)
    x, y = batch(model, 7)
    unused = model.step(model.into(x))
    mse(model(x, times=1), y).backward()
    kfac.step()
    assert all(state["counts"][0] == 1 for state in kfac.state_dict()["layers"].values())
    del unused


def test_a_convolution_used_twice_is_refused_by_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blur = nn.Conv1d(2, 2, 3, padding=1)

        def forward(self, x):
            return self.blur(self.blur(x))

    model = Net()
    KFACPreconditioner(model)
    with pytest.raises(NotImplementedError, match="'blur', a Conv1d, was used 2 times"):
        model(torch.randn(3, 2, 5)).sum().backward()


def test_uses_for_different_samples_are_refused_by_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x):
            return self.part(x).sum() + self.part(x[1:]).sum()

    model = Net()
    KFACPreconditioner(model)
    with pytest.raises(RuntimeError, match=r"'part' was used 2 times .* for \[3, 4\] samples"):
        model(torch.randn(4, 3)).backward()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (7, 2), (7, 2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_single_samples_and_operations_in_place(device, shape, bias):
    """Also where PyTorch's layer gives a view, and where the samples have no dimension."""
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


def test_sequences(device):
    """[B, T, d]: B samples of T positions."""
    model = nn.Linear(4, 3).double().to(device)
    kfac = KFACPreconditioner(model)
    x, y = draw(5, 6, 4, device=device), draw(5, 6, 3, device=device)
    mse(model(x), y).backward()
    g = 5 * (2 * (model(x) - y) / y.numel()).detach().cpu()
    kfac.step()
    a = torch.cat([x.cpu(), torch.ones(5, 6, 1)], 2).flatten(0, 1)
    state = kfac.state_dict()["layers"]["Linear"]
    assert_close(state["input_factor"], a.T @ a / 30, 1e-12)
    assert_close(state["output_factor"], torch.einsum("bti,btj->ij", g, g) / 5, 1e-12)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"damping": 0.0}, "damping"),
        ({"damping": -1.0}, "damping"),
        ({"damping": math.nan}, "damping"),
        ({"factor_decay": 1.5}, "factor_decay"),
        ({"kl_clip": -1.0}, "kl_clip"),
        ({"compute_method": "newton"}, "compute_method"),
        ({"sharing": "all"}, "sharing"),
        ({"fisher": "true"}, "fisher must be one of"),
        ({"loss_reduction": "none"}, "loss_reduction must be one of"),
        ({"precision": "low"}, "precision must be one of"),
        ({"accumulation_steps": 0}, "accumulation_steps must be a whole number"),
        ({"factor_dtype": torch.float16}, "factor_dtype must be"),
        ({"inv_dtype": torch.bfloat16}, "inv_dtype must be"),
        ({"inv_dtype": torch.float64, "factor_dtype": torch.float32}, "needs factor_dtype"),
    ],
    ids=str,
)
def test_options_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KFACPreconditioner(mlp(), **options)


def test_numbers_that_go_wrong_later_are_refused_by_name():
    model = mlp()
    optimizer = KFAC(model, TCov=1, TInv=1)
    train(model, optimizer, 1)
    for name, value in (("damping", 0.0), ("TCov", 0), ("TInv", 1.5), ("kl_clip", -1.0)):
        good = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match={"TCov": "factor_update", "TInv": "inv_update"}.get(name, name)):
            train(model, optimizer, 1)
        optimizer.param_groups[0][name] = good
    train(model, optimizer, 1)


@pytest.mark.parametrize("model", [nn.Identity(), nn.LayerNorm(3), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_without_a_layer_to_take_is_refused(model):
    with pytest.raises(ValueError, match=r"no layer|empty parameter list"):
        KFAC(model)


@pytest.mark.parametrize("model", [None, [torch.ones(2, requires_grad=True)], "model"], ids=["none", "list", "str"])
def test_what_is_no_model_is_refused(model):
    for cls in (KFAC, KFACPreconditioner):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            cls(model)
