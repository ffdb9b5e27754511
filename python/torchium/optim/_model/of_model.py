"""Optimizers that observe the layers of a model: SGD on preconditioned gradients.

Gradients are unscaled before preconditioning, which with clipping is not linear; the step still skips gradients that
the scaler has found not to be finite, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .._engine.matrices import Role
from ..first_order import SGD
from ..options import Options
from .watch import PassWatch

__all__ = ["OfModel"]


class OfModel(SGD):
    """Base of KFAC and NaturalGradient; not for direct use."""

    # Options of groups in addition to SGD's: they affect preconditioning only, not the library's step.
    _turning: ClassVar[Options] = Options()
    _watch: PassWatch

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        """`arguments`: those of the class's constructor, by name."""
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__}: model must be a torch.nn.Module, got an object of type "
                f"{type(model).__name__}: it observes the layers of a model"
            )
        self._scaler = arguments["grad_scaler"]
        super().__init__(model, **{row.name: arguments[row.name] for row in SGD._options if row.name in arguments})
        turning = {row.name: arguments[row.name] for row in self._turning}
        self.defaults.update(turning)
        for group in self.param_groups:
            group.update(turning)

    def _take_fused(self) -> None:
        """Always set, to detect a GradScaler that was not passed to the constructor."""
        self._step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._watch.begin()

    def _layer_modules(self) -> list[nn.Module]:
        """The layers whose gradients are preconditioned."""
        raise NotImplementedError

    def _method_of(self, parameter: torch.Tensor, role: Role, has_blocks: Callable[..., bool]) -> tuple[str, str]:
        method, reason = super()._method_of(parameter, role, has_blocks)
        inside = any(p is parameter for layer in self._layer_modules() for p in layer.parameters(recurse=False))
        if method == "nothing":
            return method, reason
        return (method, "layer") if inside else ("SGD", "other parameter")

    def _turn_gradients(self) -> None:
        """Preconditions p.grad in place."""
        raise NotImplementedError

    def _take_step(self) -> None:
        scale = getattr(self, "grad_scale", None)
        if getattr(self, "found_inf", None) is not None and self._scaler is None:
            raise RuntimeError(
                f"{type(self).__name__} is stepped by a GradScaler, whose scale it must know in the backward pass: "
                "pass grad_scaler=scaler to its constructor"
            )
        with torch.no_grad():
            if scale is not None:
                self._unscale(scale)
            self._turn_gradients()
        if scale is None:
            super()._take_step()
            return
        self.grad_scale = None
        try:
            super()._take_step()
        finally:
            self.grad_scale = scale

    def _unscale(self, scale: torch.Tensor) -> None:
        inverse = scale.double().reciprocal().float()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device, non_blocking=True))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has hooks on its model and cannot be copied or pickled: create one for the other "
            "model and load this one's state_dict()"
        )
