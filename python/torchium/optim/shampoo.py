"""Shampoo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .options import ADAMW, COMMON, Option, Options, drift, dtype_name, number, or_else, pair, period, same
from .second_order import SecondOrder

__all__ = ["CUDAShampoo", "Shampoo"]


class Shampoo(SecondOrder):
    """Shampoo: each dimension of a gradient is multiplied by an inverse root of its second moment.

    For a matrix, with F the filtered gradient and L, R averaged, or summed where beta2 = 1:

        L <- beta2 L + (1 - beta2) G G'
        R <- beta2 R + (1 - beta2) G' G
        p <- (1 - lr weight_decay) p - lr (L + eps I)^(-1/4) F (R + eps I)^(-1/4)

    Factors are updated at every step, roots when they have drifted, or every `update_freq` steps, spread over them.
    Vectors and scalars get AdamW.

    Args:
        params: a model, of which embeddings and the output layer get AdamW, as `summary()` tells; or parameters, groups
            of them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        eps: damping, added to the factors where it is more than `relative_eps` gives; None means 1e-12, which leaves it
            to that.
        update_freq: steps between two refreshes of a root; None refreshes by need, at least every 100 steps.
        weight_decay: of the kind that `weight_decay_type` says.
        betas: of the filtered gradient (0: none) and of the factors (1: a sum).
        weight_decay_type: 'decoupled', or 'l2': added to the gradient.
        relative_eps: the least damping relative to a factor's largest eigenvalue; bounds the cost of a root in advance.
        max_preconditioner_dim: larger dimensions are cut into blocks of at most this size.
        merge_dims: neighboring small dimensions, as those of a convolution, are taken as one.
        precondition_1d: vectors too.
        start_preconditioning_step: the grafted method alone before this step; -1 begins at once.
        use_bias_correction: of both averages.
        grafting: None, 'sgd', 'adagrad', 'rmsprop' or 'adam': whose step length is taken.
        grafting_beta2: of the grafted method's second moment.
        grafting_eps: of the grafted method, beside the root of its second moment.
        momentum: of the preconditioned direction.
        nesterov: look ahead with that momentum.
        exponent_override: the root, where it is not twice the number of dimensions: 1, 2, 3, 4, 6 or 8.
        root_method: 'auto', 'eigen', 'newton' or 'rational'.
        root_tolerance: the error that a root has to reach; 0 for the default.
        refresh_drift: by need, how far a root may be off when it is refreshed, as the residual of the old root with the
            new factor: the steps between two refreshes, 1 at first, double where it was less than half of this and
            halve where it was more. None means 10 without `update_freq`, and 0, a fixed period, with it; with both,
            `update_freq` is the most.
        refresh_budget: by need, the largest share of all roots that is refreshed at one step.
        stagger: spread the refreshes over the steps of a period; False takes all at once.
        packed_factors: keep factors and roots as lower triangles: half their memory and the same numbers; a step
            unpacks what it needs as matrices, some at a time.
        root_dtype: 'float32', or 'bfloat16' for roots in a quarter of the memory, which adds at most 0.2 % of its norm
            to the error of a root.

    The other arguments are those of all optimizers: see `TorchiumOptimizer`.

    Examples:
        >>> optimizer = torchium.optim.Shampoo(model, lr=1e-3, update_freq=20)
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "shampoo"
    _options: ClassVar = Options(
        Option("betas", ("beta1", "beta2"), pair),
        Option("update_freq", "precondition_frequency", period),
        Option("weight_decay_type", "decay"),
        Option("use_bias_correction", "bias_correction"),
        *same("refresh_drift", convert=drift(10.0)),
        *same("eps", "refresh_budget", "relative_eps", "grafting_beta2", "grafting_eps", "momentum", convert=number),
        *same(
            "max_preconditioner_dim", "merge_dims", "precondition_1d", "packed_factors", "start_preconditioning_step"
        ),
        *same("root_dtype", convert=dtype_name),
        *same("grafting", convert=or_else("none")),
        *same("nesterov", "exponent_override", "root_method", "root_tolerance", "stagger", "packed_factors"),
        *ADAMW,
        *COMMON,
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        eps: float = 1e-12,
        update_freq: int | None = None,
        weight_decay: float = 0,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay_type: str = "decoupled",
        relative_eps: float = 1e-6,
        max_preconditioner_dim: int = 1024,
        merge_dims: bool = True,
        precondition_1d: bool = False,
        start_preconditioning_step: int = -1,
        use_bias_correction: bool = True,
        grafting: str | None = "adam",
        grafting_beta2: float = 0.999,
        grafting_eps: float = 1e-8,
        momentum: float = 0.0,
        nesterov: bool = False,
        exponent_override: int = 0,
        root_method: str = "auto",
        root_tolerance: float = 0.0,
        refresh_drift: float | None = None,
        refresh_budget: float = 1.0,
        stagger: bool = True,
        packed_factors: bool = False,
        root_dtype: str | torch.dtype = "float32",
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


class CUDAShampoo(Shampoo):
    """Shampoo with other defaults, those of a class of this name that people come from: lr=0.03, eps=1e-4,
    update_freq=100, factors that are summed (betas=(0.9, 1.0)) and no grafting.

    Args:
        params: as for `Shampoo`.
        lr: learning rate, a number or a tensor of one element.
        eps: damping.
        update_freq: steps between refreshes of a root; None refreshes by need.
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
        before = {"betas": (0.9, 1.0), "grafting": None}
        super().__init__(params, lr, eps, update_freq, weight_decay, **(before | options))
