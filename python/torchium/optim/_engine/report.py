"""What an optimizer takes, in bytes."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MemoryReport"]


class MemoryReport(dict[str, int]):
    """Bytes of `state`, of `scratch` that a step keeps, of what a `refresh` takes for its length, their sum as `peak`;
    and the numbers of `blocks` and `factors`. `forecast` tells whether the optimizer has taken them yet."""

    def __init__(self, parts: Iterable[dict[str, int]], forecast: bool) -> None:
        parts = list(parts)
        total = {name: sum(part[name] for part in parts) for name in ("state", "blocks", "factors")}
        # A forecast is of one group after the other, which share their scratch; figures are of devices, which do not.
        most = max if forecast else sum
        scratch, refresh = (most([part[name] for part in parts] or [0]) for name in ("scratch", "refresh"))
        peak = total["state"] + scratch + refresh
        super().__init__(
            state=total["state"],
            scratch=scratch,
            refresh=refresh,
            peak=peak,
            blocks=total["blocks"],
            factors=total["factors"],
        )
        self.forecast = forecast

    def __str__(self) -> str:
        size, unit = (2**20, "MiB") if self["peak"] >= 2**23 else (2**10, "KiB")
        rows = [f"{name:<8} {self[name] / size:12.1f} {unit}" for name in ("state", "scratch", "refresh", "peak")]
        matrices = f"{self['blocks']} blocks with {self['factors']} factors"
        return "\n".join(["forecast" if self.forecast else "in use", *rows, matrices])
