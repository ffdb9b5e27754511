"""The matrix functions for PyTorch tensors, as operators torch.ops.torchium.* with shape functions and gradients.

In eager mode a function calls the C library directly, or through a torch.autograd.Function if a gradient is required.
Under torch.compile, export, vmap, a profiler, a dispatch mode or with a tensor subclass, it calls its operator, whose
kernel does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchium import _C
from torchium._functions import dispatch, gradients

# --- eager or operator ------------------------------------------------------------------------------------------------


# Whether something besides the kernels observes calls: there is no public way to ask. Without these private names every
# call uses its operator, which is correct and slower. In eager mode, `_recorded` says whether autograd records the
# call; otherwise it is None.
try:
    _transforms = torch._C._functorch.peek_interpreter_stack
    _C.set_listeners(
        types=(Tensor, torch.nn.Parameter),
        calls=(
            (torch._C._len_torch_dispatch_stack, 0),
            (_transforms, None),
            (torch._C._get_tracing_state, None),
            (torch.autograd._profiler_enabled, False),  # a profiler shows operators by name
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
    """A tensor whose storage was shrunk, or a list that contains one."""
    if isinstance(value, (list, tuple)):
        return any(is_hollow(item) for item in value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    try:
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        needed = (value.storage_offset() + last + 1) * value.element_size()
        return value.numel() > 0 and value.untyped_storage().nbytes() < needed
    except (RuntimeError, NotImplementedError):  # it has no storage
        return False


def _check_printable(operator: Any, args: Sequence[Any]) -> None:
    """If an argument does not match its schema, PyTorch prints it, which would read freed memory."""
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if str(argument.type) != "Tensor" and is_hollow(value):
            raise TypeError(f"{argument.name} must be a {argument.type}, got a tensor without storage")


def _through(operator: Any, *args: Any) -> Any:
    """Calls the operator, which is visible to observers."""
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


# --- the functions of torchium.linalg ---------------------------------------------------------------------------------


def _function(name: str, tensors: str, gradient: Any = None) -> Callable[..., Any]:
    """Calls the function of that name in `dispatch`, whose first arguments are these tensors. Without a gradient it
    rejects tensors that require one."""
    kernel, count = getattr(dispatch, name), len(tensors)

    def function(*args: Any) -> Any:
        recorded = None if _traced() else _recorded(*args[:count])
        if recorded is False:
            return kernel(*args)
        if recorded and gradient is not None:
            return gradient.run(*args)
        given = dict(zip(tensors, args, strict=False))
        if gradient is None:
            _refuse_gradient(name, **given)
        _check_tensors(**given)
        return _through(getattr(torch.ops.torchium, name).default, *args)

    return function


matrix_power = _function("matrix_power", "a", gradients.MatrixPower)
matmul = _function("matmul", "ab", gradients.Matmul)
matmul_chunked = _function("matmul_chunked", "ab", gradients.MatmulChunked)
gram = _function("gram", "a", gradients.Gram)
symmetric_product = _function("symmetric_product", "ab", gradients.SymmetricProduct)
kronecker_product = _function("kronecker_product", "ab", gradients.KroneckerProduct)
kronecker_matmul = _function("kronecker_matmul", "abx", gradients.KroneckerMatmul)
kronecker_apply = _function("kronecker_apply", "abx", gradients.KroneckerApply)
eigh = _function("eigh", "a")
orthogonalize = _function("orthogonalize", "a")
kronecker_solve = _function("kronecker_solve", "abx")


def matrix_power_backward(a: Tensor, power: float, eps: float, grad: Tensor) -> Tensor:
    if not _traced() and _recorded(a, grad) is False:
        return dispatch.matrix_power_backward(a, power, eps, grad)
    return _through(torch.ops.torchium.matrix_power_backward.default, a, power, eps, grad)


def inverse_root(
    a: Tensor, root: int, eps: float, relative_eps: float, method: str, tolerance: float, return_residual: bool
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


def matmul_into(a: Tensor, b: Tensor, memory_budget: int, device: str, out: Tensor) -> Tensor:
    _refuse_gradient("a product with out", a=a, b=b, out=out)
    if not _traced() and _recorded(a, b, out) is not None:
        dispatch.matmul_into(a, b, memory_budget, device, out)
    else:
        _check_tensors(a=a, b=b, out=out)
        torch.ops.torchium.matmul_into.default(a, b, memory_budget, device, out)
    return out


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


# Declares torch.ops.torchium, after the functions, which the gradients call.
from torchium._functions import operators  # noqa: E402
