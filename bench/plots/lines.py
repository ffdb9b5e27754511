"""Draws lines over linear axes as an SVG, with the standard library only."""

import math
from xml.sax.saxutils import escape

STYLE = (
    "<style>text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc;stroke-width:.6}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}}</style>"
)


def text(x, y, content, **attributes):
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(content)}</text>'


def segment(x1, y1, x2, y2, attributes):
    return f'<line {attributes} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def look(line, width):
    dash = f' stroke-dasharray="{line["dash"]}"' if line.get("dash") else ""
    return f'stroke="{line["color"]}" stroke-width="{width}"{dash}'


class Axis:
    """Maps values between `low` and `high` to the page."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def at(self, value, start, stop):
        return start + (value - self.low) / (self.high - self.low) * (stop - start)

    def ticks(self):
        """Multiples of the first of 1, 2, 5, 10, ... with at most eight of them."""
        spread = self.high - self.low
        power = 10.0 ** math.floor(math.log10(spread / 8))
        step = next(d * power for d in (1, 2, 5, 10) if spread / (d * power) <= 8)
        return [k * step for k in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def label(value):
    """1000 as 1000, 1e-06 as 1e-6."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def panel(box, x, y, names, lines):
    """Grid, axis labels, and lines, in the box (left, top, right, bottom). A line has `color`, `points`, and optionally
    `dash` and `width`."""
    left, top, right, bottom = box
    parts = []
    for tick in y.ticks():
        at = y.at(tick, bottom, top)
        parts += [segment(left, at, right, at, 'class="grid"'), text(left - 7, at + 4, label(tick), text_anchor="end")]
    for tick in x.ticks():
        at = x.at(tick, left, right)
        parts += [segment(at, top, at, bottom, 'class="grid"')]
        parts += [text(at, bottom + 17, label(tick), text_anchor="middle")]
    parts.append(text((left + right) / 2, bottom + 34, names[0], text_anchor="middle"))
    parts.append(text(left - 44, top - 10, names[1]))
    for line in lines:
        path = " ".join(f"{x.at(a, left, right):.1f},{y.at(b, bottom, top):.1f}" for a, b in line["points"])
        parts += [f'<polyline fill="none" {look(line, line.get("width", 1.8))} points="{path}"/>'] if path else []
    return parts


def legend(left, top, lines, columns=1, width=470):
    """The legend from `top` down, in columns."""
    parts = []
    for k, line in enumerate(lines):
        x, y = left + k % columns * width, top + 19 * (k // columns)
        parts += [segment(x, y, x + 26, y, look(line, 2.4)), text(x + 32, y + 4, line["name"], font_size="11")]
    return parts


def page(width, height, title, remark, *parts, font_size=12):
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{font_size}">'
    )
    said = [text(12, 22, title, font_size="16", font_weight="bold"), text(12, 42, remark)] if title else []
    return "\n".join([head, STYLE, *said, *parts, "</svg>"]) + "\n"
