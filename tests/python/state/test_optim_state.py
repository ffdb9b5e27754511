"""State round trips: state_dict, torch.save, pickle, deepcopy. A copy continues bitwise like the original, and the
state of a half-precision model stays float32."""

import copy
import functools
import pickle

import pytest
import torch
from optim_cases import (
    LIVELY,
    OTHER,
    assert_go_on_alike,
    assert_same_bits,
    copies,
    fresh,
    make,
    pair,
    small,
    tensors_of,
    through_file,
    train,
    trained,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def by(way):
    return lambda model, optimizer, twin, other: other.load_state_dict(way(optimizer.state_dict()))


def in_another_default_device(model, optimizer, twin, other):
    """Host state stays on the host inside `with torch.device(...)`, which libraries use to create models."""
    with torch.device("meta"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def by_checkpoint(model, optimizer, twin, other):
    """torch.distributed.checkpoint initializes a new optimizer's state by a step with zero gradients and lr 0."""
    set_optimizer_state_dict(twin, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


WAYS = {
    "directly": by(lambda state: state),
    "deepcopy": by(copy.deepcopy),
    "pickle": by(lambda state: pickle.loads(pickle.dumps(state))),
    "file": by(through_file),
    "default device": in_another_default_device,
    "checkpoint": by_checkpoint,
}


# --- round trips


@pytest.mark.parametrize("way", WAYS)
def test_round_trip(kind, way, device):
    model, optimizer = trained(kind, device, 5)
    twin, other = fresh(kind, model)
    WAYS[way](model, optimizer, twin, other)
    assert other.param_groups[0]["lr"] == LIVELY[kind]["lr"]
    assert_same_bits(tensors_of(optimizer), tensors_of(other))
    first, second = optimizer.state_dict(), other.state_dict()
    for a, b in zip(first["param_groups"], second["param_groups"], strict=True):
        assert {**a, "param_names": None} == {**b, "param_names": None}
    assert [list(s) for s in first["state"].values()] == [list(s) for s in second["state"].values()]
    assert_go_on_alike(model, optimizer, twin, other)


def test_state_of_an_optimizer_that_has_not_stepped(kind, device):
    model, optimizer = trained(kind, device)
    state = through_file(optimizer.state_dict())
    train(model, optimizer, 3)
    twin = small(device)
    other = make(kind, twin.parameters(), **OTHER)
    train(twin, other, 2, first=30)
    twin.load_state_dict(small(device).state_dict())
    other.load_state_dict(state)
    train(twin, other, 3)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


def test_a_loaded_state_is_a_copy(kind, device):
    """Two optimizers loaded from one state do not share it, nor is it updated with them."""
    model, optimizer = trained(kind, device, 3)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    twin, other = fresh(kind, model)
    third, another = fresh(kind, model)
    other.load_state_dict(state)
    another.load_state_dict(state)
    train(twin, other, 5)
    for saved, before in zip(state["state"].values(), kept["state"].values(), strict=True):
        assert_same_bits(saved.values(), before.values())
    assert_go_on_alike(model, optimizer, third, another)


def test_groups_and_late_parameters(kind, device):
    """Groups added during training, a parameter without gradients, and different step counts."""

    def grow(model, optimizer):
        optimizer.add_param_group({"params": [model.hidden.weight, model.hidden.bias], "lr": 0.002})

    def start(model):
        rest = [p for n, p in model.named_parameters() if not n.startswith("hidden")]
        return make(kind, rest)

    model = small(device)
    model.norm.bias.requires_grad_(False)
    optimizer = start(model)
    train(model, optimizer, 3)
    grow(model, optimizer)
    train(model, optimizer, 4, first=3)
    twin = copy.deepcopy(model)
    other = start(twin)
    grow(twin, other)
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert_go_on_alike(model, optimizer, twin, other)
    for m in (model, twin):
        m.norm.bias.requires_grad_(True)
    assert_go_on_alike(model, optimizer, twin, other)


# --- half precision


def floats_of(optimizer):
    return [v for s in optimizer.state.values() for v in s.values() if v.is_floating_point()]


@pytest.mark.parametrize("master_weights", [False, True], ids=["alone", "master"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_models_keep_float32_state(kind, dtype, master_weights, device):
    model = small(device, dtype)
    optimizer = make(kind, model.parameters(), master_weights=master_weights)
    train(model, optimizer, 5)
    assert floats_of(optimizer)
    assert all(v.dtype != dtype for v in floats_of(optimizer))
    for p in model.parameters() if master_weights else ():
        assert torch.equal(optimizer.state[p]["master"].to(dtype), p)
    twin, other = fresh(kind, model, master_weights=master_weights)
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert_same_bits(tensors_of(optimizer), tensors_of(other))
    assert_go_on_alike(model, optimizer, twin, other)
    assert all(v.dtype != dtype for v in floats_of(other))


# --- whole optimizers


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), functools.partial(through_file, weights_only=False)],
)
@pytest.mark.parametrize("steps", [0, 5])
def test_copies_of_model_and_optimizer(kind, steps, again, device):
    model, optimizer = trained(kind, device, steps)
    twin, other = again((model, optimizer))
    assert type(other) is type(optimizer)
    assert next(twin.parameters()) is other.param_groups[0]["params"][0]
    kept = copies(model.parameters())
    train(twin, other, 3, first=100)
    assert_same_bits(kept, copies(model.parameters()))
    train(model, optimizer, 3, first=100)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


# --- the dictionary itself


def test_what_a_state_dict_holds(kind, device):
    model, optimizer = trained(kind, device, 3)
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "torchium_kind"}
    assert state["torchium_kind"] == kind
    assert list(state["state"]) == list(range(len(list(model.parameters()))))
    assert state["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
    for entry in state["state"].values():
        assert "step" in entry
        assert all(isinstance(v, torch.Tensor) for v in entry.values())
    p = model.hidden.weight
    names = {
        "sgd": "momentum_buffer",
        "adamw": "exp_avg",
        "shampoo": "exp_avg",
        "soap": "exp_avg",
        "muon": "momentum_buffer",
        "lion": "exp_avg",
        "normuon": "momentum_buffer",
        "kl_shampoo": "exp_avg",
    }
    assert optimizer.state[p][names[kind]].shape == p.shape
    assert optimizer.state[p][names[kind]].device == p.device


def test_state_is_alive(kind, device):
    """optimizer.state is the state itself: it changes with the steps, and writing to it takes effect."""
    model, optimizer, twin, beside = pair(kind, device, 3)
    before = copies(tensors_of(optimizer))
    train(model, optimizer, 1, first=3)
    train(twin, beside, 1, first=3)
    assert any(not torch.equal(a, b) for a, b in zip(before, tensors_of(optimizer), strict=True))
    for s in optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if name in s:
                s[name].fill_(1.0)  # which changes a sign, too
    train(model, optimizer, 1, first=4)
    train(twin, beside, 1, first=4)
    assert not torch.equal(model.out.weight, twin.out.weight)


def test_state_dict_hooks(kind, device):
    model, optimizer = trained(kind, device, 2)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda opt, state: state | {"note": "kept"})
    state = optimizer.state_dict()
    assert state["note"] == "kept"

    def strip(opt, state):
        seen.append("before loading")
        return {k: v for k, v in state.items() if k != "note"}

    _, other = fresh(kind, model)
    other.register_load_state_dict_pre_hook(strip)
    other.register_load_state_dict_post_hook(lambda opt: seen.append(f"after loading {opt.param_groups[0]['lr']}"))
    other.load_state_dict(state)
    assert seen == ["before saving", "before loading", f"after loading {LIVELY[kind]['lr']}"]
    assert_same_bits(tensors_of(optimizer), tensors_of(other))
