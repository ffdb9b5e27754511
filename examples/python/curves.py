"""Learning curves as an SVG file, in plain Python.

`draw` makes one picture with two panels that share a vertical axis: loss against steps and loss against seconds. Ink
and grid follow the reader's light or dark scheme; the colors of the curves are readable on both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM, GAP = 64, 24, 98, 50, 60
COLORS = ("#d6455d", "#d98a0b", "#1f9e89", "#3d7fd9", "#966bb8", "#7a8a3a", "#b86a4a", "#808080")
STYLE = (
    "text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc}.note{stroke:#777}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}.note{stroke:#999}}"
)


@dataclass
class Series:
    """One curve: the same losses over steps and over seconds."""

    label: str
    steps: Sequence[float]
    seconds: Sequence[float]
    losses: Sequence[float]


@dataclass
class Axis:
    """From values to places on the page, by their logarithm if `log` is set."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float) -> list[float]:
    """Multiples of the first of 1, 2, 5, 10, 20, ... that leaves at most seven of them in the range."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    distance = next(d * power for d in (1, 2, 5, 10) if (high - low) / (d * power) <= 6)
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [k * distance for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with as many of their multiples between them as the range leaves room for."""
    decades = math.log10(high / low)
    choices = (
        (0.4, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
        (1.2, (1, 1.5, 2, 3, 4, 6)),
        (3, (1, 2, 5)),
        (math.inf, (1,)),
    )
    multiples = next(multiples for most, multiples in choices if decades < most)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**k for k in powers for m in multiples if low * 0.999 <= m * 10.0**k <= high * 1.001]


def line(points: Sequence[tuple[float, float]], look: str, width: float) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline fill="none" {look} stroke-width="{width:g}" points="{places}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def grid(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    """Axes with their ticks and names."""
    parts = []
    for tick in y.ticks():
        at = y.place(tick)
        parts += [
            line([(x.start, at), (x.stop, at)], 'class="grid"', 0.6),
            text(x.start - 8, at + 4, f"{tick:g}", "end"),
        ]
    for tick in x.ticks():
        at = x.place(tick)
        parts += [
            line([(at, y.start), (at, y.stop)], 'class="grid"', 0.6),
            text(at, y.start + 18, f"{tick:g}", "middle"),
        ]
    parts.append(line([(x.start, y.stop), (x.start, y.start), (x.stop, y.start)], 'class="axis"', 1))
    parts.append(text(x.start, y.stop - 10, y_label, "middle"))
    parts.append(text((x.start + x.stop) / 2, y.start + 38, x_label, "middle"))
    return parts


def curve(x: Axis, y: Axis, xs: Sequence[float], losses: Sequence[float], look: str) -> str:
    shown = [(a, b) for a, b in zip(xs, losses, strict=True) if math.isfinite(b) and b > 0]
    return line([(x.place(a), y.place(b)) for a, b in shown], look + ' stroke-linejoin="round"', 2)


def legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], float(LEFT)
    for color, one in zip(COLORS, series, strict=False):
        parts += [line([(x, 62), (x + 24, 62)], f'stroke="{color}"', 3), text(x + 30, 66, one.label)]
        x += 30 + 8 * len(one.label) + 20
    return parts


def vertical(series: Sequence[Series], floor: float | None) -> Axis:
    losses = [v for one in series for v in one.losses if math.isfinite(v) and v > 0] or [1.0]
    low = min(*losses, floor) if floor else min(losses)
    return Axis(low / 1.02, max(max(losses), low * 1.1), HEIGHT - BOTTOM, TOP, log=True)


def draw(
    path: str | Path,
    series: Sequence[Series],
    title: str,
    subtitle: str = "",
    y_label: str = "loss",
    floor: float | None = None,
    floor_label: str = "",
) -> None:
    """Writes the picture. `floor` is a loss to be marked by a dashed line, such as the best that is possible."""
    y = vertical(series, floor)
    width = (WIDTH - LEFT - RIGHT - GAP) / 2
    parts = [text(12, 24, title, size=17), text(12, 44, subtitle), *legend(series)]
    for panel, x_label in enumerate(("steps", "seconds")):
        start = LEFT + panel * (width + GAP)
        runs = [(one.steps, one.seconds)[panel] for one in series]
        x = Axis(0, max((max(xs, default=0) for xs in runs), default=0) or 1, start, start + width)
        parts += grid(x, y, x_label, y_label)
        if floor:
            at = y.place(floor)
            parts.append(line([(x.start, at), (x.stop, at)], 'class="note" stroke-dasharray="5 4"', 1))
            parts.append(text(x.stop, at - 6, floor_label, "end", 12))
        for color, one, xs in zip(COLORS, series, runs, strict=False):
            parts.append(curve(x, y, xs, one.losses, f'stroke="{color}"'))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif">\n<style>{STYLE}</style>\n'
    )
    Path(path).write_text(head + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")
