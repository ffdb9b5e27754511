"""PyTorch features that intercept calls. Tensors of torch.func transforms have no memory that the library could read,
and hooks on them see a stage of the transform instead of the values of a backward pass. torch.compile is disabled for
code it cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["in_transform", "untraced"]

# torch.compiler.disable imports the compiler immediately; this one, which torch.optim itself uses, at the first call.
_disable: Any = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """The function, excluded from torch.compile, with the same type for type checkers."""
    return _disable(function)


def _no_transform() -> Any:
    return None


# There is no public way to ask.
_innermost = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", _no_transform)


def in_transform() -> bool:
    """Whether a transform of torch.func is active, such as grad, vmap, jvp or jacrev."""
    return not torch.compiler.is_compiling() and _innermost() is not None
