"""Gathers the state of a shared optimizer on one rank, in the form of one process: full moments, factors, roots and
bases with their numbers, failures in the counts. Any number of ranks can load it."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .sharding import is_sharded, whole_tensor

__all__ = ["consolidate", "is_divided", "wanted_by_checkpoint"]

# Moments in the parameter's layout in one process. Other state has the same names there as for tiles.
_WHOLE = ("exp_avg", "momentum_buffer", "grafting_sq", "master")
_TILE = re.compile(r"([a-z_]+)\.(\d+)")

State = dict[str, Any]


def is_divided(engines: Iterable[Any]) -> bool:
    """Whether the state of replicated parameters is divided among ranks. Sharded parameters do not count."""
    for engine in engines:
        if engine.group is not None:
            for parameter, _, owner, *_ in engine.all_tiles():
                if owner != engine.group.rank and not is_sharded(engine.parameters[parameter]):
                    return True
    return False


def wanted_by_checkpoint() -> bool:
    """Whether torch.distributed.checkpoint is the caller, which calls state_dict() on every rank and saves
    each result."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.distributed.checkpoint"):
            return True
        if name.split(".")[0] not in ("torchium", "torch"):
            return False
        frame = frame.f_back
    return False


def consolidate(engines: Iterable[Any], state: Mapping[Any, State], to: int) -> dict[Any, State] | None:
    """The state of all parameters in host memory on global rank `to`, None on the others. A collective."""
    found: dict[Any, State] = {p: _on_host(values) for p, values in state.items()}
    for engine in engines:
        if engine.group is not None:
            tiles = defaultdict(dict)
            for parameter, number, _, dims, start, size in engine.all_tiles():
                tiles[parameter][number] = dims, tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            for i, numbers in tiles.items():
                parameter = engine.parameters[i]
                mine = {name: value for name, value in found[parameter].items() if _TILE.match(name)}
                every = engine.group.gather(mine, to)
                if every is not None:
                    found[parameter] = _merged(found[parameter], every, numbers, parameter.shape)
    return found if _is_here(to) else None


def _is_here(to: int) -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == to


def _on_host(values: State) -> State:
    return {
        name: whole_tensor(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _merged(own: State, every: Iterable[State], tiles: Mapping[int, Any], shape: torch.Size) -> State:
    """The state of one process, from the replicated state and the tiles of all ranks."""
    merged = {name: value for name, value in own.items() if not _TILE.match(name)}
    failures: dict[int, list[int]] = {}
    numbered: State = {}
    for name, value in sorted(item for part in every for item in part.items()):
        what, number = _TILE.match(name).groups()
        if what == "failures":
            failures[int(number)] = value.tolist()
        elif what in _WHOLE:
            dims, at = tiles[int(number)]
            merged.setdefault(what, torch.zeros(dims, dtype=value.dtype, device="cpu"))[at] = value
        else:
            numbered[name] = value
    for what in _WHOLE:
        if what in merged:
            merged[what] = merged[what].reshape(shape)
    if failures:
        in_order = [count for number in sorted(failures) for count in failures[number]]
        merged["counts"] = torch.cat([merged["counts"], torch.tensor(in_order, dtype=torch.int64, device="cpu")])
    return merged | numbered
