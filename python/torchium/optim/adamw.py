"""AdamW with the names and defaults of torch.optim.AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import TorchiumOptimizer
from .options import COMMON, Option, Options, number, pair

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
        >>> optimizer = torchium.optim.AdamW(model.parameters(), lr=3e-4)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "adamw"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair),
        Option("eps", "eps", number),
        Option("amsgrad", "amsgrad"),
        *COMMON,
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
