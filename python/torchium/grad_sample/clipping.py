"""Per-sample clipping in one backward pass: the norms first, then the sum of the clipped gradients, both from the
layers' inputs and output gradients, which are kept until the end. Per-sample gradients are not materialized, and
nothing synchronizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchium import _C
from torchium._messages import shown
from torchium._watch.uses import Use
from torchium.grad_sample import products
from torchium.grad_sample.norms import NormSink, per_sample_norms


class ClipSink(NormSink):
    """Keeps what the sums need, in the order in which norms were added."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: list[Use] = []
        self.kept_forms: list[tuple[nn.Parameter, Tensor]] = []

    def after(self, use: Use) -> None:
        self.kept.append(use)

    def after_forming(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.kept_forms.append((parameter, gradient))

    def add_to_gradients(self, weights: Tensor) -> None:
        for use in self.kept:
            add_weighted(use, weights)
            use.release()
        for parameter, gradient in self.kept_forms:
            whole = weighted(gradient, weights).to(parameter.dtype)
            parameter.grad = whole if parameter.grad is None else parameter.grad + whole
        self.kept, self.kept_forms = [], []


def add_weighted(use: Use, weights: Tensor) -> None:
    """p.grad += sum over i of weights[i] (gradient of sample i), scaled as the loss: mean or sum. Accumulates in p.grad
    if it has the library's accumulation type."""
    made, straight = {}, {}
    dtype = products.result_dtype(use)
    for name, p in use.parameters.items():
        if p.grad is not None and p.grad.dtype == dtype and p.grad.layout == torch.strided:
            straight[name] = p.grad
        else:
            made[name] = torch.empty(p.shape, dtype=dtype, device=use.gradient.device)
    for beta, outputs in ((1.0, straight), (0.0, made)):
        if outputs:
            weight, bias = outputs.get("weight"), outputs.get("bias")
            _C.grad_weighted_sum(use.part.description, use.input, use.gradient, weights, beta, weight, bias)
    for name, gradient in made.items():
        p = use.parameters[name]
        p.grad = gradient.to(p.dtype) if p.grad is None else p.grad + gradient.to(p.dtype)


def weighted(gradients: Tensor, weights: Tensor) -> Tensor:
    """The sum over samples; weight 0 excludes a sample even if it is not finite."""
    w = weights.to(gradients.dtype)
    dropped = (weights == 0).view(-1, *[1] * (gradients.dim() - 1))
    return torch.tensordot(w, gradients.masked_fill(dropped, 0.0), 1)


class GhostClipping(per_sample_norms):
    """Per-sample clipping in one backward pass: `p.grad` gets the mean (for a loss that is a mean, else the sum) over
    the samples of g_i min(1, max_norm / (|g_i| + 1e-6)), with |g_i| over all trainable parameters. Each term is
    shorter than max_norm, up to rounding. An empty batch gives zeros.

    Memory: the output gradients of all layers, until the end of the `with` block; per-sample gradients are materialized
    only for modules without a rule. Samples whose gradient is not finite are excluded. `p.grad` accumulates, as in
    backward.

    Args:
        model: any module; see `GradSampleModule` for supported layers.
        max_norm: above 0.
        batch_first: as in `GradSampleModule`.
        loss_reduction: "mean" or "sum", the loss's reduction over samples.
        strict: as in `GradSampleModule`.

    Examples:
        >>> clipping = torchium.GhostClipping(model, max_norm=1.0)
        >>> with clipping:
        ...     loss_fn(model(x), y).backward()
        >>> optimizer.step()                                   # clipping.norms has the norms before clipping
    """

    def __init__(
        self,
        model: nn.Module,
        max_norm: float,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
    ) -> None:
        super().__init__(model, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict)
        if not (isinstance(max_norm, (int, float)) and 0 < max_norm < math.inf):
            raise ValueError(f"max_norm must be a finite number above 0, got {shown(max_norm)}")
        self.max_norm = float(max_norm)

    def sink(self) -> NormSink:
        """One per pass: it also keeps what the sums need."""
        return ClipSink(self.plan, self.loss_reduction == "mean")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        sink = self.capture.sink
        super().__exit__(kind, error, trace)
        if kind is None and sink.squares is not None:
            weights = torch.empty_like(sink.squares)
            with torch.no_grad():
                _C.grad_clip_weights(sink.squares, self.max_norm, weights)
                sink.add_to_gradients(weights)
