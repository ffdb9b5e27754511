#!/usr/bin/env python3
"""Draws how many times faster ours is than the fastest other, for every row of bench/compare.py that has one, as an SVG
with the standard library alone.

    bench/plots/bars.py bench/results/h200.json docs/images/performance-gpu.svg
"""

import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from plots.lines import STYLE, _text

ROW, LEFT, WIDTH, TOP = 18, 330, 860, 64
FAST, SLOW = "#3ca951", "#ff725c"


def ratio_of(row):
    """The fastest other's time over ours; None where there is no other."""
    others = row.get("anchors_ms")
    return row.get("ratio") or (min(others.values()) / row["ours_ms"] if others else None)


def ratio_bars(title, rows):
    """A bar for each row on a logarithmic scale, from the line of equal times to the right where ours is faster."""
    rows = [row | {"ratio": ratio_of(row)} for row in rows if ratio_of(row)]
    low = min([0.5] + [row["ratio"] for row in rows])
    high = max([2.0] + [row["ratio"] for row in rows])
    unit = (WIDTH - LEFT - 150) / math.log2(high / low)
    height = TOP + ROW * len(rows) + 24

    def at(ratio):
        return LEFT + unit * math.log2(ratio / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        STYLE,
        _text(12, 24, title, font_size="16", font_weight="bold"),
        _text(12, 44, "fastest other over ours, logarithmic: the line marks equal times; ours in ms beside each bar"),
    ]
    for i, row in enumerate(rows):
        y, ends = TOP + i * ROW, sorted((at(1), at(row["ratio"])))
        label = f"{row['work']}, {row['size']}" + (f", {row['dtype']}" if "dtype" in row else "")
        parts.append(_text(LEFT - 8, y + 13, label, text_anchor="end"))
        color = FAST if row["ratio"] >= 1 else SLOW
        bar = f'x="{ends[0]:.1f}" y="{y + 2}" width="{ends[1] - ends[0]:.1f}" height="{ROW - 5}"'
        parts.append(f'<rect {bar} fill="{color}"/>')
        parts.append(_text(ends[1] + 6, y + 13, f"{row['ratio']:.3g}  ({row['ours_ms']:.3g} ms)"))
    parts.append(f'<line class="axis" x1="{at(1):.1f}" y1="{TOP - 6}" x2="{at(1):.1f}" y2="{height - 20}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    with open(sys.argv[1], encoding="ascii") as file:
        figures = json.load(file)
    with open(sys.argv[2], "w", encoding="ascii") as file:
        file.write(ratio_bars(f"Times faster than PyTorch, {figures['machine']['device']}", figures["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
