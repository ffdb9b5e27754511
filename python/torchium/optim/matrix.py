"""A base class for optimizers of matrices that are written in Python.

The engine of the C library does AdamW's part alone: matrices never come to it. Their state is kept in `self.state` by
parameter, as slices of the stacks that the last step left, so that the next one finds them stacked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchium import _C

from ._engine.placement import Arrival, Engines, Group, labels_of
from ._engine.report import MemoryReport
from ._shared.sharding import is_sharded
from .arguments import AdamWArguments, Nonfinite
from .options import ADAMW, COMMON, Options, lr_for, plain
from .second_order import SecondOrder

__all__ = ["MatrixOptimizer"]

_READ = {"lr", "weight_decay", "maximize", "nonfinite", "use_adamw"}
_READ |= {"adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay"}


def _matrix_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns, as Muon has them: dimensions of size 1 are left out, and all but the first are merged. None
    for vectors, scalars and empty tensors."""
    sizes = [size for size in shape if size != 1]
    return (sizes[0], math.prod(sizes[1:])) if len(sizes) > 1 and 0 not in sizes else None


def _stacked(slices: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of them: the stack that they are slices of, or else a copy."""
    first, size = slices[0], slices[0].numel()
    memory, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        s.shape == first.shape
        and s.dtype == first.dtype
        and s.is_contiguous()
        and s.untyped_storage().data_ptr() == memory
        and s.storage_offset() == offset + i * size
        for i, s in enumerate(slices)
    ):
        return first.as_strided((len(slices), *first.shape), (size, *first.stride()), offset)
    return torch.stack(slices)


class MatrixOptimizer(SecondOrder):
    """A base class for optimizers of matrices written in Python. A subclass has a method `direction`, which gets the
    gradients of all matrices of one shape at once, and may use any function or kernel; the rest is here.

        p <- (1 - lr weight_decay) p - lr direction(g)

    In tensors of more dimensions all but the first are merged, as by `Muon`. Vectors, scalars and `use_adamw`
    parameters get AdamW. float16 and bfloat16 gradients come as float32, and the parameter is rounded after the step.

    Args:
        params: a model, of which embeddings and the output layer get AdamW, as `summary()` tells; or parameters, groups
            of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay.
        adamw: an `AdamWArguments`, or a dictionary of its arguments; its learning rate of None means lr.
        maximize: maximize the objective.
        nonfinite: what a step does with an infinity or a NaN in a gradient: 'skip' it (counted in `stats()`), 'raise',
            or 'ignore'. The first two synchronize with the device.
        hyperparameters: further defaults of groups, which `direction` finds in `group`; also `adamw_lr` and so on.

    Examples:
        >>> class Orthogonal(torchium.optim.MatrixOptimizer):
        ...     def direction(self, gradients, state, group):
        ...         return torchium.linalg.orthogonalize(gradients)
        >>> optimizer = Orthogonal(model, lr=0.02)
    """

    _options: ClassVar = Options(*(option for option in (*ADAMW, *COMMON) if option.name in _READ))
    _taken = 0
    _skipped = 0

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
        **hyperparameters: Any,
    ) -> None:
        if type(self).direction is MatrixOptimizer.direction:
            raise TypeError(f"{type(self).__name__} must have a method direction(self, gradients, state, group)")
        arguments = {name: value for name, value in locals().items() if name in _READ or name == "adamw"}
        options = {name: value for name, value in hyperparameters.items() if name in _READ}
        defaults = self._options.defaults(type(self).__name__, arguments | {"options": options})
        super().__init__(params, defaults | {"step": 0} | hyperparameters)

    def init_state(self, gradients: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The state of matrices before their first step: none, unless a subclass has some.

        Args:
            gradients: of these matrices, [batch, m, n].
            group: the options of their group.

        Returns:
            Tensors by name, each with the batch as its first dimension.
        """
        return {}

    def direction(self, gradients: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
        """What a step subtracts from matrices, lr times; to be written by a subclass.

        Args:
            gradients: of all matrices of one shape in a group, [batch, m, n]; it may be written to.
            state: what `init_state` has made: to be written to, or given other tensors under the same names.
            group: the options of the group. `group["step"]` is the number of its steps before this one.

        Returns:
            A tensor of the shape of `gradients`.
        """
        raise NotImplementedError

    # --- which parameters are the matrices

    def _defaults_of(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    def _config(self, group: Group, lr: float) -> dict[str, Any]:
        """Muon's, for its AdamW."""
        return super()._config(group, lr) | {"kind": "muon"}

    def _adamw_share(self, group: Group) -> float | None:
        return 1.0

    def _check_group(self, index: int, groups: list[Group]) -> None:
        group, who = groups[index], type(self).__name__
        if any(map(is_sharded, group["params"])):
            raise NotImplementedError(f"{who}: group {index} has DTensors, which a MatrixOptimizer does not support")
        if group.get("batch_dims") or group.get("cuts") is not None:
            raise NotImplementedError(
                f"{who}: a MatrixOptimizer does not support batch_dims and cuts, as of group {index}"
            )
        super()._check_group(index, groups)

    def _matrices(self, groups: list[Group]) -> set[torch.Tensor]:
        return {
            p
            for index, group in enumerate(groups)
            for p, elementwise in zip(group["params"], self._elementwise(group, index), strict=True)
            if not elementwise and _matrix_of(p.shape)
        }

    def _arrivals(
        self, engines: Engines, groups: list[Group], state: Mapping[Any, Any], wanted: Callable[[torch.Tensor], bool]
    ) -> list[Arrival]:
        matrices = self._matrices(groups)
        others = {p: saved for p, saved in state.items() if p not in matrices}
        return super()._arrivals(engines, groups, others, lambda p: p not in matrices and wanted(p))

    def _look_at_groups(self) -> None:
        super()._look_at_groups()
        self._here = self._matrices(self.param_groups)
        self._outside = [p for p in self._outside if p not in self._here]

    # --- a step

    def _take_step(self) -> None:
        if self._groups_changed():
            self._look_at_groups()
        if self._may_step():
            with torch.no_grad():
                for group in self.param_groups:
                    self._step_group(group)
            super()._take_step()
            self._taken += 1

    def _may_step(self) -> bool:
        """Whether the gradients are finite, of AdamW's parameters too: a step is skipped as a whole."""
        given = [
            (index, k, p.grad)
            for index, group in enumerate(self.param_groups)
            for k, p in enumerate(group["params"])
            if p.grad is not None
        ]
        who, policy = type(self).__name__, self.param_groups[0]["nonfinite"]
        for index, k, gradient in given:
            if gradient.layout is not torch.strided:
                label = labels_of(self.param_groups)[index][k]
                raise RuntimeError(f"{who} does not support sparse gradients: that of {label!r} is {gradient.layout}")
        if policy == "ignore" or not given:
            return True
        finite = [gradient.isfinite().all() for *_, gradient in given]
        results = torch.stack([result.to(finite[0].device) for result in finite]).tolist()
        if all(results):
            return True
        if policy == "raise":
            index, k, _ = given[results.index(False)]
            label = labels_of(self.param_groups)[index][k]
            raise _C.NumericError(f"{who}: the gradient of {label!r} is not finite; nothing was changed")
        self._skipped += 1
        return False

    def _step_group(self, group: Group) -> None:
        batches: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None and p in self._here:
                dtype = torch.promote_types(p.dtype, torch.float32)
                batches[_matrix_of(p.shape), p.device, dtype].append(p)
        for (sides, _, dtype), parameters in batches.items():
            gradients = torch.stack([p.grad.to(dtype).reshape(sides) for p in parameters])
            self._step_batch(parameters, gradients.neg_() if group["maximize"] else gradients, group)
        group["step"] += bool(batches)

    def _step_batch(self, parameters: list[torch.Tensor], gradients: torch.Tensor, group: Group) -> None:
        shape, device, dtype = gradients.shape, gradients.device, gradients.dtype
        state = self._stacked_state(parameters, gradients, group)
        names = set(state)
        directions = self.direction(gradients, state, group)
        if not isinstance(directions, torch.Tensor) or directions.shape != shape:
            raise self._wrong("direction", "a tensor", shape, directions)
        self._check_state_of("direction", state, names, len(parameters))
        number, tensor = lr_for(device, group["lr"])
        lr = number if tensor is None else tensor.reshape(())
        decay = 1 - lr * plain(group["weight_decay"])
        steps = directions.to(dtype) * lr
        for i, p in enumerate(parameters):
            self.state[p] = {name: stack[i] for name, stack in state.items()}
            p.copy_(p.to(dtype) * decay - steps[i].reshape(p.shape))

    # --- state

    def _stacked_state(
        self, parameters: list[torch.Tensor], gradients: torch.Tensor, group: Group
    ) -> dict[str, torch.Tensor]:
        """The state of these parameters, begun for those that have none."""
        fresh = [i for i, p in enumerate(parameters) if p not in self.state]
        if fresh:
            begun = self.init_state(gradients if len(fresh) == len(parameters) else gradients[fresh], group)
            self._check_state_of("init_state", begun, None, len(fresh))
            begun = {name: stack.clone(memory_format=torch.contiguous_format) for name, stack in begun.items()}
            for k, i in enumerate(fresh):
                self.state[parameters[i]] = {name: stack[k] for name, stack in begun.items()}
        states = [self.state[p] for p in parameters]
        forms = [{name: (value.dtype, value.shape) for name, value in saved.items()} for saved in states]
        if any(form != forms[0] for form in forms):
            raise ValueError(
                f"{type(self).__name__}: parameters of one shape have different states: {forms[0]} and "
                f"{next(form for form in forms if form != forms[0])}; del optimizer.state[parameter] begins anew"
            )
        return {name: _stacked([saved[name].to(gradients.device) for saved in states]) for name in forms[0]}

    def _check_state_of(self, method: str, state: Any, names: set[str] | None, batch: int) -> None:
        who = type(self).__name__
        if not isinstance(state, dict):
            raise TypeError(f"{who}.{method} returned {type(state).__name__!r}, expected a dictionary of tensors")
        if names is not None and set(state) != names:
            raise ValueError(
                f"{who}.{method} left the state {sorted(state)}, expected {sorted(names)} as of init_state"
            )
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (batch,):
                raise self._wrong(method, f"a state {name!r}", (batch, "..."), value)

    def _wrong(self, method: str, what: str, shape: Sequence[Any], found: Any) -> Exception:
        expected = f"[{', '.join(map(str, shape))}]"
        if not isinstance(found, torch.Tensor):
            kind = type(found).__name__
            return TypeError(f"{type(self).__name__}.{method}: expected {what} of shape {expected}, got {kind!r}")
        return ValueError(
            f"{type(self).__name__}.{method}: expected {what} of shape {expected}, got shape {list(found.shape)}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was loaded is copied: steps write to the state, and must not write to a state_dict."""
        super().__setstate__(state)
        for p in self._matrices(self.param_groups) & self.state.keys():
            self.state[p] = {name: value.to(p.device, copy=True) for name, value in self.state[p].items()}

    # --- reports

    def memory_report(self) -> MemoryReport:
        """Bytes of state and scratch. The state of matrices is counted after the first step, and what `direction` takes
        is not."""
        report, matrices = super().memory_report(), self._matrices(self.param_groups) & self.state.keys()
        size = sum(value.nbytes for p in matrices for value in self.state[p].values())
        return MemoryReport([report, dict.fromkeys(report, 0) | {"state": size}], report.forecast and not matrices)

    def stats(self) -> dict[str, float]:
        """`steps`, taken or skipped, and `skipped` of them, since the optimizer was made; learning rates and updates as
        of other optimizers."""
        counted = {"steps": float(self._taken + self._skipped), "skipped": float(self._skipped)}
        return counted | self._rates_and_updates()
