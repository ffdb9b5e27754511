"""Shampoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .arguments import AdamWArguments, MemoryArguments, NumericsArguments, ShampooOptions
from .options import ADAMW, COMMON, Option, Options, drift, dtype_name, number, or_else, pair, period, same
from .second_order import SecondOrder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CUDAShampoo", "Shampoo"]


class Shampoo(SecondOrder):
    """Shampoo: preconditions each dimension of a gradient with an inverse root of its second moment.

    For a matrix, with F the moving average of the gradient and factors L, R (averages, or sums if beta2 = 1):

        L <- beta2 L + (1 - beta2) G G'
        R <- beta2 R + (1 - beta2) G' G
        p <- (1 - lr weight_decay) p - lr (L + eps I)^(-1/2) F (R + eps I)^(-1/2)

    Factors are updated in every step, roots adaptively or every `precondition_frequency` steps, staggered. Vectors and
    scalars get AdamW.

    Args:
        params: a model, whose embeddings and output layer get AdamW, as shown by `summary()`; or parameters, groups of
            them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the gradient's average (0: none) and of the factors (1: a sum).
        eps: absolute damping of the factors, used if it exceeds `numerics.damping` times the largest eigenvalue.
        weight_decay: decoupled, or of `weight_decay_type`.
        precondition_frequency: steps between two refreshes of a root; None refreshes adaptively, at least
            every 100 steps.
        max_preconditioner_dim: larger dimensions are split into blocks of at most this size.
        grafting: None, 'sgd', 'adagrad', 'rmsprop' or 'adam': the method whose update norm is used.
        momentum: of the preconditioned direction.
        nesterov: Nesterov momentum.
        use_bias_correction: of both averages.
        options: also any key of a parameter group:

            - `weight_decay_type`: 'decoupled', 'l2', added to the gradient, or 'cautious', only where the step reduces
              |p|;
            - `merge_dims=True`: merge small adjacent dimensions, such as those of a convolution;
            - `precondition_1d=False`: precondition vectors;
            - `start_preconditioning_step=-1`: use only the grafted method before this step;
            - `grafting_beta2=0.999`, `grafting_eps=1e-8`: of the grafted method;
            - `exponent_override=2`: the root: 1, 2, 3, 4, 6 or 8; 0: twice the number of dimensions, as in the paper;
            - `refresh_drift`: growth of the mean square of a block's direction at which its roots are refreshed. None
              means 1.5 without `precondition_frequency`, and 0, a fixed interval, with it;
            - `stagger=True`: spread the refreshes over the steps of an interval.

    Examples:
        >>> optimizer = torchium.optim.Shampoo(model, lr=1e-3, precondition_frequency=20)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "shampoo"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair),
        *same("nesterov", "use_bias_correction", "packed_factors", "root_method", "root_tolerance"),
        *same("eps", "relative_eps", "momentum", convert=number),
        *same("root_dtype", convert=dtype_name),
        *same("max_preconditioner_dim", struct="shampoo", merge_dims=True, precondition_1d=False, stagger=True),
        *same(struct="shampoo", start_preconditioning_step=-1, exponent_override=2),
        *same("precondition_frequency", struct="shampoo", convert=period),
        *same("refresh_drift", struct="shampoo", convert=drift(1.5)),
        *same(struct="shampoo", convert=number, grafting_beta2=0.999, grafting_eps=1e-8),
        *same("grafting", struct="shampoo", convert=or_else("none")),
        *ADAMW,
        *COMMON,
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
        weight_decay: float = 0,
        *,
        precondition_frequency: int | None = None,
        max_preconditioner_dim: int = 1024,
        grafting: Literal["none", "sgd", "adagrad", "rmsprop", "adam"] | None = "adam",
        momentum: float = 0.0,
        nesterov: bool = False,
        use_bias_correction: bool = True,
        adamw: AdamWArguments | Mapping[str, Any] | None = None,
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[ShampooOptions],
    ) -> None:
        super().__init__(params, locals())


class CUDAShampoo(Shampoo):
    """Shampoo with the defaults of an existing class of this name, for compatibility: lr=0.03, eps=1e-4,
    update_freq=100, summed factors (betas=(0.9, 1.0)), the power -1/4 for matrices and no grafting.

    Args:
        params: as for `Shampoo`.
        lr: learning rate, a number or a tensor of one element.
        eps: damping.
        update_freq: steps between refreshes of a root; None refreshes adaptively.
        weight_decay: decoupled weight decay.
        options: further arguments of `Shampoo`.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 0.03,
        eps: float = 1e-4,
        update_freq: int | None = 100,
        weight_decay: float = 0,
        **options: Any,
    ) -> None:
        defaults = {"betas": (0.9, 1.0), "grafting": None, "exponent_override": 0}
        numbers = {"eps": eps, "weight_decay": weight_decay, "precondition_frequency": update_freq}
        super().__init__(params, lr, **(defaults | numbers | options))
