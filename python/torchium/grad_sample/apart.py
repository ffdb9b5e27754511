"""Whether a module that is run sample by sample keeps the samples apart: what it computes for a sample by itself must
be what it computes for it among the others, else a single sample has no gradient of its own. It is tried once for a
module, and once more when it or a module inside it has been put into another mode; there the host waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # as in units

if TYPE_CHECKING:
    from torchium.grad_sample.units import SampleCall, UnitForward

# What was found, by the modes of a module and of those inside it.
_found: weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], bool]] = weakref.WeakKeyDictionary()


def keeps_apart(unit: UnitForward, call: SampleCall, parameters: dict[str, nn.Parameter]) -> bool:
    """A batch of one cannot tell, and is taken to be right."""
    if call.size < 2:
        return True
    known = _found.setdefault(unit.module, {})
    modes = tuple(m.training for m in unit.module.modules())
    if modes not in known:
        known[modes] = _try(unit, call, parameters)
    return known[modes]


def _try(unit: UnitForward, call: SampleCall, parameters: dict[str, nn.Parameter]) -> bool:
    # They ask for gradients as in the pass itself, without which some modules of PyTorch take another way.
    shared = {f"inner.{name}": p.detach().requires_grad_() for name, p in parameters.items()}
    own = {name: p.expand(call.size, *p.shape) for name, p in shared.items()}

    def whole(call: SampleCall, draws: int = 0) -> list[Any]:
        return _run(unit.module, call.device, lambda: call.whole(unit.shell, shared), draws)

    alone = _run(unit.module, call.device, lambda: unit.run(call, own), 0)
    among = whole(call)
    if not _have_the_same_shapes(alone, among):
        return False
    if _are_close(alone, among):
        return True
    if _are_close(whole(call, draws=1), among):
        return False
    # Random numbers are drawn. With the same numbers, other samples at the end must not change those at the beginning.
    half = call.size // 2
    return _are_close(call.first(whole(call.repeating(half)), half), call.first(among, half))


def _run(module: nn.Module, device: torch.device, forward: Callable[[], Any], draws: int) -> list[Any]:
    """The results of a run, flat, which leaves generators and buffers as they were; it begins after so many draws."""
    buffers = [(b, b._version, b.clone()) for b in module.buffers()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.rand(draws)
        torch.rand(draws, device=device)
        results = pytree.tree_flatten(forward())[0]
    with torch.no_grad():
        for buffer, version, before in buffers:
            if buffer._version != version:
                buffer.copy_(before)
    return results


def _have_the_same_shapes(x: list[Any], y: list[Any]) -> bool:
    shapes = [[t.shape if isinstance(t, Tensor) else None for t in results] for results in (x, y)]
    return shapes[0] == shapes[1]


def _are_close(x: list[Any], y: list[Any]) -> bool:
    """As two ways to compute the same thing are: half of the digits are, of the largest number of a tensor."""
    return all(_is_close(a.detach(), b.detach()) for a, b in zip(x, y, strict=True) if isinstance(a, Tensor))


def _is_close(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or not x.is_floating_point():
        return True
    eps = torch.finfo(x.dtype).eps
    if x.is_cuda and x.dtype == torch.float32:
        eps = 2.0**-10  # products may be in TF32
    largest = y.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(x, y, rtol=0.0, atol=eps**0.5 * largest, equal_nan=True)
