"""Shapes of results from shapes of arguments, for every kind of array. All functions work on tuples, including symbolic
ones of torch.compile, and name a wrong argument in a ValueError; other checks are left to the C library. The rules take
the arguments of their function, with shapes for arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Shape = tuple[int, ...]


def matrix(name: str, shape: Sequence[int]) -> tuple[Shape, int, int]:
    """Leading dimensions, rows and columns."""
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {list(shape)}, expected a matrix or a batch of matrices, [..., m, n]")
    return tuple(shape[:-2]) if len(shape) > 2 else (), shape[-2], shape[-1]


def square(name: str, shape: Sequence[int]) -> tuple[Shape, int]:
    leading, rows, columns = matrix(name, shape)
    if rows != columns:
        raise ValueError(f"{name} has shape {list(shape)}, expected square matrices, [..., n, n]")
    return leading, rows


def square_like(a: Sequence[int], *numbers: Any) -> Shape:
    """For a function whose result has the shape of `a`, which is square."""
    square("a", a)
    return tuple(a)


def matrix_like(a: Sequence[int], *numbers: Any) -> Shape:
    matrix("a", a)
    return tuple(a)


def inverse_root(a: Sequence[int], *numbers: Any) -> tuple[Shape, Shape]:
    """Shapes of the root and of the residuals."""
    return tuple(a), square("a", a)[0]


def eigh(a: Sequence[int]) -> tuple[Shape, Shape]:
    leading, n = square("a", a)
    return (*leading, n), tuple(a)


def broadcast(*named: tuple[str, Shape]) -> Shape:
    """Broadcasts leading dimensions, by NumPy's rules."""
    first_name, result = named[0]
    for name, shape in named[1:]:
        if shape == result:
            continue
        wide, narrow = (result, shape) if len(result) >= len(shape) else (shape, result)
        joined = list(wide)
        for k in range(1, len(narrow) + 1):
            if wide[-k] != narrow[-k] and narrow[-k] != 1:
                if wide[-k] != 1:
                    raise ValueError(
                        f"the leading dimensions {list(shape)} of {name} and {list(result)} of {first_name} "
                        "cannot be broadcast together"
                    )
                joined[-k] = narrow[-k]
        result = tuple(joined)
    return result


def matmul(a: Sequence[int], b: Sequence[int], *numbers: Any) -> Shape:
    if len(a) == len(b) == 2 and a[1] == b[0]:
        return a[0], b[1]
    lead_a, m, k = matrix("a", a)
    lead_b, rows, n = matrix("b", b)
    if k != rows:
        raise ValueError(f"b has shape {list(b)}, expected {k} rows, as many as a of shape {list(a)} has columns")
    return (*broadcast(("a", lead_a), ("b", lead_b)), m, n)


def gram(a: Sequence[int], transpose: bool, alpha: float = 1.0) -> Shape:
    leading, m, n = matrix("a", a)
    size = n if transpose else m
    return (*leading, size, size)


def kronecker_product(a: Sequence[int], b: Sequence[int]) -> Shape:
    lead_a, m, n = matrix("a", a)
    lead_b, p, q = matrix("b", b)
    return (*broadcast(("a", lead_a), ("b", lead_b)), m * p, n * q)


def kronecker_matmul(a: Sequence[int], b: Sequence[int], x: Sequence[int]) -> Shape:
    lead_a, m, n = matrix("a", a)
    lead_b, p, q = matrix("b", b)
    lead_x, rows, r = matrix("x", x)
    if rows != n * q:
        raise ValueError(f"x has shape {list(x)}, expected {n * q} rows: {n} columns of a times {q} of b")
    return (*broadcast(("a", lead_a), ("b", lead_b), ("x", lead_x)), m * p, r)


def kronecker_apply(a: Sequence[int], b: Sequence[int], x: Sequence[int]) -> Shape:
    lead_a, m, n = matrix("a", a)
    lead_b, p, q = matrix("b", b)
    lead_x, rows, columns = matrix("x", x)
    if rows != n or columns != q:
        raise ValueError(f"x has shape {list(x)}, expected [..., {n}, {q}] for a of {list(a)} and b of {list(b)}")
    return (*broadcast(("a", lead_a), ("b", lead_b), ("x", lead_x)), m, p)


def kronecker_solve(a: Sequence[int], b: Sequence[int], x: Sequence[int], damping: float = 0.0) -> Shape:
    square("a", a)
    square("b", b)
    return kronecker_apply(a, b, x)


def _factor(name: str, shape: Sequence[int]) -> tuple[int, int]:
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 2:
        raise TypeError(f"{name} must be two sizes, (rows, columns), got {type(shape).__name__}")
    rows, columns = shape
    if hasattr(rows, "untyped_storage") or hasattr(columns, "untyped_storage"):  # a tensor
        raise TypeError(f"{name} must be two sizes, (rows, columns), got a tensor among them")
    if rows < 0 or columns < 0:
        raise ValueError(f"{name} is ({rows}, {columns}), expected sizes of 0 or more")
    return rows, columns


def nearest_kronecker(m: Sequence[int], shape_a: Sequence[int], shape_b: Sequence[int]) -> tuple[Shape, Shape, Shape]:
    """Shapes of A, of B and of the errors."""
    leading, rows, columns = matrix("m", m)
    first, second = _factor("shape_a", shape_a), _factor("shape_b", shape_b)
    if rows != first[0] * second[0] or columns != first[1] * second[1]:
        raise ValueError(
            f"m has shape {list(m)}, expected [..., {first[0] * second[0]}, {first[1] * second[1]}] "
            f"for shape_a {list(first)} and shape_b {list(second)}"
        )
    return (*leading, *first), (*leading, *second), leading
