"""Connects a layer's call with its gradient.

The gradient comes from a hook on the output tensor. It is cheaper than a module's backward hook, and sees the gradient
of the output before any in-place operation that follows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchium._functions.transforms import in_transform
from torchium._watch.layers import Part
from torchium._watch.uses import Use

__all__ = ["Hook", "Watch", "backward_number", "remove_all"]

# The id of the current backward pass, -1 outside: there is no public way to tell whether two hooks belong to the same
# one. Without the private name it is always -1.
backward_number: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Hook:
    """A hook on a module. In a copy or unpickled module it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return Hook, ()


class Watch:
    """Observes the layers of one model. Subclasses define how it learns of their calls."""

    # The messages for a part inside a transform of torch.func, and for a second backward pass.
    INSIDE_TRANSFORM: ClassVar[str]
    SECOND_BACKWARD: ClassVar[str]

    def __init__(self) -> None:
        self.enabled = True
        self.round = 0  # passes through the model
        self.handles: list[Any] = []  # of hooks

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are not observed."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def trainable(self, part: Part) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are to be observed, if any. A call inside a transform is an error: ignoring it
        would silently omit the loss's own pass."""
        parameters = part.trainable() if self.enabled and torch.is_grad_enabled() else {}
        if parameters and in_transform():
            raise RuntimeError(self.INSIDE_TRANSFORM.format(part=part))
        return parameters

    def expect(self, use: Use, output: Tensor, arrive: Callable[[Tensor], None] | None = None) -> None:
        """A part has returned this output: its gradient is passed to `arrive`, by default the watch's."""
        use.sink.made(use)
        _on_gradient(output, arrive or functools.partial(self.arrive, use))

    def arrive(self, use: Use, gradient: Tensor) -> None:
        """Passes the gradient of an output on; the input in the layer's compute type, which autocast may set."""
        x = use.input
        if x is None:
            raise RuntimeError(self.SECOND_BACKWARD.format(part=use.part))
        if use.version is not None and x._version != use.version:
            raise RuntimeError(f"the input of {use.part.title} was modified in place after its forward")
        if torch.is_grad_enabled():  # a backward pass that is itself differentiated
            with torch.no_grad():
                self.arrive(use, gradient.detach())
            return
        if x.dtype is not gradient.dtype and x.is_floating_point():
            use.input = x.to(gradient.dtype)
        use.gradient = gradient
        use.sink.arrived(use)


def _on_gradient(output: Tensor, arrive: Callable[[Tensor], None]) -> None:
    """Calls `arrive` with the gradient of the current output. Some layers return a view, and an in-place operation
    would lose a hook on a view: there the hook is on its base."""
    base = output._base  # the only way to ask for it
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        output.register_hook(arrive)
        return
    shape = output.shape
    base.grad_fn.register_prehook(lambda gradients: arrive(gradients[0].reshape(shape)))


def remove_all(handles: list[Any]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()
    handles.clear()
