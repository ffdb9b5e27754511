"""Memory of an optimizer, methods of parameters, and statistics for loggers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchium import _C

from .._shared.sharding import local_tensor

__all__ = [
    "MemoryReport",
    "Method",
    "Summary",
    "SummaryRow",
    "UpdateMeter",
    "device_of_forecast",
    "engine_stats",
    "rates_of",
]


def device_of_forecast(device: torch.device) -> str:
    """The device of a forecast: a model on "meta" is assumed to be for a GPU if there is one."""
    if device.type != "meta":
        return str(device)
    return "cuda" if _C.device_count("cuda") > 0 else "cpu"


class MemoryReport(dict[str, int]):
    """Bytes of `state`, of persistent `scratch`, of temporary `refresh` memory, of the driver's memory for `recorded`
    steps on a GPU (estimated), and their sum as `peak`; the numbers of `blocks` and `factors`. `forecast`: whether this
    is an estimate before allocation."""

    def __init__(self, parts: Iterable[dict[str, int]], forecast: bool) -> None:
        parts = list(parts)
        total = {name: sum(part[name] for part in parts) for name in ("state", "recorded", "blocks", "factors")}
        # A forecast has an entry per group, and groups share scratch; actual figures have an entry per device.
        most = max if forecast else sum
        scratch, refresh = (most([part[name] for part in parts] or [0]) for name in ("scratch", "refresh"))
        peak = total["state"] + scratch + refresh + total["recorded"]
        super().__init__(
            state=total["state"],
            scratch=scratch,
            refresh=refresh,
            recorded=total["recorded"],
            peak=peak,
            blocks=total["blocks"],
            factors=total["factors"],
        )
        self.forecast = forecast

    def __str__(self) -> str:
        size, unit = (2**20, "MiB") if self["peak"] >= 2**23 else (2**10, "KiB")
        names = ["state", "scratch", "refresh", *(["recorded"] if self["recorded"] else []), "peak"]
        rows = [f"{name:<8} {self[name] / size:12.1f} {unit}" for name in names]
        matrices = f"{self['blocks']} blocks with {self['factors']} factors"
        return "\n".join(["forecast" if self.forecast else "in use", *rows, matrices])


class Method(NamedTuple):
    """The method of one parameter."""

    method: str
    reason: str
    lr: float | None  # None for frozen parameters
    group: int
    parameter: torch.Tensor
    label: str


class SummaryRow(NamedTuple):
    """Parameters with the same method, reason and learning rate."""

    method: str
    reason: str
    names: tuple[str, ...]
    elements: int
    lr: float | None  # None for frozen parameters


class Summary(tuple[SummaryRow, ...]):
    """Which parameters get which method, why, and at which learning rate: one row for each reason and rate, in order of
    appearance."""

    def __new__(cls, methods: Iterable[Method]) -> Summary:
        found: dict[tuple[str, str, float | None], list[tuple[str, int]]] = defaultdict(list)
        for m in methods:
            found[m.method, m.reason, m.lr].append((m.label, m.parameter.numel()))
        return super().__new__(
            cls,
            (
                SummaryRow(method, reason, tuple(name for name, _ in members), sum(count for _, count in members), lr)
                for (method, reason, lr), members in found.items()
            ),
        )

    def __str__(self) -> str:
        cells = [
            (
                row.method,
                row.reason,
                "" if row.lr is None else f"{row.lr:.4g}",
                f"{len(row.names)}",
                f"{row.elements:,}",
                _shortened(row.names),
            )
            for row in self
        ]
        head = ("method", "reason", "lr", "tensors", "elements", "")
        wide = [max(len(row[k]) for row in (head, *cells)) for k in range(5)]
        return "\n".join(
            "  ".join(
                [f"{row[k]:<{wide[k]}}" for k in range(2)] + [f"{row[k]:>{wide[k]}}" for k in range(2, 5)] + [row[5]]
            ).rstrip()
            for row in (head, *cells)
        )


def _shortened(names: tuple[str, ...]) -> str:
    """Abbreviates a long list to its first and last name."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]}, ..., {names[-1]}"


# --- statistics -------------------------------------------------------------------------------------------------------


def engine_stats(parts: list[dict[str, float]]) -> dict[str, float]:
    """Merges the statistics of several engines. Intervals and staleness appear only after a refresh."""
    told = {}
    for name in ("steps", "skipped", "refreshes", "failed", "worst_residual"):
        numbers = [part[name] for part in parts]
        told[name] = sum(numbers, 0.0) if name in ("refreshes", "failed") else max(numbers, default=0.0)
    count = sum(part["refreshed_factors"] for part in parts)
    for name in ("interval", "staleness") if count else ():
        told[f"{name}_mean"] = sum(part[f"{name}_mean"] * part["refreshed_factors"] for part in parts) / count
        told[f"{name}_max"] = max(part[f"{name}_max"] for part in parts)
    return told


def rates_of(methods: Iterable[Method]) -> dict[str, float]:
    """The learning rate of each method; per group if groups differ."""
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for m in methods:
        if m.lr is not None:
            rates[m.method][m.group] = m.lr
    return {
        f"lr/{method}" if len(set(of_groups.values())) == 1 else f"lr/{method}/{group}": rate
        for method, of_groups in rates.items()
        for group, rate in of_groups.items()
    }


class UpdateMeter:
    """The RMS of the next step's update, by method; for sharded parameters, of the local shard. A step skipped by a
    GradScaler is not measured: the next one is."""

    def __init__(self, optimizer: Any) -> None:
        self.is_measured = False
        self._before: list[tuple[Method, torch.Tensor]] = []
        self._moved: list[tuple[str, int, torch.Tensor]] = []  # method, elements, sum of squares
        self._hooks = [optimizer.register_step_pre_hook(self._keep), optimizer.register_step_post_hook(self._measure)]

    def _keep(self, optimizer: Any, *_: Any) -> None:
        trained = [m for m in optimizer._methods() if m.lr is not None]
        self._before = [(m, local_tensor(m.parameter).detach().clone()) for m in trained]

    def _measure(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        for m, before in self._before:
            moved = (local_tensor(m.parameter).detach() - before).double().square().sum()
            self._moved.append((m.method, before.numel(), moved))
        self._before = []
        self.is_measured = True

    def rms(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for method, count, moved in self._moved:
            sums[method] += moved.item()
            counts[method] += count
        return {f"update_rms/{method}": math.sqrt(sums[method] / max(counts[method], 1)) for method in sums}
