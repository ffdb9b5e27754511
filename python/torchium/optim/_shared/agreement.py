"""What an optimizer whose ranks share parameters does before a step: they agree that all take it, with the same
gradients and options, and whether to skip it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from torchium import _C

from .._engine.placement import Engines, Home, labels_of
from .group import CHAINED, EvenInputs, Group, make_group, ranks_of
from .sharding import local_tensor

__all__ = ["BEGIN", "STEP", "TAKE", "Sharing"]

# What ranks do together, as messages say it.
STEP, BEGIN, TAKE = "take a step", "have first gradients", "take the state"


class Sharing(torch.optim.Optimizer):
    """The part of an optimizer that ranks agree in."""

    _all_decide: ClassVar[bool] = False  # also parameters without an engine, on a step
    _engines: Engines
    _process_group: Any

    def _forget_sharing(self) -> None:
        self._shared_groups: dict[Home, Group] = self.__dict__.get("_shared_groups", {})
        self._sharing: dict[Group, list[tuple[int, int]]] = {}  # where the parameters of each are in the groups
        self._is_joint = self._all_decide  # parameters have several homes, which decide together
        self._unread: Any = None  # what the last step's agreement was on GPUs
        self._even_inputs: EvenInputs | None = None

    def _check_inputs(self) -> None:
        if self._even_inputs is None:
            self._even_inputs = EvenInputs(self._process_group)
        self._even_inputs.check(type(self).__name__)

    def _home_of(self, parameter: torch.Tensor, joins: bool = True) -> Home:
        """DTensors belong to the ranks of their mesh; plain tensors are replicas only with a process group. Joins the
        group, which may be a collective."""
        ranks = ranks_of(parameter, self._process_group)
        home = parameter.device, ranks
        if ranks and joins and home not in self._shared_groups:
            self._shared_groups[home] = make_group(parameter, self._process_group, parameter.device)
        return home

    def _settle(self, doing: str) -> None:
        """Waits for all ranks, before something that all do, or none."""
        for group in self._sharing:
            group.check(group.agree(doing).tolist(), doing)

    def _agree(self, doing: str, found: torch.Tensor | None) -> torch.Tensor | None:
        """Before a step changes anything: all ranks have gradients of the same parameters, and the same options. With
        `found`, whether to skip. Ranks that disagree get an error; on a GPU they skip, and get it at the next step."""
        self._read_agreement()
        looks, seen = found is not None, list[torch.Tensor]()
        for group, places in self._sharing.items():
            params = [self.param_groups[index]["params"][k] for index, k in places]
            numbers = group.agree(doing, params, [self.param_groups[index] for index in dict(places)], found)
            found = torch.maximum(numbers[6], (numbers[0] != ~numbers[1]).int() * 2)
            seen.append(numbers.to(found.device))
            if doing == BEGIN or group.mode is None:
                group.mode = int(numbers[7]) if numbers[0] == ~numbers[1] else None
        for group in reversed([group for group in self._sharing if group.mode == CHAINED]):  # what later groups found
            numbers = group.agree(doing, found=found)
            found = torch.maximum(numbers[6], (numbers[0] != ~numbers[1]).int() * 2)
        read, event = torch.cat([*seen, found.reshape(1)]), None
        if read.is_cuda and doing == STEP:
            read, event = read.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
        self._unread = doing, self._sharing, read, event
        if event is None:
            self._read_agreement()
        return found > 0 if looks or event is not None else None

    def _read_agreement(self) -> None:
        """Raises the error that the last agreement was, if it was one."""
        if self._unread is None:
            return
        (doing, sharing, read, event), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        *numbers, found = read.tolist()
        for k, (group, places) in enumerate(sharing.items() if found > 1 else ()):
            labels = labels_of(self.param_groups)
            group.check(numbers[8 * k : 8 * k + 8], doing, [labels[index][at] for index, at in places])
        if found > 1:
            raise RuntimeError("the ranks of another mesh disagree, and their errors say why; nothing was changed")

    def _given(self) -> list[tuple[int, int, torch.Tensor]]:
        """The local parts of gradients, with the places of their parameters."""
        found = []
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if p.grad is not None and p.grad.layout is not torch.strided:
                    what = f"that of {labels_of(self.param_groups)[index][k]!r} has layout {p.grad.layout}"
                    who = type(self).__name__
                    raise RuntimeError(f"{who} does not support sparse gradients: {what}, expected torch.strided")
                if p.grad is not None:
                    found.append((index, k, local_tensor(p.grad).detach()))
        return found

    def _nonfinite(self) -> torch.Tensor | None:
        """Whether a gradient of this rank is not finite, or a GradScaler has found one; None: not checked."""
        parts = [part for *_, part in self._given() if part.numel()]
        if "found_inf" in self.__dict__:
            return self.found_inf.reshape(()) > 0
        if self.param_groups[0]["nonfinite"] == "ignore" or not (parts or self._sharing):
            return None
        device = parts[0].device if parts else next(iter(self._sharing)).device
        norms = torch._foreach_norm(parts or [torch.zeros((), device=device)], math.inf)
        return torch.stack([norm.to(device) for norm in norms]).isfinite().all().logical_not()

    def _decide(self, doing: str) -> torch.Tensor | None:
        """Whether to skip the step, unless an engine decides that."""
        joint = self._is_joint or any(group.mode for group in self._sharing)
        found = self._nonfinite() if joint else None
        begins = doing == BEGIN or not any(engine.group for engine in self._engines.values())
        return self._agree(doing, found) if self._sharing and (joint or begins) else found

    def _check_finite(self, found: torch.Tensor | None) -> None:
        if found is None or self.param_groups[0]["nonfinite"] != "raise" or not found.item():
            return
        which = "a gradient of another rank"
        for index, k, part in reversed(self._given()):
            if not part.isfinite().all():
                which = f"the gradient of {labels_of(self.param_groups)[index][k]!r}"
        raise _C.NumericError(f"{type(self).__name__}: {which} is not finite; nothing was changed")
