"""The layout of a DTensor's shards.

Every rank needs the rectangles of all ranks: they follow from the mesh and the placements, by cutting indices as
PyTorch cuts tensors. This includes uneven, empty and strided shards, as of fully_shard over tensor parallelism.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from .flat import flat_of

__all__ = [
    "Placement",
    "arrived",
    "is_laid_out",
    "is_sharded",
    "local_gradient",
    "local_part",
    "local_tensor",
    "placement_of",
    "same_layout",
    "shards_here",
    "whole_tensor",
    "wrap_like",
]

# (shape, shards), each shard (rank, start, size, offset): the argument of _C.Optimizer.
Shard = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Placement = tuple[tuple[int, ...], tuple[Shard, ...]]
# (first index in the whole, first index in the shard, length)
Interval = tuple[int, int, int]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, including replicated ones."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return arrived(tensor.to_local())


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for a tensor of an asynchronous collective."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def same_layout(a: Any, b: Any) -> bool:
    return is_sharded(a) and a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)


def is_laid_out(parameter: torch.Tensor) -> bool:
    """Whether its gradient, if it has one, is in its layout; others take a collective."""
    gradient = parameter.grad
    return gradient is None or not is_sharded(gradient) or same_layout(gradient, parameter)


def local_gradient(parameter: torch.Tensor, moves: bool) -> torch.Tensor | None:
    """The local shard of its gradient, which moves to the layout of the parameter."""
    gradient = parameter.grad
    if moves:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return None if gradient is None else local_tensor(gradient)


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


def _cut(indices: torch.Tensor, placement: Any, parts: int, part: int) -> torch.Tensor:
    """The indices of a dimension on one coordinate of the mesh."""
    split = getattr(placement, "split_factor", None)
    if split is None:  # Shard: as torch.chunk, with empty shards at the end
        each = -(-len(indices) // parts)
        return indices[part * each : (part + 1) * each]
    return type(placement)(0, split_factor=split)._split_tensor(indices, parts, with_padding=False, contiguous=True)[0][
        part
    ]


def _intervals(indices: torch.Tensor) -> list[Interval]:
    """Runs of consecutive indices."""
    numbers = indices.tolist()
    runs: list[Interval] = []
    first = 0
    for k in range(1, len(numbers) + 1):
        if k == len(numbers) or numbers[k] != numbers[k - 1] + 1:
            runs.append((numbers[first], first, k - first))
            first = k
    return runs


def _shards_at(shape: tuple[int, ...], placements: tuple[Any, ...], sides: tuple[int, ...], at: tuple[int, ...]) -> Any:
    """The rectangles of one coordinate of the mesh: (start, size, offset) each."""
    indices = [torch.arange(size, device="cpu") for size in shape]
    for placement, parts, part in zip(placements, sides, at, strict=True):
        if placement.is_partial():
            raise ValueError("a parameter whose placement is Partial has no values of its own to update")
        if not placement.is_replicate():
            indices[placement.dim] = _cut(indices[placement.dim], placement, parts, part)
    for runs in itertools.product(*map(_intervals, indices)):
        yield tuple(zip(*runs, strict=True)) if runs else ((), (), ())


def shards_here(tensor: Any) -> list[Any]:
    """The rectangles of a DTensor on this rank: (start, offset, size) each."""
    sides, at = tuple(tensor.device_mesh.mesh.shape), tuple(tensor.device_mesh.get_coordinate())
    return list(_shards_at(tuple(tensor.shape), tuple(tensor.placements), sides, at))


@functools.lru_cache(maxsize=4096)
def _placement(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[tuple[int, ...], tuple[int, ...]]
) -> Placement:
    """`mesh`: its shape, and the rank in the group of each coordinate."""
    sides, ranks = mesh
    shards = []
    for at, rank in zip(itertools.product(*map(range, sides)), ranks, strict=True):
        for start, offset, size in _shards_at(shape, placements, sides, at):
            shards.append((rank, start, size, offset))
    return shape, tuple(shards)


def placement_of(parameter: Any, rank_of: dict[int, int]) -> Placement | None:
    """Of a DTensor, with ranks of the group by global rank; None for a replicated plain tensor."""
    flat = flat_of(parameter)
    if flat is not None or not is_sharded(parameter):
        return flat and flat.placement
    mesh = parameter.device_mesh.mesh
    ranks = tuple(rank_of[rank] for rank in mesh.flatten().tolist())
    return _placement(tuple(parameter.shape), tuple(parameter.placements), (tuple(mesh.shape), ranks))
