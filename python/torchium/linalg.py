"""The matrix functions of second-order optimization, for PyTorch, NumPy, CuPy and JAX arrays.

    import numpy, torchium
    a = numpy.cov(numpy.random.randn(8, 100))
    x = torchium.linalg.inverse_root(a, 4, relative_eps=1e-6)     # (A + damping I)^(-1/4)

The arrays of a call are of one kind and on one device, and so is the result; inputs are never written to. A batch of
matrices, `[..., m, n]`, has any number of leading dimensions. Types are float32, float64, float16 and bfloat16; the two
narrow ones are computed wider and rounded once. Transposed, sliced and expanded arrays are read as they are.

A matrix that is not finite, not symmetric where it must be, or not positive where it must be, is a
`torchium.NumericError` that names its number in the batch; so is one whose eigenvalues, power, root or solution is too
large for its type. In products, `orthogonalize` and gradients what is too large is an infinity.

With PyTorch the functions can be differentiated where a gradient is defined, and seen by `torch.compile` as operators
`torch.ops.torchium.*`. A function without a gradient refuses tensors that require one. With CUDA tensors work is queued
on the current stream.
"""

# This file only says what the functions do and finds out whose arrays they got: torchium._functions.ops is for
# PyTorch's, and torchium._functions.arrays for the others. It does not import PyTorch.

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from torchium._functions import arrays as _arrays

Array = TypeVar("Array")  # of the kind that was given
_RootMethod = Literal["auto", "eigen", "newton", "rational"]
_PolarMethod = Literal["polar_express", "muon", "minimax"]

__all__ = [
    "eigh",
    "gram",
    "inverse_root",
    "kronecker_apply",
    "kronecker_matmul",
    "kronecker_product",
    "kronecker_solve",
    "matmul",
    "matrix_power",
    "nearest_kronecker",
    "orthogonalize",
    "symmetric_product",
]


class _NoTensor:
    """Stands for torch.Tensor as long as nobody has imported PyTorch."""


_Tensor: Any = _NoTensor
_torch_functions: Any = None


def _find_torch() -> bool:
    """Looks whether PyTorch has come, and if so remembers it."""
    global _Tensor, _torch_functions
    torch = sys.modules.get("torch")
    if _torch_functions is not None or torch is None or not hasattr(torch, "Tensor"):
        return False
    from torchium._functions import ops

    _torch_functions = ops
    _Tensor = torch.Tensor
    return True


def _home(name: str, x: Any) -> Any:
    """The functions for arrays like x."""
    if isinstance(x, _Tensor) or (_find_torch() and isinstance(x, _Tensor)):
        return _torch_functions
    return _arrays.arrays_of(name, x)


_find_torch()


def matrix_power(a: Array, power: float, eps: float = 0.0) -> Array:
    """V max(w + eps, eps)^power V' for symmetric A = V diag(w) V': any real power of A + eps I.

    Args:
        a: symmetric matrices, [..., n, n].
        power: any real number.
        eps: damping, 0 or more. Eigenvalues that it leaves below eps are raised to it, negative ones among them. With
            0, a negative power of a matrix with eigenvalues that are not positive is a NumericError.

    The gradient with respect to A is V (K o V' (G + G')/2 V) V' with K the divided differences of the function; it is
    computed in float64, and cannot be differentiated once more.

    Examples:
        >>> x = matrix_power(a, -0.25, eps=1e-8)
    """
    return _home("a", a).matrix_power(a, power, eps)


@overload
def inverse_root(
    a: Array,
    root: int,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: _RootMethod = "auto",
    tolerance: float = 0.0,
    return_residual: Literal[False] = False,
) -> Array: ...


@overload
def inverse_root(
    a: Array,
    root: int,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: _RootMethod = "auto",
    tolerance: float = 0.0,
    *,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


def inverse_root(
    a: Array,
    root: int,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: _RootMethod = "auto",
    tolerance: float = 0.0,
    return_residual: bool = False,
) -> Any:
    """(A + d I)^(-1/root) for symmetric positive semidefinite A, d = max(eps, relative_eps * largest eigenvalue).

    Args:
        a: [..., n, n].
        root: 1, 2, 3, 4, 6 or 8; `matrix_power` takes any power.
        eps: damping.
        relative_eps: damping relative to the largest eigenvalue. It bounds the cost in advance: prefer it.
        method: "auto", the fastest that reaches the tolerance; "eigen", by eigenvalues; "newton", products only;
            "rational", shifted inverses (CPU only).
        tolerance: the largest error of the result relative to its norm; 0 means 1e-9 for float64, 1e-3 for the others.
        return_residual: also return the certificate |X^ceil(r/2) (A + d I) X^floor(r/2) - I| / sqrt(n) of each result,
            as float64 of the batch's shape.

    The gradient, in the manner of `matrix_power`, includes the dependence of d on the largest eigenvalue. The residual
    has none.

    Examples:
        >>> x, residual = inverse_root(a, 4, relative_eps=1e-6, return_residual=True)
    """
    return _home("a", a).inverse_root(a, root, eps, relative_eps, method, tolerance, return_residual)


def eigh(a: Array) -> tuple[Array, Array]:
    """Eigenvalues w [..., n], ascending, and eigenvectors V [..., n, n], in columns: A = V diag(w) V' for symmetric A.

    Args:
        a: symmetric matrices, [..., n, n].

    There is no gradient.

    Examples:
        >>> w, v = eigh(a)
    """
    return _home("a", a).eigh(a)


def matmul(a: Array, b: Array) -> Array:
    """A B; leading dimensions are broadcast.

    Args:
        a: [..., m, k].
        b: [..., k, n].

    Examples:
        >>> c = matmul(a, b)
    """
    return _home("a", a).matmul(a, b)


def gram(a: Array, transpose: bool = False, alpha: float = 1.0) -> Array:
    """alpha A A', or alpha A' A with transpose: symmetric to the last bit, for half the work of a product.

    Args:
        a: any matrices, [..., m, n].
        transpose: A' A in place of A A'.
        alpha: a factor of the result.

    Examples:
        >>> covariance = gram(x, transpose=True, alpha=1 / len(x))
    """
    return _home("a", a).gram(a, transpose, alpha)


def symmetric_product(a: Array, b: Array) -> Array:
    """A B for symmetric A and B that commute, such as powers of one matrix: the result is symmetric to the last bit.

    Args:
        a: symmetric matrices, [..., n, n].
        b: symmetric matrices of the same shape, each of which commutes with its A.

    Examples:
        >>> square = symmetric_product(a, a)
    """
    return _home("a", a).symmetric_product(a, b)


def orthogonalize(a: Array, steps: int = 5, method: _PolarMethod = "polar_express") -> Array:
    """Near U V' for A = U S V' [..., m, n]: the closest semi-orthogonal matrix, by Newton-Schulz steps as Muon uses it.

    Args:
        a: any matrices.
        steps: 1 to 100. Singular values come out near 1, not at 1; five steps are usual.
        method: "polar_express", coefficients chosen step by step, "muon", the same ones at every step, or "minimax",
            three steps of higher degree, which end nearer to 1 for less work; further ones as of "polar_express".

    There is no gradient.

    Examples:
        >>> direction = orthogonalize(momentum)
    """
    return _home("a", a).orthogonalize(a, steps, method)


def kronecker_product(a: Array, b: Array) -> Array:
    """A (x) B, [..., m p, n q]. Mind its size: the functions below never form it.

    Args:
        a: [..., m, n].
        b: [..., p, q].

    Examples:
        >>> c = kronecker_product(a, b)
    """
    return _home("a", a).kronecker_product(a, b)


def kronecker_matmul(a: Array, b: Array, x: Array) -> Array:
    """(A (x) B) X without forming the product: [..., m p, r].

    Args:
        a: [..., m, n].
        b: [..., p, q].
        x: [..., n q, r].

    Leading dimensions are broadcast, here and below.

    Examples:
        >>> y = kronecker_matmul(a, b, x)
    """
    return _home("a", a).kronecker_matmul(a, b, x)


def kronecker_apply(a: Array, b: Array, x: Array) -> Array:
    """A X B', [..., m, p]: A (x) B applied to the elements of X in row-major order.

    Args:
        a: [..., m, n].
        b: [..., p, q].
        x: [..., n, q].

    Examples:
        >>> direction = kronecker_apply(left_root, right_root, gradient)
    """
    return _home("a", a).kronecker_apply(a, b, x)


def kronecker_solve(a: Array, b: Array, x: Array, damping: float) -> Array:
    """(A + pi sqrt(damping) I)^-1 X (B + sqrt(damping)/pi I)^-1, pi = sqrt((tr A / m) / (tr B / n)): KFAC's step.

    Args:
        a: symmetric positive semidefinite, [..., m, m].
        b: symmetric positive semidefinite, [..., n, n].
        x: [..., m, n].
        damping: 0 or more.

    There is no gradient.

    Examples:
        >>> step = kronecker_solve(a, b, gradient, damping=1e-3)
    """
    return _home("a", a).kronecker_solve(a, b, x, damping)


def nearest_kronecker(
    m: Array, shape_a: Sequence[int], shape_b: Sequence[int], return_error: bool = False
) -> tuple[Array, ...]:
    """The A of shape_a and B of shape_b that make |M - A (x) B| least.

    Args:
        m: [..., m p, n q].
        shape_a: (m, n).
        shape_b: (p, q).
        return_error: also return |M - A (x) B| / |M|, float64 of the batch's shape.

    The factors have equal norms, and A's largest entry is positive. There is no gradient.

    Examples:
        >>> a, b = nearest_kronecker(m, (4, 3), (5, 2))
    """
    return _home("m", m).nearest_kronecker(m, shape_a, shape_b, return_error)
