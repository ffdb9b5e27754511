"""The functions of `ops` for ordinary CPU and GPU tensors: calls of the C library, which allocates a result like its
argument if `out` is None. Results are contiguous for any layout of the arguments: the shape functions in `operators`
depend on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchium import _C
from torchium._functions import shapes


def new(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)


def check_together(**tensors: Tensor) -> None:
    """One dtype and one device."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dtype is not first.dtype:
            raise TypeError(f"{name} has dtype {t.dtype}, expected {first.dtype} like {first_name}")
        if t.device != first.device:
            raise ValueError(f"{name} is on {t.device}, expected {first.device} like {first_name}")


def _spread(shape: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """Matrices with the leading dimensions of `shape`."""
    leading = tuple(shape[:-2])
    return [t if tuple(t.shape[:-2]) == leading else t.expand(*leading, *t.shape[-2:]) for t in tensors]


def _call(function: Any, a: Tensor, b: Tensor, x: Tensor, *rest: Any) -> Tensor:
    try:
        return function(a, b, x, *rest)
    except (TypeError, ValueError):
        check_together(a=a, b=b, x=x)
        raise


def matrix_power(a: Tensor, power: float, eps: float) -> Tensor:
    return _C.matrix_power(a, power, eps, None)


def matrix_power_backward(a: Tensor, power: float, eps: float, grad: Tensor) -> Tensor:
    return _C.matrix_power_backward(a, power, eps, grad, None)


def inverse_root(
    a: Tensor, root: int, eps: float, relative_eps: float, method: str, tolerance: float
) -> tuple[Tensor, Tensor]:
    residual = new(a, shapes.square("a", a.shape)[0], torch.float64)
    return _C.inverse_root(a, root, eps, relative_eps, method, tolerance, None, residual), residual


def inverse_root_alone(a: Tensor, root: int, eps: float, relative_eps: float, method: str, tolerance: float) -> Tensor:
    return _C.inverse_root(a, root, eps, relative_eps, method, tolerance, None)


def inverse_root_backward(a: Tensor, root: int, eps: float, relative_eps: float, grad: Tensor) -> Tensor:
    return _C.inverse_root_backward(a, root, eps, relative_eps, grad, None)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    return _C.eigh(a, None, None)


def _product_of_two(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def product(a: Tensor, b: Tensor) -> Tensor:
        try:
            return function(a, b, None)
        except (TypeError, ValueError):
            check_together(a=a, b=b)  # the message would name the result, which the caller has not seen
            raise

    return product


matmul = _product_of_two(_C.matmul)
symmetric_product = _product_of_two(_C.symmetric_product)
_kronecker_product = _product_of_two(_C.kronecker_product)


def matmul_chunked(a: Tensor, b: Tensor, memory_budget: int, device: str) -> Tensor:
    try:
        return _C.matmul_chunked(a, b, memory_budget, None, device or None)
    except TypeError:
        if a.dtype is not b.dtype:
            raise TypeError(f"b has dtype {b.dtype}, expected {a.dtype} like a") from None
        raise


def matmul_into(a: Tensor, b: Tensor, memory_budget: int, device: str, out: Tensor) -> None:
    _C.matmul_chunked(a, b, memory_budget, out, device or None)


def gram(a: Tensor, transpose: bool, alpha: float) -> Tensor:
    return _C.gram(a, transpose, alpha, None)


def orthogonalize(a: Tensor, steps: int, method: str) -> Tensor:
    return _C.orthogonalize(a, steps, method, None)


def kronecker_product(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != 2 or b.dim() != 2:
        a, b = _spread(shapes.kronecker_product(a.shape, b.shape), a, b)
    return _kronecker_product(a, b)


# The C library accepts equal leading dimensions, and in the next two also single matrices A and B with any X.


def kronecker_matmul(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    if a.dim() != 2 or b.dim() != 2:
        a, b, x = _spread(shapes.kronecker_matmul(a.shape, b.shape, x.shape), a, b, x)
    return _call(_C.kronecker_matmul, a, b, x, None)


def kronecker_apply(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    if a.dim() != 2 or b.dim() != 2:
        a, b, x = _spread(shapes.kronecker_apply(a.shape, b.shape, x.shape), a, b, x)
    return _call(_C.kronecker_apply, a, b, x, None)


def kronecker_solve(a: Tensor, b: Tensor, x: Tensor, damping: float) -> Tensor:
    if not a.dim() == b.dim() == x.dim() == 2:
        a, b, x = _spread(shapes.kronecker_solve(a.shape, b.shape, x.shape), a, b, x)
    return _call(_C.kronecker_solve, a, b, x, damping, None)


def nearest_kronecker(m: Tensor, shape_a: Sequence[int], shape_b: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    first, second, leading = shapes.nearest_kronecker(m.shape, shape_a, shape_b)
    a, b, error = new(m, first), new(m, second), new(m, leading, torch.float64)
    _C.nearest_kronecker(m, a, b, error)
    return a, b, error


def nearest_kronecker_alone(m: Tensor, shape_a: Sequence[int], shape_b: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Without the error, which costs products."""
    try:
        return _C.nearest_kronecker(m, tuple(shape_a), tuple(shape_b), None)
    except (TypeError, ValueError):
        shapes.nearest_kronecker(m.shape, shape_a, shape_b)  # which names the wrong shape
        raise
