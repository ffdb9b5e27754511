#!/usr/bin/env python3
"""Draws the steps of bench/optim_compare.py: ours beside PyTorch's, on a logarithmic scale.

bench/plots/optim.py bench/results/optim-h200.json docs/images/performance-optimizers.svg
"""

import json
import math
import sys
from xml.sax.saxutils import escape

LEFT, RIGHT, WIDTH, TOP, BAR, GAP = 280, 130, 780, 76, 15, 12
OURS, THEIRS = "#3ca951", "#ff725c"


def text(x, y, content, **attributes):
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(content)}</text>'


def chosen(rows):
    """Rows with an anchor: label, ours, the fastest of the others and its name."""
    for row in rows:
        if row["anchors_ms"]:
            name, ms = min(row["anchors_ms"].items(), key=lambda item: item[1])
            yield f"{row['work']}, {row['size']}", row["ours_ms"], name, ms


def bars(device, rows):
    entries = list(chosen(rows))
    low = 10 ** math.floor(math.log10(min(ours for _, ours, _, _ in entries)))
    high = 10 ** math.ceil(math.log10(max(max(ours, ms) for _, ours, _, ms in entries)))
    unit = (WIDTH - LEFT - RIGHT) / math.log10(high / low)
    bottom = TOP + len(entries) * (2 * BAR + GAP)

    def at(ms):
        return LEFT + unit * math.log10(ms / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 30}" '
        f'viewBox="0 0 {WIDTH} {bottom + 30}" font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222}line{stroke:#8884}@media (prefers-color-scheme:dark){text{fill:#ddd}}</style>",
        text(12, 24, f"One step of an optimizer on {device}", font_size="16", font_weight="bold"),
        text(12, 44, "milliseconds, logarithmic: shorter is better; green ours, red PyTorch"),
    ]
    decade = low
    while decade <= high:
        x = at(decade)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(text(x, bottom + 16, f"{decade:g}", text_anchor="middle"))
        decade *= 10
    for i, (label, ours, name, ms) in enumerate(entries):
        y = TOP + i * (2 * BAR + GAP)
        parts.append(text(LEFT - 8, y + BAR + 4, label, text_anchor="end"))
        for k, (value, color, note) in enumerate(((ours, OURS, ""), (ms, THEIRS, f" {name}"))):
            top = y + k * BAR
            parts.append(
                f'<rect x="{LEFT}" y="{top + 1}" width="{at(value) - LEFT:.1f}" height="{BAR - 2}" fill="{color}"/>'
            )
            parts.append(text(at(value) + 5, top + 12, f"{value:.3g}{note}" if value < 1000 else f"{value:.0f}{note}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    with open(sys.argv[1], encoding="ascii") as file:
        figures = json.load(file)
    with open(sys.argv[2], "w", encoding="ascii") as file:
        file.write(bars(figures["machine"]["device"], figures["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
