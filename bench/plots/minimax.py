"""Tables and plot of docs/numerics/minimax.md, computed by the library's own C code.

    python3 bench/plots/minimax.py > tables.md        (also rewrites docs/images/minimax.svg)

Needs only a C compiler: the two source files are compiled into a temporary library.
"""

import ctypes
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plots.lines import Axis, legend, page, panel

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
    """M and X after each step for the eigenvalue x; stops on overflow."""
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
    """The largest excess over 1 for which the error of X stays within the limit."""
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
EIGENVALUES = [10 ** (-6 + 6 * i / 600) for i in range(601)]


def step_lines(library):
    """M after each of the first four steps."""
    steps = make_plan(library, 4, 2, 1e-6, 1e-6)
    histories = [run_plan(steps, 4, x)[0] for x in EIGENVALUES]
    for k in range(4):
        points = [(x, h[k]) for x, h in zip(EIGENVALUES, histories, strict=True)]
        yield {"name": f"step {k + 1}", "color": COLORS[k], "points": points}


def pole_lines(library):
    for color, tolerance in ((COLORS[0], 2.5e-2), (COLORS[3], 8e-3), (COLORS[5], 3e-3)):
        poles, _ = make_poles(library, 4, 1e-6, tolerance)
        points = [(x, x**0.25 * sum(w / (x + s) for s, w in poles) - 1) for x in EIGENVALUES]
        yield {"name": f"{len(poles)} poles", "color": color, "points": points}


def draw_picture(library, path):
    x, steps, poles = Axis(1e-6, 1, 10), list(step_lines(library)), list(pole_lines(library))
    values = [b for line in steps for _, b in line["points"]]
    parts = panel((66, 78, 446, 338), x, Axis(min(values), max(values), 10), ("eigenvalue x", "M, degree 2"), steps)
    parts += panel((542, 78, 922, 338), x, Axis(-0.03, 0.03), ("eigenvalue x", "relative error"), poles)
    parts += legend(66, 396, steps, 4, 110) + legend(542, 396, poles, 3, 110)
    remark = "p = 4, eigenvalues from 1e-6 on"
    path.write_text(page(960, 410, "Polynomial steps and sums of poles", remark, *parts), encoding="utf-8")


def main():
    with tempfile.TemporaryDirectory() as folder:
        library = load_library(folder)
        print_plans(library)
        print_poles(library)
        print_overshoot(library)
        draw_picture(library, REPOSITORY / "docs/images/minimax.svg")


if __name__ == "__main__":
    main()
