"""Embedding bags, by the library's rule for embeddings: a bag is a sample, its tokens are positions, each with its
share of the gradient of the bag's row.

Bags given by offsets are padded to the length of the longest, which requires the only synchronization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchium._watch.uses import Use
from torchium.grad_sample.forwards import LayerForward, spread

NO_TOKEN = -1  # outside of every table, so without a gradient


class BagForward(LayerForward):
    def __call__(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Any:
        parameters = self.capture.trainable(self.part)
        if not parameters:
            return self.original(input, offsets, per_sample_weights)
        capture = self.capture
        output = self.run(parameters, input, offsets, per_sample_weights)
        count = output.size(0)
        use = Use(self.part, capture.sink, capture.round, parameters, capture.check_batch(self.part, count))
        with torch.no_grad():
            flat = flat_bags(self.module, input, offsets, per_sample_weights)
            bags = LargestOfBags(self.module, flat) if self.module.mode == "max" else SumOfBags(self.module, flat)
        use.input = bags.tokens
        if use.batch != count:  # one bag for all samples
            output, use.input = spread(output, 0, use.batch), spread(bags.tokens, 0, use.batch)
        use.version = use.input._version
        capture.expect(use, output, lambda gradient: capture.arrive(use, bags.shares(gradient.detach())))
        return output


class FlatBags(NamedTuple):
    """All tokens concatenated, and the beginning and end of each bag."""

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    weights: Tensor | None
    length: int | None  # of every bag, or None


def flat_bags(module: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> FlatBags:
    """From arguments that PyTorch has validated."""
    if input.is_nested:
        ends = input.offsets()
        weights = None if weights is None else weights.values().reshape(-1)
        return FlatBags(input.values().reshape(-1), ends[:-1], ends[1:], weights, None)
    if input.dim() == 2:
        count, length = input.shape
        starts = torch.arange(count, device=input.device) * length
        return FlatBags(
            input.reshape(-1), starts, starts + length, None if weights is None else weights.reshape(-1), length
        )
    if module.include_last_offset:
        return FlatBags(input, offsets[:-1], offsets[1:], weights, None)
    return FlatBags(input, offsets, nn.functional.pad(offsets[1:], (0, 1), value=input.numel()), weights, None)


def counted(module: nn.EmbeddingBag, flat: FlatBags) -> Tensor:
    """[B, 1]: the number of tokens of each bag, without padding."""
    if module.padding_idx is None:
        return (flat.ends - flat.starts).unsqueeze(1)
    before = nn.functional.pad((flat.tokens != module.padding_idx).cumsum(0), (1, 0))
    return (before[flat.ends.long()] - before[flat.starts.long()]).unsqueeze(1)


class SumOfBags:
    """Sum or mean: every token of a bag has the bag's gradient times its weight."""

    def __init__(self, module: nn.EmbeddingBag, flat: FlatBags) -> None:
        self.counts = counted(module, flat).clamp(min=1) if module.mode == "mean" else None
        lengths = flat.ends - flat.starts
        longest = flat.length
        if longest is None:
            longest = int(lengths.max()) if lengths.numel() else 0
        steps = torch.arange(longest, device=flat.tokens.device)
        outside = steps >= lengths.unsqueeze(1)
        places = (flat.starts.unsqueeze(1) + steps).masked_fill(outside, 0)
        self.tokens = flat.tokens[places].masked_fill(outside, NO_TOKEN)
        self.weights = None if flat.weights is None else flat.weights.detach()[places].masked_fill(outside, 0.0)

    def shares(self, gradient: Tensor) -> Tensor:
        """[B, L, d]: an expanded row if all tokens of a bag have equal shares."""
        if self.counts is not None:
            gradient = gradient / self.counts
        gradient = gradient.unsqueeze(1)
        if self.weights is not None:
            return gradient * self.weights.unsqueeze(2).to(gradient.dtype)
        return gradient.expand(-1, self.tokens.size(1), -1)


class LargestOfBags:
    """A position for each column, with the token of the maximum."""

    def __init__(self, module: nn.EmbeddingBag, flat: FlatBags) -> None:
        count, width = flat.starts.numel(), module.embedding_dim
        self.tokens = torch.full((count, width), NO_TOKEN, device=flat.tokens.device)
        if count > 0 and flat.tokens.numel() > 0:
            # PyTorch's forward decides, also in case of ties.
            bounds = torch.cat([flat.starts, flat.ends[-1:]]).to(flat.tokens.dtype)
            found = torch.embedding_bag(
                module.weight.detach(), flat.tokens, bounds, False, 2, False, None, True, module.padding_idx
            )[3]
            self.tokens = found[:count].long().masked_fill(counted(module, flat) == 0, NO_TOKEN)

    def shares(self, gradient: Tensor) -> Tensor:
        """[B, d, d]: each position gets its column of the gradient."""
        return torch.diag_embed(gradient)
