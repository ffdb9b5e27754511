"""SGD with the names and defaults of torch.optim.SGD."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import TorchiumOptimizer
from .options import COMMON, Options, number, same

__all__ = ["SGD"]


class SGD(TorchiumOptimizer):
    """Stochastic gradient descent with momentum, all parameters in one launch.

        g <- g + weight_decay p
        b <- momentum b + (1 - dampening) g
        p <- p - lr b                          (with nesterov: p - lr (g + momentum b))

    Args:
        params: parameters, groups of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        momentum: share of the buffer b that stays from step to step; 0 keeps no buffer.
        dampening: share of the gradient that does not enter the buffer.
        weight_decay: added to the gradient, times the parameter.
        nesterov: look ahead with the momentum.

    The other arguments are those of all optimizers: see `TorchiumOptimizer`.

    Examples:
        >>> optimizer = torchium.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "sgd"
    _options: ClassVar = Options(*same("momentum", "dampening", convert=number), *same("nesterov"), *COMMON)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
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
