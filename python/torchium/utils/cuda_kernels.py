"""Compatibility API: matrix functions and memory for PyTorch tensors.

    from torchium.utils.cuda_kernels import CUDAMatrixOps
    root = CUDAMatrixOps.matrix_sqrt_inv_eigen(factor, power=-0.25, eps=1e-8)

Calls run on the device of their tensors, on PyTorch's current stream. Types are float32 and float64, and float16 and
bfloat16, which are computed in higher precision. A batch of matrices, `[..., n, n]`, has any number of leading
dimensions. Inputs are never modified and may be transposed, sliced, expanded. See torchium.linalg for details and other
arrays.

All methods are static.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchium import _C, linalg
from torchium._functions import ops
from torchium.grad_sample import functions

__all__ = [
    "CUDAGradientOps",
    "CUDAMatrixOps",
    "CUDAMemoryOps",
    "cuda_memory_info",
    "get_cuda_device_count",
    "get_optimal_device",
    "is_cuda_available",
]


def is_cuda_available() -> bool:
    """Whether Torchium's CUDA module is loaded and a GPU works. `python -m torchium` shows why not."""
    return get_cuda_device_count() > 0


def get_cuda_device_count() -> int:
    """The number of GPUs that the CUDA module can use."""
    return _C.device_count("cuda")


def get_optimal_device() -> torch.device:
    """The GPU with the most free memory, or the CPU if there is no GPU that both Torchium and PyTorch can use.

    Examples:
        >>> model.to(get_optimal_device())
    """
    usable = get_cuda_device_count() if torch.cuda.is_available() else 0
    if usable == 0:
        return torch.device("cpu")
    return torch.device("cuda", max(range(usable), key=lambda index: _C.memory_info(f"cuda:{index}")["free"]))


def cuda_memory_info(device: Any = None) -> dict[str, Any]:
    """The memory of one GPU, in bytes.

    Args:
        device: an index, a name or a torch.device; None for the current one.

    `total_memory` and `free_memory` are the GPU's. `allocated_memory` is that of PyTorch's and Torchium's tensors in
    this process, and `cached_memory` that of the pools of both, including allocated memory. Without a GPU all of them
    are 0, `available` is False, `device` is None and `reason` says why.

    Examples:
        >>> cuda_memory_info(0)["free_memory"]
    """
    if not is_cuda_available():
        zeros = dict.fromkeys(("total_memory", "allocated_memory", "cached_memory", "free_memory"), 0)
        return {"available": False, "device": None, "reason": _why_no_cuda(), **zeros}
    place = _gpu(device)
    pool = _C.memory_info(str(place))
    theirs = torch.cuda.is_available()
    return {
        "available": True,
        "device": str(place),
        "total_memory": pool["total"],
        "allocated_memory": pool["allocated"] + (torch.cuda.memory_allocated(place) if theirs else 0),
        "cached_memory": pool["reserved"] + (torch.cuda.memory_reserved(place) if theirs else 0),
        "free_memory": pool["free"],
    }


def _why_no_cuda() -> str:
    reasons = [backend["reason"] for backend in _C.backends() if backend["name"] == "cuda"]
    return reasons[0] if reasons and reasons[0] else "no GPU was found"


def _gpu(device: Any) -> torch.device:
    """A GPU by index, name or device, with its number."""
    if device is None:
        device = "cuda"
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"device must be an index, a name or a torch.device, got {type(device).__name__}")
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        raise ValueError(f"device is {str(place)!r}, expected a CUDA device")
    if place.index is None:
        place = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if place.index >= get_cuda_device_count():
        raise ValueError(f"device is {str(place)!r}, but there are {get_cuda_device_count()} CUDA devices")
    return place


class CUDAMatrixOps:
    """Compatibility names of functions of torchium.linalg."""

    @staticmethod
    def matrix_sqrt_inv_eigen(matrix: Tensor, power: float = -0.25, eps: float = 1e-8) -> Tensor:
        """`torchium.linalg.matrix_power` with other defaults.

        Args:
            matrix: symmetric, [..., n, n].
            power: any real number.
            eps: damping, 0 or more; shifted eigenvalues below eps are clamped to it.

        Examples:
            >>> CUDAMatrixOps.matrix_sqrt_inv_eigen(torch.eye(3) * 16, power=-0.25, eps=0.0)  # 0.5 on the diagonal
        """
        return linalg.matrix_power(matrix, power, eps)

    @staticmethod
    def batch_matrix_multiply(A: Tensor, B: Tensor) -> Tensor:
        """`torchium.linalg.matmul`.

        Args:
            A: [..., m, k].
            B: [..., k, n].
        """
        return linalg.matmul(A, B)

    @staticmethod
    def kronecker_product_approx(A: Tensor, B: Tensor) -> Tensor:
        """`torchium.linalg.kronecker_product`, which is exact.

        Args:
            A: [..., m, n].
            B: [..., p, q].
        """
        return linalg.kronecker_product(A, B)

    kronecker_matmul = staticmethod(linalg.kronecker_matmul)
    kronecker_solve = staticmethod(linalg.kronecker_solve)
    nearest_kronecker = staticmethod(linalg.nearest_kronecker)
    inverse_root = staticmethod(linalg.inverse_root)
    orthogonalize = staticmethod(linalg.orthogonalize)


class CUDAGradientOps:
    """Per-sample gradients from one forward and one backward pass.

    `loss_fn(outputs, targets)` is called once for the batch. A scalar is interpreted as the mean over the samples, or
    as their sum if `loss_fn.reduction` is "sum"; per-sample losses are summed. `inputs` is a tensor, or a tuple or
    dictionary of arguments. Gradients, modes and hooks of the model are unchanged. Unsupported layers raise an error,
    see `torchium.GradSampleModule`.
    """

    per_sample_gradients = staticmethod(functions.per_sample_gradients)
    per_sample_gradient_norms = staticmethod(functions.per_sample_gradient_norms)


_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


class CUDAMemoryOps:
    """Tensors from Torchium's memory pool, products in bounded memory, and pool statistics."""

    @staticmethod
    def efficient_tensor_creation(
        shape: int | Sequence[int],
        device: Any,
        dtype: torch.dtype,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """A zero-filled tensor from the memory pool.

        Args:
            shape: one size or several.
            device: a name or a torch.device.
            dtype: float64, float32, float16, bfloat16, int32 or int64.
            memory_format: contiguous, channels_last (rank 4) or channels_last_3d (rank 5).

        Examples:
            >>> CUDAMemoryOps.efficient_tensor_creation((8, 3, 32, 32), "cuda", torch.float16, torch.channels_last)
        """
        sizes = [shape] if isinstance(shape, int) else [operator.index(size) for size in shape]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
        if not isinstance(memory_format, torch.memory_format):
            raise TypeError(f"memory_format must be a torch.memory_format, got {type(memory_format).__name__}")
        rank = _CHANNELS_LAST.get(memory_format)
        if rank is not None and len(sizes) != rank:
            raise ValueError(f"memory_format is {memory_format}, which needs rank {rank}, and shape is {sizes}")
        memory = _C.Memory(sizes, str(dtype).removeprefix("torch."), str(torch.device(device)), rank is not None)
        return torch.from_dlpack(memory)

    @staticmethod
    def memory_efficient_matmul(
        A: Tensor, B: Tensor, memory_budget: int | None = None, out: Tensor | None = None, *, device: Any = None
    ) -> Tensor:
        """A B in bounded memory, in tiles, streamed if operands or result are in host memory.

        If a tensor is on a GPU, or with `device`, the product is computed there; tensors in host memory may be larger
        than GPU memory and are copied during computation. Otherwise it is computed on the CPU. The result is on A's
        device, or in `out`. There is a gradient, except with `out`.

        Args:
            A: [..., m, k]. Page-locked host memory (`tensor.pin_memory()`) is copied fastest.
            B: [..., k, n].
            memory_budget: limit of extra memory in bytes; None lets the library choose.
            out: where to write the product.
            device: the GPU to compute on.

        Examples:
            >>> C = CUDAMemoryOps.memory_efficient_matmul(A, B, memory_budget=2**30, device="cuda")
        """
        budget = 0 if memory_budget is None else memory_budget
        together = device is None and out is None and isinstance(A, Tensor) and isinstance(B, Tensor)
        together = together and A.device == B.device
        place = "" if together else _where_to_compute(device, A=A, B=B, out=out)
        return ops.matmul_chunked(A, B, budget, place) if out is None else ops.matmul_into(A, B, budget, place, out)

    @staticmethod
    def pool_stats() -> dict[str, dict[str, int]]:
        """Statistics of each device's pool: total, free, allocated, reserved and peak in bytes, requests, misses.

        Examples:
            >>> CUDAMemoryOps.pool_stats()["cpu"]["peak"]
        """
        return {device["device"]: _C.memory_info(device["device"]) for device in _C.devices()}

    @staticmethod
    def trim_pool() -> None:
        """Releases unused cached memory."""
        for device in _C.devices():
            _C.trim_pool(device["device"])


def _where_to_compute(device: Any, **tensors: Any) -> str:
    """The GPU of the tensors, or the requested one; "" for the CPU."""
    places = {}
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
        if t.is_cuda:
            places.setdefault(str(t.device), name)
    if device is not None:
        asked = torch.device(device)
        places.setdefault(str(_gpu(asked) if asked.type == "cuda" else asked), "device")
    if len(places) > 1:
        (first, one), (second, two) = list(places.items())[:2]
        raise ValueError(f"{one} is on {first} and {two} on {second}, expected one GPU")
    return next(iter(places), "")
