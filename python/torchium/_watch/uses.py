"""One call of a part of a model, and the interface of observers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from torchium._watch.layers import Part

__all__ = ["PARTS", "Pair", "Sink", "Use", "joined", "positions"]

PARTS = {"weight": 1, "bias": 2}  # as tch_grad_part counts them

# The input of a layer and the gradient of its output.
Pair = tuple[Tensor, Tensor]


class Use:
    """One call of a part in one pass through the model. For a layer: its input and later its output's gradient.
    `parameters` are those whose per-sample gradients are required, `batch` the number of samples."""

    __slots__ = ("__weakref__", "batch", "gradient", "input", "parameters", "part", "round", "sink", "version")

    def __init__(
        self, part: Part, sink: Sink, round: int, parameters: Mapping[str, nn.Parameter] | None = None, batch: int = 0
    ) -> None:
        self.part, self.sink, self.round = part, sink, round
        self.parameters, self.batch = parameters or {}, batch
        self.input: Tensor | None = None
        self.gradient: Tensor | None = None
        self.version: int | None = None  # of the input, which must not be modified

    def release(self) -> None:
        self.input = self.gradient = None


class Sink(Protocol):
    """An observer. Called in the backward pass, except for `made`."""

    def made(self, use: Use) -> None:
        """A part was called; its gradients may follow."""

    def arrived(self, use: Use) -> None:
        """The input and the output's gradient of a layer are complete."""

    def formed(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The gradients [B, ...] of a unit's parameter are complete."""


# --- merging uses -----------------------------------------------------------------------------------------------------


def joined(part: Part, pairs: list[Pair]) -> Pair:
    """Merges the uses of a linear, embedding, layer norm or RMS norm layer into one with all positions."""
    kept = len(part.module.normalized_shape) if part.kind in ("layer_norm", "rms_norm") else 1
    rank = 1 if part.kind == "embedding" else 1 + kept
    inputs, gradients = zip(*pairs, strict=True)
    return (
        torch.cat([positions(x, rank) for x in inputs], 1),
        torch.cat([positions(gradient, 1 + kept) for gradient in gradients], 1),
    )


def positions(x: Tensor, rank: int) -> Tensor:
    """[B, T] or [B, T, features] for any number of middle dimensions; `rank` is the result's, without the samples."""
    middle = 1
    for size in x.shape[1 : x.dim() + 1 - rank]:
        middle *= size
    return x.reshape(x.size(0), middle, *x.shape[x.dim() + 1 - rank :])
