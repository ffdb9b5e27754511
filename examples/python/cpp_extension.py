"""An update of Shampoo's factor, F = beta F + (1 - beta) G Gᵀ, written three times: as a C++ extension that calls the C
library on torch tensors (factor_update.cpp), as a custom kernel (factor_update.cu), and in plain PyTorch.

    python cpp_extension.py                       # about 15 seconds at first, for the compiler; then it is kept
    python cpp_extension.py --rows 1024 --device cuda

The extension wants a C++ compiler and ninja, the kernel a C++ compiler, or on a GPU NVRTC, which comes with PyTorch.
Where one cannot be built the program says why and takes PyTorch in its place.
"""

import argparse
import time
import warnings
from pathlib import Path

import torch
import torchium
from torch import Tensor

HERE = Path(__file__).resolve().parent


def load_extension():
    """The operator of factor_update.cpp, compiled when something has changed since the last time."""
    from torch.utils import cpp_extension  # needs setuptools, which not every installation has

    folders = torchium.library_paths()
    cpp_extension.load(
        name="factor_update",
        sources=[str(HERE / "factor_update.cpp")],
        extra_include_paths=torchium.include_paths(),
        extra_ldflags=[*(f"-L{f} -Wl,-rpath,{f}" for f in folders), "-ltorchium"],
        is_python_module=False,
    )
    return torch.ops.torchium_example.factor_update


class Extension:
    def __init__(self):
        self.operator = load_extension()

    def __call__(self, factor: Tensor, gradient: Tensor, beta: float) -> None:
        stream = torch.cuda.current_stream(factor.device).cuda_stream if factor.is_cuda else 0
        self.operator(factor, gradient, beta, stream)


class Kernel:
    def __init__(self):
        self.kernel = torchium.kernel(HERE / "factor_update.cu")

    def __call__(self, factor: Tensor, gradient: Tensor, beta: float) -> None:
        rows, cols = gradient.shape
        grid, block = self.kernel.suggest(rows * rows, factor.device)
        self.kernel(grid, block, (gradient.contiguous(), factor, rows, cols, beta))


def plain(factor: Tensor, gradient: Tensor, beta: float) -> None:
    factor.lerp_(gradient @ gradient.mT, 1 - beta)


def with_fallback(make, device: str):
    """What `make` gives, tried once on a small factor; PyTorch's own lines, with a warning, where that fails."""
    try:
        update = make()
        update(torch.eye(2, device=device), torch.ones(2, 3, device=device), 0.9)
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(f"{make.__name__} cannot be used, PyTorch stands in: {error}", RuntimeWarning, stacklevel=2)
        return plain
    return update


def milliseconds(update, factor: Tensor, gradient: Tensor, repeats: int) -> float:
    def wait():
        if factor.is_cuda:
            torch.cuda.synchronize(factor.device)

    update(factor, gradient, 0.95)
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        update(factor, gradient, 0.95)
    wait()
    return 1000 * (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torchium.is_available("cuda") else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    gradient = torch.randn(args.rows, args.cols, device=args.device)
    start = torch.eye(args.rows, device=args.device)
    exact = start.double().lerp(gradient.double() @ gradient.double().mT, 0.05)
    updates = {
        "C++ extension": with_fallback(Extension, args.device),
        "torchium.kernel": with_fallback(Kernel, args.device),
        "PyTorch": plain,
    }
    for name, update in updates.items():
        factor = start.clone()
        update(factor, gradient, 0.95)
        error = ((factor - exact).norm() / exact.norm()).item()
        symmetric = "symmetric" if torch.equal(factor, factor.mT) else "not symmetric"
        took = milliseconds(update, factor, gradient, args.repeats)
        stand_in = " (PyTorch in its place)" if update is plain and name != "PyTorch" else ""
        print(f"{name:<16} error {error:.1e}, {symmetric}, {took:.3f} ms{stand_in}")


if __name__ == "__main__":
    main()
