"""Conversion of 8-bit moments (`state_dtype="int8"`) from and to float32.

A moment is a uint8 tensor of codes and a float32 tensor of scales, `exp_avg` and `exp_avg_scale`, one scale for each
128 elements in the order of the parameter's memory; src/core/codes.h defines both. Codes have the parameter's shape if
it is contiguous, and scales its rows if these are whole blocks; otherwise they are one row in memory order.

Factors and roots are matrices, or with `packed_factors` a row with the lower triangle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._shared.sharding import whole_tensor
from .._shared.tiles import scales_shape

__all__ = ["SCALED", "adapt", "coded", "decode", "encode"]

SCALED = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_BLOCK = 128
_OCTAVE = 0x80  # a factor of two, among a bfloat16's bits; also the least normal number


def coded(name: str, view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Codes, unpacked from the library's words of four, or their scales, in the shape for the parameter."""
    laid = parameter.is_contiguous()
    if name.endswith("_scale"):
        return view.view(scales_shape(parameter.shape)) if laid else view
    codes = view.view(torch.uint8)[: parameter.numel()]
    return codes.view(parameter.shape) if laid else codes


def _is_second(name: str) -> bool:
    return name == "exp_avg_sq"


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """One row per block; the last one is padded with zeros."""
    count = values.numel()
    rows = torch.zeros(-(-count // _BLOCK) * _BLOCK, dtype=values.dtype, device=values.device)
    rows[:count] = values.reshape(-1)
    return rows.view(-1, _BLOCK)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int64)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _range(signed: bool, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The minimum and maximum of each block and the step between codes, as float32 bits."""
    words = _bits(scales.float()).reshape(-1, 1) & 0xFFFFFFFF
    floor, top = words << 16 & 0xFFFFFFFF, words & 0xFFFF0000
    if signed:
        top = _bits(_floats(top) + _floats(floor))
        return floor, top, (top - floor + 126) // 127
    powers = 1 << torch.arange(8, 24, device=scales.device)
    return floor, top, powers[torch.searchsorted(254 * powers, top - floor).clamp_max(15)]


def decode(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The moment in float32, in the shape of the codes."""
    signed = not _is_second(name)
    given = _blocks(codes.to(torch.int64))
    floor, top, step = _range(signed, scales)
    steps = given & 127 if signed else given - 1
    values = _floats(torch.minimum(floor + steps * step, top))
    if signed:
        values = (values - _floats(floor)) * torch.where(given > 127, -1.0, 1.0)
    else:
        values = torch.where(given == 0, 0.0, values)
    return values.view(-1)[: codes.numel()].view(codes.shape)


def encode(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of a row of float32, and their scales."""
    signed = not _is_second(name)
    rows = _blocks(values.float())
    sizes = rows.abs()
    smallest = sizes.view(-1, _BLOCK // 2, 2).amax(2) if signed else sizes
    smallest = torch.where(smallest == 0, torch.inf, smallest).amin(1, keepdim=True)
    top = ((_bits(sizes.amax(1, keepdim=True)) + 0xFFFF) >> 16).clamp(_OCTAVE + 1, 0x7F80)
    least = (top - (24 if signed else 48) * _OCTAVE).clamp_min(_OCTAVE)
    floor = ((_bits(smallest) - 1) >> 16) - (2 * _OCTAVE if signed else 0)
    floor = torch.minimum(torch.maximum(floor, least), top + (_OCTAVE if signed else -1))
    scales = _floats(top << 16 | floor).view(-1)
    floor, _, step = _range(signed, scales)
    above = _bits(sizes + _floats(floor) if signed else sizes) - floor
    codes = (above.clamp_min(0) + step // 2) // step
    if signed:
        codes = codes.clamp_max(127)
        codes = torch.where((rows < 0) & (codes > 0), codes | 128, codes)
    else:
        codes = torch.where(sizes == 0, 0, codes.clamp_max(254) + 1)
    return codes.view(-1)[: values.numel()].to(torch.uint8), scales


def _in_memory_order(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    laid = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.float32, device=value.device)
    laid.copy_(value.detach().reshape(parameter.shape))
    return laid.as_strided((parameter.numel(),), (1,))


def _repacked(value: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Packs or unpacks the lower triangle of a symmetric matrix, as the optimizer stores it; other values are
    unchanged, and later named in an error."""
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
    """Converts saved state to the form of the optimizer: 8 bits to float32 without loss, float32 to the nearest codes;
    symmetric matrices packed or full."""
    adapted = dict(saved)
    for name, view in views.items():
        value = saved.get(name)
        if name.startswith(("factor.", "root.")) and isinstance(value, torch.Tensor) and value.dim() == 3 - view.dim():
            adapted[name] = _repacked(value.detach(), view)
    for name, value in saved.items():
        what, dot, tile = str(name).partition(".")
        if what not in SCALED or not isinstance(value, torch.Tensor):
            continue
        scale = f"{what}_scale{dot}{tile}"
        wanted = scale in views or (not tile and any(view.startswith(f"{scale}.") for view in views))
        fits = value.is_floating_point() and (tile or value.numel() == parameter.numel())  # or an error names it
        if not isinstance(saved.get(scale), torch.Tensor):
            if wanted and fits:
                whole = whole_tensor(value)
                codes, scales = encode(what, whole.float() if tile else _in_memory_order(parameter, whole))
                adapted[name] = codes.view(views[name].shape if name in views else parameter.shape)
                adapted[scale] = scales.view(views[scale].shape) if scale in views else scales
        elif not wanted:
            codes = whole_tensor(value)
            adapted[name] = decode(what, codes, whole_tensor(adapted.pop(scale)).to(codes.device))
        elif scale in views and saved[scale].numel() == views[scale].numel() and saved[scale].ndim == 1:
            adapted[scale] = saved[scale].view(views[scale].shape)  # of an earlier version
    return adapted
