"""Optimizers for PyTorch: Shampoo, KL-Shampoo, SOAP, Muon, NorMuon, AdamW, Lion and SGD, drop-in replacements for
torch.optim.

    optimizer = torchium.optim.Shampoo(model, lr=1e-3)

The second-order method updates matrices; AdamW, in the same optimizer, updates embeddings, the output layer and all
other parameters. KFAC and NaturalGradient observe the layers of a model; KFACPreconditioner preconditions gradients for
any optimizer. MatrixOptimizer is a base class for optimizers written in Python.

    optimizer = torchium.optim.KFAC(model, lr=0.01)
"""

from torchium.factory import create_optimizer

from ._model.qk_clip import qk_clip_
from .arguments import AdamWArguments, MemoryArguments, NumericsArguments
from .base import TorchiumOptimizer
from .first_order import SGD, AdamW, Lion
from .kfac import KFAC
from .kl_shampoo import KLShampoo
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
    "KLShampoo",
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
    "qk_clip_",
]
