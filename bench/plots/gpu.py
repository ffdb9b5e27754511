#!/usr/bin/env python3
"""Draws the sweep of bench/compare.py: inverse roots, time against the size.

bench/plots/gpu.py bench/results/h200.json docs/images/performance-gpu-time.svg
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from plots.lines import log_lines

COLORS = {
    "auto": "#3ca951",
    "newton": "#4269d0",
    "eigen": "#a463f2",
    "torch eigh": "#ff725c",
    "torch textbook Newton": "#efb118",
}


def method_lines(points):
    """One line per method. Points without an error failed, and are left out."""
    for name, color in COLORS.items():
        pairs = [(p["n"], p["us_per_matrix"]) for p in points if p["method"] == name and p["error"] is not None]
        if pairs:
            yield {"name": name, "color": color, "points": pairs, "dashed": name.startswith("torch")}


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    figures = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="ascii"))
    picture = log_lines(
        f"Time of one inverse root on {figures['machine']['device']}",
        "A^(-1/4), float32, relative damping 1e-6, power-law spectrum; batches of about 2^24 elements; PyTorch dashed",
        "n",
        "microseconds per matrix",
        list(method_lines(figures["sweeps"])),
    )
    pathlib.Path(sys.argv[2]).write_text(picture, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
