"""The watch of KFAC and NaturalGradient. A forward hook on each layer stores its input and hooks the gradient of its
output.

Uses of a module within one forward pass of the model are collected and passed on after the last gradient. Hooks have
weak references to the watch, which therefore lives as long as the optimizer, not the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchium._functions.transforms import in_transform, untraced
from torchium._watch.layers import Part, has_batch
from torchium._watch.uses import Pair, Use, joined
from torchium._watch.watch import Hook, Watch, backward_number, remove_all

from .._shared.sharding import is_sharded, local_tensor

__all__ = ["PassWatch", "of_one_pass"]

_REPLICATED = (
    "is run by DataParallel, whose replicas each see a part of the batch: use DistributedDataParallel, one process for "
    "each GPU"
)


class _Pass:
    """The uses of one layer in one forward pass. They keep it alive, and live as long as the graph that their gradients
    come from."""

    def __init__(self, watch: PassWatch, part: Part) -> None:
        self.watch, self.part = watch, part
        # The backward pass in which activation checkpointing ran the layer again, which opens another group of uses; or
        # -1.
        self.waiting: weakref.WeakKeyDictionary[Use, int] = weakref.WeakKeyDictionary()
        self.pairs: list[Pair] = []

    def made(self, use: Use) -> None:
        self.waiting[use] = backward_number()

    def arrived(self, use: Use) -> None:
        number = self.waiting.pop(use, -1)
        self.watch.count(self.part, backward_number() if number < 0 else number)
        self.pairs.append((use.input, use.gradient))
        use.release()
        if self.waiting:
            self.watch.partial[self] = None
        else:
            self.hand_over()

    def hand_over(self) -> None:
        self.watch.partial.pop(self, None)
        pairs, self.pairs = self.pairs, []
        self.watch.complete(self.part, pairs)


class _WeakHook(Hook):
    """On a layer, or before the forward of the whole model if `part` is None."""

    def __init__(self, watch: PassWatch, part: Part | None = None) -> None:
        self._watch, self._part = weakref.ref(watch), part

    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        watch = self._watch()
        if watch is None:
            return
        if self._part is None:
            watch.round += 1
        else:
            watch.note(self._part, module, args[0] if args else next(iter(kwargs.values())), output)


class PassWatch(Watch):
    """Hooks on the layers of a model.

    `wanted(module)`: in the forward pass, whether to store a use; `listening()`: in the backward pass, whether to
    accept gradients. `complete(part, pairs)` receives those of a layer. `accumulation`: the maximum number of backward
    passes before a step, or None.
    """

    INSIDE_TRANSFORM = (
        "layer {part.name!r} is run inside a transform of torch.func (grad, vmap, jvp, ...), where its gradients "
        "cannot be watched: take those of the loss by backward(), and put other passes inside "
        "`with optimizer.paused():`"
    )
    SECOND_BACKWARD = (
        "a second backward pass goes through one output of layer {part.name!r}: the first has been taken for that of "
        "the whole loss; add the losses up before one backward(), or pause the watching with paused() for those that "
        "are not the loss"
    )

    def __init__(
        self,
        model: nn.Module,
        layers: list[Part],
        wanted: Callable[[nn.Module], bool],
        listening: Callable[[], bool],
        complete: Callable[[Part, list[Pair]], None],
        accumulation: int | None,
    ) -> None:
        super().__init__()
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise NotImplementedError(f"model {_REPLICATED}")
        self.complete, self._accumulation = complete, accumulation
        self._backward: dict[Part, set[int]] = {}  # ids of the accumulated passes
        self._sharded = {
            layer: [p for p in layer.module.parameters(recurse=False) if is_sharded(p)] for layer in layers
        }
        self.partial: dict[_Pass, None] = {}  # some gradients are still missing
        self._wanted, self._listening = wanted, listening
        self._passes: weakref.WeakValueDictionary[tuple[Part, int], _Pass] = weakref.WeakValueDictionary()
        self.handles.append(model.register_forward_pre_hook(_WeakHook(self), with_kwargs=True))
        for layer in layers:
            self.handles.append(layer.module.register_forward_hook(_WeakHook(self, layer), with_kwargs=True))
        self._finalizer = weakref.finalize(self, remove_all, self.handles)

    def remove(self) -> None:
        """Removes all hooks."""
        self._finalizer()

    def note(self, part: Part, module: nn.Module, x: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor) or not self.enabled or not self._wanted(module):
            return
        if in_transform():
            self.trainable(part)  # which raises if gradients may follow
            return
        if not output.requires_grad:
            return
        if getattr(module, "_is_replica", False):
            raise NotImplementedError(f"layer {part.name!r} {_REPLICATED}")
        key = (part, self.round)
        together = self._passes.get(key)
        if together is None:
            together = self._passes[key] = _Pass(self, part)
        use = Use(part, together, self.round)
        use.input = x.detach()
        self.expect(use, output)

    def arrive(self, use: Use, gradient: torch.Tensor) -> None:
        if self.enabled and self._listening():
            Watch.arrive(self, use, gradient.detach())

    def count(self, part: Part, number: int) -> None:
        """Rejects a backward pass beyond `accumulation`. Cleared gradients are None or 0; the latter is only checked
        before an error, since it synchronizes."""
        seen = self._backward.setdefault(part, set())
        if self._accumulation is None or number in seen:
            return
        parameters = [*self._sharded[part], *part.module.parameters(recurse=False)]
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        is_full = len(seen) >= self._accumulation
        if is_full and any(gradient.any() for gradient in gradients):
            raise RuntimeError(
                f"{len(seen) + 1} backward passes have gone through layer {part.name!r} since the last step, expected "
                f"accumulation_steps = {self._accumulation}: set accumulation_steps to their number and divide each "
                "loss by it, call zero_grad() before a new accumulation, and put passes that are not the loss's "
                "inside `with optimizer.paused():`"
            )
        if is_full or not gradients:
            seen.clear()
        seen.add(number)

    def begin(self) -> None:
        """Starts a new accumulation: after a step, or after gradients were cleared."""
        self._backward.clear()

    def flush(self) -> None:
        """Passes on the gradients of passes in which some outputs had none."""
        for together in list(self.partial):
            together.hand_over()

    def forget(self) -> None:
        """Resets: pending passes no longer count."""
        self._passes.clear()
        self.partial.clear()
        self.begin()


def of_one_pass(part: Part, pairs: list[Pair]) -> Pair:
    """Merges the uses of a layer in one forward pass into positions."""
    pairs = [_with_samples(part, *pair) for pair in pairs]
    if len(pairs) == 1:
        return pairs[0]
    if part.kind in ("conv", "group_norm"):
        raise NotImplementedError(
            f"layer {part.name!r}, a {type(part.module).__name__}, was used {len(pairs)} times in one forward pass; "
            "only linear, embedding, layer norm and RMS norm layers may be"
        )
    sizes = sorted({x.shape[0] for x, _ in pairs})
    if len(sizes) > 1:
        raise RuntimeError(
            f"layer {part.name!r} was used {len(pairs)} times in one forward pass, for {sizes} samples: all uses must "
            "be for the same samples"
        )
    return joined(part, pairs)


def _with_samples(part: Part, x: torch.Tensor, gradient: torch.Tensor) -> Pair:
    """Adds the batch dimension to a single sample, which PyTorch accepts without it."""
    if not has_batch(part.module, part.kind, x):
        return x.unsqueeze(0), gradient.unsqueeze(0)
    return x, gradient
