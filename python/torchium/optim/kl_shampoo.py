"""KL-Shampoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .arguments import AdamWArguments, KLShampooOptions, MemoryArguments, NumericsArguments
from .options import ADAMW, COMMON, Option, Options, drift, dtype_name, number, pair, period, same
from .second_order import SecondOrder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["KLShampoo"]


class KLShampoo(SecondOrder):
    """KL-Shampoo: Shampoo with the factors whose Kronecker product is closest to the covariance of the gradients in
    Kullback-Leibler divergence (arXiv 2509.03378). It needs no grafting and no second moment.

    For a matrix [m, n], with F the filtered gradient and X_L, X_R the inverse square roots in use:

        L <- beta2 L + (1 - beta2) / n (G X_R)(G X_R)',   X_L = (L + damping)^(-1/2)
        R <- beta2 R + (1 - beta2) / m (X_L G)'(X_L G),   X_R = (R + damping)^(-1/2)
        P  = X_L F X_R;  p <- (1 - lr weight_decay) p - lr P min(1, 1 / rms(P))

    Factors are updated at every step, roots adaptively or every `precondition_frequency` steps, staggered. Vectors and
    scalars get AdamW.

    Args:
        params: a model, of which embeddings and the output layer get AdamW, as `summary()` tells; or parameters, groups
            of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the filtered gradient (0: none) and of the factors.
        eps: absolute damping, where it exceeds `numerics.damping` times the largest eigenvalue of a factor.
        weight_decay: decoupled, or of `weight_decay_type`.
        precondition_frequency: steps between two refreshes of a root; None refreshes adaptively, at least every 100.
        max_preconditioner_dim: larger dimensions are split into blocks of at most this size.
        use_bias_correction: of both averages.
        options: also any key of a parameter group:

            - `weight_decay_type`: 'decoupled', 'l2', added to the gradient, or 'cautious', only where the step reduces
              |p|;
            - `merge_dims=True`: merge small neighboring dimensions, as those of a convolution;
            - `precondition_1d=False`: precondition vectors;
            - `refresh_drift`: as in `Shampoo`;
            - `stagger=True`: spread the refreshes over the steps of an interval.

    Examples:
        >>> optimizer = torchium.optim.KLShampoo(model, lr=3e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "kl_shampoo"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair),
        *same("use_bias_correction", "packed_factors", "root_method", "root_tolerance"),
        *same("eps", "relative_eps", convert=number),
        *same("root_dtype", convert=dtype_name),
        *same("max_preconditioner_dim", struct="shampoo", merge_dims=True, precondition_1d=False, stagger=True),
        *same("precondition_frequency", struct="shampoo", convert=period),
        *same("refresh_drift", struct="shampoo", convert=drift(1.5)),
        *ADAMW,
        *COMMON,
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 0.0,
        weight_decay: float = 0,
        *,
        precondition_frequency: int | None = None,
        max_preconditioner_dim: int = 1024,
        use_bias_correction: bool = True,
        adamw: AdamWArguments | Mapping[str, Any] | None = None,
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[KLShampooOptions],
    ) -> None:
        super().__init__(params, locals())
