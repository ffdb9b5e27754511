"""Whether a transform of torch.func is at work. Its tensors have no memory that the library could read, and a hook on
one would see a stage of the transform and not the numbers of a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_transform"]


def _no_transform() -> Any:
    return None


# There is no public way to ask.
_innermost = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", _no_transform)


def in_transform() -> bool:
    """Inside torch.func.grad, vmap, jvp, jacrev and the like."""
    return not torch.compiler.is_compiling() and _innermost() is not None
