"""GradSampleModule: a wrapper of a model that adds per-sample gradients. Names are those of Opacus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchium._watch.uses import Use
from torchium._watch.watch import backward_number
from torchium.grad_sample import products
from torchium.grad_sample.capture import Capture
from torchium.grad_sample.norms import check_reduction
from torchium.grad_sample.plan import Plan


class SampleSink:
    """Writes `p.grad_sample`. Uses of one parameter in one pass are summed; a second pass while it exists
    is an error."""

    def __init__(self, plan: Plan, mean: bool) -> None:
        self.plan, self.mean = plan, mean
        self.passes: dict[nn.Parameter, tuple[int, int]] = {}

    def made(self, use: Use) -> None:
        pass

    def arrived(self, use: Use) -> None:
        scale = float(use.batch) if self.mean else 1.0
        for parameter, gradient in products.samples(use, scale).items():
            self.add(use, parameter, gradient.to(parameter.dtype))
        use.release()

    def formed(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        # A copy: autograd may use its tensor elsewhere.
        self.add(use, parameter, gradient * (use.batch if self.mean else 1))

    def add(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        now = (use.round, backward_number())  # without the latter, two forwards before one backward are an error
        present = getattr(parameter, "grad_sample", None)
        if present is None:
            parameter.grad_sample = gradient
            self.passes[parameter] = now
            return
        before = self.passes.get(parameter, (-1, -1))
        name = self.plan.name(parameter)
        if now[0] != before[0] and (now[1] < 0 or now[1] != before[1]):
            raise RuntimeError(
                f"{name}.grad_sample is still there from an earlier backward pass: use it, and call zero_grad() of the "
                "GradSampleModule (or set it to None) before the next"
            )
        if present.shape != gradient.shape:
            raise RuntimeError(f"{name} had {len(present)} samples in one use and has {len(gradient)} in another")
        present += gradient


class GradSampleModule(nn.Module):
    """A model whose parameters get per-sample gradients in an ordinary backward pass.

    After `loss.backward()` every trainable parameter has `p.grad_sample`, [B, *p.shape] in its type, in addition
    to `p.grad`. With reduction "mean" the mean of `grad_sample` is `grad`, with "sum" its sum.

    Rules are for Linear, Conv1d to Conv3d, Embedding, EmbeddingBag, LayerNorm, RMSNorm, GroupNorm and InstanceNorm. Any
    other module with its own parameters is run per sample, including its submodules, by torch.func.vmap or in a loop.
    Unsupported cases raise an error that names them: in the constructor batch norm in training mode, in a pass a module
    without a rule that mixes samples, a parameter used outside its module, an input without the batch dimension, a
    transform of torch.func outside of `paused()`, a second backward.

    Args:
        model: modified in place, see `to_standard_module`.
        batch_first: False for sequence models whose tensors are [T, B, ...].
        loss_reduction: "mean" or "sum", the loss's reduction over samples.
        strict: False leaves unsupported layers without a `grad_sample` instead of raising an error, and permits batch
            norm.

    Examples:
        >>> model = torchium.GradSampleModule(model)
        >>> loss_fn(model(x), y).backward()
        >>> [p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]
    """

    def __init__(
        self, model: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean", strict: bool = True
    ) -> None:
        super().__init__()
        check_reduction(loss_reduction)
        plan = Plan(model, strict)
        self._module = model
        self.batch_first, self.loss_reduction, self.strict = batch_first, loss_reduction, strict
        self._capture = Capture(model, plan, SampleSink(plan, loss_reduction == "mean"), batch_first, True)
        self._capture.install()
        for p in model.parameters():
            p.grad_sample = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def disable_hooks(self) -> None:
        """Disables `grad_sample` for the following passes."""
        self._capture.enabled = False

    def enable_hooks(self) -> None:
        """Enables `grad_sample` for the following passes."""
        self._capture.enabled = True

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Passes inside compute no `grad_sample`, and may use torch.func."""
        return self._capture.paused()

    def remove_hooks(self) -> None:
        """Restores the original model; existing `grad_sample` tensors remain."""
        self._capture.remove()

    def to_standard_module(self) -> nn.Module:
        """The original model, without hooks and `grad_sample`."""
        self.remove_hooks()
        for p in self._module.parameters():
            p.__dict__.pop("grad_sample", None)
        return self._module

    # --- the model inside ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for p in self._module.parameters():
            p.grad_sample = None

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that get a `grad_sample`."""
        return ((name, p) for name, p in self._module.named_parameters() if p.requires_grad)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The model's."""
        if not (destination is None or isinstance(destination, dict)):
            raise TypeError(f"destination must be a dictionary, got {type(destination).__name__}")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, got {type(prefix).__name__}")
        return self._module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        for name in state_dict if isinstance(state_dict, Mapping) else ():
            if not isinstance(name, str):
                raise TypeError(f"state_dict has a key of type {type(name).__name__}, expected names")
        return self._module.load_state_dict(state_dict, strict, assign)

    def __reduce__(self) -> Any:
        """Copies the model and gives the copy its own hooks."""
        options = {"batch_first": self.batch_first, "loss_reduction": self.loss_reduction, "strict": self.strict}
        return _again, (self._module, options, bool(self._capture.handles), self._capture.enabled)


def _again(model: nn.Module, options: dict[str, Any], installed: bool, enabled: bool) -> GradSampleModule:
    made = GradSampleModule(model, **options)
    made._capture.enabled = enabled
    if not installed:
        made.remove_hooks()
    return made
