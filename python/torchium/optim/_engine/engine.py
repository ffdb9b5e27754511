"""The part of an optimizer on one device: the C object, the memory of its state, and its parameter groups.

Parameters of an engine are numbered in the order of their addition; a step's list of gradients has this order. A group
of the C object belongs to the group of `param_groups` with its index; parameters added later to an existing group of
`param_groups` are another group of the C object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from torchium import _C

from .._shared.flat import flat_of
from .._shared.sharding import is_sharded, local_tensor, local_tensors, moved_gradient, wrap_like
from .._shared.tiles import TileShape, shape_of
from .matrices import Role
from .moments import SCALED, coded

__all__ = ["Engine", "Members", "allocate_state", "profiled_range", "profiler_enabled", "stream_on"]

# From PyTorch 2.10 on, the extension reads the current stream itself.
_TELLS_STREAM = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


# There is no public function for it. Without this one, assume an active profiler.
profiler_enabled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", None) or (lambda: True)


def stream_on(device: torch.device) -> int | None:
    """PyTorch's current stream, if the extension cannot read it."""
    if _TELLS_STREAM or device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).cuda_stream


def profiled_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of torch.profiler, if active."""
    return torch.autograd.profiler.record_function(name) if profiler_enabled() else contextlib.nullcontext()


def allocate_state(device: torch.device, size: int) -> tuple[torch.Tensor, int]:
    """Memory of the state, from PyTorch's allocator."""
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return memory, memory.data_ptr()


@dataclasses.dataclass
class Members:
    """A group of the C object, and its latest hyperparameters."""

    index: int  # in param_groups
    number: int  # in the C object
    generation: int  # the arrival that added its parameters, which a restart must repeat
    parameters: list[torch.Tensor]
    options: tuple[Any, ...] | None = None
    lr: float = 0.0
    lr_tensor: bool = False  # it is read from a tensor on the device


class Ranges:
    """Phases of a step as ranges of torch.profiler, named "torchium::shampoo/refresh"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: list[torch.autograd.profiler.record_function] = []

    def push(self, name: str) -> None:
        phase = name.removeprefix("tch_optimizer_").removeprefix("tch_")
        entered = torch.autograd.profiler.record_function(f"torchium::{self._kind}/{phase}")
        entered.__enter__()
        self._open.append(entered)

    def pop(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


class Engine:
    """All parameters of an optimizer on one device, local or shared with the ranks of a group."""

    def __init__(self, kind: str, device: torch.device, group: Any = None) -> None:
        self.kind = kind
        self.device = device
        self.group = group
        self._parts = False  # this process has a part of some parameters
        self._moving: list[int] = []  # those whose gradients came in another layout at the last step
        self._fitting: list[Any] = []  # the description of each gradient that was last seen to be in the right layout
        self.parameters: list[torch.Tensor] = []
        self.labels: list[str] = []
        self.groups: list[Members] = []
        self.broken = False  # an error of the device has corrupted the state
        self._profiled = False
        self._handle = _C.Optimizer(
            str(device), functools.partial(allocate_state, device), group.arguments() if group else None
        )

    def add(
        self,
        index: int,
        generation: int,
        config: dict[str, Any],
        parameters: list[torch.Tensor],
        labels: list[str],
        roles: list[Role],
    ) -> Members:
        placements = tuple(map(self.group.placement_of, parameters)) if self.group else None
        local = [local_tensor(p) for p in parameters]
        number = self._handle.add_group(config, local, labels, roles, stream_on(self.device), placements)
        self._parts = self._parts or any(is_sharded(p) or flat_of(p) for p in parameters)
        members = Members(index, number, generation, parameters)
        self.groups.append(members)
        self.parameters += parameters
        self._fitting += [None] * len(parameters)
        self.labels += labels
        return members

    def states(self) -> list[dict[str, torch.Tensor]]:
        """The state of each parameter, by name: views of the engine's memory."""
        views: list[dict[str, torch.Tensor]] = [{} for _ in self.parameters]
        tiles = functools.cache(self.tiles)
        for name, parameter, memory in self._handle.states():
            view, whose = torch.from_dlpack(memory), self.parameters[parameter]
            what, _, tile = name.partition(".")
            if what in SCALED and view.dtype == torch.int32 and tile:
                at = tiles()[parameter][int(tile)].at[0]
                view = view.view(torch.uint8)[: at.stop - at.start]
            elif not tile and (view.dtype == torch.int32 or name.endswith("_scale")):
                view = coded(name, view, local_tensor(whose))
            views[parameter][name] = self._as_parameter(whose, name, view)
        return views

    @staticmethod
    def _as_parameter(parameter: torch.Tensor, name: str, view: torch.Tensor) -> torch.Tensor:
        """Tensors in the layout of a DTensor parameter are DTensors, which torch.distributed.checkpoint reshards.
        Tiles, whose names end in their numbers, and clocks are plain tensors."""
        like = is_sharded(parameter) and name != "step" and "." not in name
        return wrap_like(view, parameter, shape_of(name, parameter.shape)) if like else view

    def generation_of(self, parameter: int) -> int:
        for members in self.groups:
            if parameter < len(members.parameters):
                return members.generation
            parameter -= len(members.parameters)
        raise IndexError(parameter)

    def counts(self, parameter: int) -> list[int]:
        """The host's counts of a parameter; for a shared one, those that are equal on every rank."""
        counts = self._handle.get_counts(parameter)
        return counts[:2] if self.group else counts

    def failures(self, parameter: int) -> dict[str, list[int]]:
        """For a shared parameter: failed refreshes of the factors of each local tile, by the tile's name."""
        found: dict[str, list[int]] = {}
        if self.group:
            for tile, count in zip(self._factors(parameter), self._handle.get_counts(parameter)[2:], strict=True):
                found.setdefault(f"failures.{tile}", []).append(count)
        return found

    def _factors(self, parameter: int) -> list[str]:
        """The tile of each factor, in the order of the counts."""
        return [
            name.split(".")[1]
            for name, whose, _ in self._handle.states()
            if whose == parameter and name.startswith("factor.")
        ]

    def set_counts(self, parameter: int, counts: list[int], failures: dict[str, list[int]] | None = None) -> None:
        if self.group:
            left = {name: list(numbers) for name, numbers in (failures or {}).items()}
            names = [f"failures.{tile}" for tile in self._factors(parameter)]
            counts = counts[:2] + [int(left[name].pop(0)) if left.get(name) else 0 for name in names]
        self._handle.set_counts(parameter, counts)

    def all_tiles(self) -> list[tuple[Any, ...]]:
        """(parameter, number, owner, factors, dims, start, size) of every tile on any rank."""
        return self._handle.tiles()

    def tiles(self) -> dict[int, dict[int, TileShape]]:
        """Of each parameter that has tiles, on any rank, their shapes by number."""
        found: dict[int, dict[int, TileShape]] = {}
        for parameter, number, _, factors, dims, start, size in self.all_tiles():
            at = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            found.setdefault(parameter, {})[number] = TileShape(factors, dims, at)
        return found

    def set_lr(self, members: Members, lr: float) -> None:
        self._handle.set_lr(members.number, lr)
        members.lr = lr

    def set_lr_tensor(self, members: Members, lr: torch.Tensor | None) -> None:
        """A tensor on the engine's device that every later step reads, or None to use the number."""
        if lr is not None or members.lr_tensor:
            self._handle.set_lr_tensor(members.number, lr)
            members.lr_tensor = lr is not None

    def set_config(self, members: Members, config: dict[str, Any]) -> None:
        self._handle.set_config(members.number, config)
        members.lr = config["lr"]

    def step(
        self,
        gradients: list[torch.Tensor | None] | None,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> list[torch.Tensor] | None:
        """A step with these gradients, or with `p.grad`. Returns the parameters with a gradient; None, without changes,
        if a parameter's tensor was replaced."""
        profiled = profiler_enabled()
        if profiled != self._profiled:
            ranges = Ranges(self.kind) if profiled else None
            self._handle.set_range_hook(ranges and ranges.push, ranges and ranges.pop)
            self._profiled = profiled
        stream = None if _TELLS_STREAM else stream_on(self.device)
        if self._parts:
            return self._step_parts(gradients, grad_scale, found_inf, stream)
        outcome = self._handle.step(self.parameters, gradients, grad_scale, found_inf, stream)
        if outcome is None:
            return self.parameters
        return None if isinstance(outcome, int) else outcome

    def _step_parts(self, gradients: list[torch.Tensor | None] | None, *rest: Any) -> list[torch.Tensor] | None:
        given = [p.grad for p in self.parameters] if gradients is None else gradients
        specs = [getattr(g, "_spec", None) for g in given]
        moving = [
            i
            for i, (spec, seen) in enumerate(zip(specs, self._fitting, strict=True))
            if spec is not seen
            and not (spec and seen and spec.mesh is seen.mesh and spec.placements == seen.placements)
            and not self._fits(i, spec)
        ]
        if moving != self._moving and self.group:  # their collectives are of all ranks, or of none
            doing = "have a gradient in another layout than its parameter's"
            self.group.check(self.group.agree(doing).tolist(), doing)
        self._moving = moving
        local, parts = local_tensors(self.parameters), local_tensors(given)
        for i in moving:
            parts[i] = moved_gradient(self.parameters[i])
        outcome = self._handle.step(local, parts, *rest)
        if isinstance(outcome, int):
            return None
        return [p for p, g in zip(local, parts, strict=True) if g is not None]

    def _fits(self, i: int, spec: Any) -> bool:
        """Whether the gradient of parameter i, which has this description, is in the parameter's layout."""
        own = getattr(self.parameters[i], "_spec", None)
        fits = spec is None or own is None or (spec.mesh == own.mesh and spec.placements == own.placements)
        self._fitting[i] = spec if fits else self._fitting[i]
        return fits

    def memory(self) -> dict[str, int]:
        return self._handle.memory()

    def stats(self) -> dict[str, float]:
        return self._handle.stats()
