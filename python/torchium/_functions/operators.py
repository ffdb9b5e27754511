"""The operators torch.ops.torchium.*: their schemas, kernels, shape functions, gradients and batching rules, one row
each in the table below. Importing this file declares them.

A shape function runs without numbers, when torch.compile or torch.export asks what an operator will return. It must
give what the kernel gives, contiguous strides included; torch.library.opcheck compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchium._functions import dispatch, gradients, shapes

# --- shape functions --------------------------------------------------------------------------------------------------


def _fake_square(a: Tensor, *numbers: Any) -> Tensor:
    shapes.square("a", a.shape)
    return dispatch.new(a, a.shape)


def _fake_matrices(a: Tensor, *numbers: Any) -> Tensor:
    shapes.matrix("a", a.shape)
    return dispatch.new(a, a.shape)


def _fake_backward(a: Tensor, *rest: Any) -> Tensor:
    dispatch.check_together(a=a, grad=rest[-1])
    return _fake_square(a)


def _fake_inverse_root(a: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    leading, _ = shapes.square("a", a.shape)
    return dispatch.new(a, a.shape), dispatch.new(a, leading, torch.float64)


def _fake_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    leading, n = shapes.square("a", a.shape)
    return dispatch.new(a, (*leading, n)), dispatch.new(a, a.shape)


def _fake_matmul(a: Tensor, b: Tensor) -> Tensor:
    dispatch.check_together(a=a, b=b)
    return dispatch.new(a, shapes.matmul(a.shape, b.shape))


def _fake_matmul_chunked(a: Tensor, b: Tensor, memory_budget: int, device: str) -> Tensor:
    return dispatch.new(a, shapes.matmul(a.shape, b.shape))


def _fake_gram(a: Tensor, transpose: bool, alpha: float) -> Tensor:
    return dispatch.new(a, shapes.gram(a.shape, transpose))


def _fake_symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    dispatch.check_together(a=a, b=b)
    return _fake_square(a)


def _fake_kronecker_product(a: Tensor, b: Tensor) -> Tensor:
    dispatch.check_together(a=a, b=b)
    return dispatch.new(a, shapes.kronecker_product(a.shape, b.shape))


def _fake_kronecker_matmul(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    dispatch.check_together(a=a, b=b, x=x)
    return dispatch.new(x, shapes.kronecker_matmul(a.shape, b.shape, x.shape))


def _fake_kronecker_apply(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    dispatch.check_together(a=a, b=b, x=x)
    return dispatch.new(x, shapes.kronecker_apply(a.shape, b.shape, x.shape))


def _fake_kronecker_solve(a: Tensor, b: Tensor, x: Tensor, damping: float) -> Tensor:
    dispatch.check_together(a=a, b=b, x=x)
    return dispatch.new(x, shapes.kronecker_solve(a.shape, b.shape, x.shape))


def _fake_nearest_kronecker(m: Tensor, shape_a: Sequence[int], shape_b: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    first, second, leading = shapes.nearest_kronecker(m.shape, shape_a, shape_b)
    return dispatch.new(m, first), dispatch.new(m, second), dispatch.new(m, leading, torch.float64)


# --- the table --------------------------------------------------------------------------------------------------------

# Schema, shape function, gradient: None where there is none, text where it ends at its first derivative. The kernel is
# the function of that name in `dispatch`.
_TABLE: list[tuple[str, Callable, Any]] = [
    ("matrix_power(Tensor a, float power, float eps) -> Tensor", _fake_square, gradients.MatrixPower),
    (
        "matrix_power_backward(Tensor a, float power, float eps, Tensor grad) -> Tensor",
        _fake_backward,
        "matrix_power",
    ),
    (
        "inverse_root(Tensor a, int root, float eps, float relative_eps, str method, float tolerance)"
        " -> (Tensor, Tensor)",
        _fake_inverse_root,
        gradients.InverseRoot,
    ),
    (
        "inverse_root_backward(Tensor a, int root, float eps, float relative_eps, Tensor grad) -> Tensor",
        _fake_backward,
        "inverse_root",
    ),
    ("eigh(Tensor a) -> (Tensor, Tensor)", _fake_eigh, None),
    ("matmul(Tensor a, Tensor b) -> Tensor", _fake_matmul, gradients.Matmul),
    (
        "matmul_chunked(Tensor a, Tensor b, int memory_budget, str device) -> Tensor",
        _fake_matmul_chunked,
        gradients.MatmulChunked,
    ),
    ("gram(Tensor a, bool transpose, float alpha) -> Tensor", _fake_gram, gradients.Gram),
    ("symmetric_product(Tensor a, Tensor b) -> Tensor", _fake_symmetric_product, gradients.SymmetricProduct),
    ("orthogonalize(Tensor a, int steps, str method) -> Tensor", _fake_matrices, None),
    ("kronecker_product(Tensor a, Tensor b) -> Tensor", _fake_kronecker_product, gradients.KroneckerProduct),
    ("kronecker_matmul(Tensor a, Tensor b, Tensor x) -> Tensor", _fake_kronecker_matmul, gradients.KroneckerMatmul),
    ("kronecker_apply(Tensor a, Tensor b, Tensor x) -> Tensor", _fake_kronecker_apply, gradients.KroneckerApply),
    ("kronecker_solve(Tensor a, Tensor b, Tensor x, float damping) -> Tensor", _fake_kronecker_solve, None),
    (
        "nearest_kronecker(Tensor m, SymInt[] shape_a, SymInt[] shape_b) -> (Tensor, Tensor, Tensor)",
        _fake_nearest_kronecker,
        None,
    ),
]

# --- declaring them ---------------------------------------------------------------------------------------------------


def _in_front(t: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """The dimension that vmap took away, put before all others; `rank` is how many those are at least."""
    t = t.movedim(dim, 0) if dim is not None else t.unsqueeze(0)
    t = t.reshape(t.shape[0], *(1,) * (rank + 1 - t.dim()), *t.shape[1:])
    return t.expand(size, *t.shape[1:])


def _batching_rule(operator: Callable) -> Callable:
    """vmap: one more leading dimension, which every function here takes."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        tensors = [(x, dim) for x, dim in zip(args, in_dims, strict=True) if isinstance(x, Tensor)]
        rank = max(x.dim() - (dim is not None) for x, dim in tensors)
        moved = [
            _in_front(x, dim, info.batch_size, rank) if isinstance(x, Tensor) else x
            for x, dim in zip(args, in_dims, strict=True)
        ]
        result = operator(*moved)
        return result, tuple(0 for _ in result) if isinstance(result, tuple) else 0

    return rule


def _gradient_of(name: str, row: Any) -> Any:
    if row is None:
        return gradients.without(f"{name} has no gradient: give it detached tensors, or call it under torch.no_grad()")
    if isinstance(row, str):
        return gradients.without(f"{row} can be differentiated once, and its gradient was to be differentiated again")
    return row


def _declare_writing(library: torch.library.Library) -> None:
    """The one operator that writes to an argument: such have neither a gradient nor a batching rule."""
    library.define("matmul_into(Tensor a, Tensor b, int memory_budget, str device, Tensor(a!) out) -> ()")
    library.impl("matmul_into", dispatch.matmul_into, "CPU")
    library.impl("matmul_into", dispatch.matmul_into, "CUDA")
    torch.library.register_fake("torchium::matmul_into", lambda a, b, memory_budget, device, out: None)


def _declare(library: torch.library.Library) -> None:
    _declare_writing(library)
    for schema, fake, row in _TABLE:
        name = schema.partition("(")[0]
        kernel = getattr(dispatch, name)
        gradient = _gradient_of(name, row)
        library.define(schema)
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"torchium::{name}", fake)
        torch.library.register_autograd(f"torchium::{name}", gradient.backward, setup_context=gradient.keep)
        operator = getattr(torch.ops.torchium, name).default
        transformed[operator] = gradients.under_transforms(gradient, operator)
        if hasattr(torch.library, "register_vmap"):  # from 2.5 on; before it, vmap runs an operator in a loop
            torch.library.register_vmap(f"torchium::{name}", _batching_rule(operator))


# What torch.func differentiates, by operator.
transformed: dict[Any, Any] = {}
_library = torch.library.Library("torchium", "DEF")
_declare(_library)
