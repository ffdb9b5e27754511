"""What an optimizer takes, in bytes, and which parameters get what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["MemoryReport", "Summary", "SummaryRow"]


class MemoryReport(dict[str, int]):
    """Bytes of `state`, of `scratch` that a step keeps, of what a `refresh` takes for its length, of the driver's
    memory for `recorded` steps on a GPU, which is an estimate, their sum as `peak`; and the numbers of `blocks` and
    `factors`. `forecast` tells whether the optimizer has taken them yet."""

    def __init__(self, parts: Iterable[dict[str, int]], forecast: bool) -> None:
        parts = list(parts)
        total = {name: sum(part[name] for part in parts) for name in ("state", "recorded", "blocks", "factors")}
        # A forecast is of one group after the other, which share their scratch; figures are of devices, which do not.
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


class SummaryRow(NamedTuple):
    """Parameters that get the same method for the same reason, at the same learning rate."""

    method: str
    reason: str
    names: tuple[str, ...]
    elements: int
    lr: float | None  # None for parameters that get nothing


class Summary(tuple[SummaryRow, ...]):
    """Which parameters get which method, why, and at which learning rate: one row for each reason and rate, in the
    order in which they come up."""

    def __new__(cls, found: Mapping[tuple[str, str, float | None], list[tuple[str, int]]]) -> Summary:
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
    """The first and the last of many."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]}, ..., {names[-1]}"
