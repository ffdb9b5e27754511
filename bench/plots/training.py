#!/usr/bin/env python3
"""Plots the runs of bench/train_lm.py: the loss over steps and over seconds.

bench/plots/training.py bench/results/train-lm-33m.json docs/images/train-lm-33m.svg
bench/plots/training.py bench/results/train-lm-33m.json docs/images/headline.svg headline
"""

import json
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from plots.lines import Axis, legend, page, panel, segment, text

COLORS = {"adamw": "#ff725c", "muon": "#4269d0", "normuon": "#97bbf5", "shampoo": "#3ca951", "soap": "#a463f2"}
OTHER = "#9c6b4e"
# The label of a line, and its distance below the end.
HEADLINE = {
    "torch-adamw": ("AdamW", 5),
    "muon": ("Muon", 5),
    "shampoo": ("Shampoo", 22),
    "kl_shampoo": ("KL-Shampoo", 4),
}
DASHES = ("", "6 4", "2 3", "9 3 2 3")


def looks(runs):
    """Color and dashes of every run: one color per method, whose first run, one of Torchium's, is solid."""
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
    """From the minimum loss to the maximum after 10 % of the steps: before that all runs fall alike."""
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


def headline(figures):
    """Four of the lines over seconds, labeled at their ends, for a page as narrow as a phone's."""
    runs = {run["name"]: run for run in figures["runs"] if run["name"] in HEADLINE}
    left, top, right, bottom = box = 46, 32, 440, 290
    x = Axis(0, max(run["curve"]["seconds"][-1] for run in runs.values()))
    last = {name: points(run, "seconds")[-1] for name, run in runs.items()}
    y, chosen = Axis(min(loss for _, loss in last.values()) - 0.4, 5), looks(runs.values())
    shown = {name: [p for p in points(run, "seconds") if p[1] <= y.high] for name, run in runs.items()}
    lines = [chosen[name] | {"points": shown[name], "width": 2.6} for name in runs]
    parts = panel(box, x, y, ("seconds on one H200", "training loss"), lines)
    level = y.at(last["torch-adamw"][1], bottom, top)
    parts.append(
        segment(left, level, x.at(last["torch-adamw"][0], left, right), level, 'class="axis" stroke-dasharray="2 4"')
    )
    parts.append(text(left + 4, level + 18, "AdamW's loss"))
    for name, (seconds, loss) in last.items():
        label, below = HEADLINE[name]
        at = x.at(seconds, left, right) + 6, y.at(loss, bottom, top) + below
        parts.append(text(*at, label, font_weight="bold"))
    return page(560, 330, "", "", *parts, font_size=16)


def write(path, figures, draw=draw):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="ascii") as file:
        file.write(draw(figures))


def main():
    if sys.argv[3:] not in ([], ["headline"]) or len(sys.argv) < 3:
        print(__doc__)
        return 2
    with open(sys.argv[1], encoding="ascii") as file:
        write(sys.argv[2], json.load(file), headline if sys.argv[3:] else draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
