"""The names of torchium.optim with `get_available_optimizers`, for programs written for a module of this name."""

from torchium.factory import list_optimizers as get_available_optimizers
from torchium.optim import *  # noqa: F403
from torchium.optim import __all__ as _names

__all__ = [*_names, "get_available_optimizers"]
