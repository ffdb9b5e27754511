"""NaturalGradient vs a dense solve over all parameters at once, in float64, with per-sample gradients from one backward
pass each; and its errors."""

import copy

import pytest
import torch
from grad_cases import LAYERS, Add, loss_of, make, reference, tokens_twice
from kfac_cases import assert_close, batch, mlp, mse, natural_gradient, train, twin
from torch import nn
from torchium.optim import NaturalGradient

# The Gram matrix has float64 rounding, which the solve magnifies by its largest eigenvalue over m damping.
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-3}


def expected_of(model, x, y, damping=0.05):
    """By name: the expected gradients after a step."""
    rows = {n: g.cpu() for n, g in reference(twin(model).to(x.device), x, y).items()}
    return {n: g for n, g in natural_gradient(rows, damping).items() if model.get_parameter(n).requires_grad}


def assert_gradients(model, expected, tolerance=1e-9):
    for name, g in expected.items():
        assert_close(model.get_parameter(name).grad, g, tolerance, name)


@pytest.mark.parametrize(("size", "dtype"), zip((1, 9), BOUNDS, strict=True))
@pytest.mark.parametrize("name", [*LAYERS, "conv net", "layers in turns"])
def test_natural_gradient_is_the_dense_solve(device, name, size, dtype):
    model, x, y = make(name, size, dtype, device)
    before = twin(model)
    optimizer = NaturalGradient(model, lr=0.1, damping=0.01)
    expected = expected_of(model, x, y, 0.01)
    whole = torch.cat([v.flatten() for v in expected.values()]).norm().item()
    loss_of(model(x), y).mean().backward()
    optimizer.step()
    for n, p in model.named_parameters():
        error = (p.grad.double().cpu() - expected[n]).norm().item() / whole
        assert error < BOUNDS[dtype], f"{n} is off by {error:.2g} of the whole gradient"
        moved = (before.get_parameter(n).detach() - 0.1 * expected[n]).to(dtype)
        torch.testing.assert_close(p.detach().cpu(), moved, rtol=1e-3, atol=BOUNDS[dtype] * whole)


@pytest.mark.parametrize("every", [1, 3])
def test_steps_follow_the_definition(device, every):
    """Between updates each batch's gradient is solved with the Fisher matrix of the stored batch."""
    model = mlp(device)
    plain = twin(model)
    options = {"momentum": 0.9, "weight_decay": 0.01}
    optimizer = NaturalGradient(model, lr=0.05, damping=0.1, update_freq=every, **options)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, **options)
    for step in range(8):
        x, y = batch(plain, 6, step)
        if step % every == 0:
            j = torch.cat([g.flatten(1) for g in reference(plain, x, y).values()], 1)
            fisher = j.T @ j / len(j) + 0.1 * torch.eye(j.shape[1], dtype=torch.float64)
        sgd.zero_grad()
        mse(plain(x), y).backward()
        grad = torch.cat([p.grad.flatten() for p in plain.parameters()])
        parts = torch.linalg.solve(fisher, grad).split([p.numel() for p in plain.parameters()])
        for p, part in zip(plain.parameters(), parts, strict=True):
            p.grad = part.reshape(p.shape)
        sgd.step()
        train(model, optimizer, 1, first=step, size=6)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close(q, p.detach(), 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("parts", [1, 3])
def test_micro_batches_are_one_batch(device, reduction, parts):
    """Per-sample losses are independent of the loss's reduction."""
    model = mlp(device)
    optimizer = NaturalGradient(model, damping=0.05, loss_reduction=reduction, accumulation_steps=parts)
    x, y = batch(model, 9)
    expected = expected_of(model, x, y)
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        each = (model(a) - b).square().mean(1)
        (each.mean() / parts if reduction == "mean" else each.sum()).backward()
    optimizer.step()
    assert_gradients(model, expected)


def test_half_precision(device):
    """Under autocast, and with a bfloat16 model: the error is the rounding to 8 bits in each gradient."""
    torch.manual_seed(0)
    wide = mlp(device, torch.float32, sizes=(5, 8, 3))
    x, y = batch(wide, 12)
    expected = expected_of(wide, x, y, 1.0)
    for half in (False, True):
        model = copy.deepcopy(wide).to(torch.bfloat16 if half else torch.float32)
        optimizer = NaturalGradient(model, lr=1e-3, damping=1.0)
        with torch.autocast(device, torch.bfloat16, enabled=not half):
            loss = mse(model(x.to(next(model.parameters()).dtype)).float(), y)
        loss.backward()
        optimizer.step()
        assert_gradients(model, expected, 0.1)


# --- right, or an error that names it ---------------------------------------------------------------------------------


def test_frozen_parameters(device):
    model = mlp(device)
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    optimizer = NaturalGradient(model, damping=0.05)
    x, y = batch(model, 7)
    expected = expected_of(model, x, y)
    assert set(expected) == {"0.weight", "2.bias"}
    mse(model(x), y).backward()
    optimizer.step()
    assert_gradients(model, expected)
    assert all(p.requires_grad or p.grad is None for p in model.parameters())


def test_layers_that_no_gradient_reaches(device):
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(5, 3)}).double().to(device)
    optimizer = NaturalGradient(model, damping=0.05)
    x, y = batch(model, 6)
    before = model["unused"].weight.detach().clone()
    mse(model["used"](x), y).backward()
    optimizer.step()
    assert torch.equal(before, model["unused"].weight) and model["unused"].weight.grad is None


@pytest.mark.parametrize(
    "model, message",
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "'1', a BatchNorm1d"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), "'1', which mixes the samples"),
        (nn.Sequential(nn.LSTM(3, 3), nn.PReLU()), "'0', a LSTM; '1', a PReLU"),
        (nn.Sequential(nn.ConvTranspose1d(2, 2, 2)), "ConvTranspose1d"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))), "ParametrizedLinear"),
        (tokens_twice(), "'tokens', which shares a parameter.*'head', which shares"),
        (Add(), "'Add', a Add"),
    ],
    ids=["batch norm", "plain batch norm", "lstm", "transposed", "parametrized", "tied", "own"],
)
def test_layers_are_refused_before_the_first_backward(model, message):
    with pytest.raises(ValueError, match=message):
        NaturalGradient(model)


def test_frozen_batch_norm_is_right():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval().requires_grad_(False), nn.Linear(4, 3)).double()
    model[1].eval()
    optimizer = NaturalGradient(model, damping=0.05)
    x, y = batch(model, 6)
    expected = expected_of(model, x, y)
    mse(model(x), y).backward()
    optimizer.step()
    assert_gradients(model, expected)


def test_weights_that_are_used_without_their_module_are_refused():
    model = mlp()
    optimizer = NaturalGradient(model)
    x, _ = batch(model, 4)
    nn.functional.linear(x, model[0].weight).sum().backward()
    with pytest.raises(RuntimeError, match="seen 0 backward passes through layer '0'"):
        optimizer.step()


def test_micro_batches_of_different_sizes_are_refused():
    model = mlp()
    optimizer = NaturalGradient(model, accumulation_steps=2)
    for size in (4, 5):
        x, y = batch(model, size)
        (mse(model(x), y) / 2).backward()
    with pytest.raises(RuntimeError, match="expected one shape"):
        optimizer.step()


def test_layers_with_different_samples_are_refused():
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    optimizer = NaturalGradient(model)
    (model["a"](torch.randn(4, 3)).sum() + model["b"](torch.randn(5, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match="different numbers of samples"):
        optimizer.step()
