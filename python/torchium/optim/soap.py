"""SOAP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .options import ADAMW, COMMON, Option, Options, drift, number, pair, period, same
from .second_order import SecondOrder

__all__ = ["SOAP"]


class SOAP(SecondOrder):
    """SOAP: Adam in the eigenbasis of Shampoo's factors.

    For a matrix with factors L and R (averages of G G' and G' G) and their bases Q_L and Q_R:

        p <- (1 - lr weight_decay) p - lr Q_L Adam(Q_L' G Q_R) Q_R'

    The bases follow the factors when these have drifted, or every `precondition_frequency` steps. At its first gradient
    a parameter only finds its bases. Vectors and scalars get AdamW.

    Args:
        params: a model, of which embeddings and the output layer get AdamW, as `summary()` tells; or parameters, groups
            of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        betas: of Adam.
        shampoo_beta: of the factors; below 0 for betas[1].
        eps: of Adam.
        weight_decay: of the kind that `weight_decay_type` says.
        weight_decay_type: 'decoupled', or 'l2': added to the gradient.
        precondition_frequency: steps between two refreshes of a basis; None refreshes by need, at least every 100.
        refresh_drift: by need, how far a basis may be off when it is refreshed, as the correlations that the factor has
            in the old basis: the steps between two refreshes, 1 at first, double where it was less than half of this
            and halve where it was more. None means 2.5 without `precondition_frequency`, and 0, a fixed period, with
            it; with both, `precondition_frequency` is the most.
        refresh_budget: by need, the largest share of all bases that is refreshed at one step.
        stagger: spread the refreshes over the steps of a period; False takes all at once, as the reference does.
        packed_factors: keep factors, though not bases, as lower triangles: a quarter less memory for both and the same
            numbers; every step unpacks some of them at a time.
        max_precond_dim: larger dimensions have no factor; with `block` they are cut into blocks of at most this size.
        block: cut dimensions larger than `max_precond_dim` into blocks.
        merge_dims: neighboring small dimensions, as those of a convolution, are taken as one.
        precondition_1d: vectors too.
        normalize_grads: every step of a matrix is scaled to a mean square of 1.
        correct_bias: of Adam's averages.

    The other arguments are those of all optimizers: see `TorchiumOptimizer`.

    Examples:
        >>> optimizer = torchium.optim.SOAP(model.parameters(), lr=3e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "soap"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair),
        Option("weight_decay_type", "decay"),
        Option("precondition_frequency", "precondition_frequency", period),
        Option("max_precond_dim", "max_preconditioner_dim"),
        Option("correct_bias", "bias_correction"),
        *same("refresh_drift", convert=drift(2.5)),
        *same("shampoo_beta", "eps", "refresh_budget", convert=number),
        *same("stagger", "block", "merge_dims", "precondition_1d", "packed_factors", "normalize_grads"),
        *ADAMW,
        *COMMON,
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int | None = None,
        max_precond_dim: int = 10000,
        merge_dims: bool = False,
        precondition_1d: bool = False,
        normalize_grads: bool = False,
        correct_bias: bool = True,
        *,
        refresh_drift: float | None = None,
        refresh_budget: float = 1.0,
        stagger: bool = True,
        packed_factors: bool = False,
        block: bool = False,
        weight_decay_type: str = "decoupled",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        use_adamw: bool | Sequence[str] = False,
        precision: str = "high",
        world_invariant: bool = False,
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
