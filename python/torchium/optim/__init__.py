"""Optimizers for PyTorch: Shampoo, SOAP, Muon, NorMuon, AdamW, Lion and SGD, drop-in for those of torch.optim.

    optimizer = torchium.optim.Shampoo(model, lr=1e-3)

Matrices get the second-order method; embeddings, the output layer and everything else get AdamW in the same optimizer.
KFAC and NaturalGradient look at a model's layers and are made from the model; KFACPreconditioner turns the gradients
for any optimizer. MatrixOptimizer is a base class for other methods, written in Python.

    optimizer = torchium.optim.KFAC(model, lr=0.01)
"""

from torchium.factory import create_optimizer

from .arguments import AdamWArguments, MemoryArguments, NumericsArguments
from .base import TorchiumOptimizer
from .first_order import SGD, AdamW, Lion
from .kfac import KFAC
from .matrix import MatrixOptimizer
from .muon import Muon
from .natural import NaturalGradient
from .normuon import NorMuon
from .preconditioner import KFACPreconditioner
from .shampoo import CUDAShampoo, Shampoo
from .soap import SOAP

__all__ = [
    "KFAC",
    "SGD",
    "SOAP",
    "AdamW",
    "AdamWArguments",
    "CUDAShampoo",
    "KFACPreconditioner",
    "Lion",
    "MatrixOptimizer",
    "MemoryArguments",
    "Muon",
    "NaturalGradient",
    "NorMuon",
    "NumericsArguments",
    "Shampoo",
    "TorchiumOptimizer",
    "create_optimizer",
]
