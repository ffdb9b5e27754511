"""The layout of a DTensor's shards.

Every rank needs the rectangles of all ranks: they follow from the mesh and the placements, by cutting indices as
PyTorch cuts tensors. This includes uneven, empty and strided shards, as of fully_shard over tensor parallelism.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .flat import flat_of

__all__ = [
    "Placement",
    "arrived",
    "is_laid_out",
    "is_sharded",
    "local_part",
    "local_tensor",
    "local_tensors",
    "moved_gradient",
    "placement_of",
    "same_layout",
    "shards_here",
    "whole_tensor",
    "wrap_like",
]

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}

# (shape, shards), each shard (rank, start, size, offset): the argument of _C.Optimizer.
Shard = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Placement = tuple[tuple[int, ...], tuple[Shard, ...]]
Mesh = tuple[tuple[int, ...], tuple[int, ...]]  # its shape, and the rank in the group of each coordinate
Runs = tuple[tuple[int, int], ...]  # consecutive indices: the first, and how many
# (first index in the whole, first index in the shard, length)
Interval = tuple[int, int, int]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, including replicated ones."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard, in the same memory. DTensor.to_local() would make a view of it for each parameter and step."""
    return arrived(getattr(tensor, "_local_tensor", tensor))


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for a tensor of an asynchronous collective."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def same_layout(a: Any, b: Any) -> bool:
    return is_sharded(a) and a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)


def is_laid_out(parameter: torch.Tensor) -> bool:
    """Whether its gradient, if it has one, is in its layout; others take a collective."""
    gradient = parameter.grad
    return gradient is None or not is_sharded(gradient) or same_layout(gradient, parameter)


def moved_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The local shard of its gradient in the layout of the parameter."""
    return local_tensor(parameter.grad.redistribute(parameter.device_mesh, parameter.placements))


def local_tensors(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The local shards, without a call for each."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return [part if type(part) in _PLAIN else arrived(part) for part in parts]


def wrap_like(local: torch.Tensor, parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A DTensor of this shape with the local shard `local`, in the layout of the parameter. `DTensor.from_local` would
    move it to the mesh's device, but CPUOffloadPolicy keeps shards in host memory."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = list(itertools.accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1]
    meta = TensorMeta(torch.Size(shape), tuple(stride) if shape else (), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(parameter.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """The mesh's collectives gather it, on its device."""
    if not is_sharded(value):
        return value
    there = value.device_mesh.device_type
    return (value if value.device.type == there else value.to(there)).full_tensor()


def local_part(value: Any, like: Any) -> torch.Tensor:
    """The local shard of a saved tensor, full or in any layout, in the layout of `like`."""
    if not is_sharded(like):
        return whole_tensor(value)
    if is_sharded(value):
        if not same_layout(value, like):
            value = value.redistribute(like.device_mesh, like.placements)
        return local_tensor(value)
    part = local_tensor(like).new_empty(local_tensor(like).shape)
    whole = (value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")).reshape(like.shape)
    for start, offset, size in shards_here(like):
        there = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
        part[there] = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    return part


@functools.lru_cache(maxsize=4096)
def _parts(length: int, placement: Any, parts: int) -> list[Runs]:
    """The positions of a dimension that each coordinate of the mesh gets."""
    if getattr(placement, "split_factor", None) is None:  # Shard: as torch.chunk, with empty shards at the end
        each = -(-length // parts)
        limits = [min(part * each, length) for part in range(parts + 1)]
        return [((first, end - first),) if first < end else () for first, end in itertools.pairwise(limits)]
    whole, along = torch.arange(length, device="cpu"), type(placement)(0, split_factor=placement.split_factor)
    found = []
    for part in along._split_tensor(whole, parts, with_padding=False, contiguous=True)[0]:
        breaks = [0, *((part.diff() != 1).nonzero().flatten() + 1).tolist(), len(part)]
        found.append(tuple((int(part[a]), b - a) for a, b in itertools.pairwise(breaks) if a < b))
    return found


def _chosen(runs: Runs, positions: Runs) -> Runs:
    """The indices at these positions of the runs."""
    found, at = [], 0
    for start, length in runs:
        for first, count in positions:
            low, high = max(first, at), min(first + count, at + length)
            if low < high:
                found.append((start + low - at, high - low))
        at += length
    return tuple(found)


def _divided(length: int, cuts: list[tuple[Any, int, range]]) -> dict[tuple[int, ...], list[Interval]]:
    """The intervals of a dimension by the coordinates along the mesh dimensions that cut it. A cut: the placement, the
    mesh's size and the wanted coordinates."""
    level: dict[tuple[int, ...], Runs] = {(): ((0, length),)}
    for placement, size, wanted in cuts:
        level = {
            (*at, part): _chosen(runs, _parts(sum(count for _, count in runs), placement, size)[part])
            for at, runs in level.items()
            for part in wanted
        }
    ends = {at: itertools.accumulate((count for _, count in runs), initial=0) for at, runs in level.items()}
    return {at: [(start, first, n) for (start, n), first in zip(level[at], ends[at], strict=False)] for at in level}


def _shards(shape: tuple[int, ...], placements: tuple[Any, ...], sides: tuple[int, ...], wanted: list[range]) -> Any:
    """The rectangles of each wanted coordinate of the mesh: (start, offset, size) each."""
    if any(placement.is_partial() for placement in placements):
        raise ValueError("a parameter whose placement is Partial has no values of its own to update")
    axes = [[a for a, p in enumerate(placements) if not p.is_replicate() and p.dim == k] for k in range(len(shape))]
    divided = [
        _divided(length, [(placements[a], sides[a], wanted[a]) for a in axes[k]]) for k, length in enumerate(shape)
    ]
    for at in itertools.product(*wanted):
        runs = [intervals[tuple(at[a] for a in axes[k])] for k, intervals in enumerate(divided)]
        yield [tuple(zip(*rectangle, strict=True)) or ((), (), ()) for rectangle in itertools.product(*runs)]


def shards_here(tensor: Any) -> list[Any]:
    """The rectangles of a DTensor on this rank: (start, offset, size) each."""
    at = [range(k, k + 1) for k in tensor.device_mesh.get_coordinate()]
    return next(_shards(tuple(tensor.shape), tuple(tensor.placements), tuple(tensor.device_mesh.mesh.shape), at))


@functools.lru_cache(maxsize=4096)
def _placement(shape: tuple[int, ...], placements: tuple[Any, ...], mesh: Mesh) -> Placement:
    sides, ranks = mesh
    found = zip(ranks, _shards(shape, placements, sides, list(map(range, sides))), strict=True)
    return shape, tuple((rank, start, size, offset) for rank, here in found for start, offset, size in here)


def placement_of(parameter: Any, mesh_of: Callable[[Any], Mesh]) -> Placement | None:
    """Of a DTensor; None for a replicated plain tensor."""
    flat = flat_of(parameter)
    if flat is not None or not is_sharded(parameter):
        return flat and flat.placement
    return _placement(tuple(parameter.shape), tuple(parameter.placements), mesh_of(parameter.device_mesh))
