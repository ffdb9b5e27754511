#!/usr/bin/env python3
"""Draws the runs of bench/train_lm.py: the loss over steps and over seconds, side by side.

bench/plots/training.py bench/results/train-lm-33m.json docs/images/train-lm-33m.svg
"""

import json
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from plots.lines import STYLE, _text

WIDTH, PANEL, LEFT, GAP, TOP, HEIGHT = 960, 412, 56, 60, 66, 330
LEGEND, ROW, COLUMNS = 54, 19, 2  # below the panels
COLORS = {"adamw": "#ff725c", "muon": "#4269d0", "normuon": "#97bbf5", "shampoo": "#3ca951", "soap": "#a463f2"}
OTHER = "#9c6b4e"
DASHES = ("", "6 4", "2 3", "9 3 2 3")


def looks(runs):
    """Color and dashes of every run: a color for each method, whose first run, one of ours, has a plain line."""
    used, chosen = {}, {}
    for run in sorted(runs, key=lambda run: (not run["ours"], "-" in run["name"])):
        method = next((name for name in ("normuon", *COLORS) if name in run["name"]), None)
        color = COLORS.get(method, OTHER)
        k = used.setdefault(color, 0)
        used[color] += 1
        chosen[run["name"]] = color, DASHES[k % len(DASHES)]
    return chosen


def ticks(low, high):
    """Multiples of the first of 1, 2, 5, 10, ... that leaves at most eight of them."""
    power = 10.0 ** math.floor(math.log10((high - low) / 8))
    distance = next(d * power for d in (1, 2, 5, 10) if (high - low) / (d * power) <= 8)
    return [k * distance for k in range(math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9) + 1)]


def scale(low, high, start, stop):
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def points(run, axis):
    line = run["curve"]
    return [(a, b) for a, b in zip(line[axis], line["losses"], strict=True) if b is not None]


def limits(runs):
    """From the least loss to the highest after a tenth of the steps: the fall before is much the same for all."""
    shown = [b for run in runs for a, b in points(run, "steps") if a >= 0.1 * run["curve"]["steps"][-1]]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    room = 0.03 * (high - low) or 0.1
    return low - room, high + room


def panel(left, runs, axis, vertical, chosen):
    low, high = vertical
    most = max(run["curve"][axis][-1] for run in runs) or 1.0
    x, y = scale(0, most, left, left + PANEL), scale(low, high, HEIGHT + TOP, TOP)
    parts = [_text(left + PANEL / 2, HEIGHT + TOP + 34, axis, text_anchor="middle")]
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{left}" y1="{y(tick):.1f}" x2="{left + PANEL}" y2="{y(tick):.1f}"/>')
        parts.append(_text(left - 7, y(tick) + 4, f"{tick:g}", text_anchor="end"))
    for tick in ticks(0, most):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{HEIGHT + TOP}"/>')
        parts.append(_text(x(tick), HEIGHT + TOP + 17, f"{tick:g}", text_anchor="middle"))
    for run in runs:
        color, dash = chosen[run["name"]]
        inside = [(x(a), y(b)) for a, b in points(run, axis) if b <= high]
        if inside:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in inside)
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.8"{dashed(dash)} points="{path}"/>')
    return parts


def dashed(dash):
    return f' stroke-dasharray="{dash}"' if dash else ""


def legend(runs, chosen):
    parts = []
    for k, run in enumerate(runs):
        color, dash = chosen[run["name"]]
        x, y = LEFT - 30 + (k % COLUMNS) * (PANEL + GAP), TOP + HEIGHT + LEGEND + ROW * (k // COLUMNS)
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{color}" stroke-width="2.4"{dashed(dash)}/>'
        )
        parts.append(_text(x + 32, y + 4, run["label"], font_size="11"))
    return parts


def draw(figures):
    runs, course = figures["runs"], figures["course"]
    height = TOP + HEIGHT + LEGEND + ROW * math.ceil(len(runs) / COLUMNS)
    chosen, vertical = looks(runs), limits(runs)
    remark = f"{course['model']}; {course['batch']} a step, {course['arithmetic']}; means of training loss over 5 steps"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        STYLE,
        _text(
            12,
            22,
            f"Training {course['parameters'] / 1e6:.3g} M parameters on Python sources, {figures['machine']['device']}",
            font_size="16",
            font_weight="bold",
        ),
        _text(12, 42, remark),
        *panel(LEFT, runs, "steps", vertical, chosen),
        *panel(LEFT + PANEL + GAP, runs, "seconds", vertical, chosen),
        *legend(runs, chosen),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(path, figures):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="ascii") as file:
        file.write(draw(figures))


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    with open(sys.argv[1], encoding="ascii") as file:
        write(sys.argv[2], json.load(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
