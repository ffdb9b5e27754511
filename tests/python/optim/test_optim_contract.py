"""The optimizers follow torch.optim's contract: construction, groups, closures, hooks; and they train."""

import inspect
import warnings

import numpy as np
import pytest
import torch
import torchium.optim
from optim_cases import CLASSES, LIVELY, assert_same_bits, copies, make, small, train, trained


def matrix(*shape, device="cpu"):
    return torch.nn.Parameter(torch.randn(shape or (4, 3), device=device))


# --- construction


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_signature_begins_as_torchs(kind):
    """Positional arguments mean the same in both, and have the same defaults, but for Muon's own."""
    theirs = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "muon": torch.optim.Muon}[kind]
    positional = [n for n, p in inspect.signature(theirs).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    mine = list(inspect.signature(CLASSES[kind]).parameters)
    assert mine[: len(positional)] == positional
    if kind != "muon":
        defaults = {name: inspect.signature(theirs).parameters[name].default for name in positional[1:]}
        assert defaults.items() <= CLASSES[kind]([matrix()]).defaults.items()


def test_shampoo_by_position():
    first = torchium.optim.Shampoo([matrix()], 0.1, (0.5, 0.6), 1e-3, 0.2).param_groups[0]
    assert [first[name] for name in ("lr", "betas", "eps", "weight_decay")] == [0.1, (0.5, 0.6), 1e-3, 0.2]


def test_cuda_shampoo_keeps_its_defaults():
    """Of the original class of this name; all else is Shampoo's."""
    before = {"lr": 0.03, "eps": 1e-4, "precondition_frequency": 100, "weight_decay": 0}
    before |= {"betas": (0.9, 1.0), "grafting": None}
    group = torchium.optim.CUDAShampoo([matrix()]).param_groups[0]
    assert before.items() <= group.items()
    assert group.keys() == torchium.optim.Shampoo([matrix()]).param_groups[0].keys()
    assert issubclass(torchium.optim.CUDAShampoo, torchium.optim.Shampoo)
    by_position = torchium.optim.CUDAShampoo([matrix()], 0.1, 1e-3, 7, 0.2, grafting="sgd").param_groups[0]
    assert [by_position[name] for name in ("lr", "eps", "precondition_frequency", "grafting")] == [0.1, 1e-3, 7, "sgd"]


@pytest.mark.parametrize("make_muon", [torchium.optim.Muon, torchium.optim.NorMuon])
def test_a_number_of_steps_alone_is_not_silent(make_muon):
    """Selects other polynomials than the default."""
    with pytest.warns(UserWarning, match="ns_steps is 5 and method is not given: 'polar_express' is used"):
        assert make_muon([matrix()], ns_steps=5).param_groups[0]["method"] == "polar_express"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_muon([matrix()])
        make_muon([matrix()], ns_steps=5, method="muon")
        made = make_muon([matrix()], ns_steps=5, ns_coefficients=(3.4445, -4.7750, 2.0315))
    config = made._config(
        made.param_groups[0], 0.1
    )  # torch.optim.Muon's own argument, given alone, means its polynomial
    assert config["muon.method"] == "muon" and config["muon.ns_coefficients"] == (3.4445, -4.7750, 2.0315)


def test_parameters_in_every_form(kind, device):
    """A list, an iterator, groups, named parameters and named groups, some without names, train alike."""
    forms = [
        lambda m: list(m.parameters()),
        lambda m: (p for p in m.parameters()),
        lambda m: [{"params": list(m.parameters())}],
        lambda m: m.named_parameters(),
        lambda m: [{"params": m.named_parameters(), "lr": LIVELY[kind]["lr"]}],
        lambda m: [{"params": []}, {"params": list(m.parameters())}],
    ]
    results = []
    for form in forms:
        model = small(device)
        train(model, make(kind, form(model)), 3)
        results.append(copies(model.parameters()))
    for other in results[1:]:
        assert_same_bits(results[0], other)


# --- closures


def test_closure(kind, device):
    model, other = small(device), small(device)
    optimizer = make(kind, model.parameters())
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (model.out.weight**2).sum() + model.conv.weight.sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure)
    assert len(calls) == 1 and returned is calls[0]
    beside = make(kind, other.parameters())
    ((other.out.weight**2).sum() + other.conv.weight.sum()).backward()
    assert beside.step() is None
    assert_same_bits(copies(model.parameters()), copies(other.parameters()))


def test_a_closure_that_raises_changes_nothing(kind, device):
    model, optimizer = trained(kind, device, 2)
    before = copies(model.parameters())

    def closure():
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        optimizer.step(closure)
    assert_same_bits(before, copies(model.parameters()))
    train(model, optimizer, 1)


# --- hooks


def test_step_hooks(kind, device):
    model, optimizer = trained(kind, device)
    seen = []

    def before(opt, args, kwargs):
        seen.append(("before", opt is optimizer, model.scale.item()))

    def after(opt, args, kwargs):
        seen.append(("after", opt is optimizer, model.scale.item()))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    train(model, optimizer, 3)
    assert [s[0] for s in seen] == ["before", "after"] * 3
    assert all(s[1] for s in seen)
    assert seen[4][2] != seen[5][2]
    for handle in handles:
        handle.remove()
    train(model, optimizer, 1)
    assert len(seen) == 6


def test_a_pre_hook_may_change_the_arguments():
    model = small()
    optimizer = make("adamw", model.parameters())
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


# --- groups


def test_numbers_of_other_types(kind, device):
    """Integers, NumPy's numbers and tensors of one element are the same number."""
    results = []
    for lr in (0.25, np.float64(0.25), np.float32(0.25), torch.tensor([0.25])):
        model = small(device)
        train(model, make(kind, model.parameters(), lr=lr, weight_decay=np.float32(0.5)), 2)
        results.append(copies(model.parameters()))
    for other in results[1:]:
        assert_same_bits(results[0], other)
    train(model, make(kind, model.parameters(), lr=1, weight_decay=0), 1)
