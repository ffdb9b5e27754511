"""Gradients of the matrix functions, one torch.autograd.Function each. Eager calls apply these classes; torch.library
gets their `keep`, as setup_context, and `backward`, so that each formula is written once. `forward` saves the same
tensors itself: a class with setup_context takes 20 microseconds more to apply.

A backward calls functions of `ops`. Those of products can therefore be differentiated again; powers and roots have a
first derivative only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.autograd import Function

# ops imports this module: its names are resolved at call time.
from torchium._functions import dispatch, ops


def _fit(gradient: Tensor, like: Tensor) -> Tensor:
    """Sums the gradient of a broadcast tensor over the repeated dimensions."""
    return gradient if gradient.shape == like.shape else gradient.sum_to_size(like.shape)


class Gradient(Function):
    """`run` is `apply` without its support for torch.func, a third of its time."""

    run: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.run = super(Function, cls).apply


def _keeping(kernel: Callable[..., Any], tensors: int) -> Callable[[type], type]:
    """Gives a class its `forward`, which calls the kernel, and `keep`: both save the tensors, which come first, and the
    numbers after them."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.numbers = inputs[tensors:]
        return kernel(*inputs)

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.numbers = inputs[tensors:]

    def complete(cls: type) -> type:
        cls.forward, cls.keep = staticmethod(forward), staticmethod(keep)
        return cls

    return complete


@_keeping(dispatch.matrix_power, 1)
class MatrixPower(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (a,) = ctx.saved_tensors
        return ops.matrix_power_backward(a, *ctx.numbers, grad), None, None


@_keeping(dispatch.inverse_root_alone, 1)
class InverseRootAlone(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (a,) = ctx.saved_tensors
        return ops.inverse_root_backward(a, *ctx.numbers[:3], grad), None, None, None, None, None


class InverseRoot(Gradient):
    """With the residual, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple:
        output = dispatch.inverse_root(*inputs)
        InverseRoot.keep(ctx, inputs, output)
        return output

    @staticmethod
    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        InverseRootAlone.keep(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
        return InverseRootAlone.backward(ctx, grad)


@_keeping(dispatch.matmul, 2)
class Matmul(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        a, b = ctx.saved_tensors
        return (
            _fit(ops.matmul(grad, b.mT), a) if ctx.needs_input_grad[0] else None,
            _fit(ops.matmul(a.mT, grad), b) if ctx.needs_input_grad[1] else None,
        )


@_keeping(dispatch.symmetric_product, 2)
class SymmetricProduct(Matmul):
    """A B is symmetric if A and B commute; its gradient is that of a general product."""


@_keeping(dispatch.matmul_chunked, 2)
class MatmulChunked(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        a, b = ctx.saved_tensors
        left = right = None
        if ctx.needs_input_grad[0]:
            left = _fit(ops.matmul_chunked(grad, b.mT, *ctx.numbers), a).to(a.device)
        if ctx.needs_input_grad[1]:
            right = _fit(ops.matmul_chunked(a.mT, grad, *ctx.numbers), b).to(b.device)
        return left, right, None, None


@_keeping(dispatch.gram, 1)
class Gram(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (a,), (transpose, alpha) = ctx.saved_tensors, ctx.numbers
        both = alpha * (grad + grad.mT)
        return ops.matmul(a, both) if transpose else ops.matmul(both, a), None, None


def _by_factors(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Rearranges a gradient [..., m p, n q] to [..., m n, p q]: a row for each element of A, a column for each of B."""
    (m, n), (p, q) = a.shape[-2:], b.shape[-2:]
    leading = grad.shape[:-2]
    return grad.reshape(*leading, m, p, n, q).transpose(-3, -2).reshape(*leading, m * n, p * q)


@_keeping(dispatch.kronecker_product, 2)
class KroneckerProduct(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        a, b = ctx.saved_tensors
        rows = _by_factors(grad, a, b)
        left = right = None
        if ctx.needs_input_grad[0]:
            left = ops.matmul(rows, b.reshape(*b.shape[:-2], -1, 1))
            left = _fit(left.reshape(*left.shape[:-2], *a.shape[-2:]), a)
        if ctx.needs_input_grad[1]:
            right = ops.matmul(rows.mT, a.reshape(*a.shape[:-2], -1, 1))
            right = _fit(right.reshape(*right.shape[:-2], *b.shape[-2:]), b)
        return left, right


@_keeping(dispatch.kronecker_matmul, 3)
class KroneckerMatmul(Gradient):
    """With X as [n, q, r] and the result as [m, p, r]: out(i, k, c) = sum of A(i, j) B(k, l) X(j, l, c)."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        a, b, x = ctx.saved_tensors
        (m, n), (p, q), r = a.shape[-2:], b.shape[-2:], x.shape[-1]
        cubes = x.reshape(*x.shape[:-2], n, q, r)
        left = right = below = None
        if ctx.needs_input_grad[0]:
            turned = ops.matmul(b.unsqueeze(-3), cubes)  # [..., n, p, r]
            left = ops.matmul(grad.reshape(*grad.shape[:-2], m, p * r), turned.flatten(-2).mT)
            left = _fit(left, a)
        if ctx.needs_input_grad[1]:
            mixed = ops.matmul(a, cubes.flatten(-2))  # [..., m, q r]
            mixed = mixed.reshape(*mixed.shape[:-1], q, r)
            right = ops.matmul(grad.reshape(*grad.shape[:-2], m, p, r), mixed.mT).sum(-3)
            right = _fit(right, b)
        if ctx.needs_input_grad[2]:
            below = _fit(ops.kronecker_matmul(a.mT, b.mT, grad), x)
        return left, right, below


@_keeping(dispatch.kronecker_apply, 3)
class KroneckerApply(Gradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        a, b, x = ctx.saved_tensors
        left = right = below = None
        if ctx.needs_input_grad[0]:
            left = _fit(ops.matmul(grad, ops.matmul(b, x.mT)), a)
        if ctx.needs_input_grad[1]:
            right = _fit(ops.matmul(grad.mT, ops.matmul(a, x)), b)
        if ctx.needs_input_grad[2]:
            below = _fit(ops.kronecker_apply(a.mT, b.mT, grad), x)
        return left, right, below


def without(message: str) -> type[Function]:
    """Raises an error if the gradient of an operator without one is required."""

    class Without(Gradient):
        @staticmethod
        def keep(ctx: Any, inputs: tuple, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(message)

    return Without


def under_transforms(gradient: Any, operator: Any) -> type[Function]:
    """The same gradient for torch.func, which requires setup_context and ignores an operator's own gradient."""

    class Transformed(gradient):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            gradient.keep(ctx, inputs, output)

    return Transformed
