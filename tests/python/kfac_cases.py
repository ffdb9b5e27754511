"""Shared by tests of KFAC and of the natural gradient: small models, and references in plain float64 PyTorch that
process one sample at a time."""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)  # tensors are small: threads would only synchronize
torch.backends.cudnn.allow_tf32 = False  # convolutions of the models are compared in float32


def mlp(device="cpu", dtype=torch.float64, bias=True, sizes=(5, 7, 4, 3)):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device=device, dtype=dtype)


METHODS = ["eigen", "inverse", "ekfac"]
mse = functional.mse_loss


def batch(model, size, step=0):
    p = next(model.parameters())
    generator = torch.Generator().manual_seed(1000 * step + size)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x.to(p.device, p.dtype), y.to(p.device, p.dtype)


def train(model, optimizer, steps, first=0, size=8):
    for step in range(first, first + steps):
        x, y = batch(model, size, step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def draw(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(device=device, dtype=dtype)


def twin(model):
    """The same values in float64 on the CPU, without hooks."""
    other = copy.deepcopy(model)
    for module in other.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return other.double().cpu()


def natural_gradient(rows, damping):
    """(J'J/m + damping I)^-1 (mean of the rows), by a dense solve over all parameters at once."""
    j = torch.cat([g.flatten(1) for g in rows.values()], 1)
    m, p = j.shape
    solved = torch.linalg.solve(j.T @ j / m + damping * torch.eye(p, dtype=j.dtype), j.mean(0))
    parts = solved.split([g[0].numel() for g in rows.values()])
    return {name: part.reshape(g.shape[1:]) for (name, g), part in zip(rows.items(), parts, strict=True)}


def assert_close(actual, expected, tolerance, what=""):
    """Norm of the difference over the norm."""
    error = (actual.detach().double().cpu() - expected).norm() / expected.norm().clamp_min(1e-300)
    assert error < tolerance, f"{what} is off by {error:.2g}, allowed {tolerance:.2g}"


def factors_of_samples(model, x, y):
    """{name: (A, G)} of the linear layers: mean outer products of the inputs, with a 1 for the bias, and of the
    gradients of each sample's loss, by one forward and backward pass per sample."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def hook(module, args, output, name=name):
                rows = seen.setdefault(name, ([], []))
                one = [torch.ones(1, dtype=output.dtype)] if module.bias is not None else []
                rows[0].append(torch.cat([args[0].detach()[0], *one]))
                output.register_hook(lambda g: rows[1].append(g.detach()[0]))

            handles.append(module.register_forward_hook(hook))
    for i in range(len(x)):
        mse(model(x[i : i + 1]), y[i : i + 1]).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return {name: [torch.stack(r).T @ torch.stack(r) / len(x) for r in rows] for name, rows in seen.items()}
