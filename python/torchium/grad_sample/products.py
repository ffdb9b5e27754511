"""The library's functions on one use of a layer, and on several uses of one weight.

The gradient of a weight used twice is a sum, whose norm does not follow from the norms. Two uses of a linear layer or
of an embedding are one use with more positions; an embedding and a linear layer with a tied weight have a function;
otherwise the gradients of that parameter are materialized.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchium import _C
from torchium._watch.uses import PARTS, Use, joined, positions


def parts_of(use: Use) -> int:
    return sum(PARTS[name] for name in use.parameters)


def result_dtype(use: Use) -> torch.dtype:
    """The accumulation type: float32 for half precision."""
    dtype = use.gradient.dtype
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def samples(use: Use, scale: float, names: tuple[str, ...] = ("weight", "bias")) -> dict[nn.Parameter, Tensor]:
    """The gradients [B, ...] of the layer's parameters, or of some of them."""
    wanted = {name: p for name, p in use.parameters.items() if name in names}
    made = {
        name: torch.empty((use.batch, *p.shape), dtype=result_dtype(use), device=use.gradient.device)
        for name, p in wanted.items()
    }
    _C.grad_samples(use.part.description, use.input, use.gradient, made.get("weight"), made.get("bias"), scale)
    return {p: made[name] for name, p in wanted.items()}


def add_norms(use: Use, parts: int, scale: float, norms: Tensor) -> None:
    _C.grad_norms(use.part.description, use.input, use.gradient, parts, True, norms, scale)


def add_formed_norms(gradients: Tensor, scale: float, norms: Tensor) -> None:
    """Norms of materialized gradients."""
    flat = gradients.flatten(1) if gradients.dim() > 1 else gradients.unsqueeze(1)
    norms.add_(torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).mul_(scale).square_())


# --- several uses -----------------------------------------------------------------------------------------------------


def as_one(uses: list[Use]) -> Use:
    """Merges uses of linear layers, or of embeddings, with one weight into a use with the positions of all."""
    if len(uses) == 1:
        return uses[0]
    first = uses[0]
    one = Use(first.part, first.sink, first.round, first.parameters, first.batch)
    one.input, one.gradient = joined(first.part, [(use.input, use.gradient) for use in uses])
    return one


def add_tied_norms(embedding: Use, linear: Use, scale: float, norms: Tensor) -> None:
    """2 <gradient in the embedding, gradient in the linear layer> of each sample. The linear layer's gradients, over
    the whole vocabulary, are by far the largest tensor: the others are converted to their type."""
    _C.grad_tied_norms(
        embedding.part.description,
        positions(embedding.input, 1),
        positions(embedding.gradient, 2).to(linear.gradient.dtype),
        positions(linear.input, 2),
        positions(linear.gradient, 2),
        norms,
        scale,
    )
