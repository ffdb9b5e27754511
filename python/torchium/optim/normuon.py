"""NorMuon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from .arguments import AdamWArguments, Matrices, MemoryArguments, NumericsArguments
from .muon import Muon, usual_steps
from .options import Options, number, same
from .second_order import SecondOrder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NorMuon"]


class NorMuon(Muon):
    """NorMuon: Muon's direction, with every row of a matrix divided by the root of its own second moment, so that no
    neuron moves much more than another.

        O    = orthogonal(U)
        v_i <- beta2 v_i + (1 - beta2) mean over j of O_ij^2
        D_ij = O_ij / (sqrt(v_i) + eps)
        p   <- (1 - lr weight_decay) p - lr s sqrt(min(m, n)) D / |D|

    with U and s as in `Muon` and |D| the Frobenius norm, for a matrix of m by n: a step is as long as Muon's. The
    default of `adjust_lr_fn`, 'match_rms_adamw', makes that 0.2 sqrt(m n) as in the paper, so that learning rates of
    AdamW carry over. The state is Muon's and one number for each row.

    Args:
        params: a model, whose embeddings and output layer get AdamW, as shown by `summary()`; or parameters, groups of
            them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay.
        momentum: of U, see `Muon`.
        beta2: of the rows' second moments v. As in the paper v is not corrected for its beginning at 0.
        nesterov: of U, see `Muon`; the paper's algorithm has False, its authors' code True.
        ns_coefficients: of the orthogonalization, see `Muon`.
        eps: beside the root of v, and the least norm that a matrix is divided by before the first Newton-Schulz step.
        ns_steps: of the orthogonalization, see `Muon`.
        method: of the orthogonalization, see `Muon`.
        ns_dtype: of the orthogonalization, see `Muon`.
        adjust_lr_fn: s: 'match_rms_adamw' for 0.2 sqrt(max(m, n)), None or 'original' for sqrt(max(1, m / n)).
        adamw: an `AdamWArguments`, or a dictionary of its arguments. Its lr of None means lr, or 0.3 lr where
            `adjust_lr_fn` is not 'match_rms_adamw'. The lr of a
            group with use_adamw=True is AdamW's own.

    Examples:
        >>> optimizer = torchium.optim.NorMuon(model.named_parameters(), lr=1e-3, use_adamw=("*embed*",))
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "normuon"
    _options: ClassVar = Options(
        *same("beta2", convert=number), *(option for option in Muon._options if option.name != "constant_norm")
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | None = None,
        eps: float = 1e-8,
        ns_steps: int | None = None,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = "match_rms_adamw",
        *,
        method: Literal["minimax", "polar_express", "muon"] | None = None,
        ns_dtype: Literal["auto", "bfloat16", "float32"] | torch.dtype = "auto",
        adamw: AdamWArguments | Mapping[str, Any] | None = None,
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[Matrices],
    ) -> None:
        method, ns_steps = usual_steps(method, ns_steps, ns_coefficients)
        SecondOrder.__init__(self, params, locals())
