"""AdamW with the names and defaults of torch.optim.AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import TorchiumOptimizer
from .options import COMMON, Option, Options, number, pair, same

__all__ = ["AdamW"]


class AdamW(TorchiumOptimizer):
    """Adam with decoupled weight decay, all parameters in one launch.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- (1 - lr weight_decay) p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params: parameters, groups of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: beta1 and beta2, of the averages of the gradient and of its square.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        amsgrad: divide by the largest v so far.

    The other arguments are those of all optimizers: see `TorchiumOptimizer`.

    Examples:
        >>> optimizer = torchium.optim.AdamW(model.parameters(), lr=3e-4)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "adamw"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair), *same("eps", convert=number), *same("amsgrad"), *COMMON
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
