"""The batch dimensions in the arguments and results of a module that is run per sample, and whether it treats samples
independently: its result for a sample must not depend on the others, or a per-sample gradient does not exist. Both are
determined by running the module on single samples and on the whole batch: once per module, and again after a change of
mode or of the kinds of arguments or results; only then this synchronizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # as in units

if TYPE_CHECKING:
    from torchium.grad_sample.units import SampleCall, UnitForward


class Layout(NamedTuple):
    """The batch dimension of each argument, None if shared, and of each tensor of the results."""

    arguments: list[int | None]
    results: list[int]


# The layout, or why there is none, by the modes of a module and its submodules and by the kinds of its arguments.
_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Layout | str]] = weakref.WeakKeyDictionary()

_MIXES = (
    "mixes the samples of a batch, or changes as it runs: what it computes for one of them by itself is not what it "
    "computes for it among the others, so that a single sample has no gradient of its own. Let each sample's output "
    "depend on that sample alone, as with GroupNorm in place of batch norm, or call eval() on a module that keeps "
    "statistics"
)
_NO_DIMENSION = (
    "returns tensors of shapes {whole} for {size} samples and {one} for one sample: each must have one dimension for "
    "the samples, and otherwise the same shape. What belongs to the batch as a whole, such as a sum over the samples "
    "or a product of them, has no gradient of a single sample: do not return it"
)


def layout_of(unit: UnitForward, call: SampleCall, parameters: dict[str, nn.Parameter], anew: bool) -> Layout | str:
    """The layout of a call, or why it has none, as the end of a sentence; `anew` if the previous one does not fit. With
    one sample any layout is right."""
    if call.size < 2:
        return Layout(call.dims, [])
    known = _found.setdefault(unit.module, {})
    kind = (tuple(m.training for m in unit.module.modules()), call.kind())
    found = known.get(kind)
    fits = not unit.capture.plan.strict if isinstance(found, str) else found is not None and call.fits(found)
    if anew or not fits:
        known[kind] = found = _search(unit, call, parameters)
    return found


def _search(unit: UnitForward, call: SampleCall, parameters: dict[str, nn.Parameter]) -> Layout | str:
    """Uses the first choice of batch dimensions with independent samples; if there is none, reports the problem of the
    usual choice."""
    failures: list[str | RuntimeError] = []
    for dims in call.choices():
        try:
            results = _try(unit, call.arranged(dims), parameters)
        except RuntimeError as error:
            results = error
        if isinstance(results, list):
            return Layout(dims, results)
        unit.loops = False
        failures.append(results)
    if isinstance(failures[0], str):
        return failures[0]
    raise failures[0]


def _try(unit: UnitForward, call: SampleCall, parameters: dict[str, nn.Parameter]) -> list[int] | str:
    """The batch dimensions of the results, or why they have none."""
    # Requires gradients as in the actual pass: without them some PyTorch modules use another implementation.
    shared = {f"inner.{name}": p.detach().requires_grad_() for name, p in parameters.items()}
    own = {name: p.expand(call.size, *p.shape) for name, p in shared.items()}

    def whole(call: SampleCall, draws: int = 0) -> list[Any]:
        results = _run(unit.module, call.device, lambda: call.whole(unit.shell, shared), draws)
        return pytree.tree_flatten(results)[0]

    rows, _ = _run(unit.module, call.device, lambda: unit.run(call, own), 0)
    among = whole(call)
    dims = _result_dims(call.size, _tensors(rows), _tensors(among))
    if isinstance(dims, str):
        return dims
    if len(rows) == len(among) and _are_close(call.joined(rows, dims), among):
        return dims
    if len(rows) != len(among) or _are_close(whole(call, draws=1), among):
        return _MIXES
    # For modules that draw random numbers: with the same ones, replacing the last samples must not change the results
    # of the first.
    half = call.size // 2
    first, other = (
        [t.narrow(dim, 0, half) for t, dim in zip(_tensors(results), dims, strict=True)]
        for results in (among, whole(call.repeating(half)))
    )
    return dims if _are_close(other, first) else _MIXES


def _run(module: nn.Module, device: torch.device, forward: Callable[[], Any], draws: int) -> Any:
    """The results of a run that restores generators and buffers; it begins after `draws` draws."""
    buffers = [(b, b._version, b.clone()) for b in module.buffers()]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.rand(draws)
            torch.rand(draws, device=device)
            return forward()
    finally:
        with torch.no_grad():
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)


def _result_dims(size: int, rows: list[Tensor], among: list[Tensor]) -> list[int] | str:
    """The dimension of each result that has this size for the batch and 1 for one sample. It is unique: other
    dimensions are equal in both."""
    one, whole = [list(t.shape[1:]) for t in rows], [list(t.shape) for t in among]
    dims = [
        d
        for a, b in zip(one, whole, strict=False)
        for d in range(len(a))
        if a[d] == 1 and b == [*a[:d], size, *a[d + 1 :]]
    ]
    return dims if len(dims) == len(one) == len(whole) else _NO_DIMENSION.format(whole=whole, size=size, one=one)


def _tensors(results: list[Any]) -> list[Tensor]:
    return [t for t in results if isinstance(t, Tensor)]


def _are_close(x: list[Any], y: list[Any]) -> bool:
    """Equality up to the rounding of two implementations: half of the digits, relative to the largest number of a
    tensor."""
    x, y = _tensors(x), _tensors(y)
    return [t.shape for t in x] == [t.shape for t in y] and all(
        _is_close(a.detach(), b.detach()) for a, b in zip(x, y, strict=True)
    )


def _is_close(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or not x.is_floating_point():
        return True
    eps = torch.finfo(x.dtype).eps
    if x.is_cuda and x.dtype == torch.float32:
        eps = 2.0**-10  # products may be in TF32
    largest = y.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(x, y, rtol=0.0, atol=eps**0.5 * largest, equal_nan=True)
