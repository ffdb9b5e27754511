"""Loss scaling for float16. `GradScaler` is PyTorch's, with its state machine, its state_dict and its errors; only the
passes over the gradients are Torchium's. For casting use torch.autocast: there is nothing to add to it.

PyTorch keeps those passes in one method, `_unscale_grads_`, whose name is private: it is overridden here and nowhere
else. A PyTorch that renames it goes on with its own passes, and nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch

from torchium import _C
from torchium._functions.ops import is_hollow

__all__ = ["GradScaler"]

# Dividing float16 gradients would lose what the scale was for: PyTorch refuses it, in words of its own.
_TO_DIVIDE = (torch.float32, torch.bfloat16, torch.float64)
_TO_LOOK_AT = (*_TO_DIVIDE, torch.float16)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, to be used in its place with any optimizer.

    The loss is multiplied by a scale S, gradients are divided by it. At an infinity or a NaN the step is skipped and
    S becomes backoff_factor S; after growth_interval good steps in a row it becomes growth_factor S.

    `unscale_` divides all gradients of one type in one launch, in any layout. `step` with an optimizer that was made
    with fused=True reads the gradients once to look for infinities and leaves them as they are: the optimizer divides
    inside its step, and skips it on the device.

    Args:
        device: "cuda" or "cpu".
        init_scale: the scale S to begin with.
        growth_factor: of S after growth_interval good steps in a row.
        backoff_factor: of S at an infinity or a NaN.
        growth_interval: good steps in a row before S grows.
        enabled: False makes everything here do nothing.

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
            if is_hollow(number):  # PyTorch would compare it, and read memory that is gone
                raise TypeError(f"{name} must be a number, got a tensor that has no memory")
        try:
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        except AssertionError as wrong:  # as PyTorch has it, which python -O would leave out
            raise ValueError(str(wrong)) from None

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiplies the gradients by `inv_scale` and returns the flag of each device. PyTorch calls it with
        `allow_fp16` and an inv_scale of 1 when it only wants to know whether there are infinities."""
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
        state.pop("_workers", None)  # memory of this process; made again when needed
        return state


def _gradients_by_device(
    optimizer: torch.optim.Optimizer, dtypes: tuple[torch.dtype, ...]
) -> dict[torch.device, list[torch.Tensor]] | None:
    """None where a gradient is PyTorch's own affair: of another type, sparse, a subclass, on another kind of device."""
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
    """The library's scaler of one device, of which only the pass over gradients is used: PyTorch keeps the scale. Its
    two numbers are tensors here that share its memory, so nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.scaler = _C.Scaler(str(device))
        self.scale = torch.from_dlpack(self.scaler.scale())
        self.found_inf = torch.from_dlpack(self.scaler.found_inf())

    @torch.no_grad()
    def inspect(self, gradients: list[torch.Tensor], inv_scale: torch.Tensor | None) -> torch.Tensor:
        """1 where any gradient is not finite, as a tensor of this call alone; divides where inv_scale is given."""
        if inv_scale is not None:
            self.scale.copy_(inv_scale.double().reciprocal(), non_blocking=True)
        self.scaler.unscale(gradients, divide=inv_scale is not None)
        found_inf = self.found_inf.clone()
        self.scaler.update()  # clears the flag; the scale it changes is written again before it is used
        return found_inf
