"""The matrix functions of second-order optimization, for PyTorch, NumPy, CuPy and JAX arrays.

    import numpy, torchium
    a = numpy.cov(numpy.random.randn(8, 100))
    x = torchium.linalg.inverse_root(a, 4, relative_eps=1e-6)     # (A + damping I)^(-1/4)

All arrays of a call have the same library, dtype and device, as does the result; inputs are never modified. A batch of
matrices, `[..., m, n]`, has any number of leading dimensions. Types are float32, float64, float16 and bfloat16; the
last two are computed in higher precision and rounded once. Transposed, sliced and expanded arrays are not copied.

A matrix that is not finite, not symmetric or not positive definite where required, or whose eigenvalues, power, root or
solution overflow, raises a `torchium.NumericError` with its index in the batch. Products, `orthogonalize` and gradients
overflow to infinity.

PyTorch's autograd works where a gradient is defined; other functions raise an error for tensors that require one.
`torch.compile` sees operators `torch.ops.torchium.*`. CUDA tensors use the current stream.
"""

# Documentation and dispatch by array library: torchium._functions.ops for PyTorch, torchium._functions.arrays for the
# others. Does not import PyTorch.

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
    """Stands for torch.Tensor while PyTorch is not imported."""


_Tensor: Any = _NoTensor
_torch_functions: Any = None


def _find_torch() -> bool:
    """Whether PyTorch has been imported since the last call."""
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
        eps: damping, 0 or more. Shifted eigenvalues below eps, including negative ones, are clamped to it. With 0, a
            negative power of a matrix that is not positive definite is a NumericError.

    The gradient with respect to A is V (K o V' (G + G')/2 V) V' with K the divided differences of the function; it is
    computed in float64, and has no second derivative.

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
        relative_eps: damping relative to the largest eigenvalue, preferred: it bounds the cost in advance.
        method: "auto", the fastest that reaches the tolerance; "eigen", by eigendecomposition; "newton", only products;
            "rational", shifted inverses (CPU only).
        tolerance: the largest error of the result relative to its norm; 0 means 1e-9 for float64, 1e-3 for the others.
        return_residual: also return the certificate |X^ceil(r/2) (A + d I) X^floor(r/2) - I| / sqrt(n) of each result,
            as float64 of the batch's shape.

    The gradient, as that of `matrix_power`, includes the dependence of d on the largest eigenvalue. The residual has
    none.

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
    """alpha A A', or alpha A' A with transpose: exactly symmetric, with half the work of a product.

    Args:
        a: any matrices, [..., m, n].
        transpose: A' A instead of A A'.
        alpha: scale of the result.

    Examples:
        >>> covariance = gram(x, transpose=True, alpha=1 / len(x))
    """
    return _home("a", a).gram(a, transpose, alpha)


def symmetric_product(a: Array, b: Array) -> Array:
    """A B for symmetric A and B that commute, such as powers of one matrix: the result is exactly symmetric.

    Args:
        a: symmetric matrices, [..., n, n].
        b: symmetric matrices of the same shape, each of which commutes with its A.

    Examples:
        >>> square = symmetric_product(a, a)
    """
    return _home("a", a).symmetric_product(a, b)


def orthogonalize(a: Array, steps: int = 5, method: _PolarMethod = "polar_express") -> Array:
    """Approximately U V' for A = U S V' [..., m, n], the closest semi-orthogonal matrix, by Newton-Schulz steps.

    Args:
        a: any matrices.
        steps: 1 to 100. Singular values are close to 1; five steps are usual.
        method: "polar_express", different coefficients in each step, "muon", the same in every step, or "minimax",
            three steps of higher degree, more accurate at lower cost, and further ones as in "polar_express".

    There is no gradient.

    Examples:
        >>> direction = orthogonalize(momentum)
    """
    return _home("a", a).orthogonalize(a, steps, method)


def kronecker_product(a: Array, b: Array) -> Array:
    """A (x) B, [..., m p, n q]. The functions below do not form it.

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
    """The A of shape_a and B of shape_b that minimize |M - A (x) B|.

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
