"""Saved state of one parameter: checks before anything is written, and writing.

It is a dictionary of tensors, and of `counts`, a row of integers: [generation, steps of the optimizer, steps with this
parameter, then one for each factor]. States of torch.optim's AdamW, SGD and Muon have the same names without the
counts, which then follow from `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchium._functions.ops import is_hollow
from torchium._messages import shown

from .._shared.sharding import is_sharded, local_part, local_tensor
from .moments import SCALED

__all__ = [
    "COUNTS",
    "KIND",
    "MOST_STEPS",
    "check",
    "check_counts",
    "check_form",
    "check_memory",
    "counts_of",
    "generation_of",
    "has_state",
    "is_ours",
    "kinds_of",
    "restore",
]

COUNTS = "counts"
KIND = "torchium_kind"  # next to 'state' and 'param_groups'
# Identifies the kind of a state_dict without KIND, from an earlier version or torch.optim: by options of groups, or
# else by names of state.
_OPTIONS_OF = {
    "adamw": {"amsgrad"},
    "sgd": {"dampening"},
    "muon": {"ns_steps"},
    "normuon": {"ns_steps", "beta2"},
    "shampoo": {"grafting"},
    "kl_shampoo": {"root_method"},
    "soap": {"shampoo_beta"},
}
_STATE_OF = {"root": "shampoo", "basis": "soap"}
MOST_STEPS = 2**53  # clocks are float64, which cannot count further
# Of a factor: failed refreshes, 0 to 2, in two bits, two gaps of five bits, up to 30, staleness and level in 17.
_MOST_FACTOR_COUNT = 0x1FFFFFFF
_NAMES = {COUNTS, "step", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "grafting_sq"}
_NAMES |= {f"{name}_scale" for name in SCALED}
# State of blocks, with their numbers; and moments and master copies of tiles, which one rank of a group owns.
_NUMBERED = (
    *(f"{name}_scale." for name in SCALED),
    "factor.",
    "root.",
    "basis.",
    "exp_avg_sq.",
    "exp_avg.",
    "momentum_buffer.",
    "grafting_sq.",
    "master.",
    "failures.",
)
# Optional state: a clock follows from the rest, a master copy from the parameter, and SGD begins without momentum.
_MAY_BE_MISSING = ("step", "master", "momentum_buffer", "momentum_buffer_scale")
_RESIZED = "; `del optimizer.state[parameter]` resets the state of a resized parameter"


def kinds_of(state_dict: Mapping[str, Any], guess: bool) -> set[str]:
    """The kinds of optimizer that may have written it; empty if unknown."""
    if KIND in state_dict or not guess:
        return {str(state_dict[KIND])} if KIND in state_dict else set()
    options = {name for group in state_dict["param_groups"] for name in group}
    found = {kind for kind, names in _OPTIONS_OF.items() if names <= options}
    for kind, part in (("normuon", "muon"), ("shampoo", "kl_shampoo")):
        if kind in found:
            found.discard(part)
    if not found and "betas" in options and "eps" not in options:
        found = {"lion"}
    states = [saved for saved in state_dict["state"].values() if isinstance(saved, Mapping)]
    names = {str(name).partition(".")[0] for saved in states for name in saved}
    return found or {kind for name, kind in _STATE_OF.items() if name in names}


def is_ours(name: Any) -> bool:
    """Whether it belongs to the library; users may have added other entries."""
    return isinstance(name, str) and (name in _NAMES or name.startswith(_NUMBERED))


def has_state(saved: Any) -> bool:
    """Whether there is anything to restore; torch.optim.SGD saves `momentum_buffer: None`."""
    return isinstance(saved, Mapping) and any(value is not None and is_ours(name) for name, value in saved.items())


def generation_of(saved: Any) -> int | None:
    """The generation of this parameter, or None if unknown."""
    counts = saved.get(COUNTS) if isinstance(saved, Mapping) else None
    return None if counts is None or is_hollow(counts) else int(counts[0])


def check(label: str, views: Mapping[str, torch.Tensor], saved: Mapping[str, Any], counts: int, strict: bool) -> None:
    """Raises an error that names incompatible state. If not strict, missing state is initialized."""
    for name, view in views.items():
        value = saved.get(name)
        if value is None:
            if strict and name not in _MAY_BE_MISSING:
                raise ValueError(
                    f"the state of {label!r} has no {name!r}: it is of another optimizer or of other options"
                )
            continue
        tensor = check_form(label, name, view, value, "" if strict else _RESIZED)
        if name in SCALED and tensor.is_floating_point() != view.is_floating_point():
            raise ValueError(f"the state {name!r} of {label!r} is {tensor.dtype}, expected {view.dtype}")
        if name == "step":
            check_counts(f"the state 'step' of {label!r}", tensor.reshape(1), [MOST_STEPS])
    given = saved.get(COUNTS)
    if strict and given is not None and len(given) != counts + 1:
        raise ValueError(f"the state 'counts' of {label!r} has {len(given)} numbers, expected {counts + 1}")
    if given is not None:
        most = [MOST_STEPS] * 3 + [_MOST_FACTOR_COUNT] * (len(given) - 3)
        what = f"the state 'counts' of {label!r}"
        check_counts(what, given, most)
        _check_factors(what, [int(number) for number in list(given)[3:]])


def _check_factors(what: str, counts: list[int]) -> None:
    for count in counts:
        if count & 3 > 2 or count >> 2 & 31 > 30 or count >> 7 & 31 > 30:
            raise ValueError(f"{what} has {count} for a factor: its failures are beyond 2, or its gaps beyond 30")


def check_counts(what: str, given: Any, most: Sequence[int]) -> None:
    """Rejects counts out of range, by name and range."""
    numbers = given.tolist() if isinstance(given, torch.Tensor) else list(given)
    for number, limit in zip(numbers, most, strict=False):
        whole = isinstance(number, (int, float)) and 0 <= number <= limit and number == int(number)
        if not whole:
            raise ValueError(f"{what} has {shown(number)}, expected a number from 0 to {limit}, without a fraction")


def check_memory(label: str, saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        if is_hollow(value):
            raise ValueError(f"the state {name!r} of {label!r} has no storage: it was resized")


def check_form(label: str, name: str, view: torch.Tensor, value: Any, remedy: str = "") -> torch.Tensor:
    """A value of the state as a tensor, which must have the optimizer's shape."""
    if not isinstance(value, (torch.Tensor, int, float)):
        raise TypeError(f"the state {name!r} of {label!r} is a {type(value).__name__}, expected a tensor")
    tensor = _as_tensor(value)
    shape = list(tensor.shape)
    if shape != list(view.shape) and not (view.ndim == 0 and shape == [1]):
        raise ValueError(f"the state {name!r} of {label!r} has shape {shape}, expected {list(view.shape)}{remedy}")
    return tensor


def _as_tensor(value: Any) -> torch.Tensor:
    """torch.as_tensor would also move tensors under `with torch.device(...)`."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")


def restore(views: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Copies saved values; a parameter with state but no clock is assumed to have had one step."""
    for name, view in views.items():
        value = saved.get(name)
        if value is not None:
            if is_sharded(view) or is_sharded(value):
                local_tensor(view).copy_(local_part(value, view))
            else:
                view.copy_(_as_tensor(value).detach().reshape(view.shape))
    if saved.get("step") is None:
        views["step"].fill_(1.0)


def counts_of(views: Mapping[str, torch.Tensor], saved: Mapping[str, Any], length: int) -> list[int]:
    """The counts of a restored parameter, without the generation."""
    given = saved.get(COUNTS)
    if given is None:
        step = int(views["step"].item())
        return [step, step] + [0] * (length - 2)
    counts = [int(count) for count in given[1:]]
    return counts if len(counts) == length else counts[:2] + [0] * (length - 2)
