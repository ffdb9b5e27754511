"""Captures a layer's input and its output's gradient: an object in the module's own dictionary replaces its forward,
calls the class's forward and observes the result's gradient, without copies. A forward hook is not enough: parameters
may have to be detached, and results must require gradients."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from torchium._watch.layers import Part, has_batch
from torchium._watch.uses import Use

if TYPE_CHECKING:
    from torchium.grad_sample.capture import Capture


class Forward:
    """The forward in a module's dictionary. Copied and unpickled modules get the class's forward instead."""

    def __init__(self, capture: Capture, part: Part) -> None:
        self.capture, self.part, self.module = capture, part, part.module
        self.hidden: Any = None  # a forward set by the user
        self.original = _forward_of_class(part.module)

    def __reduce__(self) -> Any:
        if self.hidden is not None:
            return _same, (self.hidden,)
        return _forward_of_class, (self.module,)

    def put(self) -> None:
        self.hidden = self.module.__dict__.get("forward")
        self.original = _forward_of_class(self.module) if self.hidden is None else self.hidden
        self.module.__dict__["forward"] = self

    def restore(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.hidden is not None:
                self.module.__dict__["forward"] = self.hidden


def _forward_of_class(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def _same(value: Any) -> Any:
    return value


class LayerForward(Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        parameters = self.capture.trainable(self.part)
        given = (*args, *kwargs.values())
        if not parameters or len(given) != 1 or not isinstance(given[0], Tensor):
            return self.original(*args, **kwargs)
        capture, part = self.capture, self.part
        x = as_computed(part.kind, given[0])
        if not has_batch(self.module, part.kind, x):
            raise RuntimeError(f"the input of {part.title} has shape {list(x.shape)}, without a batch dimension")
        dim = self.batch_dim(x)
        use = Use(part, capture.sink, capture.round, parameters, capture.check_batch(part, x.size(dim)))
        output = self.run(parameters, x)
        if use.batch != x.size(dim):  # shared by all samples: only here are their gradients still separate
            output, x = spread(output, dim, use.batch), spread(x, dim, use.batch)
        use.input = x.detach() if dim == 0 else x.detach().transpose(0, 1)
        use.version = use.input._version  # PyTorch keeps no input if it computes no gradient of the weight
        capture.expect(use, output, None if dim == 0 else lambda g: capture.arrive(use, g.transpose(0, 1)))
        return output

    def batch_dim(self, x: Tensor) -> int:
        """Sequences may come first; layers without a sequence have samples first."""
        if self.capture.batch_dim == 0 or self.part.kind in ("conv", "group_norm"):
            return 0
        return 1 if has_batch(self.module, self.part.kind, x[0] if x.size(0) else x.new_empty(x.shape[1:])) else 0

    def run(self, parameters: dict[str, nn.Parameter], *args: Any) -> Tensor:
        own = self.module._parameters  # where forward finds them, for any tensor class
        try:
            own.update({name: self.capture.source(p) for name, p in parameters.items()})
            output = self.compute(*args)
        finally:
            own.update(parameters)
        if output._is_view():  # whose hook an in-place operation would lose
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output if output.requires_grad else Anchor.apply(output, self.capture.anchor)

    def compute(self, *args: Any) -> Tensor:
        """The module's forward. PyTorch's instance norm rejects empty batches; its group norm does not."""
        module = self.module
        if isinstance(module, _InstanceNorm) and args[0].size(0) == 0:
            return nn.functional.group_norm(*args, module.num_features, module.weight, module.bias, module.eps)
        return self.original(*args)


def as_computed(kind: str, x: Tensor) -> Tensor:
    """Under autocast, casts the input to the compute type once; PyTorch keeps the same tensor."""
    if (
        kind in ("linear", "conv")
        and x.is_floating_point()
        and x.dtype != torch.float64
        and torch.is_autocast_enabled(x.device.type)
    ):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def spread(x: Tensor, dim: int, batch: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = batch
    return x.expand(shape)


class Anchor(torch.autograd.Function):
    """Makes a result without trainable inputs require its gradient, without a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
