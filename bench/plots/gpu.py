#!/usr/bin/env python3
"""Draws the sweeps of bench/compare.py: inverse roots, time against the size and against the batch.

    bench/plots/gpu.py bench/results/h200.json docs/images

writes performance-gpu-time.svg and performance-gpu-batch.svg. Points without an error in the file failed,
and are left out of the lines.
"""

import json
import os
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
SIZE_COLORS = ("#4269d0", "#3ca951", "#efb118", "#ff725c", "#a463f2", "#6cc5b0")


def by_size(points):
    """One line per method, of the sweep over sizes."""
    lines = []
    for name, color in COLORS.items():
        mine = [p for p in points if p["sweep"] == "size" and p["method"] == name]
        pairs = [(p["n"], p["us_per_matrix"]) for p in mine if p["error"] is not None]
        lines.append({"name": name, "color": color, "points": pairs, "dashed": name.startswith("torch")})
    return [line for line in lines if line["points"]]


def by_batch(points):
    """One line per size, of the sweep over batches, for the method the library takes by itself."""
    mine = [p for p in points if p["sweep"] == "batch" and p["method"] == "auto" and p["error"] is not None]
    sizes = sorted({p["n"] for p in mine})
    return [
        {
            "name": f"n = {n}",
            "color": SIZE_COLORS[i % len(SIZE_COLORS)],
            "points": sorted((p["batch"], p["us_per_matrix"]) for p in mine if p["n"] == n),
        }
        for i, n in enumerate(sizes)
    ]


def pictures(figures):
    device = figures["machine"]["device"]
    points = figures["sweeps"]
    kind = "A^(-1/4), float32, relative damping 1e-6, power-law spectrum"
    return {
        "time": log_lines(
            f"Time of one inverse root on {device}",
            f"{kind}; batches of about 2^24 elements; PyTorch's lines dashed",
            "n",
            "microseconds per matrix",
            by_size(points),
        ),
        "batch": log_lines(
            f"Inverse roots in batches on {device}",
            f"{kind}; the method `auto` takes",
            "matrices in the batch",
            "microseconds per matrix",
            by_batch(points),
        ),
    }


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    with open(sys.argv[1], encoding="ascii") as file:
        figures = json.load(file)
    for name, picture in pictures(figures).items():
        path = os.path.join(sys.argv[2], f"performance-gpu-{name}.svg")
        with open(path, "w", encoding="ascii") as file:
            file.write(picture)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
