"""Norms of per-sample gradients without materializing them. A layer's norms are added as soon as the backward pass
reaches it, and its input is released; only weights that are used repeatedly wait for the end, since their norms need
all uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchium._messages import shown
from torchium._watch.uses import PARTS, Use
from torchium.grad_sample import products
from torchium.grad_sample.capture import Capture
from torchium.grad_sample.plan import Plan


def check_reduction(loss_reduction: str) -> None:
    if not isinstance(loss_reduction, str) or loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {shown(loss_reduction)}")


class NormSink:
    """Accumulates squared norms, float64 [B]."""

    def __init__(self, plan: Plan, mean: bool) -> None:
        self.plan, self.mean = plan, mean
        self.squares: Tensor | None = None
        self.uses: dict[nn.Parameter, list[Use]] = {}
        self.waiting: list[Use] = []
        self.added: set[nn.Parameter] = set()
        self.forms: list[tuple[Use, nn.Parameter, Tensor]] = []

    def scale(self, use: Use) -> float:
        return float(use.batch) if self.mean else 1.0

    def total(self, use: Use, like: Tensor) -> Tensor:
        if self.squares is None:
            self.squares = torch.zeros(use.batch, dtype=torch.float64, device=like.device)
        if self.squares.numel() != use.batch:
            raise RuntimeError(f"{use.part.title} has {use.batch} samples, and others before it {len(self.squares)}")
        return self.squares

    # --- during the backward pass -------------------------------------------------------------------------------------

    def made(self, use: Use) -> None:
        for p in use.parameters.values():
            self.uses.setdefault(p, []).append(use)

    def is_alone(self, use: Use, parameter: nn.Parameter) -> bool:
        """Tensors that torch.func.functional_call substitutes for a parameter are unknown."""
        return len(self.uses[parameter]) == 1 and len(self.plan.owners.get(parameter, ())) == 1

    def check_new(self, use: Use, parameter: nn.Parameter) -> None:
        if parameter in self.added:
            raise RuntimeError(
                f"{use.part.title} was used again after the norms of {self.plan.name(parameter)} had been added: run "
                "the model and the backward pass once"
            )

    def arrived(self, use: Use) -> None:
        for p in use.parameters.values():
            self.check_new(use, p)
        if all(self.is_alone(use, p) for p in use.parameters.values()):
            total = self.total(use, use.gradient)
            products.add_norms(use, products.parts_of(use), self.scale(use), total)
            self.added.update(use.parameters.values())
            self.after(use)
        else:
            self.waiting.append(use)

    def formed(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.check_new(use, parameter)
        if self.is_alone(use, parameter):
            products.add_formed_norms(gradient, self.scale(use), self.total(use, gradient))
            self.added.add(parameter)
            self.after_forming(use, parameter, gradient)
        else:
            self.forms.append((use, parameter, gradient))

    def after(self, use: Use) -> None:
        use.release()

    def after_forming(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        pass

    # --- at the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Adds the norms of weights with several uses."""
        by_parameter: dict[nn.Parameter, list[tuple[Use, str]]] = {}
        for use in self.waiting:
            for name, p in use.parameters.items():
                by_parameter.setdefault(p, []).append((use, name))
        formed = {p for _, p, _ in self.forms}
        together: dict[tuple[int, ...], tuple[list[Use], int]] = {}
        for p, places in by_parameter.items():
            if p in formed or not self.can_join(places):
                formed.add(p)
                continue
            uses = [use for use, _ in places]
            key = tuple(id(use) for use in uses)
            together[key] = (uses, together.get(key, (uses, 0))[1] | PARTS[places[0][1]])
        for uses, parts in together.values():
            self.add_joined(uses, parts)
        for p in formed:
            self.add_formed(p, by_parameter.get(p, []))
        for use in self.waiting:
            self.after(use)
        for form in self.forms:
            self.after_forming(*form)
        self.waiting, self.forms = [], []

    def can_join(self, places: list[tuple[Use, str]]) -> bool:
        kinds = {use.part.kind for use, _ in places}
        names = {name for _, name in places}
        return len(places) == 1 or (len(names) == 1 and kinds <= {"linear", "embedding"})

    def add_joined(self, uses: list[Use], parts: int) -> None:
        total, scale = self.total(uses[0], uses[0].gradient), self.scale(uses[0])
        by_kind = {
            kind: products.as_one([use for use in uses if use.part.kind == kind])
            for kind in {use.part.kind for use in uses}
        }
        for use in by_kind.values():
            products.add_norms(use, parts, scale, total)
        if len(by_kind) == 2 and parts & PARTS["weight"]:
            products.add_tied_norms(by_kind["embedding"], by_kind["linear"], scale, total)

    def add_formed(self, parameter: nn.Parameter, places: list[tuple[Use, str]]) -> None:
        """Materializes, sums and discards the gradients of one parameter."""
        gradients = [(use, gradient) for use, p, gradient in self.forms if p is parameter]
        gradients += [(use, products.samples(use, 1.0, (name,))[parameter]) for use, name in places]
        first, whole = gradients[0]
        for use, gradient in gradients[1:]:
            self.total(use, gradient)
            whole = whole + gradient
        products.add_formed_norms(whole, self.scale(first), self.total(first, whole))


class per_sample_norms:
    """Norms of per-sample gradients, |g_i| over all trainable parameters, in one pass and without materializing them.

    The `with` block contains one pass: the model, the loss, one backward. Then `norms` is [B].

    Args:
        model: any module; see `GradSampleModule` for supported layers.
        batch_first: as in `GradSampleModule`.
        loss_reduction: "mean" or "sum", the loss's reduction over samples.
        gradients: whether to compute the ordinary gradients too; otherwise `p.grad` is unchanged.
        strict: as in `GradSampleModule`.

    Examples:
        >>> with torchium.per_sample_norms(model) as result:
        ...     loss_fn(model(x), y).backward()
        >>> result.norms
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        gradients: bool = False,
        strict: bool = True,
    ) -> None:
        check_reduction(loss_reduction)
        self.model, self.loss_reduction = model, loss_reduction
        self.plan = Plan(model, strict)
        self.capture = Capture(model, self.plan, self.sink(), batch_first, gradients)
        self.squared_norms: Tensor | None = None

    def sink(self) -> NormSink:
        """One per pass: it accumulates the norms of the layers."""
        return NormSink(self.plan, self.loss_reduction == "mean")

    def __enter__(self) -> Any:
        self.squared_norms = None
        self.capture.forget()
        self.capture.sink = self.sink()
        self.capture.install()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        capture, sink = self.capture, self.capture.sink
        capture.remove()
        capture.sink = self.sink()
        if kind is None:
            capture.checked = True
            with torch.no_grad():
                sink.finish()
            self.squared_norms = sink.squares
            if self.squared_norms is None and sink.uses:
                raise RuntimeError("no gradient came to any layer: run the backward pass inside the `with` block")
            if self.squared_norms is None and capture.samples() is not None:  # no trainable parameters
                place = next(self.model.parameters(), torch.empty(0)).device
                self.squared_norms = torch.zeros(capture.samples(), dtype=torch.float64, device=place)

    @property
    def norms(self) -> Tensor:
        """[B], in the parameters' type; float32 for half precision."""
        if self.squared_norms is None:
            raise RuntimeError("there are no norms yet: they are available after the `with` block")
        wide = any(p.dtype == torch.float64 for p in self.model.parameters())
        return self.squared_norms.clamp(min=0.0).sqrt_().to(torch.float64 if wide else torch.float32)
