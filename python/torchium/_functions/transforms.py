"""What else of PyTorch may look at a call. Tensors of a transform of torch.func have no memory that the library could
read, and a hook on one would see a stage of the transform and not the numbers of a backward pass. The compiler of
torch.compile is kept out of what it could not follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["in_transform", "untraced"]

# torch.compiler.disable loads the compiler when a module is imported; this one, which torch.optim itself uses, when
# what it decorates is first called.
_disable: Any = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """The function, which torch.compile does not look into; with its own type, for type checkers."""
    return _disable(function)


def _no_transform() -> Any:
    return None


# There is no public way to ask.
_innermost = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", _no_transform)


def in_transform() -> bool:
    """Whether a transform of torch.func is active, such as grad, vmap, jvp or jacrev."""
    return not torch.compiler.is_compiling() and _innermost() is not None
