"""What is between a layer's call and its gradient, for whoever watches.

The gradient is taken by a hook on the output tensor. Such a hook costs least of all that PyTorch has, less than a
module's backward hook, and sees the gradient of the output as it was before any operation in place that follows.
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

# The number of the backward pass at work, -1 outside: there is no public way to tell whether two hooks were called by
# one. Without it every pass is -1.
backward_number: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Hook:
    """A hook on a module. A copy of the module, or one from a pickle, is another module: its hook does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return Hook, ()


class Watch:
    """Looks at the layers of one model. How it learns of their calls is for the classes made from this one."""

    # What is said of a part that is run inside a transform of torch.func, and of a second backward pass.
    INSIDE_TRANSFORM: ClassVar[str]
    SECOND_BACKWARD: ClassVar[str]

    def __init__(self) -> None:
        self.enabled = True
        self.round = 0  # passes through the model
        self.handles: list[Any] = []  # of hooks

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are not looked at."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def trainable(self, part: Part) -> dict[str, nn.Parameter]:
        """Its parameters that gradients are to be seen of, none where nothing is. What runs inside a transform is
        refused: not looking would leave the loss's own pass out without a word."""
        parameters = part.trainable() if self.enabled and torch.is_grad_enabled() else {}
        if parameters and in_transform():
            raise RuntimeError(self.INSIDE_TRANSFORM.format(part=part))
        return parameters

    def expect(self, use: Use, output: Tensor, arrive: Callable[[Tensor], None] | None = None) -> None:
        """A part has returned this output: its gradient will come, to `arrive` where that is not the watch's own."""
        use.sink.made(use)
        _on_gradient(output, arrive or functools.partial(self.arrive, use))

    def arrive(self, use: Use, gradient: Tensor) -> None:
        """The gradient of an output, to whom the use is for; the input in the type that the layer computed in, which
        autocast may have chosen."""
        x = use.input
        if x is None:
            raise RuntimeError(self.SECOND_BACKWARD.format(part=use.part))
        if use.version is not None and x._version != use.version:
            raise RuntimeError(f"the input of {use.part.title} was modified in place after its forward")
        if torch.is_grad_enabled():  # a backward pass that is to be differentiated itself
            with torch.no_grad():
                self.arrive(use, gradient.detach())
            return
        if x.dtype is not gradient.dtype and x.is_floating_point():
            use.input = x.to(gradient.dtype)
        use.gradient = gradient
        use.sink.arrived(use)


def _on_gradient(output: Tensor, arrive: Callable[[Tensor], None]) -> None:
    """Calls `arrive` with the gradient by the output as it is now. Some layers return a view of what they have
    computed, and a hook on a view is lost in an operation in place: there the hook is on what the view is of."""
    base = output._base  # the only way to ask for it
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        output.register_hook(arrive)
        return
    shape = output.shape
    base.grad_fn.register_prehook(lambda gradients: arrive(gradients[0].reshape(shape)))


def remove_all(handles: list[Any]) -> None:
    """Takes hooks off."""
    for handle in handles:
        handle.remove()
    handles.clear()
