"""The exact damped natural gradient in the span of a batch.

With J the per-sample gradients of m samples as rows, (J'J/m + damping I)^-1 times their mean is J'w, where w solves a
system with the m by m Gram matrix JJ'. It is accumulated layer by layer from inputs and output gradients: J is never
formed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchium import _C
from torchium._watch.layers import Part, kind_of, layer_of
from torchium._watch.uses import PARTS, Pair

from ._engine.engine import profiled_range, stream_on
from ._model.of_model import OfModel
from ._model.watch import PassWatch, of_one_pass
from .options import Option, Options, plain, shown
from .preconditioner import loss_scale_of, whole, word

__all__ = ["NaturalGradient"]

_HALF = (torch.float16, torch.bfloat16)


class NaturalGradient(OfModel):
    """Natural gradient descent with the empirical Fisher matrix of the batch itself, without approximation.

        F  = mean over i of g_i g_i'
        p <- p - lr (F + damping I)^-1 (mean over i of g_i)
           = p - lr (sum over i of w_i g_i),  w = (J J' + m damping I)^-1 1

    for the gradients g_i of the m samples' losses, the rows of J. It stores m² numbers, and the inputs and output
    gradients of all layers until the step. All trainable layers must be linear, convolution, embedding, layer norm, RMS
    norm, group norm or instance norm; others raise an error that names them. After a step `p.grad` holds the natural
    gradient.

    Args:
        model: the model, whose layers get hooks; `remove()` removes them.
        lr: learning rate, a number or a tensor of one element.
        damping: added to the Fisher matrix, above 0.
        update_freq: steps between updates of the Fisher matrix; in between it is used with the new gradients.
        momentum: as in `SGD`, of the natural gradient.
        weight_decay: as in `SGD`.
        nonfinite: handling of infinities and NaN in gradients: 'skip' the step (counted in `stats()`), 'raise', or
            'ignore'.
        loss_reduction: 'mean' or 'sum': reduction of the loss over the samples.
        accumulation_steps: backward passes per step, with losses divided by their number; their samples form one batch.
        grad_scaler: the GradScaler that steps this optimizer, if any.

    Examples:
        >>> optimizer = torchium.optim.NaturalGradient(model, lr=0.1, damping=1e-2)
        >>> loss.backward()
        >>> optimizer.step()
    """

    _turning: ClassVar = Options(Option("damping", None), Option("update_freq", None))

    def __init__(
        self,
        model: nn.Module,
        lr: Any = 0.01,
        damping: float = 1e-3,
        update_freq: int = 1,
        *,
        momentum: float = 0,
        weight_decay: float = 0,
        nonfinite: str = "skip",
        loss_reduction: str = "mean",
        accumulation_steps: int = 1,
        grad_scaler: Any = None,
    ) -> None:
        whole("update_freq", update_freq)
        _check_damping(damping)
        super().__init__(model, locals())
        self._mean = word("loss_reduction", loss_reduction, ("mean", "sum")) == "mean"
        self._accumulation = whole("accumulation_steps", accumulation_steps)
        self._layers = _layers_of(model)
        self._captured: dict[Part, list[Pair]] = {layer: [] for layer in self._layers}
        self._span: _Span | None = None
        self._count = 0
        self._watch = PassWatch(
            model, self._layers, lambda module: self._is_due(), lambda: True, self._complete, self._accumulation
        )

    def _is_due(self) -> bool:
        return self._span is None or self._count % whole("update_freq", self.param_groups[0]["update_freq"]) == 0

    def _complete(self, layer: Part, pairs: list[Pair]) -> None:
        self._captured[layer].append(of_one_pass(layer, pairs))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._captured = {layer: [] for layer in self._layers}

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context whose forward and backward passes are not observed."""
        return self._watch.paused()

    def remove(self) -> None:
        """Removes the hooks from the model."""
        self._watch.remove()

    # --- a step

    def _layer_modules(self) -> list[nn.Module]:
        return [layer.module for layer in self._layers]

    def _turn_gradients(self) -> None:
        damping = _check_damping(plain(self.param_groups[0]["damping"]))
        if all(p.grad is None for group in self.param_groups for p in group["params"]):
            return
        with profiled_range("torchium::natural/step"):
            if self._is_due():
                self._watch.flush()
                self._span = self._take_span()
                self._span.natural_gradient(damping)
            else:
                self._span.solve(damping)
        self._count += 1

    def _take_span(self) -> _Span:
        captured, self._captured = self._captured, {layer: [] for layer in self._layers}
        self._watch.begin()
        batches = []
        for layer, pairs in captured.items():
            if not pairs and all(p.grad is None for p in layer.module.parameters(recurse=False)):
                continue
            if len(pairs) != self._accumulation:
                raise RuntimeError(
                    f"NaturalGradient has seen {len(pairs)} backward passes through layer {layer.name!r} since the "
                    f"last step, expected accumulation_steps = {self._accumulation}; weights that are used other than "
                    "by calling their module are not seen"
                )
            batches.append((layer, _one_batch(layer, pairs)))
        return _Span(batches, self._mean, loss_scale_of(self._scaler))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, with the number of steps in 'natural'. It does not contain the Fisher matrix: the
        first step after loading computes a new one."""
        return super().state_dict() | {"natural": {"steps": self._count}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("natural"), dict):
            raise ValueError("a state_dict of NaturalGradient must have 'state', 'param_groups' and 'natural'")
        steps = whole("steps + 1", state_dict["natural"].get("steps", -1) + 1) - 1
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "natural"})
        self._count, self._span = steps, None
        self._captured = {layer: [] for layer in self._layers}
        self._watch.forget()


# --- which layers -----------------------------------------------------------------------------------------------------


def _check_damping(damping: Any) -> float:
    if isinstance(damping, bool) or not isinstance(damping, (int, float)) or not 0.0 < damping < float("inf"):
        raise ValueError(f"NaturalGradient: damping must be a positive number, got {shown(damping)}")
    return float(damping)


def _layers_of(model: nn.Module) -> list[Part]:
    """All layers with trainable parameters. Raises an error that names all unsupported ones."""
    modules = [(name or type(module).__name__, module) for name, module in model.named_modules()]
    trainable = [(n, m) for n, m in modules if any(p.requires_grad for p in m.parameters(recurse=False))]
    owners = Counter(id(p) for _, module in trainable for p in module.parameters(recurse=False))
    refused = [f"{name!r}, a {type(module).__name__}" for name, module in trainable if kind_of(module) is None]
    refused += [
        f"{name!r}, which mixes the samples of a batch in training mode"
        for name, module in modules
        if isinstance(module, _BatchNorm) and module.training and (name, module) not in trainable
    ]
    refused += [
        f"{name!r}, which shares a parameter with another layer"
        for name, module in trainable
        if kind_of(module) is not None and any(owners[id(p)] > 1 for p in module.parameters(recurse=False))
    ]
    if refused:
        raise ValueError(f"NaturalGradient: no per-sample gradients for {'; '.join(refused)}: freeze or replace them")
    return [Part(name, module, kind_of(module), layer_of(module, rounded=False)) for name, module in trainable]


# --- the span of a batch ----------------------------------------------------------------------------------------------


def _one_batch(layer: Part, pairs: list[Pair]) -> Pair:
    """Micro-batches one after the other: of one size, or else the mean of their means would not be that of all."""
    if len(pairs) == 1:
        return pairs[0]
    shapes = {tuple(x.shape) for x, _ in pairs}
    if len(shapes) > 1:
        raise RuntimeError(
            f"the micro-batches of layer {layer.name!r} have inputs of shapes {sorted(shapes)}, expected one shape"
        )
    return torch.cat([x for x, _ in pairs]), torch.cat([g for _, g in pairs])


class _Span:
    """The per-sample gradients of a batch, as inputs and output gradients, with their Gram matrix. The gradients are of
    the mean loss where `mean`, and `loss_scale` times what they should be."""

    def __init__(self, batches: list[tuple[Part, Pair]], mean: bool, loss_scale: torch.Tensor | None) -> None:
        sizes = {layer.name: x.shape[0] for layer, (x, _) in batches}
        if len(set(sizes.values())) > 1:
            raise RuntimeError(f"NaturalGradient: layers have seen different numbers of samples: {sizes}")
        devices = {gradient.device for _, (_, gradient) in batches}
        if len(devices) > 1:
            raise RuntimeError(f"NaturalGradient: layers are on several devices: {sorted(map(str, devices))}")
        self._batches = batches
        self._size = next(iter(sizes.values()))
        self._device = next(iter(devices))
        self._scale = float(self._size) if mean else 1.0
        # Numbers per sample are in float64, where the square of a loss scale has room.
        self._loss_scale = None if loss_scale is None else loss_scale.to(self._device, torch.float64, copy=True)
        self._gram = torch.zeros(self._size, self._size, dtype=torch.float64, device=self._device)
        for layer, (x, gradient) in batches:
            parts = sum(PARTS[name] for name in layer.trainable())
            _C.grad_gram(
                layer.description, x, gradient, parts, True, self._gram, scale=self._scale, stream=self._stream()
            )
        if self._loss_scale is not None:
            self._gram.div_(self._loss_scale.square())

    def _stream(self) -> int | None:
        return stream_on(self._device)

    def _weights(self, rhs: torch.Tensor | None, damping: float) -> torch.Tensor:
        # Where the Gram matrix is not finite the weights stay what they are, and the step sees that they are none. The
        # report is given so that nothing waits.
        weights = torch.full((self._size,), torch.nan, dtype=torch.float64, device=self._device)
        report = torch.empty((), dtype=torch.int32, device=self._device)
        _C.grad_natural_weights(self._gram, rhs, damping, weights, report, self._stream())
        return weights if self._loss_scale is None else weights.div_(self._loss_scale)

    def natural_gradient(self, damping: float) -> None:
        """p.grad = (F + damping I)^-1 (mean of the per-sample gradients)."""
        weights = self._weights(None, damping)
        for layer, pair in self._batches:
            self._add(layer, pair, weights, 0.0)

    def solve(self, damping: float) -> None:
        """p.grad = (F + damping I)^-1 p.grad = (p.grad - J'(JJ' + m damping I)^-1 J p.grad) / damping."""
        dots = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        for layer, (x, gradient) in self._batches:
            wide = _wide(gradient.dtype)
            given = [None if g is None else g.to(wide) for g in _gradients(layer)]
            _C.grad_dots(layer.description, x, gradient, *given, True, dots, scale=self._scale, stream=self._stream())
        if self._loss_scale is not None:
            dots.div_(self._loss_scale)
        weights = self._weights(dots, damping).neg_()
        for layer, pair in self._batches:
            self._add(layer, pair, weights, 1.0)
            for gradient in _gradients(layer):
                if gradient is not None:
                    gradient.div_(damping)

    def _add(self, layer: Part, pair: Pair, weights: torch.Tensor, beta: float) -> None:
        """p.grad = beta p.grad + J'weights, by way of a wider type where p.grad is a half type."""
        gradients = _gradients(layer)
        wide = _wide(pair[1].dtype)
        sums = [None if g is None else g if g.dtype == wide else g.to(wide) for g in gradients]
        _C.grad_weighted_sum(layer.description, *pair, weights, beta, *sums, scale=self._scale, stream=self._stream())
        for gradient, total in zip(gradients, sums, strict=True):
            if gradient is not total:
                gradient.copy_(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What the library sums output gradients of this type in."""
    return torch.float32 if dtype in _HALF else dtype


def _gradients(layer: Part) -> list[torch.Tensor | None]:
    """Of weight and bias, where they are trained."""
    parameters = layer.trainable()
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameters[name].grad if name in parameters else None for name in PARTS]
