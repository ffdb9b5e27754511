"""Draws the ratios of a comparison as an SVG with the standard library alone."""

from xml.sax.saxutils import escape

ROW, LEFT, WIDTH, TOP = 20, 210, 720, 64
LONGEST = 4.0  # longer bars are cut here; their label says how much it was
COLORS = {"eigen power": "#4269d0", "inverse root": "#3ca951", "kronecker": "#ff725c"}


def _text(x, y, content, **attributes):
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x}" y="{y}"{extra}>{escape(content)}</text>'


def _row(row, y, unit):
    length = min(row["ratio"], LONGEST) * unit
    label = f"{row['work']} {row['size']} {row['dtype']}"
    return [
        _text(LEFT - 8, y + 13, label, text_anchor="end"),
        f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 5}" '
        f'fill="{COLORS.get(row["work"], "#888")}"/>',
        _text(LEFT + length + 6, y + 13, f"{row['ratio']:.2f}  ({row['ours_ms']:.2f} ms)"),
    ]


def ratio_bars(rows):
    """One bar per row: how many times faster than PyTorch, with the line of equality."""
    unit = (WIDTH - LEFT - 150) / LONGEST
    height = TOP + ROW * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222}line{stroke:#222}"
        "@media (prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#ddd}}</style>",
        _text(12, 24, "Times faster than PyTorch on the same CPU", font_size="16", font_weight="bold"),
        _text(12, 44, "longer is better; the line marks equal times; ours in ms beside each bar"),
    ]
    for i, row in enumerate(rows):
        parts += _row(row, TOP + i * ROW, unit)
    x = LEFT + unit
    parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 20}" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
