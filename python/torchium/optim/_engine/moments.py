"""Moments in eight bits (`state_dtype="int8"`) as tensors: what the library keeps, and the way to and from float32.

A moment is a uint8 tensor of codes and a float32 tensor of scales, `exp_avg` and `exp_avg_scale`, one scale for each
128 elements in the order of the parameter's memory. Codes have the parameter's shape where it is contiguous; otherwise
they are one row, since nothing else would say in which order they lie.

Factors and roots are matrices, or one row each where `packed_factors` keeps their lower triangles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["SCALED", "adapt", "codes_of", "decode", "encode"]

SCALED = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_BLOCK = 128
_LEAST_EXPONENT, _MOST_EXPONENT = 32, 255
_HALF = 0x80008  # of a code's unit, as the library rounds to nearest


def codes_of(parameter: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The library's words of four codes as one code for each element."""
    codes = words.view(torch.uint8)[: parameter.numel()]
    return codes.view(parameter.shape) if parameter.is_contiguous() else codes


def _is_second(name: str) -> bool:
    return name == "exp_avg_sq"


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """One row for each block, the last one filled up with zeros."""
    count = values.numel()
    rows = torch.zeros(-(-count // _BLOCK) * _BLOCK, dtype=values.dtype, device=values.device)
    rows[:count] = values.reshape(-1)
    return rows.view(-1, _BLOCK)


def decode(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The moment in float32, in the shape of the codes."""
    signed = not _is_second(name)
    given = _blocks(codes.to(torch.int32))
    magnitudes = given & 127 if signed else given
    top = 120 if signed else 248
    bits = (magnitudes << 20) + scales.float().view(torch.int32).view(-1, 1) - (top << 20)
    values = torch.where(magnitudes == 0, 0, bits).view(torch.float32)
    if signed:
        values = torch.where(given > 127, -values, values)
    return values.view(-1)[: codes.numel()].view(codes.shape)


def encode(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of a row of float32, and their scales."""
    signed = not _is_second(name)
    rows = _blocks(values.float())
    bits = rows.abs().view(torch.int32).to(torch.int64)
    exponents = ((bits.amax(1, keepdim=True) + 0xFFFFF) >> 23).clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    scales = exponents << 23
    codes = (bits + _HALF + ((120 if signed else 248) << 20) - scales) >> 20
    if signed:
        least = (scales - (119 << 20)).to(torch.int32).view(torch.float32)
        codes = torch.where(rows.abs() < least, (rows.abs() * 131072.0 > 65535.0 * least).long(), codes).clamp(0, 127)
        codes = torch.where((rows < 0) & (codes > 0), codes | 128, codes)
    else:
        codes = torch.maximum(codes, (bits != 0).long()).clamp(0, 255)
    return codes.view(-1)[: values.numel()].to(torch.uint8), scales.view(-1).to(torch.int32).view(torch.float32)


def _in_memory_order(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    laid = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.float32, device=value.device)
    laid.copy_(value.detach().reshape(parameter.shape))
    return laid.as_strided((parameter.numel(),), (1,))


def _repacked(value: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix as its lower triangle, row after row, or the other way round, as the optimizer keeps it; what
    does not fit stays, and an error names it."""
    packed = view.dim() == 1
    n = value.shape[0] if packed else view.shape[0]
    if value.numel() != (n * n if packed else n * (n + 1) // 2):
        return value
    rows, columns = torch.tril_indices(n, n, device=value.device)
    if packed:
        return value[rows, columns]
    full = value.new_empty((n, n))
    full[rows, columns] = full[columns, rows] = value
    return full


def adapt(parameter: torch.Tensor, views: Mapping[str, torch.Tensor], saved: dict[str, Any]) -> dict[str, Any]:
    """Saved state with its moments and matrices in the form that the optimizer keeps: from eight bits to float32
    without loss, from float32 to the nearest; symmetric matrices packed or whole."""
    adapted = dict(saved)
    for name, view in views.items():
        value = saved.get(name)
        if name.startswith(("factor.", "root.")) and isinstance(value, torch.Tensor) and value.dim() == 3 - view.dim():
            adapted[name] = _repacked(value.detach(), view)
    for name in SCALED:
        value, scale = saved.get(name), f"{name}_scale"
        if not isinstance(value, torch.Tensor):
            continue
        coded = isinstance(saved.get(scale), torch.Tensor)
        fits = value.numel() == parameter.numel() and value.is_floating_point()  # or an error names it
        if coded and scale not in views:
            adapted[name] = decode(name, value, adapted.pop(scale).to(value.device))
        elif not coded and scale in views and fits:
            codes, adapted[scale] = encode(name, _in_memory_order(parameter, value))
            adapted[name] = codes.view(views[name].shape)
    return adapted
