"""Several matrices in one parameter: the options `batch_dims` and `cuts` of a group, converted for the C library."""

from __future__ import annotations

import array
import operator
from typing import Any

import torch

from torchium._messages import shown

from .._shared.flat import whole_shape

__all__ = ["Role", "roles_of"]

Role = tuple[bool, int, bytes]  # elementwise, batch_dims, and the cuts as int64


def _batch_dims(group: dict[str, Any], who: str) -> int:
    try:
        return operator.index(group.get("batch_dims", 0))
    except TypeError:
        raise TypeError(f"{who}: batch_dims must be a number, got {shown(group['batch_dims'])}") from None


def _cuts(given: Any, size: int, label: str, who: str) -> tuple[int, ...]:
    """Rows of each matrix: a number for equal ones, or a list, as for torch.split."""
    if given is None:
        return ()
    try:
        if not hasattr(given, "__index__"):
            cuts = tuple(map(operator.index, given))
        else:
            rows = operator.index(given)
            cuts = (rows,) * (size // rows if rows > 0 else 0)
    except TypeError:
        raise TypeError(f"{who}: cuts must be a number of rows or a list of them, got {shown(given)}") from None
    if not cuts or min(cuts) <= 0 or sum(cuts) != size:
        raise ValueError(
            f"{who}: cuts is {shown(given)}, but the dimension of {label!r} that it cuts has size {size}: positive "
            "numbers of rows are expected whose sum is that"
        )
    return cuts


def roles_of(
    group: dict[str, Any], elementwise: list[bool], labels: list[str], parameters: list[torch.Tensor], who: str
) -> list[Role]:
    batch_dims = _batch_dims(group, who)
    given = group.get("cuts")
    roles = []
    for alone, label, parameter in zip(elementwise, labels, parameters, strict=True):
        shape = whole_shape(parameter)
        if batch_dims and not 0 <= batch_dims < len(shape):
            raise ValueError(
                f"{who}: batch_dims is {batch_dims}, but {label!r} has {len(shape)} dimensions: some must be left"
            )
        size = shape[batch_dims] if shape else 1
        cuts = _cuts(given, size, label, who)
        roles.append((alone, batch_dims, array.array("q", cuts).tobytes()))
    return roles
