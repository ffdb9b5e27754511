"""Loss scaling for float16. `GradScaler` is a subclass of PyTorch's that processes gradients in fewer launches. For
casts use torch.autocast.

It overrides the private method `_unscale_grads_`. If a version of PyTorch renames it, PyTorch's implementation is used.
"""

from __future__ import annotations

from typing import Any

import torch

from torchium import _C
from torchium._functions.ops import is_hollow

__all__ = ["GradScaler"]

# PyTorch raises an error for float16 gradients, which must not be unscaled.
_TO_DIVIDE = (torch.float32, torch.bfloat16, torch.float64)
_TO_LOOK_AT = (*_TO_DIVIDE, torch.float16)


class GradScaler(torch.amp.GradScaler):
    """A replacement for torch.amp.GradScaler, for any optimizer.

    The loss is multiplied by a scale S, gradients are divided by it. If a gradient has an infinity or NaN, the step is
    skipped and S is multiplied by backoff_factor; after growth_interval successful steps in a row it is multiplied by
    growth_factor.

    `unscale_` divides all gradients of one type in one launch, in any layout. With an optimizer with fused=True, `step`
    only checks the gradients for infinities: the optimizer unscales, and skips if necessary, inside its step on the
    device.

    Args:
        device: "cuda" or "cpu".
        init_scale: the initial scale S.
        growth_factor: of S after growth_interval successful steps in a row.
        backoff_factor: of S after an infinity or NaN.
        growth_interval: successful steps in a row before S grows.
        enabled: False disables scaling.

    Examples:
        >>> scaler = torchium.amp.GradScaler("cuda")
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        numbers = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "enabled": enabled,
        }
        for name, number in numbers.items():
            if is_hollow(number):  # PyTorch would read freed memory
                raise TypeError(f"{name} must be a number, got a tensor without storage")
        try:
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        except AssertionError as wrong:  # which python -O would disable
            raise ValueError(str(wrong)) from None

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiplies the gradients by `inv_scale` and returns the flag of each device. With `allow_fp16` and an
        inv_scale of 1 PyTorch only checks for infinities."""
        only_look = allow_fp16
        gradients = _gradients_by_device(optimizer, _TO_LOOK_AT if only_look else _TO_DIVIDE)
        if gradients is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        divisor = None if only_look else inv_scale
        return {device: self._worker(device).inspect(tensors, divisor) for device, tensors in gradients.items()}

    def _worker(self, device: torch.device) -> _Worker:
        workers = self.__dict__.setdefault("_workers", {})
        if device not in workers:
            workers[device] = _Worker(device)
        return workers[device]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_workers", None)  # memory of this process; created again when needed
        return state


def _gradients_by_device(
    optimizer: torch.optim.Optimizer, dtypes: tuple[torch.dtype, ...]
) -> dict[torch.device, list[torch.Tensor]] | None:
    """None if PyTorch must handle a gradient: an unsupported type or device, sparse, a subclass."""
    gradients: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
            if not plain or gradient.dtype not in dtypes or gradient.device.type not in ("cpu", "cuda"):
                return None
            gradients.setdefault(gradient.device, []).append(gradient)
    return gradients


class _Worker:
    """The library's scaler of one device, used only for the pass over gradients: PyTorch keeps the scale. Scale and
    flag are tensors that share its memory, so nothing synchronizes."""

    def __init__(self, device: torch.device) -> None:
        self.scaler = _C.Scaler(str(device))
        self.scale = torch.from_dlpack(self.scaler.scale())
        self.found_inf = torch.from_dlpack(self.scaler.found_inf())

    @torch.no_grad()
    def inspect(self, gradients: list[torch.Tensor], inv_scale: torch.Tensor | None) -> torch.Tensor:
        """A new tensor, 1 if any gradient is not finite; divides if inv_scale is given."""
        if inv_scale is not None:
            self.scale.copy_(inv_scale.double().reciprocal(), non_blocking=True)
        self.scaler.unscale(gradients, divide=inv_scale is not None)
        found_inf = self.found_inf.clone()
        self.scaler.update()  # clears the flag; the scale is overwritten before use
        return found_inf
