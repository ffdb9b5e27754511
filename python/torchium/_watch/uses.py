"""What is known of one call of a part of a model, and who gets it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from torchium.grad_sample.plan import Part

PARTS = {"weight": 1, "bias": 2}  # as tch_grad_part counts them


class Use:
    """One call of a part. Of a layer: its input and, once there, its output's gradient, both with the samples first."""

    __slots__ = ("batch", "gradient", "input", "parameters", "part", "round", "version")

    def __init__(self, part: Part, parameters: dict[str, nn.Parameter], batch: int, round: int) -> None:
        self.part, self.parameters, self.batch, self.round = part, parameters, batch, round
        self.input: Tensor | None = None
        self.gradient: Tensor | None = None
        self.version = 0

    def release(self) -> None:
        self.input = self.gradient = None


class Sink(Protocol):
    """Who gets what is captured. Called in the backward pass, except for `made`."""

    def made(self, use: Use) -> None:
        """A part was called: its gradients may come."""

    def arrived(self, use: Use) -> None:
        """The input and the output's gradient of a layer are there."""

    def formed(self, use: Use, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The gradients [B, ...] of a unit's parameter are there."""
