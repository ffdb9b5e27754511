"""Operands of torchium.elementwise: the type of each, and whether its memory is contiguous in the result's order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchium._functions.elementwise_source import Declaration

TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "int": torch.int32,
    "long": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


# --- types and numbers ------------------------------------------------------------------------------------------------


def check_tensor(d: Declaration, t: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    if t.layout is not torch.strided:
        raise TypeError(f"{d.name} must be a dense tensor, got layout {t.layout}")
    if t.device != device:
        raise ValueError(f"{d.name} is on {t.device}, expected {device} like the other inputs")
    if d.type != "T" and t.dtype != dtype:
        raise TypeError(f"{d.name} has dtype {t.dtype}, expected {dtype}: it is declared {d.type}")


def number(name: str, value: Any, dtype: torch.dtype) -> int | float:
    """The value of a kernel's parameter. NumPy's numbers have __index__ or __float__ as Python's do."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} must be a tensor or a number, got {type(value).__name__!r}")
    if dtype.is_floating_point:
        return float(value)
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a tensor or an integer, got {type(value).__name__!r}: it is {NAMES[dtype]}")
    number = value.__index__()
    limits = torch.iinfo(dtype)
    if not limits.min <= number <= limits.max:
        raise ValueError(f"{name} is {number}, which does not fit in {NAMES[dtype]}")
    return number


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def promoted(values: dict[str, Any]) -> torch.dtype:
    """PyTorch's promotion for any number of operands: tensors with dimensions, then tensors without, then numbers; a
    later kind counts only if its category is higher, such as float vs int."""
    ranks: list[list[torch.dtype]] = [[], [], []]
    for value in values.values():
        if isinstance(value, Tensor):
            ranks[0 if value.dim() > 0 else 1].append(value.dtype)
        else:
            integral = hasattr(value, "__index__") and not isinstance(value, float)
            ranks[2].append(torch.int64 if integral else torch.get_default_dtype())
    result: torch.dtype | None = None
    for dtypes in ranks:
        for i, dtype in enumerate(dtypes):
            dtypes[0] = torch.promote_types(dtypes[0], dtype) if i else dtype
        if dtypes and (result is None or _kind(dtypes[0]) > _kind(result)):
            result = dtypes[0]
    if result not in NAMES:
        raise TypeError(f"{', '.join(values)}: T would be {result}, expected one of {', '.join(TYPES)}")
    return result


# --- layouts ----------------------------------------------------------------------------------------------------------


def same_layout(a: Tensor, b: Tensor) -> bool:
    if a.is_contiguous() and b.is_contiguous():
        return True
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or first == second for size, first, second in strides)


def laid_out(v: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The tensor in the layout and shape of `like`, without a copy if it already has them."""
    if v.dtype == dtype and v.shape == like.shape and same_layout(v, like) and not v.is_neg():
        return v
    return torch.empty_like(like, dtype=dtype).copy_(v.detach())


def one(v: Any, dtype: torch.dtype) -> Any:
    return v.detach().to(dtype).resolve_neg() if isinstance(v, Tensor) else v


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    ends = []
    for t in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        ends.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


def clash(out: Tensor, v: Tensor) -> bool:
    """Whether writing `out` elementwise would change elements of `v` that are read later."""
    same = out.data_ptr() == v.data_ptr() and out.dtype == v.dtype and out.shape == v.shape and same_layout(out, v)
    return not same and overlap(out, v)
