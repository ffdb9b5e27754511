"""Muon."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from .arguments import AdamWArguments, MemoryArguments, MuonOptions, NumericsArguments
from .base import outside
from .options import ADAMW, COMMON, Options, dtype_name, number, or_else, plain, same, shown
from .second_order import SecondOrder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Muon"]

USUAL_STEPS = {"minimax": 3, "polar_express": 5, "muon": 5}


def _coefficients(name: str, value: Any) -> Any:
    numbers = plain(value)
    if numbers is not None and (not isinstance(numbers, tuple) or len(numbers) != 3):
        raise ValueError(f"{name} must be three numbers, got {shown(numbers)}")
    return numbers


def usual_steps(method: str | None, steps: int | None, coefficients: Any) -> tuple[str, int]:
    """Resolves the defaults of method and ns_steps. ns_steps without a method selects 'polar_express', with a warning,
    since 'minimax' always has three polynomials."""
    if method is None:
        if steps and coefficients is None:
            warnings.warn(
                f"ns_steps is {shown(steps)} and method is not given: 'polar_express' is used, where without "
                "ns_steps it would be 'minimax'. Name the method, or leave ns_steps out",
                UserWarning,
                stacklevel=outside(),
            )
        method = "polar_express" if steps or coefficients is not None else "minimax"
    return method, steps or USUAL_STEPS.get(method, 5)


class Muon(SecondOrder):
    """Muon: the update of a matrix is its orthogonalized momentum.

        B <- momentum B + (1 - momentum) G
        U  = momentum B + (1 - momentum) G with nesterov, B without
        p <- (1 - lr weight_decay) p - lr s orthogonal(U)

    with s = sqrt(max(1, m / n)) for an m by n matrix. In tensors of more dimensions all but the first are merged.
    Vectors and scalars get AdamW, at a smaller learning rate: see `adamw`.

    Args:
        params: a model, whose embeddings and output layer get AdamW, as shown by `summary()`; or parameters, groups of
            them, or `model.named_parameters()`.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay.
        momentum: decay rate of the average B.
        nesterov: Nesterov momentum: U above.
        ns_coefficients: three numbers (a, b, c) of the polynomial a X + b X X' X + c X X' X X' X, repeated `ns_steps`
            times, as in torch.optim.Muon; overrides `method`.
        eps: lower bound of the norm that a matrix is divided by before the first step.
        ns_steps: number of Newton-Schulz steps; None or 0 for the method's default, 3 or 5.
        adjust_lr_fn: s: None or 'original' as above, 'match_rms_adamw' for 0.2 sqrt(max(m, n)).
        method: 'minimax', polynomials of degree 17, 17 and 9, 'polar_express', a different one of degree 5 in each
            step, or 'muon', (3.4445, -4.7750, 2.0315) in every step. None means 'minimax', or, with a warning,
            'polar_express' if `ns_steps` is given.
        ns_dtype: of the products on a GPU that multiplies bfloat16: 'auto', bfloat16 with float16 where that is faster
            and more accurate (Hopper), 'bfloat16' alone, or 'float32'.
        adamw: an `AdamWArguments`, or a dictionary of its arguments. Its default lr is 0.3 lr, or lr with
            adjust_lr_fn='match_rms_adamw'. The lr of a group with use_adamw=True is AdamW's.
        options: also any key of a parameter group. `constant_norm=True` (Hyperball) keeps the Frobenius norm R of each
            matrix: p <- R V / |V| with V = p - lr R orthogonal(U) / |orthogonal(U)|, without decoupled or cautious
            weight decay; lr is then an angle, and a matrix of zeros stays zero.

    Examples:
        >>> optimizer = torchium.optim.Muon(model.named_parameters(), lr=0.02, use_adamw=("*embed*",))
        >>> loss.backward()
        >>> optimizer.step()
    """

    kind = "muon"
    _resolved: ClassVar = MappingProxyType({"method": "minimax", "ns_steps": USUAL_STEPS["minimax"]})
    _options: ClassVar = Options(
        *same("ns_coefficients", struct="muon", convert=_coefficients),
        *same("adjust_lr_fn", struct="muon", convert=or_else("original")),
        *same("method", "ns_steps", struct="muon"),
        *same("ns_dtype", struct="muon", convert=dtype_name),
        *same("momentum", "eps", convert=number),
        *same("nesterov", constant_norm=False),
        *ADAMW,
        *COMMON,
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 0.02,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | None = None,
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        method: Literal["minimax", "polar_express", "muon"] | None = None,
        ns_dtype: Literal["auto", "bfloat16", "float32"] | torch.dtype = "auto",
        adamw: AdamWArguments | Mapping[str, Any] | None = None,
        memory: MemoryArguments | Mapping[str, Any] | None = None,
        numerics: NumericsArguments | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **options: Unpack[MuonOptions],
    ) -> None:
        method, ns_steps = usual_steps(method, ns_steps, ns_coefficients)
        super().__init__(params, locals())

    def _adamw_share(self, group: dict[str, Any]) -> float | None:
        """The library's default, see rest_share in src/optim/muon.c."""
        return 1.0 if group["adjust_lr_fn"] == "match_rms_adamw" else 0.3

    def _config(self, group: dict[str, Any], lr: float) -> dict[str, Any]:
        config = super()._config(group, lr)
        if config["muon.ns_coefficients"] is None:
            del config["muon.ns_coefficients"]
        else:  # coefficients imply this method
            config["muon.method"] = "muon"
        return config
