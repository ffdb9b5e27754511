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
from plots.lines import Axis, legend, page, panel

COLORS = {"adamw": "#ff725c", "muon": "#4269d0", "normuon": "#97bbf5", "shampoo": "#3ca951", "soap": "#a463f2"}
OTHER = "#9c6b4e"
DASHES = ("", "6 4", "2 3", "9 3 2 3")


def looks(runs):
    """Color and dashes of every run: a color for each method, whose first run, one of ours, has a plain line."""
    used, chosen = {}, {}
    for run in sorted(runs, key=lambda run: (not run["ours"], "-" in run["name"])):
        color = COLORS.get(next((name for name in ("normuon", *COLORS) if name in run["name"]), None), OTHER)
        k = used[color] = used.get(color, -1) + 1
        chosen[run["name"]] = {"name": run["label"], "color": color, "dash": DASHES[k % len(DASHES)]}
    return chosen


def points(run, axis):
    line = run["curve"]
    return [(a, b) for a, b in zip(line[axis], line["losses"], strict=True) if b is not None]


def limits(runs):
    """From the least loss to the highest after a tenth of the steps: the fall before is much the same for all."""
    shown = [b for run in runs for a, b in points(run, "steps") if a >= 0.1 * run["curve"]["steps"][-1]]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    room = 0.03 * (high - low) or 0.1
    return Axis(low - room, high + room)


def draw(figures):
    runs, course = figures["runs"], figures["course"]
    chosen, y, panels = looks(runs), limits(runs), []
    for left, axis in ((56, "steps"), (528, "seconds")):
        x = Axis(0, max(run["curve"][axis][-1] for run in runs) or 1.0)
        lines = [chosen[run["name"]] | {"points": [p for p in points(run, axis) if p[1] <= y.high]} for run in runs]
        panels += panel((left, 66, left + 412, 396), x, y, (axis, ""), lines)
    remark = f"{course['model']}; {course['batch']} a step, {course['arithmetic']}; means of training loss over 5 steps"
    title = f"Training {course['parameters'] / 1e6:.3g} M parameters on Python sources, {figures['machine']['device']}"
    names = legend(26, 450, [chosen[run["name"]] for run in runs], columns=2)
    return page(960, 450 + 19 * math.ceil(len(runs) / 2), title, remark, *panels, *names)


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
