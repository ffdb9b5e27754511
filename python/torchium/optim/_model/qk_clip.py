"""QK-clip, from MuonClip."""

from __future__ import annotations

import torch

from torchium._messages import shown

from .._shared.sharding import is_sharded, local_tensor, shards_here

__all__ = ["qk_clip_"]


def _scale_rows(weight: torch.Tensor, rows: torch.Tensor) -> None:
    """Of a DTensor the rows that this rank has, without communication."""
    shards = shards_here(weight) if is_sharded(weight) else [((0,) * weight.ndim, (0,) * weight.ndim, weight.shape)]
    local = local_tensor(weight)
    for start, offset, size in shards:
        part = local[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))]
        part.mul_(rows[start[0] : start[0] + size[0]].reshape(-1, *(1,) * (weight.ndim - 1)))


@torch.no_grad()
def qk_clip_(
    q_weight: torch.Tensor, k_weight: torch.Tensor, max_logits: torch.Tensor, threshold: float = 100.0
) -> None:
    """QK-clip of MuonClip, after a step: scales the attention logits of each head whose largest logit exceeds a
    threshold by g = threshold / that logit, without synchronization. The head's rows of both weights are multiplied
    by sqrt(g); where heads share keys (grouped-query attention), keys stay, and the rows of the queries get g.

    Args:
        q_weight: weight of the queries, [heads * head_dim, ...], head after head; also a slice of a joint weight, a
            bias, or a DTensor. Changed in place.
        k_weight: the same of the keys, with as many heads or a divisor of them.
        max_logits: [heads], the largest logit of each head in the latest batch, or an upper bound of it; if ranks see
            different data, the maximum over them. Heads with an infinity or a NaN are left unchanged.
        threshold: the largest logit allowed, above 0.

    Examples:
        >>> optimizer.step()
        >>> torchium.optim.qk_clip_(attention.q.weight, attention.k.weight, attention.max_logits)
    """
    for name, tensor in (("q_weight", q_weight), ("k_weight", k_weight), ("max_logits", max_logits)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or not tensor.is_floating_point():
            raise TypeError(f"qk_clip_: {name} is {shown(tensor)}, expected a tensor of floating-point numbers")
    heads = max_logits.numel()
    size = q_weight.shape[0] // max(heads, 1)
    if not isinstance(threshold, (int, float)) or not threshold > 0:
        raise ValueError(f"qk_clip_: threshold is {shown(threshold)}, expected a number above 0")
    if heads == 0 or q_weight.shape[0] != heads * size or size == 0:
        raise ValueError(f"qk_clip_: q_weight has {q_weight.shape[0]} rows, expected a multiple of {heads}, the heads")
    if k_weight.shape[0] == 0 or k_weight.shape[0] % size or heads % (k_weight.shape[0] // size):
        expected = f"{size} for each of {heads} heads or of a divisor of them"
        raise ValueError(f"qk_clip_: k_weight has {k_weight.shape[0]} rows, expected {expected}")
    largest = max_logits.detach().flatten().to(torch.promote_types(max_logits.dtype, torch.float32))
    factor = torch.where(largest.isfinite(), threshold / largest.clamp(min=threshold), 1.0)
    if k_weight.shape[0] == q_weight.shape[0]:
        factor = factor.sqrt()
        _scale_rows(k_weight, factor.repeat_interleave(size))
    _scale_rows(q_weight, factor.repeat_interleave(size))
