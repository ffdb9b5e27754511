"""Transforms of torch.func over models with hooks: rejected with an error that names the alternative, and correct
inside paused()."""

import contextlib

import grad_cases as cases
import pytest
import torch
import torchium
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap


def small(device):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double().to(device)
    return model, torch.randn(3, 4, dtype=torch.float64, device=device)


def values(model):
    return {name: p.detach() for name, p in model.named_parameters()}


# Name: a function of a model and its input that uses a transform.
TRANSFORMS = {
    "grad of parameters": lambda model, x: grad(lambda p: functional_call(model, p, (x,)).square().sum())(
        values(model)
    ),
    "grad of inputs": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "jacrev": lambda model, x: jacrev(lambda p: functional_call(model, p, (x,)))(values(model)),
    "vjp": lambda model, x: vjp(lambda x: model(x), x)[1](torch.ones(3, 2, dtype=x.dtype, device=x.device)),
    "jvp": lambda model, x: jvp(lambda x: model(x), (x,), (torch.ones_like(x),)),
    "jacfwd": lambda model, x: jacfwd(lambda x: model(x))(x),
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of grad": lambda model, x: vmap(
        grad(lambda p, x: functional_call(model, p, (x[None],)).square().sum()), (None, 0)
    )(values(model), x),
}


def flat(value):
    return [t.detach() for t in torch.utils._pytree.tree_flatten(value)[0]]


WATCHERS = {
    "KFAC": lambda model: torchium.optim.KFAC(model, lr=0.1),
    "NaturalGradient": lambda model: torchium.optim.NaturalGradient(model, lr=0.1),
    "GradSampleModule": torchium.GradSampleModule,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_watched(watch, transform, device):
    """Outside paused(), inside which the transform is correct."""
    model, x = small(device)
    expected = flat(transform(model, x))
    watching = watch(model)
    words = r"0 \(Linear\)" if isinstance(watching, nn.Module) else ""
    with pytest.raises(RuntimeError, match=rf"{words}.*transform of torch\.func.*paused\(\)"):
        transform(model, x)
    with watching.paused():
        for got, wanted in zip(flat(transform(model, x)), expected, strict=True):
            assert cases.error(got, wanted) < cases.BOUND64
    with torch.no_grad():
        vmap(model)(x)  # cannot work
    watching.zero_grad()
    model(x).square().mean().backward()  # ordinary passes are captured as before
    if isinstance(watching, nn.Module):
        assert model[0].weight.grad_sample.shape == (3, 5, 4)
    else:
        watching.step()


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_norms(transform, device):
    model, x = small(device)
    with (
        contextlib.suppress(RuntimeError),
        torchium.per_sample_norms(model),
        pytest.raises(RuntimeError, match=r"0 \(Linear\).*transform of torch\.func"),
    ):
        transform(model, x)
    transform(model, x)


def test_modules_without_a_rule(device):
    model, x, y = cases.make("own parameter", 3, torch.float64, device)
    wrapped = torchium.GradSampleModule(model)
    with pytest.raises(RuntimeError, match=r"\(Add\).*transform of torch\.func"):
        grad(lambda x: model(x).sum())(x)
    cases.loss_of(wrapped(x), y).mean().backward()  # which runs it by vmap itself
    assert cases.error(model.shift.grad_sample, cases.reference(model, x, y)["shift"]) < cases.BOUND64


@pytest.mark.parametrize("name", ["conv net", "gpt with tied head", "own parameter"])
def test_functional_call_without_a_transform(name, device):
    """Substituted parameters have per-sample gradients, as they have ordinary ones."""
    model, x, y = cases.make(name, 3, torch.float64, device)
    expected = cases.reference(model, x, y)
    given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with torchium.per_sample_norms(model) as result:
        cases.loss_of(functional_call(model, given, (x,)), y).mean().backward()
    assert cases.error(result.norms, cases.reference_norms(expected)) < cases.BOUND64
    wrapped = torchium.GradSampleModule(model)
    cases.loss_of(functional_call(model, given, (x,)), y).mean().backward()
    for parameter, tensor in given.items():
        assert cases.error(tensor.grad_sample, expected[parameter]) < cases.BOUND64
    wrapped.to_standard_module()
