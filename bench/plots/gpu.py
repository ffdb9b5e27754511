#!/usr/bin/env python3
"""Plots the sweep of bench/compare.py: time of inverse roots over size.

bench/plots/gpu.py bench/results/h200.json docs/images/performance-gpu-time.svg
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from plots.lines import Axis, legend, page, panel

COLORS = {
    "auto": "#3ca951",
    "newton": "#4269d0",
    "eigen": "#a463f2",
    "torch eigh": "#ff725c",
    "torch textbook Newton": "#efb118",
}


def method_lines(points):
    """One line per method. Points without an error failed, and are omitted."""
    for name, color in COLORS.items():
        pairs = [(p["n"], p["us_per_matrix"]) for p in points if p["method"] == name and p["error"] is not None]
        if pairs:
            yield {"name": name, "color": color, "points": pairs, "dash": "5 4" if name.startswith("torch") else ""}


def draw(figures):
    lines = list(method_lines(figures["sweeps"]))
    sizes, times = ([point[k] for line in lines for point in line["points"]] for k in (0, 1))
    x, y = Axis(min(sizes), max(sizes), 2), Axis(min(times), max(times), 10)
    remark = "A^(-1/4), float32, relative damping 1e-6, power law; batches of about 2^24 elements; PyTorch dashed"
    shown = panel((78, 78, 570, 388), x, y, ("n", "microseconds per matrix"), lines)
    title = f"Time of one inverse root on {figures['machine']['device']}"
    return page(760, 440, title, remark, *shown, *legend(586, 90, lines))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="ascii"))
    pathlib.Path(sys.argv[2]).write_text(draw(found), encoding="ascii")
