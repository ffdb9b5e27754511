"""KFAC as a preconditioner: observes a model's layers, accumulates their factors, and preconditions gradients in place
before any optimizer's step.

The step count determines whether a step updates factors or refreshes inverses; in other steps the hooks do nothing.
Nothing synchronizes with the device.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torchium import _C
from torchium._functions.transforms import untraced
from torchium._watch.layers import Part
from torchium._watch.uses import Pair

from ._engine.engine import profiled_range
from ._engine.report import MemoryReport
from ._engine.state import MOST_STEPS, check_counts
from ._model.factors import FACTORS, Factors, find_layers
from ._model.watch import PassWatch, of_one_pass
from ._shared.consolidate import asked_by_checkpoint
from ._shared.group import EvenInputs
from .base import outside
from .options import Option, Options, or_else, plain, same, shown

__all__ = ["KFACPreconditioner", "loss_scale_of", "whole", "word"]

Number = float | Callable[[int], float]

# Arguments that may be functions of the step count, and options of the library.
_NUMBERS = ("factor_update_steps", "inv_update_steps", "damping", "factor_decay", "kl_clip", "lr")
_OPTIONS = Options(
    Option("compute_method", "method"),
    *same("sharing", "damping", "factor_decay", "accumulation_steps"),
    *same("kl_clip", convert=or_else(0.0)),
)


class KFACPreconditioner:
    """Kronecker-factored curvature of linear and convolution layers, for any optimizer.

    For a layer with inputs a (with a 1 appended for the bias) and output gradients g, with moving averages A and G,

        A     = E[a a'] = Q_A' diag(w_A) Q_A,   G = E[g g'] = Q_G' diag(w_G) Q_G
        grad <- Q_G' [(Q_G grad Q_A') / (w_G w_A' + damping)] Q_A,  divided element by element

    Gradients of other layers are unchanged; `left_out` names them.

    Args:
        model: the model, whose layers get hooks; `remove()` removes them.
        factor_update_steps: steps between updates of the factors.
        inv_update_steps: steps between updates of their inverses or eigenbases.
        damping: added to the products of eigenvalues.
        factor_decay: of the moving averages.
        kl_clip: the gradients of all layers are scaled by min(1, sqrt(kl_clip / |lr^2 sum <new, old>|)); None or 0
            disables it.
        lr: of the optimizer, used only for kl_clip.
        accumulation_steps: backward passes per step, with losses divided by their number.
        compute_method: 'eigen'; 'inverse', G^-1 grad A^-1 with factored damping; or 'ekfac', with the mean squares of
            the gradient's coordinates instead of w_G w_A'.
        skip_layers: regular expressions; layers whose name or class matches are left out.
        grad_scaler: the GradScaler that scales the loss, if any.
        factor_dtype: torch.float32 or torch.float64; None: float32, float64 for float64 models.
        fisher: 'empirical', with the gradients of the loss; or 'sampled', with labels sampled from the model: see
            `observe_sampled`.
        sharing: 'expand' or 'reduce': whether the positions of a sample (sequences, images) count as separate samples
            or are averaged.
        loss_reduction: 'mean' or 'sum': reduction of the loss over the samples.
        precision: 'high': float32 factors are computed in TF32 on GPUs that support it; 'highest': in float32.
        process_group: processes with replicas of the model, as in DistributedDataParallel, to divide the layers: a
            layer's owner refreshes and stores it, and preconditioned gradients (with 'ekfac' bases) are gathered.
            Without it every process refreshes all layers.
        average_factors: average factors over processes before a refresh. False uses only the samples of a layer's
            owner, which saves communication, and requires a process_group.

    damping, factor_decay, kl_clip, lr, factor_update_steps and inv_update_steps may be functions of the step count.

    Examples:
        >>> kfac = torchium.optim.KFACPreconditioner(model, lr=0.1)
        >>> loss.backward()
        >>> kfac.step()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 1,
        damping: Number = 0.001,
        factor_decay: Number = 0.95,
        kl_clip: Number | None = 0.001,
        lr: Number = 0.1,
        accumulation_steps: int = 1,
        compute_method: Literal["eigen", "inverse", "ekfac"] = "eigen",
        skip_layers: str | Iterable[str] | None = None,
        grad_scaler: Any = None,
        factor_dtype: torch.dtype | None = None,
        *,
        fisher: Literal["empirical", "sampled"] = "empirical",
        sharing: Literal["expand", "reduce"] = "expand",
        loss_reduction: Literal["mean", "sum"] = "mean",
        precision: Literal["high", "highest"] = "high",
        process_group: Any = None,
        average_factors: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got an object of type {type(model).__name__}")
        arguments = locals()
        self._numbers = {name: arguments[name] for name in _NUMBERS}
        self._fixed = {name: arguments[name] for name in _OPTIONS.names if name not in _NUMBERS}
        self._accumulation = whole("accumulation_steps", accumulation_steps)
        self._fisher = word("fisher", fisher, ("empirical", "sampled"))
        self._mean = word("loss_reduction", loss_reduction, ("mean", "sum")) == "mean"
        self._scaler, self._group = grad_scaler, process_group
        self._averages = average_factors
        if not average_factors and process_group is None:
            raise ValueError("average_factors=False needs a process_group: without one the processes would drift apart")
        self._consolidated: dict[str, Any] | None = None  # the layers' whole state, until the next step
        self._even_inputs: EvenInputs | None = None
        self._steps = 0
        self._observed = 0  # layers, since the last step
        self._sampling = False
        rounded = word("precision", precision, ("high", "highest")) == "high"
        layers, self.left_out = find_layers(model, skip_layers, rounded)
        if not layers:
            raise ValueError(f"the model has no layer that KFAC can take; left out: {self.left_out}")
        self._layers = layers
        self._factors = Factors(layers, _checked_dtype(factor_dtype), process_group)
        self._prepare()
        # The gradients of sampled labels do not accumulate.
        accumulation = None if fisher == "sampled" else self._accumulation
        self._watch = PassWatch(model, layers, self._wanted, self._listening, self._complete, accumulation)

    # --- hyperparameters

    @property
    def layers(self) -> list[str]:
        """The names of the preconditioned layers."""
        return [layer.name for layer in self._layers]

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._steps

    def _number(self, name: str) -> Any:
        value = self._numbers[name]
        return plain(value(self._steps) if callable(value) else value)

    def _is_due(self, name: str) -> bool:
        return self._steps % whole(name, self._number(name)) == 0

    def _prepare(self) -> None:
        """Passes the hyperparameters of the step to the library, which checks them."""
        numbers = {name: self._number(name) for name in _OPTIONS.names if name in _NUMBERS}
        config = _OPTIONS.config(self._fixed | numbers)
        _OPTIONS.check(lambda: _C.kfac_forecast(config, []), "KFAC")
        self._factors.configure(config)

    # --- observation

    def _wanted(self, module: nn.Module) -> bool:
        return module.training and self._is_due("factor_update_steps")

    def _listening(self) -> bool:
        return self._sampling == (self._fisher == "sampled")

    def _complete(self, layer: Part, pairs: list[Pair]) -> None:
        x, gradient = of_one_pass(layer, pairs)
        if self._observed == 0:
            self._factors.settle()
        sampled = self._fisher == "sampled"
        scale = 1.0 if sampled or not self._mean else float(x.shape[0] * self._accumulation)
        self._factors.observe(layer, x, gradient, scale, None if sampled else loss_scale_of(self._scaler))
        self._observed += 1

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context whose forward and backward passes are not observed."""
        return self._watch.paused()

    def observe_sampled(self, outputs: torch.Tensor, loss: str = "cross_entropy") -> None:
        """Updates the factors with gradients for labels sampled from the model, with fisher='sampled'.

        Call it after the forward pass and before the backward pass of the loss. It does not change `.grad`, and does
        nothing in steps that do not update factors.

        Args:
            outputs: outputs of the model: for 'cross_entropy' logits with the classes in dimension 1, as in
                torch.nn.functional.cross_entropy; for 'mse' predictions of any shape, samples first.
            loss: 'cross_entropy' or 'mse'.
        """
        word("loss", loss, ("cross_entropy", "mse"))
        if self._fisher != "sampled":
            raise RuntimeError("observe_sampled needs fisher='sampled'; with 'empirical' the loss's gradients are used")
        if not self._is_due("factor_update_steps"):
            return
        if not isinstance(outputs, torch.Tensor) or not outputs.requires_grad:
            raise ValueError("outputs must be a tensor that gradients can be computed of")
        if self._factors.sharded():
            raise RuntimeError(
                "observe_sampled: the parameters are sharded, and their gradients come from the loss's own backward "
                "pass alone; fisher='empirical' looks at that one"
            )
        gradient = _sampled_gradient(outputs.detach(), loss, self._mean)
        weights = [layer.module.weight for layer in self._layers]
        self._sampling = True
        try:
            torch.autograd.grad(outputs, weights, gradient, retain_graph=True, allow_unused=True)
            self._watch.flush()
        finally:
            self._sampling = False

    # --- a step

    @torch.no_grad()
    @untraced
    def step(self) -> None:
        """Updates factors and inverses if due, and preconditions the gradients in place."""
        self._consolidated = None
        if self._world() > 1:
            self._even_inputs = self._even_inputs or EvenInputs(self._group)
            self._even_inputs.check("KFAC")
        self._watch.flush()
        self._check_seen()
        self._prepare()
        self._factors.settle()
        if self._is_due("factor_update_steps"):
            self._average(("scales",) if self._fixed["compute_method"] == "ekfac" else ())
        if self._is_due("inv_update_steps"):
            with profiled_range("torchium::kfac/refresh"):
                self._average(FACTORS if self._averages else ())
                self._factors.refresh()
        with profiled_range("torchium::kfac/precondition"):
            self._factors.precondition(float(self._number("lr")))
        self._observed = 0
        self._watch.begin()
        self._steps += 1

    def _check_seen(self) -> None:
        """Raises an error, or warns if there are factors, if a step that updates the factors has observed nothing."""
        if self._observed > 0 or not self._is_due("factor_update_steps"):
            return
        if asked_by_checkpoint():  # performs an empty step to create state
            return
        if self._fisher == "sampled":
            raise RuntimeError(
                "fisher='sampled' and this step updates the factors: observe_sampled(outputs) must be called after the "
                "forward pass, with the model in training mode"
            )
        if not self._factors.have_gradients():
            return
        message = (
            "KFAC has observed no backward pass through its layers since the last step: those of a model in eval() "
            "mode and inside paused() do not count; call model.train() before the forward pass"
        )
        if not self._factors.made():
            raise RuntimeError(message)
        warnings.warn(f"{message}. The step uses the factors of earlier steps", stacklevel=outside())

    def _world(self) -> int:
        """The number of processes with factors of the same layers."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def _average(self, names: tuple[str, ...]) -> None:
        """Averages over all processes, so that replicas stay identical."""
        size = self._world()
        if not names or size == 1:
            return
        tensors = [view for views in self._factors.views().values() for key, view in views.items() if key in names]
        for work in [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]:
            work.wait()
        for tensor in tensors:
            tensor.div_(size)

    def remove(self) -> None:
        """Removes the hooks from the model."""
        self._watch.remove()

    # --- state and reports

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. If processes divide the layers, call `consolidate_state_dict()` before, and this
        on the rank given there, or use torch.distributed.checkpoint."""
        if asked_by_checkpoint():
            return {"steps": self._steps, "layers": self._part()}
        if self._consolidated is not None:
            return {"steps": self._steps, "layers": self._consolidated}
        if self._factors.groups():
            raise RuntimeError(
                f"{type(self).__name__}: the state is sharded over the processes of process_group: call "
                "consolidate_state_dict(to=RANK) on all of them after the latest step and state_dict() only on that "
                "rank, or save with torch.distributed.checkpoint"
            )
        return {"steps": self._steps, "layers": self._factors.state() if self._factors.made() else {}}

    def _part(self) -> dict[str, Any]:
        """This process's part of every layer. Allocated before the first step too, since torch.distributed.checkpoint
        loads in place."""
        self._factors.settle()
        size = self._world()
        return self._factors.state() if size == 1 else self._factors.agreed(size, self._averages)

    def _weights(self) -> dict[str, nn.Parameter]:
        """The weights of the layers by name."""
        return {layer.name: layer.module.weight for layer in self._layers}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the layers on global rank `to`, where `state_dict()` then returns all of them; any number of
        processes can load it. All processes must call this before each save.

        Args:
            to: the rank that gets the full state.
        """
        self._consolidated = self._factors.consolidate(to, self._averages)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict()`, from which training resumes bitwise-identically. After an error nothing has changed.

        Args:
            state_dict: of a preconditioner for the same model.
        """
        self._load(state_dict, lambda: None)

    def _load(self, state_dict: Any, load_others: Callable[[], None]) -> None:
        """Calls `load_others` after all checks and before the first write: if it raises, nothing has changed."""
        if not isinstance(state_dict, Mapping) or not {"steps", "layers"} <= state_dict.keys():
            raise ValueError("a state_dict of KFAC must have 'steps' and 'layers'")
        steps, layers = state_dict["steps"], state_dict["layers"]
        if not isinstance(steps, int) or not isinstance(layers, Mapping):
            raise ValueError("a state_dict of KFAC must have 'steps', a number, and 'layers', a dictionary")
        check_counts("the state_dict's 'steps'", [steps], [MOST_STEPS])
        with self._factors.kept():
            if layers:
                self._factors.settle()
                self._factors.check(layers)
            else:
                self._factors.forget()
            load_others()
        self._factors.restore(layers)
        self._steps = steps
        self._consolidated = None
        self._observed = 0
        self._watch.forget()

    def stats(self) -> dict[str, float]:
        """A flat dictionary for loggers. Synchronizes.

        steps; layers and left_out: numbers of layers; observations and refreshes, per layer; rejected: non-finite
        batches; failed: layers whose latest refresh failed, which keep the previous one; worst_residual: of the latest
        inverses; scale: the latest factor of kl_clip.
        """
        counted = {"steps": self._steps, "layers": len(self._layers), "left_out": len(self.left_out)}
        return {name: float(value) for name, value in counted.items()} | self._factors.stats()

    def memory_report(self) -> MemoryReport:
        """Bytes of state without scratch; a forecast before the first step."""
        return MemoryReport([self._memory()], forecast=not self._factors.made())

    def _memory(self) -> dict[str, int]:
        count = len(self._layers)
        bytes_of = {"state": self._factors.forecast(), "scratch": 0, "refresh": 0, "recorded": 0}
        return bytes_of | {"blocks": count, "factors": 2 * count}

    def __repr__(self) -> str:
        rows = [f"  {name}: left out, {reason}" for name, reason in self.left_out.items()]
        return "\n".join([f"{type(self).__name__}, {self._fixed['compute_method']}: {', '.join(self.layers)}", *rows])

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} has hooks on its model and cannot be copied or pickled: create one for the other "
            "model and load this one's state_dict()"
        )


def loss_scale_of(scaler: Any) -> torch.Tensor | None:
    """The loss scale on the device. The public `get_scale()` would synchronize."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, torch.Tensor):
        scale = torch.tensor(scaler.get_scale(), device="cpu")
    return scale.detach().float()


# --- arguments --------------------------------------------------------------------------------------------------------


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {shown(value)}")
    return value


def word(name: str, value: Any, words: tuple[str, ...]) -> str:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {shown(value)}")
    return value


def _checked_dtype(factor_dtype: Any) -> torch.dtype | None:
    if factor_dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"factor_dtype must be torch.float32 or torch.float64, got {shown(factor_dtype)}")
    return factor_dtype


def _sampled_gradient(outputs: torch.Tensor, loss: str, mean: bool) -> torch.Tensor:
    """The gradient of each sample's loss with respect to the outputs, for labels drawn from the model. Where the loss
    is a mean over the T labels of a sample, the sum of T independent gradients is divided by sqrt(T), not T: then its
    second moment is the curvature of that mean."""
    if loss == "mse":
        numbers = max(1, outputs[0].numel()) if mean and len(outputs) else 1
        return torch.randn_like(outputs) * math.sqrt(2.0 / numbers)
    if outputs.ndim < 2:
        raise ValueError(f"outputs has shape {list(outputs.shape)}, expected [samples, classes, ...]")
    probabilities = outputs.float().softmax(1).movedim(1, -1)
    classes = probabilities.shape[-1]
    labels = torch.multinomial(probabilities.reshape(-1, classes), 1).reshape(probabilities.shape[:-1])
    gradient = probabilities - nn.functional.one_hot(labels, classes)
    positions = labels[0].numel() if mean and len(labels) else 1
    return (gradient / math.sqrt(max(1, positions))).movedim(-1, 1).to(outputs.dtype)
