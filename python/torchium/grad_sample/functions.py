"""Per-sample gradients and norms as functions of a model, a loss and a batch: one pass with detached parameters, which
leaves the model unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchium._functions.ops import is_hollow
from torchium._watch.uses import Use
from torchium.grad_sample import products
from torchium.grad_sample.capture import Capture
from torchium.grad_sample.norms import NormSink
from torchium.grad_sample.plan import Plan

LossFunction = Callable[[Any, Any], Tensor]


class FormSink:
    """The gradients of each parameter, [B, ...] in its type. Uses of one parameter are summed."""

    def __init__(self) -> None:
        self.gradients: dict[nn.Parameter, Tensor] = {}

    def made(self, use: Use) -> None:
        pass

    def arrived(self, use: Use) -> None:
        for parameter, gradient in products.samples(use, 1.0).items():
            self.formed(use, parameter, gradient.to(parameter.dtype))
        use.release()

    def formed(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        present = self.gradients.get(parameter)
        self.gradients[parameter] = gradient if present is None else present.add_(gradient)


def per_sample_gradients(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> list[Tensor | None]:
    """The gradients [batch, *p.shape] of each parameter, in the order of `model.parameters()`.

    Zeros for parameters that the loss does not depend on; None for those that require no gradient.

    Args:
        model: any module; see `torchium.GradSampleModule` for supported layers.
        loss_fn: called with the model's outputs and the targets of the whole batch.
        inputs: the model's argument, or a tuple or dictionary of several.
        targets: passed on to `loss_fn`.

    Examples:
        >>> gradients = CUDAGradientOps.per_sample_gradients(model, torch.nn.CrossEntropyLoss(), x, y)
    """
    sink = FormSink()
    batch, scale = run(model, Plan(model), sink, loss_fn, inputs, targets)
    made: list[Tensor | None] = []
    for p in model.parameters():
        gradient = sink.gradients.get(p)
        if gradient is not None and scale != 1.0:
            gradient.mul_(scale)
        elif gradient is None and p.requires_grad:
            gradient = p.new_zeros((batch, *p.shape))
        made.append(gradient)
    return made


def per_sample_gradient_norms(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> Tensor:
    """The norm of each sample's gradient over all trainable parameters, [batch], without materializing the gradients.

    Args:
        model: as for `per_sample_gradients`.
        loss_fn: called with the model's outputs and the targets.
        inputs: the model's arguments.
        targets: passed on to `loss_fn`.

    Examples:
        >>> norms = CUDAGradientOps.per_sample_gradient_norms(model, torch.nn.CrossEntropyLoss(), x, y)
    """
    plan = Plan(model)
    sink = NormSink(plan, mean=False)
    batch, scale = run(model, plan, sink, loss_fn, inputs, targets)
    with torch.no_grad():
        sink.finish()
    if sink.squares is None:  # no trainable parameter was reached
        return torch.zeros(batch, device=next(model.parameters(), torch.empty(0)).device)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    return (sink.squares.clamp_(min=0.0).sqrt_() * scale).to(torch.float64 if wide else torch.float32)


def run(model: nn.Module, plan: Plan, sink: Any, loss_fn: LossFunction, inputs: Any, targets: Any) -> tuple[int, float]:
    """One forward and backward pass. Returns the number of samples, and the factor of their gradients."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, got {type(loss_fn).__name__}")
    for name, given in (("inputs", inputs), ("targets", targets)):
        if is_hollow(list(given.values()) if isinstance(given, dict) else given):  # PyTorch would read freed memory
            raise TypeError(f"{name} must be tensors, got one without storage")
    capture = Capture(model, plan, sink, batch_first=True, gradients=False)
    capture.install()
    try:
        with torch.enable_grad():
            output = call(model, inputs)
            samples = capture.samples()
            if samples is None:
                raise ValueError("inputs has no tensor with a batch dimension")
            loss, is_mean = reduced(loss_fn, loss_fn(output, targets))
            if loss.requires_grad:
                loss.backward()
    finally:
        capture.remove()
    return samples, float(samples) if is_mean else 1.0


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def reduced(loss_fn: LossFunction, loss: Any) -> tuple[Tensor, bool]:
    """The loss as a scalar, and whether it is a mean over the samples."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
    if loss.dim() > 0:
        return loss.sum(), False
    return loss, getattr(loss_fn, "reduction", "mean") != "sum"
