"""Mixed precision: GradScaler in both of its protocols, and non-finite gradients. Half-precision parameters are
compared in C (test_optim_types.c, test_optim_halves.c, test_stochastic_rounding.c).

A scale that is a power of two changes no bit of a gradient, so scaled training must be bitwise equal to unscaled
training.
"""

import copy

import pytest
import torch
from optim_cases import assert_same_bits, copies, loss_of, make, small, train

SCALE = 2.0**10


def steady(kind, device):
    """Refreshes unaffected by a skipped step: the host, which plans them, does not see skips on a GPU."""
    if kind == "soap" and device != "cpu":
        return {"precondition_frequency": 1000, "stagger": False}
    return {"precondition_frequency": 1} if kind in ("shampoo", "kl_shampoo") else {}


def scaler_for(device, **options):
    return torch.amp.GradScaler(device, **({"init_scale": SCALE, "growth_interval": 1000} | options))


def train_scaled(model, optimizer, scaler, steps, first=0, unscale=False, spoil=()):
    """Training with loss scaling; at the given steps one gradient is infinite."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step in spoil:
            model.hidden.weight.grad[1, 2] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def train_clipped(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


# --- GradScaler


def test_only_fused_optimizers_scale_by_themselves(kind):
    """As in PyTorch, so that frameworks unscale and clip for the others."""
    for fused in (None, False, True):
        optimizer = make(kind, small("cpu").parameters(), fused=fused)
        for made in (optimizer, copy.deepcopy(optimizer)):
            assert made._step_supports_amp_scaling is bool(fused)


@pytest.mark.parametrize("fused", [None, True])
def test_step_directly(kind, fused, device):
    """scaler.step without unscale_: a fused optimizer divides by the scale itself, and does not change the gradients;
    for the others the scaler does it."""
    model, twin = small(device), small(device)
    optimizer, beside = make(kind, model.parameters(), fused=fused), make(kind, twin.parameters())
    train_scaled(model, optimizer, scaler_for(device), 6)
    train(twin, beside, 6)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    torch.testing.assert_close(model.conv.weight.grad, twin.conv.weight.grad * (SCALE if fused else 1.0))


@pytest.mark.parametrize("unscale", [False, True], ids=["direct", "unscale_"])
@pytest.mark.parametrize("fused", [None, True])
def test_an_infinite_gradient_skips_the_step(kind, fused, unscale, device):
    """A bad step only reduces the scale, even the first step."""
    model, twin = small(device), small(device)
    optimizer, beside = (make(kind, m.parameters(), fused=fused, **steady(kind, device)) for m in (model, twin))
    scaler = scaler_for(device)
    go = train_clipped if unscale else train
    before = copies(model.parameters())
    train_scaled(model, optimizer, scaler, 1, first=50, unscale=unscale, spoil=[50])
    assert_same_bits(before, copies(model.parameters()))
    train_scaled(model, optimizer, scaler, 3, unscale=unscale)
    train_scaled(model, optimizer, scaler, 2, first=60, unscale=unscale, spoil=[60, 61])
    train_scaled(model, optimizer, scaler, 3, first=3, unscale=unscale)
    go(twin, beside, 6)
    assert scaler.get_scale() == SCALE / 8
    assert optimizer.stats()["skipped"] == (3 if fused else 0)  # the scaler skips the others beforehand
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))


# --- non-finite gradients


def bad_step(model, optimizer, value, step=90):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    model.hidden.weight.grad[3, 1] = value
    optimizer.step()


def test_raise(kind, device):
    model, twin = small(device), small(device)
    options = steady(kind, device) | {"nonfinite": "raise"}
    optimizer, beside = (make(kind, m.named_parameters(), **options) for m in (model, twin))
    train(model, optimizer, 2)
    before = copies(model.parameters())
    with pytest.raises(RuntimeError, match=r"hidden\.weight"):
        bad_step(model, optimizer, float("nan"))
    assert_same_bits(before, copies(model.parameters()))
    train(model, optimizer, 3, first=2)
    train(twin, beside, 5)
    assert_same_bits(copies(model.parameters()), copies(twin.parameters()))
