"""Draws lines over two logarithmic axes as an SVG with the standard library alone."""

import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 78, 190, 78, 52
STYLE = (
    "<style>text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc;stroke-width:.6}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}}</style>"
)


def _text(x, y, content, **attributes):
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(content)}</text>'


def _label(value):
    """1000 as 1000, 1e-06 as 1e-6."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


class _Axis:
    """Positions along one axis, from `start` to `stop` on the page."""

    def __init__(self, values, start, stop, base):
        self.base = base
        self.low = math.floor(math.log(min(values), base) + 1e-9)
        self.high = max(math.ceil(math.log(max(values), base) - 1e-9), self.low + 1)
        self.start, self.stop = start, stop

    def at(self, value):
        share = (math.log(value, self.base) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self):
        return [float(self.base) ** k for k in range(self.low, self.high + 1)]


def _grid(x, y, x_name, y_name):
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    parts = []
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, _label(tick), text_anchor="end"))
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 18, _label(tick), text_anchor="middle"))
    parts.append(f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    parts.append(f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{bottom}"/>')
    parts.append(_text((left + right) / 2, HEIGHT - 12, x_name, text_anchor="middle"))
    parts.append(_text(left - 66, TOP - 10, y_name))
    return parts


def _series(x, y, line):
    dash = ' stroke-dasharray="5 4"' if line.get("dashed") else ""
    points = [(x.at(a), y.at(b)) for a, b in line["points"]]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline fill="none" stroke="{line["color"]}" stroke-width="2"{dash} points="{path}"/>'


def _legend(lines):
    parts = []
    for i, line in enumerate(lines):
        y = TOP + 12 + 20 * i
        x = WIDTH - RIGHT + 16
        dash = ' stroke-dasharray="5 4"' if line.get("dashed") else ""
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{line["color"]}" stroke-width="2"{dash}/>'
        )
        parts.append(_text(x + 30, y + 4, line["name"]))
    return parts


def log_lines(title, remark, x_name, y_name, lines):
    """`lines` are dicts with name, color, points (pairs of positive numbers) and, if wanted, dashed. The horizontal
    axis counts in powers of two, the vertical in powers of ten; lines without points are named and not drawn."""
    points = [point for line in lines for point in line["points"]]
    if not points:
        raise ValueError(f"nothing to draw for {title!r}")
    x = _Axis([p[0] for p in points], LEFT, WIDTH - RIGHT, 2)
    y = _Axis([p[1] for p in points], HEIGHT - BOTTOM, TOP, 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        STYLE,
        _text(12, 22, title, font_size="16", font_weight="bold"),
        _text(12, 40, remark),
        *_grid(x, y, x_name, y_name),
    ]
    for line in lines:
        parts += [_series(x, y, line)] if line["points"] else []
    return "\n".join([*parts, *_legend(lines), "</svg>"]) + "\n"
