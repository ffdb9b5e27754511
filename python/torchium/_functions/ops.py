"""The matrix functions for PyTorch tensors, as operators torch.ops.torchium.* with shape functions and gradients.

A function here has two ways. Where nothing but the numbers is wanted, that is in ordinary eager code, it calls the C
library at once, or through a torch.autograd.Function where a gradient will be wanted. Where something else listens,
torch.compile, export, vmap, a profiler, a dispatch mode, a tensor subclass, it calls its operator, whose kernel does
the same as the short way. The kernels are in `dispatch`, the gradients of both ways in `gradients`, and the operators
are declared in `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchium import _C
from torchium._functions import dispatch, gradients

# --- which way a call goes --------------------------------------------------------------------------------------------


# Whether anything but the kernels wants to see a call: there is no public way to ask. Where these names are missing,
# every call goes through its operator, which is right and slower. For ordinary tensors, in code that is run and not
# looked at, `_recorded` tells whether autograd records the call; for all others it is None.
try:
    _transforms = torch._C._functorch.peek_interpreter_stack
    _C.set_listeners(
        types=(Tensor, torch.nn.Parameter),
        calls=(
            (torch._C._len_torch_dispatch_stack, 0),
            (_transforms, None),
            (torch._C._get_tracing_state, None),
            (torch.autograd._profiler_enabled, False),  # a profiler shows operators by their names
        ),
        attributes=((forward_ad, "_current_level", -1), (torch.compiler, "_is_compiling_flag", False)),
        is_recorded=torch.is_grad_enabled,
    )
    _ = forward_ad._current_level, torch.compiler._is_compiling_flag
    _recorded, _traced = _C.recorded, torch.compiler.is_dynamo_compiling
except AttributeError:
    _transforms, _recorded, _traced = (lambda: None), (lambda *tensors: None), (lambda: False)


def _check_tensors(**tensors: Any) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
        if not torch.compiler.is_compiling() and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"{name} has a tangent: the functions of torchium have no forward-mode derivative"
            )


def is_hollow(value: Any) -> bool:
    """A tensor whose storage was shrunk under it, or a list with one."""
    if isinstance(value, (list, tuple)):
        return any(is_hollow(item) for item in value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    try:
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        needed = (value.storage_offset() + last + 1) * value.element_size()
        return value.numel() > 0 and value.untyped_storage().nbytes() < needed
    except (RuntimeError, NotImplementedError):  # it has no storage, and says so
        return False


def _check_printable(operator: Any, args: Sequence[Any]) -> None:
    """Where an argument does not fit its schema PyTorch prints it, and reads memory that is gone."""
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if str(argument.type) != "Tensor" and is_hollow(value):
            raise TypeError(f"{argument.name} must be a {argument.type}, got a tensor that has no memory")


def _through(operator: Any, *args: Any) -> Any:
    """By its operator, so that whoever listens sees it."""
    if not torch.compiler.is_compiling():
        _check_printable(operator, args)
        if _transforms() is not None:
            return operators.transformed[operator].apply(*args)
    return operator(*args)


def _refuse_gradient(function: str, **tensors: Any) -> None:
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{function} has no gradient, and {name} requires one: give it {name}.detach(), or call it under "
                "torch.no_grad()"
            )


# --- the functions, as in torchium.linalg -----------------------------------------------------------------------------


def matrix_power(a: Tensor, power: float, eps: float = 0.0) -> Tensor:
    recorded = None if _traced() else _recorded(a)
    if recorded is False:
        return dispatch.matrix_power(a, power, eps)
    if recorded:
        return gradients.MatrixPower.run(a, power, eps)
    _check_tensors(a=a)
    return _through(torch.ops.torchium.matrix_power.default, a, power, eps)


def matrix_power_backward(a: Tensor, power: float, eps: float, grad: Tensor) -> Tensor:
    if not _traced() and _recorded(a, grad) is False:
        return dispatch.matrix_power_backward(a, power, eps, grad)
    return _through(torch.ops.torchium.matrix_power_backward.default, a, power, eps, grad)


def inverse_root(
    a: Tensor,
    root: int,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: str = "auto",
    tolerance: float = 0.0,
    return_residual: bool = False,
) -> Any:
    recorded = None if _traced() else _recorded(a)
    if recorded is None:
        _check_tensors(a=a)
        both = _through(torch.ops.torchium.inverse_root.default, a, root, eps, relative_eps, method, tolerance)
        return both if return_residual else both[0]
    if recorded:
        gradient = gradients.InverseRoot if return_residual else gradients.InverseRootAlone
        return gradient.run(a, root, eps, relative_eps, method, tolerance)
    kernel = dispatch.inverse_root if return_residual else dispatch.inverse_root_alone
    return kernel(a, root, eps, relative_eps, method, tolerance)


def inverse_root_backward(a: Tensor, root: int, eps: float, relative_eps: float, grad: Tensor) -> Tensor:
    if not _traced() and _recorded(a, grad) is False:
        return dispatch.inverse_root_backward(a, root, eps, relative_eps, grad)
    return _through(torch.ops.torchium.inverse_root_backward.default, a, root, eps, relative_eps, grad)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    if not _traced() and _recorded(a) is False:
        return dispatch.eigh(a)
    _refuse_gradient("eigh", a=a)
    _check_tensors(a=a)
    return _through(torch.ops.torchium.eigh.default, a)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    recorded = None if _traced() else _recorded(a, b)
    if recorded is False:
        return dispatch.matmul(a, b)
    if recorded:
        return gradients.Matmul.run(a, b)
    _check_tensors(a=a, b=b)
    return _through(torch.ops.torchium.matmul.default, a, b)


def matmul_chunked(a: Tensor, b: Tensor, memory_budget: int, device: str) -> Tensor:
    """`device` is where to compute, "" for where the tensors are. The result is where A is."""
    recorded = None if _traced() else _recorded(a, b)
    if recorded is False:
        return dispatch.matmul_chunked(a, b, memory_budget, device)
    if recorded:
        return gradients.MatmulChunked.run(a, b, memory_budget, device)
    _check_tensors(a=a, b=b)
    return _through(torch.ops.torchium.matmul_chunked.default, a, b, memory_budget, device)


def matmul_into(a: Tensor, b: Tensor, memory_budget: int, device: str, out: Tensor) -> Tensor:
    _refuse_gradient("a product with out", a=a, b=b, out=out)
    if not _traced() and _recorded(a, b, out) is not None:
        dispatch.matmul_into(a, b, memory_budget, device, out)
    else:
        _check_tensors(a=a, b=b, out=out)
        torch.ops.torchium.matmul_into.default(a, b, memory_budget, device, out)
    return out


def gram(a: Tensor, transpose: bool = False, alpha: float = 1.0) -> Tensor:
    recorded = None if _traced() else _recorded(a)
    if recorded is False:
        return dispatch.gram(a, transpose, alpha)
    if recorded:
        return gradients.Gram.run(a, transpose, alpha)
    _check_tensors(a=a)
    return _through(torch.ops.torchium.gram.default, a, transpose, alpha)


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    recorded = None if _traced() else _recorded(a, b)
    if recorded is False:
        return dispatch.symmetric_product(a, b)
    if recorded:
        return gradients.SymmetricProduct.run(a, b)
    _check_tensors(a=a, b=b)
    return _through(torch.ops.torchium.symmetric_product.default, a, b)


def orthogonalize(a: Tensor, steps: int = 5, method: str = "polar_express") -> Tensor:
    if not _traced() and _recorded(a) is False:
        return dispatch.orthogonalize(a, steps, method)
    _refuse_gradient("orthogonalize", a=a)
    _check_tensors(a=a)
    return _through(torch.ops.torchium.orthogonalize.default, a, steps, method)


def kronecker_product(a: Tensor, b: Tensor) -> Tensor:
    recorded = None if _traced() else _recorded(a, b)
    if recorded is False:
        return dispatch.kronecker_product(a, b)
    if recorded:
        return gradients.KroneckerProduct.run(a, b)
    _check_tensors(a=a, b=b)
    return _through(torch.ops.torchium.kronecker_product.default, a, b)


def kronecker_matmul(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    recorded = None if _traced() else _recorded(a, b, x)
    if recorded is False:
        return dispatch.kronecker_matmul(a, b, x)
    if recorded:
        return gradients.KroneckerMatmul.run(a, b, x)
    _check_tensors(a=a, b=b, x=x)
    return _through(torch.ops.torchium.kronecker_matmul.default, a, b, x)


def kronecker_apply(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    recorded = None if _traced() else _recorded(a, b, x)
    if recorded is False:
        return dispatch.kronecker_apply(a, b, x)
    if recorded:
        return gradients.KroneckerApply.run(a, b, x)
    _check_tensors(a=a, b=b, x=x)
    return _through(torch.ops.torchium.kronecker_apply.default, a, b, x)


def kronecker_solve(a: Tensor, b: Tensor, x: Tensor, damping: float) -> Tensor:
    if not _traced() and _recorded(a, b, x) is False:
        return dispatch.kronecker_solve(a, b, x, damping)
    _refuse_gradient("kronecker_solve", a=a, b=b, x=x)
    _check_tensors(a=a, b=b, x=x)
    return _through(torch.ops.torchium.kronecker_solve.default, a, b, x, damping)


def nearest_kronecker(
    m: Tensor, shape_a: Sequence[int], shape_b: Sequence[int], return_error: bool = False
) -> tuple[Tensor, ...]:
    if not _traced() and _recorded(m) is False:
        kernel = dispatch.nearest_kronecker if return_error else dispatch.nearest_kronecker_alone
        return kernel(m, shape_a, shape_b)
    _refuse_gradient("nearest_kronecker", m=m)
    _check_tensors(m=m)
    three = _through(torch.ops.torchium.nearest_kronecker.default, m, shape_a, shape_b)
    return tuple(three) if return_error else tuple(three[:2])


# Declares torch.ops.torchium: after the functions, which the gradients call.
from torchium._functions import operators  # noqa: E402
