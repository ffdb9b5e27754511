"""SGD with the names and defaults of torch.optim.SGD."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import TorchiumOptimizer
from .options import COMMON, Option, Options, number

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
        maximize: maximize the objective.
        nonfinite: what a step does with an infinity or a NaN in a gradient: 'skip' it (counted in `stats()`), 'raise',
            or 'ignore'.
        master_weights: keep a float32 copy of float16 and bfloat16 parameters.
        stochastic_rounding: round bfloat16 parameters without a copy at random.
        state_dtype: 'float32', 'bfloat16' or 'int8' (by blocks) for the moments of what is updated element by element,
            rounded stochastically; small parameters keep float32.
        seed: of the random numbers that parameters and moments are rounded with.
        memory_budget: bytes that a step may take beyond the state; None for an eighth of it, and at least 2 GiB and a
            32nd of the GPU's memory.
        process_group: the torch.distributed group whose ranks have the same parameters and gradients, as under
            DistributedDataParallel: they divide the work and the state. DTensors need none.
        fused: True lets a GradScaler leave unscaling and skipping to the step, which waits for nothing; Lightning does
            not clip gradients then.
        foreach: accepted; a step takes all parameters at once anyway.
        capturable: accepted; a step can be captured in a CUDA graph anyway.
        differentiable: only False.

    Examples:
        >>> optimizer = torchium.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "sgd"
    _options: ClassVar = Options(
        Option("momentum", "momentum", number),
        Option("dampening", "dampening", number),
        Option("nesterov", "nesterov"),
        *COMMON,
    )

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
