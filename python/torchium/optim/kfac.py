"""KFAC as an optimizer: the preconditioner and SGD with momentum in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from ._engine.report import MemoryReport
from ._model.factors import COUNTS
from ._model.of_model import OfModel
from ._shared.consolidate import asked_by_checkpoint
from .arguments import KFACOptions
from .options import Options, plain, same, unexpected
from .preconditioner import KFACPreconditioner

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["KFAC"]


class KFAC(OfModel):
    """Natural gradient with Kronecker-factored curvature, for linear and convolution layers.

        A  = E[a a'] = Q_A' diag(w_A) Q_A,   G = E[g g'] = Q_G' diag(w_G) Q_G
        v  = Q_G' [(Q_G grad Q_A') / (w_G w_A' + damping)] Q_A,  divided element by element
        b <- momentum b + v + weight_decay p
        p <- p - lr b

    for inputs a and output gradients g of each layer. Other layers get the plain gradient; `preconditioner.left_out`
    names them. After a step `p.grad` holds v.

    Args:
        model: the model, whose layers get hooks; `remove()` removes them.
        lr: learning rate, a number or a tensor of one element.
        momentum: of the preconditioned gradient: b above.
        weight_decay: times the parameter, added to the preconditioned gradient.
        damping: added to the products of eigenvalues.
        factor_update_steps: steps between updates of the factors.
        inv_update_steps: steps between updates of their inverses or eigenbases.
        fisher: 'empirical' or 'sampled', see `KFACPreconditioner`.
        method: 'eigen', 'inverse' or 'ekfac': `compute_method` of `KFACPreconditioner`.
        sharing: 'expand' or 'reduce', see `KFACPreconditioner`.
        kl_clip: limit of the update's norm in the curvature, see `KFACPreconditioner`.
        factor_decay: of the moving averages.
        nesterov: Nesterov momentum.
        skip_layers: regular expressions; layers whose name or class matches are not preconditioned.
        accumulation_steps: backward passes per step, with losses divided by their number; more raise an error.
        grad_scaler: the GradScaler that steps this optimizer, if any.
        process_group: processes that divide the layers, see `KFACPreconditioner`.
        options: `nonfinite`, 'skip', 'raise' or 'ignore': handling of infinities and NaN in gradients; and
            `loss_reduction`, `precision`, `factor_dtype` and `average_factors` of `KFACPreconditioner`.

    lr, momentum, weight_decay, damping, kl_clip, factor_decay, factor_update_steps and inv_update_steps are in
    `param_groups`, and may change from step to step; the last five are read from the first group.

    Examples:
        >>> optimizer = torchium.optim.KFAC(model, lr=0.01)
        >>> loss.backward()
        >>> optimizer.step()
    """

    # By their names in the preconditioner.
    _turning: ClassVar = Options(*same("damping", "factor_update_steps", "inv_update_steps", "kl_clip", "factor_decay"))

    def __init__(
        self,
        model: nn.Module,
        lr: Any = 0.001,
        momentum: float = 0.9,
        weight_decay: float = 0,
        damping: float = 1e-3,
        factor_update_steps: int = 10,
        inv_update_steps: int = 100,
        *,
        method: Literal["eigen", "inverse", "ekfac"] = "eigen",
        fisher: Literal["empirical", "sampled"] = "empirical",
        sharing: Literal["expand", "reduce"] = "expand",
        kl_clip: float | None = 1e-3,
        factor_decay: float = 0.95,
        nesterov: bool = False,
        skip_layers: str | Iterable[str] | None = None,
        accumulation_steps: int = 1,
        grad_scaler: Any = None,
        process_group: Any = None,
        **options: Unpack[KFACOptions],
    ) -> None:
        nonfinite = options.pop("nonfinite", "skip")
        for name in options.keys() - KFACOptions.__annotations__.keys():
            raise unexpected("KFAC", name, [*inspect.signature(KFAC).parameters, *KFACOptions.__annotations__])
        super().__init__(model, locals())
        self._lr_read: tuple[torch.Tensor, int, float] | None = None
        self.preconditioner = KFACPreconditioner(
            model,
            **self._turning.config({name: self._reader(name) for name in self._turning.names}),
            lr=lambda step: self._lr(),
            accumulation_steps=accumulation_steps,
            compute_method=method,
            skip_layers=skip_layers,
            grad_scaler=grad_scaler,
            fisher=fisher,
            sharing=sharing,
            process_group=process_group,
            **options,
        )
        self._watch = self.preconditioner._watch

    def _reader(self, name: str) -> Callable[[int], Any]:
        return lambda step: self.param_groups[0][name]

    def _lr(self) -> float:
        """The learning rate as a number. One on a GPU synchronizes only after it has changed."""
        lr = self.param_groups[0]["lr"]
        if not isinstance(lr, torch.Tensor):
            return lr
        if self._lr_read is None or self._lr_read[0] is not lr or self._lr_read[1] != lr._version:
            self._lr_read = (lr, lr._version, plain(lr))
        return self._lr_read[2]

    def _layer_modules(self) -> list[nn.Module]:
        return [layer.module for layer in self.preconditioner._layers]

    def _turn_gradients(self) -> None:
        self.preconditioner.step()

    def observe_sampled(self, outputs: torch.Tensor, loss: str = "cross_entropy") -> None:
        """With fisher='sampled', after the forward pass: see `KFACPreconditioner.observe_sampled`.

        Args:
            outputs: outputs of the model.
            loss: 'cross_entropy' or 'mse'.
        """
        self.preconditioner.observe_sampled(outputs, loss)

    def paused(self) -> Any:
        """A context whose forward and backward passes are not observed."""
        return self.preconditioner.paused()

    def remove(self) -> None:
        """Removes the hooks from the model."""
        self.preconditioner.remove()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, with the factors in 'kfac'. torch.distributed.checkpoint only stores the state of
        parameters: for it each layer's factors are in the state of its weight, under 'kfac'."""
        state, kfac = super().state_dict(), self.preconditioner.state_dict()
        return self._spread(state, kfac) if asked_by_checkpoint() else state | {"kfac": kfac}

    def _spread(self, state: dict[str, Any], kfac: dict[str, Any]) -> dict[str, Any]:
        numbers = {id(p): k for k, p in enumerate(p for group in self.param_groups for p in group["params"])}
        steps = torch.tensor(kfac["steps"], device="cpu")
        for name, weight in self.preconditioner._weights().items():
            part = kfac["layers"][name]
            part = part | {"steps": steps.clone(), COUNTS: torch.tensor(part[COUNTS], device="cpu")}
            number = numbers[id(weight)]
            state["state"][number] = state["state"].get(number, {}) | {"kfac": part}
        return state

    def _gathered(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state_dict with such factors moved to 'kfac', if it has any."""
        try:
            pairs = zip(state_dict["param_groups"], self.param_groups, strict=True)
            keys = [pair for saved, own in pairs for pair in zip(saved["params"], own["params"], strict=True)]
            state = {key: dict(values) for key, values in state_dict["state"].items()}
        except (KeyError, TypeError, ValueError):  # no state_dict of this model, which is said where it is loaded
            return state_dict
        names = {id(weight): name for name, weight in self.preconditioner._weights().items()}
        layers = {names[id(p)]: state[key].pop("kfac") for key, p in keys if "kfac" in state.get(key, {})}
        steps = [int(part["steps"]) for part in layers.values()]
        if not steps:
            return state_dict
        layers = {name: {key: value for key, value in part.items() if key != "steps"} for name, part in layers.items()}
        return {**state_dict, "state": state, "kfac": {"steps": steps[0], "layers": layers}}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Required before `state_dict()` if processes divide the layers: see `KFACPreconditioner`.

        Args:
            to: the rank that gets the full state.
        """
        super().consolidate_state_dict(to)
        self.preconditioner.consolidate_state_dict(to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict()`, from which training resumes bitwise-identically. After an error nothing has changed.

        Args:
            state_dict: of an optimizer for the same model.
        """
        if isinstance(state_dict, dict) and "kfac" not in state_dict:
            state_dict = self._gathered(state_dict)
        if not isinstance(state_dict, dict) or "kfac" not in state_dict:
            raise ValueError("a state_dict of KFAC must have 'state', 'param_groups' and 'kfac'")
        others = {key: value for key, value in state_dict.items() if key != "kfac"}
        self.preconditioner._load(state_dict["kfac"], lambda: super(KFAC, self).load_state_dict(others))

    def memory_report(self) -> MemoryReport:
        """Bytes of state and scratch, including the factors: a forecast before the first step."""
        steps = super().memory_report()
        return MemoryReport([steps, self.preconditioner._memory()], forecast=steps.forecast)

    def stats(self) -> dict[str, float]:
        """Statistics of steps and preconditioner in one flat dictionary. Synchronizes."""
        steps = super().stats()
        return steps | self.preconditioner.stats() | {"steps": steps["steps"]}
