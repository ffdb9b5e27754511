"""Assigns parameters to engines, in an order, with their saved state.

The order determines bits: refreshes are scheduled per group of the C object, and random numbers depend on a parameter's
number. So parameters added together are one generation, whose number is saved with their state, and a restart adds them
in the same order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchium._messages import shown

from .._shared.flat import flat_of
from .._shared.sharding import whole_tensor
from .._shared.tiles import rows_of
from . import state as saved_state
from .engine import Engine
from .moments import adapt

__all__ = ["Arrival", "Engines", "Group", "Home", "labels_of", "placed", "put_back"]

Group = dict[str, Any]
# A device, and the ranks that share its parameters (none for local ones): the key of an engine.
Home = tuple[torch.device, tuple[int, ...]]
Engines = dict[Home, Engine]

_MOST_LABEL = 150  # bytes: the library's limit for names is 192


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Parameters of one group and one home that are added together."""

    home: Home
    generation: int
    index: int
    positions: list[int]
    parameters: list[torch.Tensor]


def placed(engines: Engines) -> set[int]:
    """The ids of all parameters in engines."""
    return {id(p) for engine in engines.values() for p in engine.parameters}


def labels_of(groups: list[Group]) -> list[list[str]]:
    """The unique name of each parameter in messages."""
    names = [group.get("param_names") or [None] * len(group["params"]) for group in groups]
    uses = Counter(name for row in names for name in row)

    def label(index: int, position: int, name: Any) -> str:
        place = f"parameter {position} of group {index}"
        if name is None:
            return place
        text = (name if isinstance(name, str) else shown(name)).replace("\0", "?")
        if len(text.encode()) > _MOST_LABEL:
            return f"{place}, ...{text.encode()[-_MOST_LABEL // 2 :].decode(errors='ignore')}"
        return text if uses[name] == 1 and text else f"{text} ({place})"

    return [[label(index, k, name) for k, name in enumerate(row)] for index, row in enumerate(names)]


def put_back(
    engines: Engines, first: Mapping[Home, int], agree: Callable[[], None], state: Mapping[Any, Any], strict: bool
) -> dict[torch.Tensor, dict[str, Any]]:
    """Restores the state of the parameters from number first[home] on: everything is checked, on all ranks, before
    anything is written. Returns the current state."""
    views = {home: engines[home].states() for home in first}
    for home, start in first.items():
        engine = engines[home]
        for i in range(start, len(engine.parameters)):
            saved = _saved(engine, i, views[home][i], state)
            if saved_state.has_state(saved):
                saved_state.check(engine.labels[i], views[home][i], saved, len(engine.counts(i)), strict)
    agree()
    return {
        engines[home].parameters[i]: _adopt(engines[home], i, views[home][i], state)
        for home, start in first.items()
        for i in range(start, len(engines[home].parameters))
    }


def _saved(engine: Engine, i: int, views: dict[str, torch.Tensor], state: Mapping[Any, Any]) -> dict[str, Any]:
    """The saved state of a parameter; of a shared one, full moments are cut into tiles, and failures taken from the
    counts of one process."""
    saved = dict(state.get(engine.parameters[i]) or {})
    saved_state.check_memory(engine.labels[i], saved)
    if saved_state.has_state(saved):
        saved = adapt(engine.parameters[i], views, saved)
    flat = flat_of(engine.parameters[i])
    for name, view in views.items() if flat else ():
        value = saved.get(name)
        if "." not in name and isinstance(value, torch.Tensor) and value.shape == flat.shape != view.shape:
            saved[name] = flat.local(value)
    if engine.group and saved_state.has_state(saved):
        tiles = engine.tiles().get(i, {})
        counts = saved.get(saved_state.COUNTS)
        if counts is not None:
            if len(counts) > 3:
                rows = rows_of(tiles).items()
                saved = {f"failures.{number}": counts[row] for number, row in rows} | saved
            saved[saved_state.COUNTS] = counts[:3]
        for name in views:
            what, _, number = name.partition(".")
            if name not in saved and number.isdecimal() and isinstance(saved.get(what), torch.Tensor):
                tile = tiles[int(number)].of(what)
                saved[name] = whole_tensor(saved[what]).reshape(tile.dims)[tile.at]
    return saved


def _adopt(engine: Engine, i: int, views: dict[str, torch.Tensor], state: Mapping[Any, Any]) -> dict[str, Any]:
    saved = _saved(engine, i, views, state)
    counts = engine.counts(i)
    if saved_state.has_state(saved):
        saved_state.restore(views, saved)
        counts = saved_state.counts_of(views, saved, len(counts))
        failures = {name: value for name, value in saved.items() if str(name).startswith("failures.")}
        engine.set_counts(i, counts, failures)
    others = {name: value for name, value in saved.items() if not saved_state.is_ours(name)}
    generation = engine.generation_of(i)
    failures = {name: torch.tensor(numbers, device="cpu") for name, numbers in engine.failures(i).items()}
    return {
        **others,
        **views,
        **failures,
        saved_state.COUNTS: torch.tensor([generation, *counts], dtype=torch.int64, device="cpu"),
    }
