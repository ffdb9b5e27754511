"""What a backward pass shows of a layer: its input, and the gradient of the loss with respect to its output.

A forward hook notes the input and puts a hook on the output tensor, which is lighter than a module's backward hook and
does not mind operations in place after the layer. The uses of one module within one forward pass of the model belong
together: they are handed over when the last gradient has come. Hooks know their watch weakly, and a copy of the model
has hooks that do nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchium._functions.transforms import in_transform
from torchium._watch.layers import has_batch

__all__ = ["Layer", "Pair", "Watch", "joined", "untraced"]

# torch.compiler.disable loads the compiler when a module is imported; this one, which torch.optim itself uses, when it
# is first called.
untraced = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable

# The input of a layer and the gradient of its output.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module that is watched, with the library's description of it."""

    name: str
    module: nn.Module
    kind: str
    description: Any  # a _C.Layer


class _Group:
    """The uses of one module in one forward pass."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.waiting: weakref.WeakSet[_Use] = weakref.WeakSet()
        self.arrived: list[Pair] = []


class _Use:
    """One call of a module. It lives as long as the graph that its gradient would come through."""

    def __init__(self, group: _Group, x: torch.Tensor) -> None:
        self.group = group
        self.input: torch.Tensor | None = x


class _Hook:
    """On a module, or before the forward of the whole model where `index` is None."""

    def __init__(self, watch: Watch | None = None, index: int | None = None) -> None:
        self._watch = weakref.ref(watch) if watch is not None else lambda: None
        self._index = index

    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        watch = self._watch()
        if watch is None:
            return
        if self._index is None:
            watch.passes += 1
        else:
            watch.note(self._index, module, args[0] if args else next(iter(kwargs.values())), output)

    # A copy of the model, or the model from a pickle, is another model.
    def __reduce__(self) -> Any:
        return _Hook, ()


class Watch:
    """Hooks on the layers of a model.

    `wanted()` tells, in the forward pass, whether uses are noted; `listening()`, in the backward pass, whether
    gradients are taken. `complete(index, pairs)` gets what has come for a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        wanted: Callable[[nn.Module], bool],
        listening: Callable[[], bool],
        complete: Callable[[int, list[Pair]], None],
    ) -> None:
        self.passes = 0
        self._layers = layers
        self._wanted, self._listening, self._complete = wanted, listening, complete
        self._groups: weakref.WeakValueDictionary[tuple[int, int], _Group] = weakref.WeakValueDictionary()
        self._partial: dict[_Group, None] = {}  # some gradients have come, others not yet
        handles = [model.register_forward_pre_hook(_Hook(self), with_kwargs=True)]
        for index, layer in enumerate(layers):
            handles.append(layer.module.register_forward_hook(_Hook(self, index), with_kwargs=True))
        self._finalizer = weakref.finalize(self, _remove, handles)

    def remove(self) -> None:
        """Takes all hooks off."""
        self._finalizer()

    def note(self, index: int, module: nn.Module, x: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor) or not self._wanted(module):
            return
        if in_transform():
            self._refuse_transform(index, module)
        if in_transform() or not output.requires_grad:
            return
        key = (index, self.passes)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(index)
        use = _Use(group, x.detach())
        group.waiting.add(use)
        _on_gradient(output, functools.partial(self._take, use))

    def _refuse_transform(self, index: int, module: nn.Module) -> None:
        """Where gradients might come through it. Not looking would leave the loss's own pass out without a word."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(recurse=False)):
            raise RuntimeError(
                f"layer {self._layers[index].name!r} is run inside a transform of torch.func (grad, vmap, jvp, ...), "
                "where its gradients cannot be watched: take those of the loss by backward(), and put other passes "
                "inside `with optimizer.paused():`"
            )

    def _take(self, use: _Use, gradient: torch.Tensor) -> None:
        if not self._listening():
            return
        group = use.group
        if use.input is None:
            raise RuntimeError(
                f"a second backward pass goes through one output of layer {self._layers[group.index].name!r}: the "
                "first has been taken for that of the whole loss; add the losses up before one backward(), or pause "
                "the watching with paused() for those that are not the loss"
            )
        group.arrived.append((use.input, gradient.detach()))
        use.input = None
        group.waiting.discard(use)
        if group.waiting:
            self._partial[group] = None
        else:
            self._hand_over(group)

    def _hand_over(self, group: _Group) -> None:
        self._partial.pop(group, None)
        pairs, group.arrived = group.arrived, []
        self._complete(group.index, pairs)

    def flush(self) -> None:
        """Hands over what has come of passes that gave some outputs no gradient."""
        for group in list(self._partial):
            self._hand_over(group)

    def forget(self) -> None:
        """Begins anew: what is on its way no longer counts."""
        self._groups.clear()
        self._partial.clear()


def _on_gradient(output: torch.Tensor, take: Callable[[torch.Tensor], None]) -> None:
    """Calls `take` with the gradient by the output as it is now. Some layers return a view of what they have computed,
    and a hook on a view is lost in an operation in place: there the hook is on what the view is of."""
    base = output._base  # the only way to ask for it
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        output.register_hook(take)
        return
    shape = output.shape
    base.grad_fn.register_prehook(lambda gradients: take(gradients[0].reshape(shape)))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


# --- several uses as one ----------------------------------------------------------------------------------------------


def joined(layer: Layer, pairs: list[Pair]) -> Pair:
    """The uses of a layer in one forward pass as those of a layer with more positions."""
    pairs = [_as_seen(layer, x, gradient) for x, gradient in pairs]
    if len(pairs) == 1:
        return pairs[0]
    if layer.kind in ("conv", "group_norm"):
        raise NotImplementedError(
            f"layer {layer.name!r}, a {type(layer.module).__name__}, was used {len(pairs)} times in one forward pass; "
            "only linear, embedding, layer norm and RMS norm layers may be"
        )
    sizes = sorted({x.shape[0] for x, _ in pairs})
    if len(sizes) > 1:
        raise RuntimeError(
            f"layer {layer.name!r} was used {len(pairs)} times in one forward pass, for {sizes} samples: all uses must "
            "be for the same samples"
        )
    flat = [_by_positions(layer, x, gradient) for x, gradient in pairs]
    return torch.cat([x for x, _ in flat], 1), torch.cat([g for _, g in flat], 1)


def _as_seen(layer: Layer, x: torch.Tensor, gradient: torch.Tensor) -> Pair:
    """With a dimension for the samples, and in the type that the layer computed in, which autocast may have chosen."""
    if not has_batch(layer.module, layer.kind, x):
        x, gradient = x.unsqueeze(0), gradient.unsqueeze(0)
    if layer.kind != "embedding" and x.dtype != gradient.dtype:
        x = x.to(gradient.dtype)
    return x, gradient


def _by_positions(layer: Layer, x: torch.Tensor, gradient: torch.Tensor) -> Pair:
    """[B, T, ...]: all middle dimensions in one."""
    if layer.kind == "embedding":
        return x.flatten(1), gradient.reshape(x.shape[0], -1, gradient.shape[-1])
    kept = len(layer.module.normalized_shape) if layer.kind in ("layer_norm", "rms_norm") else 1
    return tuple(t.reshape(t.shape[0], -1, *t.shape[t.ndim - kept :]) for t in (x, gradient))
