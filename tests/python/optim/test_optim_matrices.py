"""Several matrices in one parameter vs the same values as separate parameters, bitwise."""

import copy

import pytest
import torch
import torchium

CASES = {
    "experts": ((4, 12, 20), {"batch_dims": 1}, lambda t: list(t)),
    "qkv": ((36, 12), {"cuts": (12, 12, 12)}, lambda t: list(t.split(12))),
    "grouped queries": ((28, 10), {"cuts": [12, 8, 8]}, lambda t: list(t.split([12, 8, 8]))),
    "heads": ((24, 18), {"cuts": 6}, lambda t: list(t.split(6))),
    "both": ((2, 18, 8), {"batch_dims": 1, "cuts": (12, 6)}, lambda t: [p for e in t for p in e.split([12, 6])]),
}


def run(params, gradients, options, split):
    groups = [{"params": params, **options}]
    optimizer = torchium.optim.Shampoo(groups, lr=0.02, max_preconditioner_dim=16, precondition_frequency=2)
    for gradient in gradients:
        for p, g in zip(params, split(gradient), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("case", CASES)
def test_as_parameters_of_their_own(case, device):
    """tests/optim/test_optim_matrices.c has every kind."""
    shape, options, split = CASES[case]
    start = torch.randn(shape, device=device)
    gradients = [torch.randn(shape, device=device) for _ in range(5)]
    whole = torch.nn.Parameter(start.clone())
    own = [torch.nn.Parameter(part.clone()) for part in split(start)]
    optimizer = run([whole], gradients, options, lambda t: [t])
    run(own, gradients, {}, split)
    for i, (a, b) in enumerate(zip(split(whole.detach()), own, strict=True)):
        assert torch.equal(a, b), f"matrix {i}"
    other = copy.deepcopy(optimizer)  # state follows, by block index
    assert other.param_groups[0].get("cuts") == options.get("cuts")
    assert other.memory_report()["state"] == optimizer.memory_report()["state"]


def test_forecast_knows_them(device):
    p = torch.nn.Parameter(torch.randn(64, 16, device=device))
    optimizer = torchium.optim.Shampoo([{"params": [p], "cuts": 16}], lr=0.1)
    forecast = optimizer.memory_report()["state"]
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert forecast == optimizer.memory_report()["state"]
    fused = torchium.optim.Shampoo([torch.nn.Parameter(torch.randn(64, 16, device=device))], lr=0.1)
    assert fused.memory_report()["state"] > forecast  # a factor of 64 by 64, where four of 16 by 16 suffice


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"cuts": (8, 9)}, ValueError, "cuts"),
        ({"cuts": (-8, 24)}, ValueError, "positive"),
        ({"cuts": ()}, ValueError, "sum"),
        ({"cuts": 5}, ValueError, "size 16"),
        ({"cuts": 0}, ValueError, "cuts"),
        ({"cuts": 2**70}, ValueError, "cuts"),
        ({"cuts": "qkv"}, TypeError, "rows"),
        ({"cuts": (8.0, 8.0)}, TypeError, "rows"),
        ({"batch_dims": 2}, ValueError, "batch_dims"),
        ({"batch_dims": -1}, ValueError, "batch_dims"),
        ({"batch_dims": None}, TypeError, "batch_dims"),
    ],
)
def test_wrong_options(options, error, words):
    p = torch.nn.Parameter(torch.randn(16, 8))
    with pytest.raises(error, match=words):
        torchium.optim.Muon([{"params": [p], **options}], lr=0.1)


def test_columns_are_refused():
    p = torch.nn.Parameter(torch.randn(8, 16).t())
    optimizer = torchium.optim.Muon([{"params": [p], "cuts": 8}], lr=0.1)
    p.grad = torch.randn_like(p)
    with pytest.raises(ValueError, match="row-major"):
        optimizer.step()
