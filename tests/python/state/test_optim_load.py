"""State from torch.optim, from a model of another dtype, through torch.distributed.checkpoint; and state that does not
fit, which raises an error that names it and changes nothing."""

import copy
import functools

import pytest
import torch
from optim_cases import (
    CLASSES,
    KINDS,
    LIVELY,
    OTHER,
    assert_go_on_alike,
    assert_same_bits,
    copies,
    fresh,
    pair,
    small,
    square,
    square_batch,
    through_file,
    train,
    trained,
)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_exchange_with_torch_optim(kind, device):
    """Into torchium and back, during training: equal to uninterrupted training, to rounding."""
    theirs = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    options = LIVELY[kind]
    model = small(device, torch.float64)
    plain = theirs(model.parameters(), **options)
    train(model, plain, 4)
    twin = copy.deepcopy(model)
    ours = CLASSES[kind](twin.parameters(), **OTHER)
    ours.load_state_dict(plain.state_dict())
    train(model, plain, 4, first=4)
    train(twin, ours, 4, first=4)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    third = copy.deepcopy(twin)
    back = theirs(third.parameters(), **OTHER)
    back.load_state_dict(through_file(ours.state_dict()))
    train(model, plain, 4, first=8)
    train(third, back, 4, first=8)
    for a, b in zip(model.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_exchange_with_torch_optim_muon(device):
    """One buffer per matrix; torch's rounding to bfloat16 makes the two differ by a few thousandths of a step."""
    options = {"lr": 0.02, "weight_decay": 0.1}
    model = square(device).float()
    for layer in (model[0], model[2]):
        layer.bias = None
    plain = torch.optim.Muon(model.parameters(), **options)
    start = copies(model.parameters())

    def go(m, optimizer, first):
        for step in range(first, first + 4):
            optimizer.zero_grad()
            m(square_batch(step, device).float()).square().mean().backward()
            optimizer.step()

    go(model, plain, 0)
    twin = copy.deepcopy(model)
    ours = CLASSES["muon"](twin.parameters(), method="muon", **OTHER)
    ours.load_state_dict(plain.state_dict())
    assert ours.param_groups[0]["lr"] == 0.02
    assert_same_bits(
        *([o.state[p]["momentum_buffer"] for p in m.parameters()] for o, m in ((plain, model), (ours, twin)))
    )
    go(model, plain, 4)
    go(twin, ours, 4)
    for a, b, s in zip(model.parameters(), twin.parameters(), start, strict=True):
        assert (a - b).norm() < 0.03 * (a - s).norm()


def _changed(name, index, number):
    """A state with another number among the counts, or as the step."""

    def change(state, entry):
        entry[name] = entry[name].clone() if name == "counts" else torch.full_like(entry[name], 0, dtype=torch.float64)
        entry[name].view(-1)[index] = number

    return change


def _other_shape(state, entry):
    name, value = next((n, v) for n, v in entry.items() if v.ndim >= 2)
    entry[name] = value.new_zeros(*value.shape[:-1], value.shape[-1] + 1)


# Invalid state and entry of one parameter, and words of the message.
WRONG = [
    (_other_shape, r"conv\.weight"),
    (lambda state, entry: state["param_groups"][0]["params"].pop(), ""),
    (lambda state, entry: state["param_groups"].append(copy.deepcopy(state["param_groups"][0])), ""),
    (lambda state, entry: state["param_groups"][0].update(lr=-1.0), "lr"),
    (lambda state, entry: state.pop("param_groups"), ""),
]
# Steps, on the host and on the device, and failed refreshes: they would change the training, or overflow.
COUNTS = [("counts", k, number) for k in range(3) for number in (-1, -5, 2**63 - 1, -(2**63))]
COUNTS += [("step", 0, number) for number in (-5.0, 0.5, 1e300, float("inf"), float("nan"))]
FAILURES = [("counts", 3, number) for number in (-1, 3, 31 << 2, 31 << 7, 1 << 29)]


def test_states_that_are_refused_change_nothing(kind, device):
    model, optimizer, twin, beside = pair(kind, device, 3)
    good = optimizer.state_dict()
    which = [n for n, _ in model.named_parameters()].index("conv.weight")
    counts = COUNTS + (FAILURES if len(good["state"][which]["counts"]) > 3 else [])
    wrong = WRONG + [(_changed(*each), rf"'{each[0]}' of 'conv\.weight'") for each in counts]
    for change, message in wrong:
        bad = copy.deepcopy(good)
        change(bad, bad["state"][which])
        with pytest.raises((ValueError, TypeError, KeyError), match=message):
            optimizer.load_state_dict(bad)
    assert_go_on_alike(model, optimizer, twin, beside, steps=3)


def without_kind(state):
    """As written by versions that did not save the kind."""
    return {name: value for name, value in state.items() if name != "torchium_kind"}


@functools.cache
def state_of(kind, source, steps, device):
    model = small(device)
    optimizer = source(model.named_parameters(), **LIVELY[kind])
    train(model, optimizer, steps)
    return optimizer.state_dict()


@pytest.mark.parametrize("steps", [0, 3])
def test_state_of_another_kind_is_refused(kind, steps, device):
    """With both names and advice, from the saved kind or from names of groups and state; the optimizer is unchanged.
    Its own state loads without a kind, too."""
    model, optimizer, twin, beside = pair(kind, device, 2)
    sources = [(other, CLASSES[other]) for other in KINDS if other != kind]
    sources += [(other, c) for other, c in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)) if other != kind]
    for other, source in sources:
        state = state_of(other, source, steps, device)
        states = [state, without_kind(state)]
        if steps and other in ("shampoo", "soap"):
            bare = [{"params": group["params"], "lr": 0.1} for group in state["param_groups"]]
            states.append({"state": state["state"], "param_groups": bare})
        names = CLASSES[kind].__name__, source.__name__
        for refused in states:
            with pytest.raises(ValueError, match=rf"^{names[0]}: the state_dict is of {names[1]},.* start fresh"):
                optimizer.load_state_dict(refused)
    assert_go_on_alike(model, optimizer, twin, beside, steps=2)
    again, other = fresh(kind, model)
    other.load_state_dict(without_kind(through_file(optimizer.state_dict())))
    assert_go_on_alike(model, optimizer, again, other, steps=2)


@pytest.mark.parametrize("left", [0, 8])
def test_state_that_was_resized(kind, left, device):
    """An error names it, on save and on load; the host's counts are rewritten."""
    model, optimizer = trained(kind, device, 2)
    good = copy.deepcopy(optimizer.state_dict())
    p = model.conv.weight
    optimizer.state[p]["counts"].untyped_storage().resize_(left)
    assert torch.equal(optimizer.state_dict()["state"][1]["counts"], good["state"][1]["counts"])
    for name in good["state"][1]:
        bad = copy.deepcopy(good)
        bad["state"][1][name].untyped_storage().resize_(left if name != "step" else 0)
        with pytest.raises(ValueError, match=rf"'{name}' of 'conv\.weight' has no storage"):
            optimizer.load_state_dict(bad)
    train(model, optimizer, 1)
    name = next(name for name, value in optimizer.state[p].items() if value.ndim > 1)
    optimizer.state[p][name].resize_(0)
    with pytest.raises(ValueError, match=rf"'{name}' of 'conv\.weight' has shape \[0\]"):
        optimizer.state_dict()
