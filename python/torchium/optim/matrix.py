"""A base class for matrix optimizers written in Python.

The C library's engine runs AdamW only. The state of matrices is in `self.state` by parameter, as slices of the stacks
of the last step, so that the next one needs no copies.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ._engine.matrices import Role
from ._engine.placement import Arrival, Engines, Group
from ._engine.report import MemoryReport
from ._shared.group import Group as SharedGroup
from ._shared.sharding import is_sharded, local_tensor, shards_here, whole_tensor
from .arguments import AdamWArguments, Nonfinite
from .base import is_trained
from .options import ADAMW, COMMON, Options, lr_for, plain
from .second_order import SecondOrder

__all__ = ["MatrixOptimizer"]

_READ = {"lr", "weight_decay", "weight_decay_type", "maximize", "nonfinite", "use_adamw"}
_READ |= {"adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay"}
_STEP = "step"  # the state that this class keeps


@dataclass(eq=False)
class _Piece:
    """Matrices of one shape in one parameter: all, or those of one cut."""

    parameter: torch.Tensor
    suffix: str  # of names of its state
    lead: tuple[int, ...]  # batch dimensions
    dim: int  # the cut dimension; the cut begins at start
    start: int
    rows: int
    sides: tuple[int, int]
    group: SharedGroup | None = None  # the ranks that share the parameter, and the one that computes this piece
    owner: int = 0
    shards: list[Any] = field(default_factory=list)

    @property
    def count(self) -> int:
        return math.prod(self.lead)

    @property
    def is_here(self) -> bool:
        return self.group is None or self.group.rank == self.owner

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its matrices in a tensor of the parameter's shape: [count, m, n]."""
        return whole.narrow(self.dim, self.start, self.rows).reshape(self.count, *self.sides)

    def own(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This piece's part of a parameter's state, by the subclass's names."""
        end = len(self.suffix)
        return {
            name[: len(name) - end]: value.reshape(self.count, *value.shape[len(self.lead) :])
            for name, value in state.items()
            if name != _STEP and name.endswith(self.suffix)
        }

    def update(self, step: torch.Tensor, decay: Any, cautious: bool) -> None:
        """Updates the local shard of the parameter."""

        def descend(part: torch.Tensor, step: torch.Tensor) -> None:
            p = part.to(step.dtype)
            part.copy_((torch.where(step * p >= 0, p * decay, p) if cautious else p * decay) - step)

        shape = self.parameter.shape
        step = step.reshape(*shape[: self.dim], self.rows, *shape[self.dim + 1 :])
        if not is_sharded(self.parameter):
            part = self.parameter.narrow(self.dim, self.start, self.rows)
            descend(part, step)
            return
        local = local_tensor(self.parameter)
        for starts, offsets, sizes in self.shards:
            first = max(starts[self.dim], self.start)
            size = min(starts[self.dim] + sizes[self.dim], self.start + self.rows) - first
            if size > 0:
                here, there = ([slice(a, a + n) for a, n in zip(x, sizes, strict=True)] for x in (offsets, starts))
                skipped = first - starts[self.dim]
                here[self.dim] = slice(offsets[self.dim] + skipped, offsets[self.dim] + skipped + size)
                there[self.dim] = slice(first - self.start, first - self.start + size)
                descend(local[tuple(here)], step[tuple(there)])


def _matrix_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns, as for Muon: dimensions of size 1 are dropped, and all but the first are merged. None for
    vectors, scalars and empty tensors."""
    sizes = [size for size in shape if size != 1]
    return (sizes[0], math.prod(sizes[1:])) if len(sizes) > 1 and 0 not in sizes else None


def _pieces_of(p: torch.Tensor, role: Role) -> list[_Piece]:
    """None for AdamW parameters."""
    elementwise, dim, cuts = role
    if elementwise or 0 in p.shape or _matrix_of(p.shape[dim:]) is None:
        return []
    sizes = memoryview(cuts).cast("q").tolist() or [p.shape[dim]]
    pieces = []
    for number, (start, rows) in enumerate(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)):
        rest = p.shape[dim + 1 :]
        sides = _matrix_of((rows, *rest)) or (1, math.prod(rest))
        pieces.append(_Piece(p, f".{number}" if len(sizes) > 1 else "", tuple(p.shape[:dim]), dim, start, rows, sides))
    return pieces


def _joined(slices: list[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors: without a copy if they are slices of one stack."""
    first = slices[0]
    memory, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in slices:
        alike = part.shape[1:] == first.shape[1:] and part.dtype == first.dtype and part.is_contiguous()
        if not alike or part.untyped_storage().data_ptr() != memory or part.storage_offset() != end:
            return torch.cat(slices)
        end += part.numel()
    return first.as_strided((sum(map(len, slices)), *first.shape[1:]), first.stride(), first.storage_offset())


class MatrixOptimizer(SecondOrder):
    """A base class for matrix optimizers written in Python. A subclass defines `direction`, which gets the gradients of
    all matrices of one shape at once, and may use any function or kernel.

        p <- (1 - lr weight_decay) p - lr direction(g)

    In tensors of more dimensions all but the first are merged, as by `Muon`. Vectors, scalars and `use_adamw`
    parameters get AdamW. float16 and bfloat16 gradients are converted to float32, and the parameter is rounded after
    the step. Ranks that share parameters, as DTensors or as replicas of `process_group`, divide the matrices: each is
    computed on one rank, which has its state.

    Args:
        params: a model, of which embeddings and the output layer get AdamW, as `summary()` tells; or parameters, groups
            of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay, or of `weight_decay_type='cautious'`.
        adamw: an `AdamWArguments`, or a dictionary of its arguments; its learning rate of None means lr.
        maximize: maximize the objective.
        nonfinite: what a step does with an infinity or a NaN in a gradient: 'skip' it (counted in `stats()`), 'raise',
            which synchronizes with the device, or 'ignore'. For 'skip' `direction` gets zeros and a copy of the state,
            and nothing of what it does is kept.
        hyperparameters: further defaults of groups, which `direction` finds in `group`; also `adamw_lr` and so on.

    Examples:
        >>> class Orthogonal(torchium.optim.MatrixOptimizer):
        ...     def direction(self, gradients, state, group):
        ...         return torchium.linalg.orthogonalize(gradients)
        >>> optimizer = Orthogonal(model, lr=0.02)
    """

    _options: ClassVar = Options(*(option for option in (*ADAMW, *COMMON) if option.name in _READ))
    _kinds_are_guessed = False
    _all_decide = True
    _counts: torch.Tensor | None = None  # steps taken or skipped, and skipped ones, on the device

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "kind" not in vars(cls):
            cls.kind = cls.__name__

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        weight_decay: float = 0.0,
        *,
        adamw: AdamWArguments | Mapping[str, Any] | None = None,
        maximize: bool = False,
        nonfinite: Nonfinite = "skip",
        process_group: Any = None,
        **hyperparameters: Any,
    ) -> None:
        if type(self).direction is MatrixOptimizer.direction:
            raise TypeError(f"{type(self).__name__} must have a method direction(self, gradients, state, group)")
        arguments = {name: value for name, value in locals().items() if name in _READ or name == "adamw"}
        options = {name: value for name, value in hyperparameters.items() if name in _READ}
        defaults = self._options.defaults(type(self).__name__, arguments | {"options": options})
        super().__init__(params, defaults | {"step": 0} | hyperparameters | {"process_group": process_group})

    def init_state(self, gradients: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The initial state of matrices; empty by default.

        Args:
            gradients: of these matrices, [batch, m, n].
            group: the options of their group.

        Returns:
            Tensors by name, each with the batch as its first dimension. The name "step" is reserved.
        """
        return {}

    def direction(self, gradients: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
        """The update of matrices, of which a step subtracts lr times; defined by the subclass.

        Args:
            gradients: of all matrices of one shape in a group, [batch, m, n]; may be modified.
            state: the tensors of `init_state`: modify or replace them, with the same shapes. In addition
                `state["step"]`, [batch]: the steps of each matrix, including this one, counted on the device.
            group: the options of the group. `group["step"]` is the number of its steps before this one, counted on the
                host, skipped ones included.

        Returns:
            A tensor of the shape of `gradients`.
        """
        raise NotImplementedError

    # --- which parameters are the matrices

    def _defaults_of(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name != "process_group"}

    def _config(self, group: Group, lr: float) -> dict[str, Any]:
        """As in Muon, for its AdamW."""
        if group["weight_decay_type"] == "l2":
            raise ValueError("weight_decay_type is 'l2', expected 'decoupled' or 'cautious'")
        return super()._config(group, lr) | {"kind": "muon"}

    def _adamw_share(self, group: Group) -> float | None:
        return 1.0

    def _matrices(self, groups: list[Group]) -> dict[torch.Tensor, list[_Piece]]:
        return {
            p: pieces
            for index, group in enumerate(groups)
            for p, role in zip(group["params"], self._roles(groups, index), strict=True)
            if (pieces := _pieces_of(p, role))
        }

    def _arrivals(
        self, engines: Engines, groups: list[Group], state: Mapping[Any, Any], wanted: Callable[[torch.Tensor], bool]
    ) -> list[Arrival]:
        matrices = self._matrices(groups)
        others = {p: saved for p, saved in state.items() if p not in matrices}
        return super()._arrivals(engines, groups, others, lambda p: p not in matrices and wanted(p))

    def _look_at_groups(self) -> None:
        super()._look_at_groups()
        self._pieces = self._matrices(self.param_groups)
        self._outside = [p for p in self._outside if p not in self._pieces]
        homes = {p: self._home_of(p) for group in self.param_groups for p in group["params"]}
        # Matrices of a shape are assigned to the ranks round-robin; the assignment never changes.
        dealt = dict.fromkeys(homes.values(), 0)
        order = [(piece.sides, p, k, piece) for p in homes for k, piece in enumerate(self._pieces.get(p, ()))]
        for _, p, k, piece in sorted(order, key=operator.itemgetter(0)):
            home = homes[p]
            piece.group = self._shared_groups.get(home)
            piece.shards = shards_here(p) if is_sharded(p) else []
            piece.owner = self._owners.setdefault((p, k), dealt[home] % max(1, len(home[1])))
            dealt[home] += 1

    # --- a step

    @torch.no_grad()
    def _step_with(self, found: torch.Tensor | None, admits: bool) -> None:
        self._count(found)
        self._check_finite(found)
        # State must not be initialized from a gradient that is not finite, so the first step checks.
        if found is not None and any(p.grad is not None and _STEP not in self.state.get(p, ()) for p in self._pieces):
            if found.item():
                return
            found = None
        try:
            for group in self.param_groups:
                self._step_group(group, found)
        except Exception as error:
            for shared in self._sharing:
                shared.give_up(f"{type(error).__name__}: {error}")
            raise
        super()._step_with(found, admits)

    def _count(self, found: torch.Tensor | None) -> None:
        if self._counts is None:
            device = self.param_groups[0]["params"][0].device if found is None else found.device
            self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._counts[0] += 1
        if found is not None:
            self._counts[1] += found.to(self._counts.device)

    def _step_group(self, group: Group, found: torch.Tensor | None) -> None:
        given = [p for p in group["params"] if p.grad is not None and p in self._pieces]
        batches: dict[tuple[Any, ...], list[_Piece]] = defaultdict(list)
        clocks: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for p in given:
            for piece in self._pieces[p]:
                batches[piece.sides, p.device, torch.promote_types(p.dtype, torch.float32)].append(piece)
            clocks[p.device].append(p)
        steps, at = {}, {}
        for device, members in clocks.items():  # stacked steps of the matrices
            none = torch.zeros((), dtype=torch.float64, device=device)
            past = [self.state.get(p, {}).get(_STEP, none) for p in members]
            steps[device] = _joined([each.to(device, torch.float64).reshape(1) for each in past])
            at |= dict(zip(members, steps[device], strict=True))
        for (_, device, dtype), pieces in batches.items():
            self._step_batch(pieces, at, dtype, group, None if found is None else found.to(device))
        for device, stack in steps.items():
            stack += 1 if found is None else found.to(device).logical_not()
            for p in clocks[device]:
                self.state[p][_STEP] = at[p]
        group["step"] += bool(given)

    def _step_batch(
        self,
        pieces: list[_Piece],
        steps: Mapping[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        group: Group,
        found: torch.Tensor | None,
    ) -> None:
        device = pieces[0].parameter.device
        number, tensor = lr_for(device, group["lr"])
        lr = number if tensor is None else tensor.reshape(())
        decay = plain(group["weight_decay"])
        decay = 1 - lr * decay * (1 if found is None else found.logical_not().double()) if decay else 1.0
        here, given, whole = [piece for piece in pieces if piece.is_here], [], None
        for last, piece in zip([None, *pieces], pieces, strict=False):
            if last is None or last.parameter is not piece.parameter:
                whole = whole_tensor(piece.parameter.grad).to(device)
            given += [piece.of(whole).to(dtype)] if piece.is_here else []
        moves = {}
        if here:
            gradients = torch.cat(given)
            if group["maximize"]:
                gradients.neg_()
            if found is not None:
                gradients.masked_fill_(found, 0)
            times = torch.cat([steps[piece.parameter].expand(piece.count) + 1 for piece in here]).to(dtype)
            computed = self._directions(here, gradients, times, group, found, lr)
            moves = dict(zip(here, computed.split([piece.count for piece in here]), strict=True))
        for piece in pieces:
            move = moves.get(piece)
            if move is None:
                move = torch.empty(piece.count, *piece.sides, dtype=dtype, device=device)
            if piece.group is not None:
                piece.group.broadcast(move, piece.owner)
            piece.update(move, decay, group["weight_decay_type"] == "cautious")

    def _directions(
        self,
        pieces: list[_Piece],
        gradients: torch.Tensor,
        steps: torch.Tensor,
        group: Group,
        found: torch.Tensor | None,
        lr: Any,
    ) -> torch.Tensor:
        """lr times the directions of these pieces, contiguous; and their state after the step."""
        shape, dtype = gradients.shape, gradients.dtype
        kept = self._state_of(pieces, gradients, group)
        state = kept if found is None else {name: stack.clone() for name, stack in kept.items()}
        state = state | {_STEP: steps}
        directions = self.direction(gradients, state, group)
        if not isinstance(directions, torch.Tensor) or directions.shape != shape:
            raise self._wrong("direction", "a tensor", shape, directions)
        state.pop(_STEP, None)
        self._check_state_of("direction", state, kept, shape[0])
        moves = (directions.to(dtype) * lr).contiguous()
        # Stacks keep their addresses, as CUDA graphs require.
        if found is not None:
            moves.masked_fill_(found, 0)
            for name, stack in kept.items():
                torch.where(found, stack, state[name].to(stack.dtype), out=stack)
            return moves
        others = {name: value.clone() for name, value in state.items() if value is not kept[name]}
        for name, value in others.items():
            kept[name].copy_(value)
        return moves

    # --- state

    def _state_of(self, pieces: list[_Piece], gradients: torch.Tensor, group: Group) -> dict[str, torch.Tensor]:
        """The stacked state of these pieces, initialized as necessary; `self.state` has slices of it."""
        who, sizes = type(self).__name__, [piece.count for piece in pieces]
        states = [piece.own(self.state.get(piece.parameter, {})) for piece in pieces]
        fresh = [i for i, saved in enumerate(states) if not saved]
        if fresh:
            parts = gradients.split(sizes)
            given = gradients if len(fresh) == len(pieces) else torch.cat([parts[i] for i in fresh])
            begun = self.init_state(given, group)
            self._check_state_of("init_state", begun, None, len(given))
            if begun and any(_STEP in self.state.get(pieces[i].parameter, ()) for i in fresh):
                raise ValueError(
                    f"{who}: the state has a step but not {sorted(begun)}: it is a part, as a rank has it of DTensors; "
                    "save with torch.distributed.checkpoint or after consolidate_state_dict()"
                )
            begun = {name: stack.clone(memory_format=torch.contiguous_format) for name, stack in begun.items()}
            cut = {name: stack.split([sizes[i] for i in fresh]) for name, stack in begun.items()}
            for k, i in enumerate(fresh):
                states[i] = {name: rows[k] for name, rows in cut.items()}
        forms = [{name: (value.dtype, value.shape[1:]) for name, value in saved.items()} for saved in states]
        if any(form != forms[0] for form in forms):
            raise ValueError(
                f"{who}: parameters of one shape have different states: {forms[0]} and "
                f"{next(form for form in forms if form != forms[0])}; del optimizer.state[parameter] resets it"
            )
        stacks = {}
        for name in forms[0]:
            slices = [saved[name].to(gradients.device) for saved in states]
            stacks[name] = stack = _joined(slices)
            if not fresh and stack.data_ptr() == states[0][name].data_ptr():
                continue
            for piece, part in zip(pieces, stack.split(sizes), strict=True):
                self.state[piece.parameter][name + piece.suffix] = part.reshape((*piece.lead, *part.shape[1:]))
        return stacks

    def _check_state_of(self, method: str, state: Any, kept: Mapping[str, Any] | None, batch: int) -> None:
        who = type(self).__name__
        if not isinstance(state, dict) or (kept is None and _STEP in state):
            found = f"a state {_STEP!r}, which is taken" if isinstance(state, dict) else repr(type(state).__name__)
            raise TypeError(f"{who}.{method} returned {found}, expected a dictionary of tensors")
        if kept is not None and state.keys() != kept.keys():
            raise ValueError(f"{who}.{method} left the state {sorted(state)}, expected {sorted(kept)} as of init_state")
        for name, value in state.items():
            shape = (batch, "...") if kept is None else kept[name].shape
            right = isinstance(value, torch.Tensor) and (
                value.shape[:1] == (batch,) if kept is None else value.shape == shape
            )
            if not right:
                raise self._wrong(method, f"a state {name!r}", shape, value)

    def _wrong(self, method: str, what: str, shape: Sequence[Any], found: Any) -> Exception:
        expected = f"[{', '.join(map(str, shape))}]"
        if not isinstance(found, torch.Tensor):
            kind = type(found).__name__
            return TypeError(f"{type(self).__name__}.{method}: expected {what} of shape {expected}, got {kind!r}")
        return ValueError(
            f"{type(self).__name__}.{method}: expected {what} of shape {expected}, got shape {list(found.shape)}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies loaded state, since steps write to it; for matrices that other ranks compute, only the step."""
        super().__setstate__(state)
        if "defaults" in state:  # a pickle or a deepcopy
            return
        for p in self._pieces.keys() & self.state.keys():
            saved = self.state[p]
            names = {name + piece.suffix for piece in self._pieces[p] if piece.is_here for name in piece.own(saved)}
            self.state[p] = {name: saved[name].to(p.device, copy=True) for name in saved if name in names | {_STEP}}

    def _forget_engines(self) -> None:
        super()._forget_engines()
        self._pieces: dict[torch.Tensor, list[_Piece]] = {}
        self._owners: dict[Any, int] = self.__dict__.get("_owners", {})

    def _is_divided(self, shards: bool = False) -> bool:
        away = [p for p, pieces in self._pieces.items() if not all(piece.is_here for piece in pieces)]
        return super()._is_divided(shards) or any(shards or not is_sharded(p) for p in away)

    def _consolidate(self, to: int | None) -> dict[Any, Any]:
        found = super()._consolidate(to)
        for group in self._sharing:
            shared = [p for p, pieces in self._pieces.items() if pieces[0].group is group]
            mine = {
                f"{i}/{name}": value
                for i, p in enumerate(shared)
                for name, value in self.state.get(p, {}).items()
                if name != _STEP
            }
            for _, label, value in group.gather(mine, to):
                i, _, name = label.partition("/")
                found[shared[int(i)]][name] = value
        return found

    # --- reports

    def memory_report(self) -> MemoryReport:
        """Bytes of state and scratch; before the first step from `init_state` for one matrix of each shape. Scratch
        includes gradients, directions and copies of the state, but not the temporaries of `direction`."""
        report = super().memory_report()
        if not self._pieces:
            self._look_at_groups()
        copies, forecast, total, blocks = self.param_groups[0]["nonfinite"] == "skip", report.forecast, 0, 0
        scratch: dict[Any, int] = defaultdict(int)
        for index, group in enumerate(self.param_groups):
            for p in (p for p in group["params"] if is_trained(p) and p in self._pieces):
                dtype, begun = torch.promote_types(p.dtype, torch.float32), p in self.state
                forecast = forecast and not begun
                for piece in (piece for piece in self._pieces[p] if piece.is_here):
                    one = torch.zeros(1, *piece.sides, dtype=dtype, device=p.device)
                    state = piece.own(self.state[p]) if begun else self.init_state(one, group)
                    size = piece.count * sum(value[:1].nbytes for value in state.values())
                    scratch[index, piece.sides, p.device, dtype] += 3 * piece.count * one.nbytes + copies * size
                    total, blocks = total + size, blocks + piece.count
        more = {"state": total, "scratch": max(scratch.values(), default=0), "blocks": blocks}
        return MemoryReport([report, dict.fromkeys(report, 0) | more], forecast)

    def stats(self) -> dict[str, float]:
        """`steps`, including skipped ones, and `skipped`; learning rates and updates as for other optimizers.
        Synchronizes."""
        steps, skipped = (0, 0) if self._counts is None else self._counts.tolist()
        return {"steps": float(steps), "skipped": float(skipped)} | self._rates_and_updates()
