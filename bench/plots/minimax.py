"""Tables and picture of docs/numerics/minimax.md, computed by the library's own C code.

    python3 bench/plots/minimax.py > tables.md        (also rewrites docs/images/minimax.svg)

Needs a C compiler and nothing else: the two source files are compiled into a temporary library.
"""

import ctypes
import math
import os
import subprocess
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_STEPS = 40
MAX_POLES = 24
ROOTS = (1, 2, 3, 4, 6, 8)


class Step(ctypes.Structure):
    _fields_ = [("c", ctypes.c_double * 5), ("lo", ctypes.c_double), ("hi", ctypes.c_double)]


def load_library(folder):
    path = Path(folder) / "minimax.so"
    sources = [str(REPOSITORY / "src/linalg" / name) for name in ("minimax.c", "minimax_rational.c")]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=gnu17", "-O2", "-shared", "-fPIC", *sources, "-lm", "-o", path], check=True)
    library = ctypes.CDLL(str(path))
    real, integer = ctypes.c_double, ctypes.c_int
    library.tchi_minimax_plan.argtypes = [integer, integer, real, real, ctypes.POINTER(Step)]
    library.tchi_minimax_poles.argtypes = [integer, real, real] + 3 * [ctypes.POINTER(real)]
    return library


def make_plan(library, root, degree, lo, tolerance):
    steps = (Step * MAX_STEPS)()
    count = library.tchi_minimax_plan(root, degree, lo, tolerance, steps)
    return steps[:count]


def make_poles(library, root, lo, tolerance):
    shifts, weights, error = (ctypes.c_double * MAX_POLES)(), (ctypes.c_double * MAX_POLES)(), ctypes.c_double()
    count = library.tchi_minimax_poles(root, lo, tolerance, shifts, weights, ctypes.byref(error))
    return list(zip(shifts[:count], weights[:count], strict=True)), error.value


def run_plan(steps, root, x):
    """M and X after each step for the eigenvalue x; stops where they leave the range of numbers."""
    m, inverse_root, history = x, 1.0, []
    for step in steps:
        q = step.c[0] + m * (step.c[1] + m * step.c[2])
        inverse_root *= q
        m *= q**root
        if abs(m) > 1e6:
            return history, math.inf
        history.append(m)
    return history, abs(inverse_root * x ** (1 / root) - 1)


def largest_overshoot(steps, root, limit):
    """The largest excess over 1 up to which the error of X stays within the limit."""
    good = 0.0
    for i in range(1200):
        excess = 10 ** (-9 + 9 * i / 1200)
        if run_plan(steps, root, 1 + excess)[1] > limit:
            return good
        good = excess
    return good


def print_table(title, header, rows):
    print(f"\n{title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def products_of(root, degree, steps):
    """M^2 for degree 2, H^p by repeated squaring, H^p M and X H; the first X H is H itself, the last step leaves M."""
    power = root.bit_length() + root.bit_count() - 2
    return (degree - 1) * steps + max(steps - 1, 0) * (power + 2)


def print_plans(library):
    ends = (1e-2, 1e-4, 1e-6, 1e-8)

    def cell(root, degree, lo):
        steps = len(make_plan(library, root, degree, lo, 1e-6))
        return f"{steps} / {products_of(root, degree, steps)}"

    rows = [[str(p), str(d)] + [cell(p, d, lo) for lo in ends] for p in ROOTS for d in (1, 2)]
    print_table("Steps / products, tolerance 1e-6", ["p", "degree"] + [f"lo = {lo:.0e}" for lo in ends], rows)


def print_poles(library):
    ends, tolerances = (1e-2, 1e-4, 1e-6, 1e-8), (1e-2, 1e-3, 1e-4, 1e-6, 1e-10)

    def cell(root, lo, tolerance):
        poles, error = make_poles(library, root, lo, tolerance)
        return str(len(poles)) if error <= tolerance else f"({len(poles)}: {error:.0e})"

    rows = [[str(p), f"{lo:.0e}"] + [cell(p, lo, t) for t in tolerances] for p in (2, 4, 8) for lo in ends]
    print_table("Poles", ["p", "lo"] + [f"error ≤ {t:.0e}" for t in tolerances], rows)


def print_overshoot(library):
    ends = (1e-2, 1e-4, 1e-6)

    def cell(root, degree, lo):
        return f"{largest_overshoot(make_plan(library, root, degree, lo, 1e-6), root, 1e-3):.1e}"

    rows = [[str(p), str(d)] + [cell(p, d, lo) for lo in ends] for p in ROOTS for d in (1, 2)]
    print_table("Overshoot with an error of at most 1e-3", ["p", "degree"] + [f"lo = {lo:.0e}" for lo in ends], rows)


COLORS = ("#1b6ca8", "#2a9d8f", "#8ab17d", "#e9a83b", "#e76f51", "#9b2226")
LEFT, TOP, WIDTH, HEIGHT, GAP = 62, 44, 380, 260, 96


def draw_text(x, y, words, anchor="middle", size=12, fill="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{words}</text>'


def draw_line(points, color, width=1.6):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def draw_panel(left, title, across, up, ticks_across, ticks_up):
    """Frame, ticks and title; across and up map data to the picture."""
    parts = [f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    parts.append(draw_text(left + WIDTH / 2, TOP - 16, title, size=14, fill="#111"))
    for value, words in ticks_across:
        parts.append(draw_text(across(value), TOP + HEIGHT + 18, words))
    for value, words in ticks_up:
        parts.append(draw_line([(left, up(value)), (left + WIDTH, up(value))], "#ddd", 0.8))
        parts.append(draw_text(left - 6, up(value) + 4, words, "end"))
    parts.append(draw_text(left + WIDTH / 2, TOP + HEIGHT + 36, "eigenvalue x"))
    return parts


def draw_steps(library, left):
    lo, root = 1e-6, 4
    steps = make_plan(library, root, 2, lo, 1e-6)
    xs = [10 ** (-6 + 6 * i / 600) for i in range(601)]
    histories = [run_plan(steps, root, x)[0] for x in xs]

    def across(x):
        return left + WIDTH * (math.log10(x) + 6) / 6

    def up(m):
        return TOP + HEIGHT - HEIGHT * (math.log10(m) + 4.5) / 5.1

    ticks = [(10.0**e, f"1e{e}" if e else "1") for e in (-6, -4, -2, 0)]
    parts = draw_panel(left, "M after steps 1 to 4 (p = 4, degree 2)", across, up, ticks, ticks[1:])
    for s in range(4):
        parts.append(draw_line([(across(x), up(h[s])) for x, h in zip(xs, histories, strict=True)], COLORS[s]))
        parts.append(draw_text(left + 12, up(histories[0][s]) - (8 if s < 3 else -16), str(s + 1), fill=COLORS[s]))
    return parts


def draw_poles(library, left):
    lo, root = 1e-6, 4

    def across(x):
        return left + WIDTH * (math.log10(x) + 6) / 6

    def up(error):
        return TOP + HEIGHT / 2 - HEIGHT / 2 * error / 0.03

    ticks = [(10.0**e, f"1e{e}" if e else "1") for e in (-6, -4, -2, 0)]
    heights = [(e, f"{e:+.2f}" if e else "0") for e in (-0.02, -0.01, 0, 0.01, 0.02)]
    parts = draw_panel(left, "Relative error of 4, 5 and 6 poles (p = 4)", across, up, ticks, heights)
    for color, tolerance in ((COLORS[0], 2.5e-2), (COLORS[3], 8e-3), (COLORS[5], 3e-3)):
        poles, _ = make_poles(library, root, lo, tolerance)
        xs = [10 ** (-6 + 6 * i / 400) for i in range(401)]
        errors = [x ** (1 / root) * sum(w / (x + s) for s, w in poles) - 1 for x in xs]
        parts.append(draw_line([(across(x), up(e)) for x, e in zip(xs, errors, strict=True)], color))
    return parts


def draw_picture(library, path):
    width, height = LEFT + 2 * WIDTH + GAP + 20, TOP + HEIGHT + 50
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    parts += draw_steps(library, LEFT) + draw_poles(library, LEFT + WIDTH + GAP) + ["</svg>"]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main():
    with tempfile.TemporaryDirectory() as folder:
        library = load_library(folder)
        print_plans(library)
        print_poles(library)
        print_overshoot(library)
        draw_picture(library, REPOSITORY / "docs/images/minimax.svg")


if __name__ == "__main__":
    main()
