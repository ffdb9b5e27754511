"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import TorchiumOptimizer
from .options import COMMON, Option, Options, pair

__all__ = ["Lion"]


class Lion(TorchiumOptimizer):
    """Lion: every element moves by the learning rate, in the direction of a sign; all parameters in one launch.

        c  = beta1 m + (1 - beta1) g
        p <- (1 - lr weight_decay) p - lr sign(c)
        m <- beta2 m + (1 - beta2) g

    Its steps are longer than those of AdamW at the same lr: take a third to a tenth of AdamW's, and a weight_decay as
    many times larger. The state is one copy of the parameters, half of AdamW's.

    Args:
        params: parameters, groups of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: beta1 and beta2, of the gradient's average in the direction and from step to step.
        weight_decay: decoupled weight decay.

    The other arguments are those of all optimizers: see `TorchiumOptimizer`.

    Examples:
        >>> optimizer = torchium.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "lion"
    _options: ClassVar = Options(Option("betas", ("beta1", "beta2"), pair), *COMMON)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        nonfinite: str = "skip",
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: str | torch.dtype = "float32",
        seed: int = 0,
        memory_budget: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(params, locals())
