"""SOAP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .arguments import AdamWArguments, MemoryArguments, NumericsArguments, SOAPOptions
from .options import ADAMW, COMMON, Option, Options, drift, number, pair, period, same
from .second_order import SecondOrder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SOAP"]


class SOAP(SecondOrder):
    """SOAP: Adam in the eigenbasis of Shampoo's factors.

    For a matrix with factors L and R (averages of G G' and G' G) and their bases Q_L and Q_R:

        p <- (1 - lr weight_decay) p - lr Q_L Adam(Q_L' G Q_R) Q_R'

    Bases are refreshed adaptively or every `precondition_frequency` steps. The first gradient of a parameter only
    initializes its bases. Vectors and scalars get AdamW.

    Args:
        params: a model, whose embeddings and output layer get AdamW, as shown by `summary()`; or parameters, groups of
            them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: of Adam.
        eps: of Adam.
        weight_decay: decoupled, or of `weight_decay_type`.
        shampoo_beta: decay rate of the factors; below 0 for betas[1].
        precondition_frequency: steps between two refreshes of a basis; None refreshes adaptively, at least every 100.
        max_preconditioner_dim: larger dimensions have no factor; with `block` they are split into blocks of at most
            this size.
        use_bias_correction: of Adam's averages.
        options: also any key of a parameter group:

            - `weight_decay_type`: 'decoupled', 'l2', added to the gradient, or 'cautious', only where the step reduces
              |p|;
            - `merge_dims=False`: merge small adjacent dimensions, such as those of a convolution;
            - `precondition_1d=False`: precondition vectors;
            - `block=False`: split dimensions larger than `max_preconditioner_dim` into blocks;
            - `normalize_grads=False`: scale every update of a matrix to a mean square of 1;
            - `orthogonalize=False`: SOAP-Muon: the direction U of a matrix, or of each block, becomes
              0.2 sqrt(max(m, n)) orthogonal(U), as in `Muon` with adjust_lr_fn='match_rms_adamw';
            - `constant_norm=False`: as in `Muon`; with `block` for each block;
            - `refresh_drift`: target correlation of the factor in the old basis at an adaptive refresh. The interval
              starts at 1, doubles if it is less than half of this and halves if it is more. None means
              2.5 without `precondition_frequency`, and 0, a fixed interval, with it; with both,
              `precondition_frequency` is the longest interval;
            - `stagger=True`: spread the refreshes over the steps of an interval; the reference has False.

    Examples:
        >>> optimizer = torchium.optim.SOAP(model.parameters(), lr=3e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "soap"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair),
        *same("use_bias_correction", "packed_factors"),
        *same("eps", convert=number),
        *same(constant_norm=False),
        *same("max_preconditioner_dim", struct="shampoo", merge_dims=False, precondition_1d=False, stagger=True),
        *same("precondition_frequency", struct="shampoo", convert=period),
        *same("refresh_drift", struct="shampoo", convert=drift(2.5)),
        *same(struct="soap", block=False, normalize_grads=False, orthogonalize=False),
        *same("shampoo_beta", struct="soap", convert=number),
        *ADAMW,
        *COMMON,
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float = -1,
        precondition_frequency: int | None = None,
        max_preconditioner_dim: int = 10000,
        use_bias_correction: bool = True,
        adamw: AdamWArguments | Mapping[str, Any] | None = None,
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[SOAPOptions],
    ) -> None:
        super().__init__(params, locals())
