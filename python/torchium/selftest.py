"""Quick computations with known results on every usable device, for `python -m torchium`. Each returns a sentence with
a figure, or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

_SIZE = 48
# The error of a float32 root of a matrix with condition number 100 is about 1e-5.
_LARGEST_RESIDUAL = 1e-3


def run(*, numpy: bool, torch: bool) -> list[Result]:
    """The tests that the installed packages allow. `passed` is None for one that could not run."""
    from torchium import _C

    results = []
    if numpy and _C.device_count("cpu") > 0:
        results.append(_attempt("cpu", "inverse root of a NumPy matrix", _root_with_numpy))
    if torch:
        for device in _torch_devices():
            results.append(_attempt(device, "inverse root of a PyTorch matrix", lambda d=device: _root_with_torch(d)))
            results.append(_attempt(device, "a step of Shampoo", lambda d=device: _step(d)))
    if not results:
        results.append(_result("cpu", "inverse root", None, "needs NumPy or PyTorch, and a device"))
    return results


def _torch_devices() -> list[str]:
    """The devices that the library and PyTorch can both use."""
    import torch

    from torchium import _C

    count = min(_C.device_count("cuda"), torch.cuda.device_count()) if torch.cuda.is_available() else 0
    cpu = ["cpu"] if _C.device_count("cpu") > 0 else []
    return cpu + [f"cuda:{i}" for i in range(count)]


def _result(device: str, name: str, passed: bool | None, result: str) -> Result:
    return {"device": device, "name": name, "passed": passed, "result": result}


def _attempt(device: str, name: str, test: Callable[[], str]) -> Result:
    try:
        return _result(device, name, True, test())
    except Exception as error:  # any failure is a result
        return _result(device, name, False, f"{type(error).__name__}: {error}")


def _judge(residual: float) -> str:
    if not residual < _LARGEST_RESIDUAL:
        raise RuntimeError(f"the residual is {residual:.1e}, expected below {_LARGEST_RESIDUAL:.0e}")
    return f"residual {residual:.1e}"


def _root_with_numpy() -> str:
    """X = A^(-1/4): the largest entry of X^4 A - I, in float64."""
    import numpy as np

    from torchium import linalg

    generator = np.random.default_rng(1)
    basis, _ = np.linalg.qr(generator.standard_normal((_SIZE, _SIZE)))
    a = ((basis * np.geomspace(0.01, 1.0, _SIZE)) @ basis.T).astype(np.float32)
    a = (a + a.T) / 2
    x = linalg.inverse_root(a, 4).astype(np.float64)
    return _judge(float(np.abs(np.linalg.matrix_power(x, 4) @ a - np.eye(_SIZE)).max()))


def _root_with_torch(device: str) -> str:
    import torch

    from torchium import linalg

    generator = torch.Generator().manual_seed(1)
    basis, _ = torch.linalg.qr(torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float64))
    a = (basis * torch.logspace(-2, 0, _SIZE, dtype=torch.float64)) @ basis.T
    a = ((a + a.T) / 2).float()
    x = linalg.inverse_root(a.to(device), 4).double().cpu()
    residual = torch.linalg.matrix_power(x, 4) @ a.double() - torch.eye(_SIZE, dtype=torch.float64)
    return _judge(float(residual.abs().max()))


def _step(device: str) -> str:
    """Least squares: a short first step lowers the loss for any method."""
    import torch

    from torchium.optim import Shampoo

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 8, generator=generator).to(device)
    targets = torch.randn(32, 4, generator=generator).to(device)
    weight = torch.zeros(8, 4, device=device, requires_grad=True)
    optimizer = Shampoo([weight], lr=0.01)

    def loss() -> torch.Tensor:
        return (inputs @ weight - targets).square().mean()

    before = loss()
    before.backward()
    optimizer.step()
    losses = before.item(), loss().item()
    if not losses[1] < losses[0]:
        raise RuntimeError(f"the loss went from {losses[0]:.4f} to {losses[1]:.4f}")
    return f"loss {losses[0]:.4f}, then {losses[1]:.4f}"
