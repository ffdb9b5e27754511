"""SGD with the names and defaults of torch.optim.SGD."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import TorchiumOptimizer
from .kernel import StepKernel
from .options import COMMON, Option, Options, number

__all__ = ["SGD"]


class SGD(TorchiumOptimizer):
    r"""Stochastic gradient descent with momentum, all parameters in one launch.

    .. math::
        g \leftarrow g + \lambda p, \quad
        b \leftarrow \mu b + (1 - \tau) g, \quad
        p \leftarrow p - \gamma b \quad (\text{with Nesterov: } p - \gamma (g + \mu b))

    Args:
        params: parameters, groups of them, or `model.named_parameters()`.
        lr: :math:`\gamma`, a number or a tensor of one element.
        momentum: :math:`\mu`; dampening: :math:`\tau`; weight_decay: :math:`\lambda`.
        nesterov: look ahead with the momentum.
        maximize: maximize the objective.
        nonfinite: what a step does with an infinity or a NaN in a gradient: 'skip' it (counted in `stats()`), 'raise',
            or 'ignore'.
        master_weights: keep a float32 copy of float16 and bfloat16 parameters.
        stochastic_rounding: round bfloat16 parameters without a copy at random; `seed` is that of the random numbers.
        state_dtype: 'float32', 'bfloat16' or 'int8' (by blocks) for the moments of what is updated element by element,
            rounded at random; small parameters keep float32.
        update_kernel: a custom kernel for what is done to one element: a
            :class:`torchium.optim.StepKernel` or its source; the built-in does it where that fails.
        process_group: the torch.distributed group whose ranks have the same parameters and gradients, as under
            DistributedDataParallel: they divide the work and the state. DTensors need none.
        fused: True lets a GradScaler leave unscaling and skipping to the step, which waits for nothing; Lightning does
            not clip gradients then. foreach, capturable: accepted; a step is fused and can be captured anyway.
            differentiable: only False.

    Example::

        optimizer = torchium.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss.backward()
        optimizer.step()
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
        update_kernel: StepKernel | str | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(params, locals())
