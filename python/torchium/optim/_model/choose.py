"""Selects the matrices of a model that get AdamW in a second-order optimizer: those whose rows belong to single words,
classes or positions, so that the rows of a gradient are nearly independent. The rules use types and names of modules,
and shapes only for the head; the guide lists them in this order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from .._shared.flat import whole_shape

__all__ = ["reasons_of"]

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "embedding" in type(module).__name__.lower()


def _own_name(path: str) -> str:
    """The last part of a module's name that is not a number: a Sequential's name for its items."""
    parts = reversed(path.removesuffix("._fsdp_wrapped_module").split("."))
    return next((part for part in parts if not part.isdigit()), "")


def _owned(model: nn.Module) -> Iterator[tuple[nn.Parameter, str, str, nn.Module]]:
    """Every parameter with its name in its module, the module's name, and the module; shared ones once per module."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield parameter, name, path, module


def _heads(model: nn.Module) -> set[nn.Parameter]:
    """The weights of output layers: Linears called lm_head, or else the last Linear, unless it is the only matrix."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    heads = {module.weight for path, module in layers if _own_name(path) == "lm_head"}
    matrices = [p for p in model.parameters() if sum(size > 1 for size in whole_shape(p)) > 1]
    return heads or ({layers[-1][1].weight} if layers and len(matrices) > 1 else set())


def reasons_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """The parameters with AdamW, and the reason. Vectors and scalars, which always get it, are not included."""
    heads, reasons = _heads(model), {}
    for parameter, name, _, module in _owned(model):
        if sum(size > 1 for size in whole_shape(parameter)) < 2:
            continue
        if _is_embedding(module):
            reasons[parameter] = "embedding"
        elif "embed" in name or "token" in name:
            reasons.setdefault(parameter, "token or position")
        elif isinstance(module, _NORMS):
            reasons.setdefault(parameter, "norm")
        elif parameter in heads:
            reasons.setdefault(parameter, "output layer")
    tied = {parameter for parameter, _, _, module in _owned(model) if not _is_embedding(module)}
    return {p: "embedding and output layer" if why == "embedding" and p in tied else why for p, why in reasons.items()}
