"""Factors and roots as lower triangles (`packed_factors`): their names and shapes, the same numbers as whole matrices,
and state of one form in an optimizer of the other.
"""

import copy

import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, through_file

OPTIONS = {
    "shampoo": {"lr": 0.02, "update_freq": 2, "max_preconditioner_dim": 8, "relative_eps": 1e-3},
    "soap": {"lr": 0.02, "precondition_frequency": 2, "max_precond_dim": 8, "block": True},
}


def made(kind, packed, device):
    """World-invariant and of even sizes, so that a GPU's libraries see one aligned matrix at a time in either form."""
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 16, bias=False).to(device)
    options = OPTIONS[kind] | {"packed_factors": packed, "world_invariant": device != "cpu"}
    return model, CLASSES[kind](model.parameters(), **options)


def steps(model, optimizer, count, first=0):
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + i)
        model.weight.grad = torch.randn(16, 24, generator=generator).to(model.weight.device)
        optimizer.step()


def names(kind):
    return ("factor.", "root.") if kind == "shampoo" else ("factor.",)


@pytest.mark.parametrize("kind", OPTIONS)
def test_triangles_of_the_same_matrices(kind, device):
    whole, packed = made(kind, False, device), made(kind, True, device)
    for model, optimizer in (whole, packed):
        steps(model, optimizer, 7)
    assert_same_bits([packed[0].weight], [whole[0].weight])
    state, other = packed[1].state[packed[0].weight], whole[1].state[whole[0].weight]
    matrices = [name for name in state if name.startswith(names(kind))]
    assert len(matrices) == 12 * len(names(kind))  # six blocks of two dimensions
    for name in matrices:
        n = other[name].shape[0]
        rows, columns = torch.tril_indices(n, n, device=device)
        assert state[name].shape == (n * (n + 1) // 2,)
        assert_same_bits([state[name]], [other[name][rows, columns]])
    report, larger = packed[1].memory_report(), whole[1].memory_report()
    assert report["state"] < larger["state"]


@pytest.mark.parametrize("to", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_either_loads_the_other(kind, to, device):
    """The saved options say whether it is packed; where they are set back, the state follows."""
    model, optimizer = made(kind, not to, device)
    steps(model, optimizer, 5)
    saved = through_file(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["packed_factors"] = to
    other, following = made(kind, to, device)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    following.load_state_dict(saved)
    shape = following.state[other.weight]["factor.0.0"].dim()
    assert shape == (1 if to else 2)
    steps(model, optimizer, 4, first=5)
    steps(other, following, 4, first=5)
    assert_same_bits([other.weight], [model.weight])


def test_what_does_not_fit_is_named(device):
    model, optimizer = made("shampoo", False, device)
    steps(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["factor.0.0"] = torch.ones(5, device=device)
    with pytest.raises(ValueError, match=r"factor\.0\.0"):
        made("shampoo", False, device)[1].load_state_dict(saved)
