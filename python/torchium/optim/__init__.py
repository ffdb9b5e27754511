"""Optimizers for PyTorch: Shampoo, SOAP, Muon, AdamW and SGD, drop-in for those of torch.optim.

    optimizer = torchium.optim.Shampoo(model.parameters(), lr=0.03)

Matrices get the second-order method, everything else AdamW in the same optimizer.
"""

from .adamw import AdamW
from .base import TorchiumOptimizer
from .muon import Muon
from .sgd import SGD
from .shampoo import CUDAShampoo, Shampoo
from .soap import SOAP

__all__ = ["SGD", "SOAP", "AdamW", "CUDAShampoo", "Muon", "Shampoo", "TorchiumOptimizer"]
