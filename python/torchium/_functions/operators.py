"""The operators torch.ops.torchium.*: schema, kernel, shape function, gradient and batching rule, one row each in the
table below. Importing this module declares them.

Shape functions run without data, under torch.compile or torch.export. They must agree with the kernel, including
contiguous strides; torch.library.opcheck compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchium._functions import dispatch, gradients, shapes

# --- shape functions --------------------------------------------------------------------------------------------------


# Numbers of the results that are always float64.
_DOUBLES = {"inverse_root": 1, "nearest_kronecker": 2}


def _fake_of(schema: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The shape function of an operator from the rule in `shapes`."""
    name, names = schema.partition("(")[0], re.findall(r"Tensor (\w+)", schema)
    is_double = _DOUBLES.get(name)

    def fake(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name != "matmul_chunked":  # which accept tensors on several devices
            dispatch.check_together(**dict(zip(names, tensors, strict=True)))
        made = rule(*(x.shape if isinstance(x, Tensor) else x for x in args))
        if schema.endswith("-> Tensor"):
            return dispatch.new(tensors[0], made)
        dtypes = (torch.float64 if i == is_double else None for i in range(len(made)))
        return tuple(dispatch.new(tensors[0], *result) for result in zip(made, dtypes, strict=True))

    return fake


# --- the table --------------------------------------------------------------------------------------------------------

# Schema, rule of shapes, gradient: None if there is none, text if there is only a first derivative. The kernel is the
# function of that name in `dispatch`.
_TABLE: list[tuple[str, Callable, Any]] = [
    ("matrix_power(Tensor a, float power, float eps) -> Tensor", shapes.square_like, gradients.MatrixPower),
    (
        "matrix_power_backward(Tensor a, float power, float eps, Tensor grad) -> Tensor",
        shapes.square_like,
        "matrix_power",
    ),
    (
        "inverse_root(Tensor a, int root, float eps, float relative_eps, str method, float tolerance)"
        " -> (Tensor, Tensor)",
        shapes.inverse_root,
        gradients.InverseRoot,
    ),
    (
        "inverse_root_backward(Tensor a, int root, float eps, float relative_eps, Tensor grad) -> Tensor",
        shapes.square_like,
        "inverse_root",
    ),
    ("eigh(Tensor a) -> (Tensor, Tensor)", shapes.eigh, None),
    ("matmul(Tensor a, Tensor b) -> Tensor", shapes.matmul, gradients.Matmul),
    (
        "matmul_chunked(Tensor a, Tensor b, int memory_budget, str device) -> Tensor",
        shapes.matmul,
        gradients.MatmulChunked,
    ),
    ("gram(Tensor a, bool transpose, float alpha) -> Tensor", shapes.gram, gradients.Gram),
    ("symmetric_product(Tensor a, Tensor b) -> Tensor", shapes.square_like, gradients.SymmetricProduct),
    ("orthogonalize(Tensor a, int steps, str method) -> Tensor", shapes.matrix_like, None),
    ("kronecker_product(Tensor a, Tensor b) -> Tensor", shapes.kronecker_product, gradients.KroneckerProduct),
    ("kronecker_matmul(Tensor a, Tensor b, Tensor x) -> Tensor", shapes.kronecker_matmul, gradients.KroneckerMatmul),
    ("kronecker_apply(Tensor a, Tensor b, Tensor x) -> Tensor", shapes.kronecker_apply, gradients.KroneckerApply),
    ("kronecker_solve(Tensor a, Tensor b, Tensor x, float damping) -> Tensor", shapes.kronecker_solve, None),
    (
        "nearest_kronecker(Tensor m, SymInt[] shape_a, SymInt[] shape_b) -> (Tensor, Tensor, Tensor)",
        shapes.nearest_kronecker,
        None,
    ),
]

# --- registration -----------------------------------------------------------------------------------------------------


def _in_front(t: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """Moves the dimension of vmap to the front; `rank` is the minimum number of the others."""
    t = t.movedim(dim, 0) if dim is not None else t.unsqueeze(0)
    t = t.reshape(t.shape[0], *(1,) * (rank + 1 - t.dim()), *t.shape[1:])
    return t.expand(size, *t.shape[1:])


def _batching_rule(operator: Callable) -> Callable:
    """vmap: one more leading dimension, which every function accepts."""

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
    """The only operator that writes to an argument: it has no gradient and no batching rule."""
    library.define("matmul_into(Tensor a, Tensor b, int memory_budget, str device, Tensor(a!) out) -> ()")
    library.impl("matmul_into", dispatch.matmul_into, "CPU")
    library.impl("matmul_into", dispatch.matmul_into, "CUDA")
    torch.library.register_fake("torchium::matmul_into", lambda a, b, memory_budget, device, out: None)


def _declare(library: torch.library.Library) -> None:
    _declare_writing(library)
    for schema, rule, row in _TABLE:
        name = schema.partition("(")[0]
        kernel = getattr(dispatch, name)
        gradient = _gradient_of(name, row)
        library.define(schema)
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"torchium::{name}", _fake_of(schema, rule))
        torch.library.register_autograd(f"torchium::{name}", gradient.backward, setup_context=gradient.keep)
        operator = getattr(torch.ops.torchium, name).default
        transformed[operator] = gradients.under_transforms(gradient, operator)
        if hasattr(torch.library, "register_vmap"):  # from 2.5 on; earlier versions run an operator in a loop
            torch.library.register_vmap(f"torchium::{name}", _batching_rule(operator))


# The differentiable function for torch.func, by operator.
transformed: dict[Any, Any] = {}
_library = torch.library.Library("torchium", "DEF")
_declare(_library)
