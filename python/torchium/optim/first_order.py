"""SGD, AdamW and Lion: each updates all parameters elementwise in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .arguments import Common, MemoryArguments, NumericsArguments
from .base import TorchiumOptimizer
from .options import COMMON, Option, Options, number, pair, same

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SGD", "AdamW", "Lion"]


class SGD(TorchiumOptimizer):
    """Stochastic gradient descent with momentum, all parameters in one launch.

        g <- g + weight_decay p
        b <- momentum b + (1 - dampening) g
        p <- p - lr b                          (with nesterov: p - lr (g + momentum b))

    Args:
        params: a model, parameters, groups of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        momentum: decay rate of the buffer b; 0 allocates no buffer.
        dampening: share of the gradient not added to the buffer.
        weight_decay: L2 regularization; `weight_decay_type` may also be 'decoupled' or 'cautious'.
        nesterov: Nesterov momentum.

    Examples:
        >>> optimizer = torchium.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "sgd"
    _options: ClassVar = Options(
        *same("momentum", "dampening", convert=number), *same("nesterov"), *COMMON, *same(weight_decay_type="l2")
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
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[Common],
    ) -> None:
        super().__init__(params, locals())


class AdamW(TorchiumOptimizer):
    """Adam with decoupled weight decay, all parameters in one launch.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- (1 - lr weight_decay) p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params: a model, parameters, groups of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: beta1 and beta2, of the averages of the gradient and of its square.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        amsgrad: divide by the largest v so far.

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
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[Common],
    ) -> None:
        super().__init__(params, locals())


class Lion(TorchiumOptimizer):
    """Lion: sign updates with momentum; all parameters in one launch.

        c  = beta1 m + (1 - beta1) g
        p <- (1 - lr weight_decay) p - lr sign(c)
        m <- beta2 m + (1 - beta2) g

    Use a third to a tenth of AdamW's lr, and a weight_decay larger by the same factor. The state is one copy of the
    parameters, half of AdamW's.

    Args:
        params: a model, parameters, groups of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: beta1 of the direction, beta2 of the average m.
        weight_decay: decoupled weight decay.

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
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[Common],
    ) -> None:
        super().__init__(params, locals())
