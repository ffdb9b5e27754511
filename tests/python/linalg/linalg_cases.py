"""Functions of torchium.linalg as a table: argument shapes, the call, and a NumPy reference in float64."""

from collections.abc import Callable
from typing import NamedTuple

import numpy
from torchium import linalg

BOUND = {"float64": 1e-12, "float32": 3e-4, "float16": 2e-3, "bfloat16": 8e-3}
ROOT = BOUND | {"float64": 1e-9, "float32": 2e-3}
PRODUCT = BOUND | {"float64": 1e-14, "float32": 1e-5}  # products have no condition number to magnify errors


def wide(x):
    return numpy.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x).astype("float64")


def close(got, like, expected, scale=1.0, bounds=BOUND):
    assert type(got) is type(like) and got.dtype == like.dtype and got.shape == expected.shape
    assert numpy.isfinite(wide(got)).all()
    assert not hasattr(got, "is_contiguous") or got.is_contiguous()
    error, bound = numpy.linalg.norm(wide(got) - expected), bounds[str(like.dtype).removeprefix("torch.")]
    assert error <= scale * bound * numpy.linalg.norm(expected), f"off by {error:.3g}"


def positive(*shape):
    """Symmetric, eigenvalues from 0.1 to about 10."""
    a = numpy.random.randn(*shape)
    return a @ a.swapaxes(-1, -2) / max(1, shape[-1]) + 0.1 * numpy.eye(shape[-1])


def transposed(x):
    return numpy.swapaxes(x, -1, -2)


def power_of(a, power, eps):
    w, v = numpy.linalg.eigh(wide(a))
    return v * numpy.maximum(w + eps, eps)[..., None, :] ** power @ transposed(v)


def kron(a, b):
    product = numpy.einsum("...ij,...kl->...ikjl", a, b)
    return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])


def mean_of_diagonal(a):
    return numpy.trace(a, axis1=-2, axis2=-1) / a.shape[-1]


def kronecker_solve(a, b, x):
    pi = numpy.sqrt(mean_of_diagonal(a) / mean_of_diagonal(b))
    left = a + (pi * 0.2)[..., None, None] * numpy.eye(a.shape[-1])
    right = b + (0.2 / pi)[..., None, None] * numpy.eye(b.shape[-1])
    return numpy.linalg.inv(left) @ x @ numpy.linalg.inv(right)


class Case(NamedTuple):
    """A shape is (rows, columns), or the rows of a positive definite matrix."""

    shapes: tuple
    function: Callable
    reference: Callable | None
    bounds: dict = BOUND
    scale: float = 1.0


def power_case(n, power, eps):
    return Case((n,), lambda a: linalg.matrix_power(a, power, eps), lambda a: power_of(a, power, eps))


def product_case(function, reference, *shapes, scale=1.0):
    return Case(shapes, function, reference, PRODUCT, scale)


FUNCTIONS = {
    "powers": power_case(7, -0.25, 1e-3),
    "powers of nothing": power_case(0, -1.0, 0.1),
    "powers of numbers": power_case(1, 1.7, 0.3),
    "root": Case(
        (6,), lambda a: linalg.inverse_root(a, 4, eps=0.1), lambda a: power_of(a + 0.1 * numpy.eye(6), -0.25, 0.0), ROOT
    ),
    "eigenvalues": Case((6,), lambda a: linalg.eigh(a)[0], numpy.linalg.eigvalsh),
    "product": product_case(linalg.matmul, lambda a, b: a @ b, (3, 4), (4, 5)),
    "sums of nothing": product_case(linalg.matmul, lambda a, b: a @ b, (3, 0), (0, 5)),
    "gram": product_case(linalg.gram, lambda a: a @ transposed(a), (3, 4)),
    "gram, transposed": product_case(
        lambda a: linalg.gram(a, transpose=True, alpha=0.5), lambda a: 0.5 * transposed(a) @ a, (3, 4)
    ),
    "symmetric product": product_case(lambda a: linalg.symmetric_product(a, a), lambda a: a @ a, 5),
    "kronecker": product_case(linalg.kronecker_product, kron, (2, 3), (5, 4)),
    "kronecker matmul": product_case(
        linalg.kronecker_matmul, lambda a, b, x: kron(a, b) @ x, (2, 3), (5, 4), (12, 2), scale=2.0
    ),
    "kronecker apply": product_case(
        linalg.kronecker_apply, lambda a, b, x: a @ x @ transposed(b), (2, 3), (5, 4), (3, 4), scale=2.0
    ),
    "kronecker solve": Case((5, 4, (5, 4)), lambda a, b, x: linalg.kronecker_solve(a, b, x, 0.04), kronecker_solve),
}


def arguments(case, batches):
    """Random numbers in float64, with leading dimensions."""
    shapes = zip(batches, case.shapes, strict=False)
    return [positive(*b, s, s) if isinstance(s, int) else numpy.random.randn(*b, *s) for b, s in shapes]
