"""Base of the second-order optimizers: which method updates which parameter, chosen from a model or from parameter
groups, including those of other implementations, and reported in a summary."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchium._functions.ops import is_hollow

from ._engine.matrices import Role
from ._engine.placement import Group, labels_of
from ._model.choose import reasons_of
from ._shared.flat import find_flats, whole_shape
from ._shared.sharding import is_sharded
from .base import TorchiumOptimizer, outside
from .options import keep_lr, shown

__all__ = ["SecondOrder"]

# A matrix with a dimension above the first number, and above the second times the other, is probably an embedding.
_VOCABULARY, _TIMES = 10_000, 8


class SecondOrder(TorchiumOptimizer):
    """Base class of the optimizers of matrices; not for direct use."""

    # Why parameters of a model get AdamW; empty for an optimizer constructed from parameters.
    _reasons: Mapping[torch.Tensor, str] = MappingProxyType({})
    _warned = False  # of a matrix as large as a vocabulary

    def __init__(self, params: Any, arguments: dict[str, Any]) -> None:
        super().__init__(params, arguments)
        given = [p for group in self.param_groups for p in group["params"]]
        asked = all(group.get("use_adamw") is True for group in self.param_groups)
        if not asked and all(sum(size > 1 for size in whole_shape(p)) < 2 for p in given):
            text = f"{type(self).__name__} was given no matrix, and AdamW updates all parameters: DeepSpeed ZeRO, and "
            text += "FSDP1 without use_orig_params=True, flatten matrices to vectors; fully_shard (FSDP2) does not"
            warnings.warn(text, UserWarning, stacklevel=outside())

    def _groups_of(self, model: nn.Module) -> list[Group]:
        """The parameters of a model by name; those that get AdamW by the rules of `choose` are in a second group."""
        find_flats(model.parameters())
        named = super()._groups_of(model)[0]["params"]
        self._reasons = reasons_of(model)
        groups: list[Group] = [
            {"params": [(name, p) for name, p in named if p not in self._reasons]},
            {"params": [(name, p) for name, p in named if p in self._reasons], "use_adamw": True},
        ]
        return [group for group in groups if group["params"]]

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, also during training.

        Args:
            param_group: a dictionary with 'params' and options; others have the defaults. `use_muon` and `algorithm` of
                other implementations are supported.
        """
        if isinstance(param_group, dict):
            self._understand(param_group)
            if param_group.get("use_adamw") is True and "lr" in param_group:
                keep_lr(param_group)
        super().add_param_group(param_group)
        self._warn_of_vocabulary(len(self.param_groups) - 1)
        self._warn_of_zeros(len(self.param_groups) - 1)

    def _unwrap_names(self, group: Group) -> None:
        super()._unwrap_names(group)
        find_flats([group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"])

    # --- groups of other implementations

    def _understand(self, group: Group) -> None:
        """`use_muon=False` and `algorithm="adamw"` are `use_adamw=True`, and the group's numbers are then AdamW's."""
        asked = [*self._use_muon(group), *self._algorithm(group)]
        if not asked:
            return
        if len({*asked, *([not group["use_adamw"]] if isinstance(group.get("use_adamw"), bool) else [])}) > 1:
            names = [name for name in ("use_muon", "algorithm", "use_adamw") if name in group]
            given = ", ".join(f"{name}={shown(group[name])}" for name in names)
            raise ValueError(f"{type(self).__name__}: a group has {given}, which contradict each other")
        group["use_adamw"] = not asked[0]
        if group["use_adamw"]:
            for name, own in (("betas", "adamw_betas"), ("eps", "adamw_eps"), ("epsilon", "adamw_eps")):
                if name in group:
                    group.setdefault(own, group.pop(name))
            for name, own in (("lr", "adamw_lr"), ("weight_decay", "adamw_weight_decay")):
                if name in group:
                    group.setdefault(own, None)  # the group's own, whatever the optimizer's default for AdamW is

    def _use_muon(self, group: Group) -> list[bool]:
        if "use_muon" not in group or self.kind not in ("muon", "normuon"):
            return []
        if not isinstance(group["use_muon"], bool):
            raise TypeError(f"{type(self).__name__}: use_muon must be True or False, got {shown(group['use_muon'])}")
        return [group["use_muon"]]

    def _algorithm(self, group: Group) -> list[bool]:
        if "algorithm" not in group:
            return []
        name = group["algorithm"]
        if name not in (self.kind, "adamw"):
            raise ValueError(
                f"{type(self).__name__}: algorithm is {shown(name)} in a group, expected {self.kind!r} or 'adamw'"
            )
        return [name == self.kind]

    # --- methods of parameters

    def _warn_of_vocabulary(self, index: int) -> None:
        """Warns once if a probable embedding gets the second-order method."""
        group, elementwise = self.param_groups[index], self._elementwise(self.param_groups[index], index)
        for position, (parameter, alone) in enumerate(zip(group["params"], elementwise, strict=True)):
            shape = whole_shape(parameter)
            short, *_, long = sorted(shape) if len(shape) == 2 else (0, 0)
            if self._warned or alone or not parameter.requires_grad or long <= max(_VOCABULARY, _TIMES * short):
                continue
            self._warned = True
            label, who = labels_of(self.param_groups)[index][position], type(self).__name__
            warnings.warn(
                f"{who}: {label!r} is {shape[0]} by {shape[1]}, the size of a vocabulary, and gets "
                f"{who} like every matrix. Embeddings and output layers usually train better with AdamW: give the "
                f"model itself, {who}(model, ...), or put them into a group with use_adamw=True",
                UserWarning,
                stacklevel=outside(),
            )

    def _warn_of_zeros(self, index: int) -> None:
        """Warns of matrices that constant_norm never moves."""
        group = self.param_groups[index]
        if not group.get("constant_norm"):
            return
        elementwise = self._elementwise(group, index)
        for position, (p, alone) in enumerate(zip(group["params"], elementwise, strict=True)):
            if alone or p.ndim < 2 or p.is_meta or is_sharded(p) or is_hollow(p) or p.detach().any():
                continue
            warnings.warn(
                f"{type(self).__name__}: {labels_of(self.param_groups)[index][position]!r} is zero, and constant_norm "
                "keeps it zero: put it into a group with use_adamw=True or constant_norm=False",
                UserWarning,
                stacklevel=outside(),
            )

    def _method_of(self, parameter: torch.Tensor, role: Role, has_blocks: Callable[..., bool]) -> tuple[str, str]:
        if not (parameter.requires_grad or parameter.grad is not None):
            return "nothing", "frozen"
        if has_blocks(whole_shape(parameter), parameter.dtype, role):
            return type(self).__name__, "matrix"
        if role[0]:
            return "AdamW", self._reasons.get(parameter, "use_adamw")
        is_matrix = sum(size > 1 for size in whole_shape(parameter)) > 1
        return "AdamW", "matrix that is too large or too narrow" if is_matrix else "vector or scalar"
