"""Modules for PyTorch programs. Importing this package imports PyTorch."""

from __future__ import annotations

from torchium.utils import cuda_kernels

__all__ = ["cuda_kernels"]
