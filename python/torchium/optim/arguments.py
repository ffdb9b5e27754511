"""Shared groups of arguments, and the types of keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import torch

from torchium._messages import shown

__all__ = ["AdamWArguments", "MemoryArguments", "NumericsArguments"]

StateDtype = Literal["float32", "bfloat16", "int8"]
RootMethod = Literal["auto", "eigen", "newton", "rational"]
Nonfinite = Literal["skip", "raise", "ignore"]
WeightDecayType = Literal["decoupled", "l2", "cautious"]


@dataclass(frozen=True)
class AdamWArguments:
    """Hyperparameters of AdamW for vectors, scalars and `params`: the argument `adamw` of an optimizer of matrices. The
    keys in parameter groups are `adamw_lr`, `adamw_betas`, `adamw_eps`, `adamw_weight_decay`, `use_adamw`.

    Args:
        lr: learning rate; None for the optimizer's default. It keeps its ratio to the optimizer's lr under schedulers.
        betas: decay rates of both moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay; None means the optimizer's.
        params: True for all, or patterns of names such as `("*embed*",)`: parameters that get AdamW regardless of
            shape. The key in groups is `use_adamw`.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | None = None
    params: bool | str | Sequence[str] = False


@dataclass(frozen=True)
class MemoryArguments:
    """Storage of state: the argument `memory` of an optimizer. Parameter groups have the same keys, and `memory_budget`
    for `budget`.

    Args:
        state_dtype: 'float32', 'bfloat16' or 'int8' (by blocks) for the moments of elementwise updates and the first
            moments of matrices, rounded stochastically; small parameters keep float32.
        packed_factors: keep symmetric factors as lower triangles: half the memory, the same results.
        root_dtype: 'float32' or 'bfloat16' for Shampoo's roots.
        master_weights: keep a float32 copy of float16 and bfloat16 parameters.
        stochastic_rounding: unbiased stochastic rounding of bfloat16 parameters without a float32 copy.
        seed: of stochastic rounding.
        budget: limit of a step's scratch in bytes; None means 1/8 of the state, and at least 2 GiB and 1/32 of the
            GPU's memory.
    """

    state_dtype: StateDtype | torch.dtype = "float32"
    packed_factors: bool = False
    root_dtype: Literal["float32", "bfloat16"] | torch.dtype = "float32"
    master_weights: bool = False
    stochastic_rounding: bool = False
    seed: int = 0
    budget: int | None = None


@dataclass(frozen=True)
class NumericsArguments:
    """Accuracy of a step and handling of non-finite gradients: the argument `numerics` of an optimizer. In parameter
    groups `damping`, `tolerance` and `method` are `relative_eps`, `root_tolerance` and `root_method`.

    Args:
        precision: of products with float32 gradients on a GPU: 'high' rounds operands to 11 bits, as TF32; 'highest'
            does not.
        damping: Shampoo's minimum damping relative to the largest eigenvalue of a factor; bounds the cost of a root.
        tolerance: largest residual of Shampoo's roots; 0 for the default.
        method: of Shampoo's roots: 'auto', 'eigen', 'newton' or 'rational'.
        nonfinite: handling of infinities and NaN in gradients: 'skip' the step (counted in `stats()`), 'raise', or
            'ignore'.
        world_invariant: update every matrix separately, for bitwise-identical results with any number of processes on
            GPUs; slower.
    """

    precision: Literal["high", "highest"] = "high"
    damping: float = 1e-6
    tolerance: float = 0.0
    method: RootMethod = "auto"
    nonfinite: Nonfinite = "skip"
    world_invariant: bool = False


_CLASSES = {"adamw": AdamWArguments, "memory": MemoryArguments, "numerics": NumericsArguments}
# Fields with a different name in parameter groups.
_KEYS = {
    "adamw": {field.name: f"adamw_{field.name}" for field in fields(AdamWArguments)} | {"params": "use_adamw"},
    "memory": {"budget": "memory_budget"},
    "numerics": {"damping": "relative_eps", "tolerance": "root_tolerance", "method": "root_method"},
}


def _key(group: str, field: str) -> str:
    return _KEYS[group].get(field, field)


_GROUPED = [(group, field) for group, cls in _CLASSES.items() for field in fields(cls)]
# The default of each key that a group of arguments sets, and the field of tch_optim_config that it is.
GROUPED_DEFAULTS = {_key(group, field.name): field.default for group, field in _GROUPED}
GROUPED_C_NAMES = {_key(group, field.name): f"{group}.{field.name}" for group, field in _GROUPED}


def grouped_options(who: str, known: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options of parameter groups that `adamw`, `memory` and `numerics` among the arguments set."""
    options: dict[str, Any] = {}
    for group, cls in _CLASSES.items():
        value = arguments.get(group)
        if value is None:
            continue
        if not isinstance(value, (cls, Mapping)):
            kind = type(value).__name__
            raise TypeError(f"{who}: {group} must be {cls.__name__} or a dictionary of its arguments, got {kind!r}")
        names = {field.name: field.default for field in fields(cls)}
        given = dict(value) if isinstance(value, Mapping) else {name: getattr(value, name) for name in names}
        for name, setting in given.items():
            if name not in names:
                raise TypeError(f"{who}: {group} has {shown(name)}, expected some of {', '.join(names)}")
            key = _key(group, name)
            if key in known:
                options[key] = setting
            elif isinstance(value, Mapping) or setting != names[name]:
                raise TypeError(f"{who}: {group} has {name!r}, which {who} does not use")
    return options


class Common(TypedDict, total=False):
    """Keywords of every optimizer."""

    maximize: bool
    weight_decay_type: WeightDecayType
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None
    nonfinite: Nonfinite
    master_weights: bool
    stochastic_rounding: bool
    state_dtype: StateDtype | torch.dtype
    seed: int
    memory_budget: int | None


class Matrices(Common, total=False):
    """Keywords of every optimizer of matrices."""

    adamw_lr: float | None
    adamw_betas: tuple[float, float]
    adamw_eps: float
    adamw_weight_decay: float | None
    use_adamw: bool | str | Sequence[str]
    precision: Literal["high", "highest"]
    world_invariant: bool


class MuonOptions(Matrices, total=False):
    """Further keywords of Muon."""

    constant_norm: bool


class _Preconditioned(Matrices, total=False):
    merge_dims: bool
    precondition_1d: bool
    refresh_drift: float | None
    stagger: bool
    packed_factors: bool


class KLShampooOptions(_Preconditioned, total=False):
    """Further keywords of KLShampoo."""

    relative_eps: float
    root_method: RootMethod
    root_tolerance: float
    root_dtype: Literal["float32", "bfloat16"] | torch.dtype


class ShampooOptions(KLShampooOptions, total=False):
    """Further keywords of Shampoo."""

    start_preconditioning_step: int
    grafting_beta2: float
    grafting_eps: float
    exponent_override: int


class SOAPOptions(_Preconditioned, total=False):
    """Further keywords of SOAP."""

    block: bool
    normalize_grads: bool
    orthogonalize: bool
    constant_norm: bool


class KFACOptions(TypedDict, total=False):
    """Further keywords of KFAC."""

    nonfinite: Nonfinite
    loss_reduction: Literal["mean", "sum"]
    precision: Literal["high", "highest"]
    factor_dtype: torch.dtype | None
    average_factors: bool
