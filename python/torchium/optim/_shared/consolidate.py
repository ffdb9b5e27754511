"""The state of a shared optimizer in the form that one process has it: moments whole, factors, roots and bases under
their numbers, failures among the counts. Any other world can load that. It is brought together on one rank or all, or,
for torch.distributed.checkpoint, described as a whole of which each rank has its tiles."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .flat import flat_of, whole_shape
from .sharding import is_sharded, local_tensor, whole_tensor
from .tiles import Tiled, TileShape, rows_of, shape_of

__all__ = ["asked_by_checkpoint", "consolidate", "in_tiles", "is_divided", "to_be_loaded"]

# Moments in the parameter's layout in one process. Other state has the same names there as for tiles.
_WHOLE = ("exp_avg", "momentum_buffer", "grafting_sq", "master")
_LIKE_PARAMETER = (*_WHOLE, "exp_avg_sq", "max_exp_avg_sq")
_TILE = re.compile(r"([a-z_]+)\.(\d+)")
_COUNTS = "counts"

State = dict[str, Any]


def is_divided(engines: Iterable[Any], shards: bool) -> bool:
    """Whether the state of parameters is divided among ranks: that of replicas, and with `shards` that of shards."""
    for engine in engines:
        if engine.group is not None:
            for parameter, _, owner, *_ in engine.all_tiles():
                if owner != engine.group.rank and (shards or not is_sharded(engine.parameters[parameter])):
                    return True
            if any(map(flat_of, engine.parameters)):
                return True
    return False


def asked_by_checkpoint() -> str | None:
    """How torch.distributed.checkpoint asks for the state, which calls state_dict() on every rank: "parts" are what
    each rank has, to save or load; "own" is the same under its own names, which flattened keys need; "whole" is all of
    it on every rank, "first" on rank 0 (full_state_dict, for which PyTorch itself only gathers DTensors); "load" is
    what a whole state is to be loaded into. None: it does not ask."""
    frame = sys._getframe(1)
    asked, loads = None, False
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("torch.distributed.checkpoint"):
            info = frame.f_locals.get("info") if name == "_get_optim_state_dict" else None
            asked = asked or "parts"
            if getattr(info, "flatten_optimizer_state_dict", False):
                asked = "own"
            if getattr(info, "full_state_dict", False):
                asked = "first" if info.cpu_offload else "whole"
            loads = loads or name == "_load_optim_state_dict"
        elif module.split(".")[0] not in ("torchium", "torch"):
            break
        frame = frame.f_back
    return "load" if loads and asked == "parts" else asked


def _is_whole(name: str, tile: TileShape) -> bool:
    """Whether one process has this as a part of one tensor: all moments where tiles are spans of elements."""
    return name in _WHOLE or (tile.factors == 0 and len(tile.dims) == 1)


def _tiles_of(engines: Iterable[Any]) -> Iterator[tuple[Any, torch.Tensor, Mapping[int, TileShape]]]:
    for engine in engines:
        tiles = engine.tiles()
        for i in tiles:
            yield engine, engine.parameters[i], tiles[i]


def consolidate(engines: Iterable[Any], state: Mapping[Any, State], to: int | None) -> dict[Any, State]:
    """The state of all parameters in host memory on rank `to` of the world, nothing on the others; None: on every rank.
    A collective: the others need memory for messages only, and that rank for the tensor that arrives."""
    wanted, groups = to is None or _is_here(to), [engine for engine in engines if engine.group is not None]
    shared = {id(p) for engine in groups for p in engine.parameters}
    found: dict[Any, State] = {}
    for p, values in state.items():
        if wanted or (id(p) not in shared and any(map(is_sharded, values.values()))):
            found[p] = _on_host(p, values, id(p) in shared)
    for engine in groups:
        _bring(engine, state, found, to)
    if not wanted:
        return {}
    return {p: {n: values[n] for n in sorted(values, key=lambda n: ("." in n, n))} for p, values in found.items()}


def _bring(engine: Any, state: Mapping[Any, State], found: dict[Any, State], to: int | None) -> None:
    """Fills in what the ranks have parts of."""
    tiles, parts, group = engine.tiles(), {}, engine.group
    for i, p in enumerate(engine.parameters):
        rows = rows_of(tiles.get(i, {}))
        if _COUNTS in found.get(p, ()) and rows:
            failures = found[p][_COUNTS].new_zeros(sum(row.stop - row.start for row in rows.values()))
            found[p][_COUNTS] = torch.cat([found[p][_COUNTS], failures])
        for name, value in state.get(p, {}).items():
            if _travels(p, name, value) and (not is_sharded(value) or _written(group.placement_of(value), group.rank)):
                parts[f"{i}/{name}"] = local_tensor(value)
    for rank, label, value in group.gather(parts, to):
        i, _, name = label.partition("/")
        p = engine.parameters[int(i)]
        like = state[p].get(name)
        if _TILE.match(name):
            _put_tile(found[p], name, value, tiles[int(i)], whole_shape(p))
        elif is_sharded(like):
            for start, size, offset in _written(group.placement_of(like), rank):
                found[p][name][_box(start, size)] = value[_box(offset, size)]
        else:
            found[p][name].view(-1)[slice(*flat_of(p).ranges[rank])] = value


def _is_here(to: int) -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == to


def _box(start: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def _travels(parameter: torch.Tensor, name: str, value: Any) -> bool:
    """Whether ranks have parts of this state."""
    flat = flat_of(parameter) is not None and name in _LIKE_PARAMETER
    return isinstance(value, torch.Tensor) and (flat or is_sharded(value) or bool(_TILE.match(name)))


def _written(placement: Any, rank: int) -> list[tuple[Any, ...]]:
    """The rectangles of a rank that no rank before has: (start, size, offset) each."""
    first: dict[Any, int] = {}
    for owner, start, size, _ in placement[1]:
        first.setdefault((start, size), owner)
    return [rest for owner, *rest in placement[1] if owner == rank and first[rest[0], rest[1]] == rank]


def _on_host(parameter: torch.Tensor, values: State, shared: bool) -> State:
    """What this rank has of the whole, and memory for what travels to it."""
    found: State = {}
    for name, value in values.items():
        if not shared or not _travels(parameter, name, value):
            tensor = isinstance(value, torch.Tensor)
            found[name] = whole_tensor(value).to("cpu", copy=True) if tensor else value
        elif not _TILE.match(name):
            shape = value.shape if is_sharded(value) else whole_shape(parameter)
            found[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
    return found


def _put_tile(whole: State, name: str, value: torch.Tensor, tiles: Mapping[int, TileShape], shape: Any) -> None:
    what, number = _TILE.match(name).groups()
    tile = tiles[int(number)]
    if what == "failures":
        whole[_COUNTS][rows_of(tiles)[int(number)]] = value
    elif _is_whole(what, tile):
        part = tile.of(what)
        if what not in whole:
            whole[what] = torch.zeros(shape_of(what, shape), dtype=value.dtype, device="cpu")
        whole[what].view(part.dims)[part.at] = value
    else:
        whole[name] = value


def in_tiles(engines: Iterable[Any], state: Mapping[Any, State]) -> dict[Any, State]:
    """The state as torch.distributed.checkpoint is to see it: this rank's tiles of what one process has whole."""
    found = dict(state)
    for _, parameter, tiles in _tiles_of(engines):
        rows = rows_of(tiles)
        length = max((row.stop for row in rows.values()), default=3)
        parts: dict[str, dict[str, Any]] = defaultdict(dict)
        kept = {}
        for name, value in state[parameter].items():
            match = _TILE.match(name)
            what, number = (match[1], int(match[2])) if match else (name, 0)
            if what in ("failures", _COUNTS) and length > 3:
                parts[_COUNTS][name] = (length,), (rows[number].start if match else 0,), value
            elif match and _is_whole(what, tiles[number]):
                part = tiles[number].of(what)
                parts[what][name] = part.dims, tuple(side.start for side in part.at), value
            else:
                kept[name] = value
        for what, of_name in parts.items():
            shape = (length,) if what == _COUNTS else shape_of(what, parameter.shape)
            kept[what] = Tiled(shape, of_name, next(iter(of_name.values()))[2].dtype)
        found[parameter] = kept
    return found


def to_be_loaded(engines: Iterable[Any], state: Mapping[Any, State]) -> tuple[dict[Any, State], list[torch.Tensor]]:
    """What this rank needs of a whole state: moments of its tiles as one tensor, with nothing in it yet, on the device
    of the others, as PyTorch requires. And these tensors."""
    found, empty = {p: dict(values) for p, values in state.items()}, []
    for engine in engines:
        tiles = engine.tiles()
        for i, parameter in enumerate(engine.parameters):
            for name, value in found.get(parameter, {}).copy().items():
                match = _TILE.match(name)
                if match and match[1] == "failures":
                    del found[parameter][name]
                elif match and i in tiles and _is_whole(match[1], tiles[i][int(match[2])]):
                    del found[parameter][name]
                    if match[1] not in found[parameter]:
                        shape = shape_of(match[1], parameter.shape)
                        empty.append(torch.empty(shape, dtype=value.dtype, device=engine.device))
                        found[parameter][match[1]] = empty[-1]
                elif value.ndim > 0 and not is_sharded(value):
                    found[parameter][name] = value.to(engine.device)
    return found, empty
