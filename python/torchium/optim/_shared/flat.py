"""Parameters that FSDP1 (FullyShardedDataParallel with use_orig_params=True) has flattened: on each rank a parameter is
a vector, the range of its elements that the rank's shard of a FlatParameter contains. The shapes are in the handles of
these, to which a parameter has no reference."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .tiles import boxes_of

__all__ = ["Flat", "fill_gradients", "find_flats", "flat_of", "whole_shape"]


class Flat(NamedTuple):
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # of each rank of the group
    process_group: Any
    whole: Any  # a weak reference to the FlatParameter
    index: int  # there

    @property
    def placement(self) -> tuple[Any, ...]:
        """The argument of _C.Optimizer: the rectangles of each range."""
        shards = []
        for rank, (first, end) in enumerate(self.ranges):
            at = 0
            for start, size in boxes_of(self.shape, first, end):
                shards.append((rank, start, size, (at, *(0 for _ in start[1:]))))
                at += math.prod(size)
        return self.shape, tuple(shards)

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the parameter's shape."""
        return whole.reshape(-1)[slice(*self.ranges[self.process_group.rank()])]


_FLATS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def flat_of(parameter: Any) -> Flat | None:
    return _FLATS.get(parameter)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    flat = flat_of(parameter)
    return tuple(parameter.shape) if flat is None else flat.shape


def find_flats(params: Iterable[Any]) -> None:
    """Notes the ranges of parameters that FSDP1 has flattened."""
    flattened = [p for p in params if getattr(p, "_fsdp_flattened", False) and flat_of(p) is None]
    handles = [each for each in gc.get_objects() if type(each).__name__ == "FlatParamHandle"] if flattened else []
    for handle in handles:
        flat = handle.flat_param
        if not handle.uses_sharded_strategy or flat._params is None:
            continue
        ends = itertools.accumulate(flat._numels_with_padding)
        sizes = zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
        starts = [end - size for end, size, padding in sizes if not padding]
        piece = flat._sharded_size.numel()
        for index, (p, shape, start) in enumerate(zip(flat._params, flat._shapes, starts, strict=True)):
            limits = [min(max(rank * piece - start, 0), shape.numel()) for rank in range(handle.world_size + 1)]
            ranges = tuple(itertools.pairwise(limits))
            _FLATS[p] = Flat(tuple(shape), ranges, handle.process_group, weakref.ref(flat), index)


def fill_gradients(params: Iterable[torch.Tensor]) -> None:
    """A rank without elements of a parameter has no gradient of it either, even where the other ranks have one."""
    for p in params:
        flat = flat_of(p)
        if flat is not None and p.grad is None and p.requires_grad and p.numel() == 0:
            whole = flat.whole()
            if whole.grad is not None and not (whole._is_grad_none_mask and whole._is_grad_none_mask[flat.index]):
                p.grad = torch.empty_like(p)
