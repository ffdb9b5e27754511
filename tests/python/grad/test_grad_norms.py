"""Ghost norms of per-sample gradients, and sums of clipped ones, vs a loop over single samples."""

import grad_cases as cases
import pytest
import torch
import torchium
from torch import nn
from torchium.utils.cuda_kernels import CUDAGradientOps


def test_samples_after_none(device):
    """One object, with an empty batch between others."""
    model, x, y = cases.make("gpt with tied head", 3, torch.float64, device)
    expected, norms = cases.clipped(cases.reference(model, x, y), 0.1)
    clipping = torchium.GhostClipping(model, 0.1)
    for size in (3, 0, 3):
        model.zero_grad()
        with clipping:
            cases.loss_of(model(x[:size]), y[:size]).mean().backward()
        assert clipping.norms.shape == (size,)
    assert cases.error(clipping.norms, norms) < cases.BOUND64
    cases.check_clipped(model, expected, cases.BOUND64)


def test_clipped_norms_are_below_the_limit(device):
    """g max_norm / (|g| + 1e-6) is shorter than max_norm for every g, and so is an unclipped gradient."""
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64, device=device)
    for norm in (1e-9, 1e-7, 1e-6, 0.5, 1.0 - 2e-6, 1.0 - 5e-7, 1.0, 1.0 + 1e-7, 2.0, 1e9):
        for limit in (1.0, 1e-7):
            model.zero_grad()
            x = torch.randn(1, 6, dtype=torch.float64, device=device)
            x *= norm / x.norm()
            with torchium.GhostClipping(model, limit, loss_reduction="sum") as clipping:
                model(x).sum().backward()
            length = model.weight.grad.norm().item()
            assert length < limit
            assert length == pytest.approx(norm * min(1.0, limit / (clipping.norms.item() + 1e-6)), rel=1e-12)


def test_clipping_adds_to_gradients(device):
    model, x, y = cases.make("conv net", 4, torch.float64, device)
    expected, _ = cases.clipped(cases.reference(model, x, y), 0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torchium.GhostClipping(model, 0.1):
        cases.loss_of(model(x), y).mean().backward()
    for name, p in model.named_parameters():
        assert cases.error(p.grad, expected[name] + 1) < cases.BOUND64


@pytest.mark.parametrize("name", ["linear", "conv net", "own parameter"])
def test_a_sample_that_is_not_finite_is_left_out(name, device):
    model, x, y = cases.make(name, 4, torch.float64, device)
    y[2] = float("nan")
    good = [0, 1, 3]
    expected, norms = cases.clipped(cases.reference(model, x[good], y[good]), 0.05)
    with torchium.GhostClipping(model, 0.05, loss_reduction="sum") as clipping:
        cases.loss_of(model(x), y).sum().backward()
    assert not clipping.norms[2].isfinite() and cases.error(clipping.norms[good], norms) < cases.BOUND64
    cases.check_clipped(model, {n: g * 3 for n, g in expected.items()}, cases.BOUND64)


def test_frozen_parameters_do_not_count(device):
    model, x, y = cases.make("gpt with tied head", 3, torch.float64, device)
    model.lm_head.weight.requires_grad_(False)
    model.transformer.h[0].mlp[0].bias.requires_grad_(False)
    gradients = cases.reference(model, x, y)
    trainable = {n: gradients[n] for n, p in model.named_parameters() if p.requires_grad}
    norms = CUDAGradientOps.per_sample_gradient_norms(model, cases.loss_of, x, y)
    assert cases.error(norms, cases.reference_norms(trainable)) < cases.BOUND64
    model.requires_grad_(False)
    assert (CUDAGradientOps.per_sample_gradient_norms(model, cases.loss_of, x, y) == 0).all()


def test_tf32_is_used_where_pytorch_may_use_it():
    from torchium.grad_sample.plan import rounds_products

    before = torch.get_float32_matmul_precision()
    try:
        for precision, rounds in (("highest", False), ("high", True), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert rounds_products() == rounds
    finally:
        torch.set_float32_matmul_precision(before)


def test_inputs_are_released_as_the_pass_goes(device):
    """The captured input of a layer is freed once the backward pass has reached the previous layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    held = []
    with torchium.per_sample_norms(model) as result:
        sink = result.capture.sink
        arrived = sink.arrived

        def watch(use):
            arrived(use)
            held.append((use.input, use.gradient))

        sink.arrived = watch
        model(torch.randn(3, 4, device=device)).sum().backward()
    assert held == [(None, None)] * 3


@pytest.mark.gpu
def test_nothing_waits_for_the_device(gpu):
    model, x, y = cases.make("gpt with tied head", 4, torch.float32, gpu)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torchium.GhostClipping(model, 0.1) as clipping:
                cases.loss_of(model(x), y).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert clipping.norms.shape == (4,)
