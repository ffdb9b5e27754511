"""Factors and roots as lower triangles (`packed_factors`), and roots in bfloat16 (`root_dtype`): their names, shapes
and types, the numbers of whole matrices, and state of one form in an optimizer of the other.
"""

import copy

import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, through_file

OPTIONS = {
    "shampoo": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 8, "relative_eps": 1e-3},
    "soap": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 8, "block": True},
}


def made(kind, packed, device, **more):
    """World-invariant and of even sizes, so that a GPU's libraries see one aligned matrix at a time in either form."""
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 16, bias=False).to(device)
    options = OPTIONS[kind] | {"packed_factors": packed, "world_invariant": device != "cpu"} | more
    return model, CLASSES[kind](model.parameters(), **options)


def steps(model, optimizer, count, first=0):
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + i)
        model.weight.grad = torch.randn(16, 24, generator=generator).to(model.weight.device)
        optimizer.step()


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


def lower(matrix):
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


@pytest.mark.parametrize("given", ["bfloat16", torch.bfloat16])
def test_roots_in_bfloat16(given, device):
    """The nearest of what float32 would keep: factors, of which roots are taken, do not depend on roots."""
    exact, rounded = made("shampoo", False, device), made("shampoo", False, device, root_dtype=given)
    for model, optimizer in (exact, rounded):
        steps(model, optimizer, 7)
    state, other = rounded[1].state[rounded[0].weight], exact[1].state[exact[0].weight]
    roots = [name for name in state if name.startswith("root.")]
    assert len(roots) == 12
    for name in roots:
        assert state[name].dtype == torch.bfloat16
        assert_same_bits([state[name]], [lower(other[name]).bfloat16()])
    error = (rounded[0].weight - exact[0].weight).norm() / exact[0].weight.norm()
    assert 0 < error < 1e-2
    assert rounded[1].memory_report()["state"] < exact[1].memory_report()["state"]


@pytest.mark.parametrize("to", ["float32", "bfloat16"])
def test_roots_of_either_type_load(to, device):
    """Nothing is refreshed after the first step, so that steps go by what was loaded."""
    kept = {"float32": "bfloat16", "bfloat16": "float32"}[to]
    model, optimizer = made("shampoo", False, device, precondition_frequency=1000, stagger=False, root_dtype=kept)
    steps(model, optimizer, 3)
    saved = through_file(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["root_dtype"] = to
    other, following = made("shampoo", False, device, precondition_frequency=1000, stagger=False, root_dtype=to)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    following.load_state_dict(saved)
    root, loaded = optimizer.state[model.weight]["root.0.0"], following.state[other.weight]["root.0.0"]
    if to == "float32":
        assert_same_bits([lower(loaded)], [root.float()])
        steps(model, optimizer, 4, first=3)
        steps(other, following, 4, first=3)
        assert_same_bits([other.weight], [model.weight])
    else:
        assert_same_bits([loaded], [lower(root).bfloat16()])


@pytest.mark.parametrize("wrong", ["int8", "float16", 3])
def test_other_types_of_roots_are_refused(wrong, device):
    with pytest.raises((ValueError, TypeError), match="root_dtype"):
        made("shampoo", False, device, root_dtype=wrong)
