"""The hooks on a whole model, installed and removed together, and the checks before a pass: the number of samples, and
whether parameters are used outside their modules.

If ordinary gradients are not required, layers run with detached parameters: the backward pass then skips them, and a
gradient that still reaches a parameter reveals a use outside its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchium._watch.layers import Part
from torchium._watch.uses import Sink
from torchium._watch.watch import Hook, Watch, remove_all
from torchium.grad_sample.bags import BagForward
from torchium.grad_sample.forwards import Forward, LayerForward
from torchium.grad_sample.plan import Plan
from torchium.grad_sample.units import UnitForward


class Capture(Watch):
    """The hooks on one model, from `install` to `remove`, repeatedly.

    `gradients`: whether the backward pass computes the ordinary gradients as well. Uses of parameters outside their
    modules are detected in the first pass only, since that is slow.
    """

    INSIDE_TRANSFORM = (
        "{part.title} is run inside a transform of torch.func (grad, vmap, jvp, ...), where per-sample gradients "
        "cannot be taken: put it inside `with module.paused():` of the GradSampleModule, or outside the `with` block "
        "that takes norms"
    )
    SECOND_BACKWARD = (
        "a second backward pass reached {part.title}, whose input was released in the first: run the model again, "
        "retain_graph does not help here"
    )

    def __init__(self, model: nn.Module, plan: Plan, sink: Sink, batch_first: bool, gradients: bool) -> None:
        super().__init__()
        self.model, self.plan, self.sink, self.gradients = model, plan, sink, gradients
        self.batch_dim = 0 if batch_first else 1
        self.batch: int | None = None
        self.guess: int | None = None  # of the batch, from the model's first argument
        self.checked = False
        self.anchor = torch.zeros((), requires_grad=True)
        self.forwards = [forward_of(p)(self, p) for p in plan.parts]

    # --- installation -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        for part in self.plan.parts:
            if isinstance(part.module.__dict__.get("forward"), Forward):
                raise RuntimeError(f"{part.title} is captured already: one GradSampleModule or context at a time")
        for forward in self.forwards:
            forward.put()
        self.handles = [
            self.model.register_forward_pre_hook(Hook(self.begin), with_kwargs=True),
            self.model.register_forward_hook(Hook(self.end)),
        ]
        if not self.gradients and not self.checked:
            self.handles += [
                p.register_hook(_refuse(self.plan.names[p])) for p in self.plan.owners if p.requires_grad and p.is_leaf
            ]

    def remove(self) -> None:
        remove_all(self.handles)
        for forward in self.forwards:
            forward.restore()

    # --- one pass -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        self.batch = self.guess = None

    def samples(self) -> int | None:
        """The number of samples in the last pass."""
        return self.guess if self.batch is None else self.batch

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.enabled and torch.is_grad_enabled()):
            return
        self.plan.check_mixing()
        self.round += 1
        self.forget()
        first = next(tensors_in((args, kwargs)), None)
        if first is not None and first.dim() > 0:
            self.guess = first.size(self.batch_dim if first.dim() > self.batch_dim else 0)
        if not self.plan.has_bags:  # which may get all tokens in one list: the first part knows the number of samples
            self.batch = self.guess

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """In the first pass, detects parameters used outside their modules. If detached, by hooks on the parameters,
        which include uses in the loss."""
        if self.checked or not (self.gradients and self.enabled and torch.is_grad_enabled()):
            return
        roots = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
        if roots:
            self.checked = True
            for parameter in used_directly(roots):
                if parameter in self.plan.owners:
                    _refuse(self.plan.names[parameter])(None)

    def check_batch(self, part: Part, size: int) -> int:
        """The number of samples, equal in all parts; 1 for an input shared by all samples."""
        if self.batch is None:
            self.batch = size
        if size not in (self.batch, 1):
            raise RuntimeError(
                f"the input of {part.title} has {size} samples where the model's has {self.batch}: what is computed "
                "for all samples together has no gradient of one sample. Give it an input for each sample, or one "
                "whose first dimension is 1, as in positions[None]"
            )
        return self.batch

    def source(self, parameter: nn.Parameter) -> Tensor:
        """The parameter as its module uses it in this pass."""
        if not self.gradients:
            return parameter.detach()
        return parameter if self.checked else Passage.apply(parameter)


def forward_of(part: Part) -> type[Forward]:
    if part.description is None:
        return UnitForward
    return BagForward if isinstance(part.module, nn.EmbeddingBag) else LayerForward


class Passage(torch.autograd.Function):
    """Marks a parameter's use in its module. Any other path to its gradient is a use outside."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.detach()  # not a view, which an embedding with max_norm could not modify in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _refuse(name: str) -> Callable[[Tensor | None], None]:
    def refuse(gradient: Tensor | None) -> None:
        raise RuntimeError(
            f"the parameter {name} is used outside the forward of its own module, where per-sample gradients cannot be "
            "taken: call the module itself (a tied head is a Linear whose weight is the embedding's)"
        )

    return refuse


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def used_directly(roots: list[Any]) -> Iterator[Tensor]:
    """The leaves of a graph that are reached without a Passage."""
    seen, waiting = set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "PassageBackward":
            continue
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            waiting.append(following)
            if hasattr(following, "variable"):
                yield following.variable
