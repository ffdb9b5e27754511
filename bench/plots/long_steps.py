"""Minimax steps of docs/numerics/orthogonalization.md: prints their singular values and those of published methods, and
draws docs/images/long-steps.svg.

    python3 bench/plots/long_steps.py        needs NumPy

A step multiplies the singular value s by P(y) / top, y = (s / top)^2, where P has a form that needs few products: U =
y^2 + u1 y + u0, F = U^2 + f1 y + f0, P = t2 F^2 + t0 (degree 17 in s, three products), or P = t2 U^2 + t1 y + t0
(degree 9, two products). Each step minimizes the largest |s P(y) / top - 1| over the singular values after the previous
step: coefficients were found by iteratively reweighted least squares from random starts.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plots.lines import Axis, legend, page, panel

# As in src/linalg/newton_schulz.c: u0, u1, f0, f1, t0, t2 for degree 17; u0, u1, t0, t1, t2 for degree 9.
LIBRARY = (
    (17, 1.0, (0.1741972, -1.073597, -0.008994106, 0.004077704, 0.274108, 60242.94)),
    (17, 2.00185, (0.1917662, -1.103001, -0.01043446, 0.006585975, 1.025102, 30596.31)),
    (9, 1.71889, (0.3180031, -1.235464, 1.9062, -1.078413, 40.38145)),
)
MUON = 5 * ((3.4445, -4.7750, 2.0315),)
POLAR_EXPRESS = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)


def polynomial(degree, c, y):
    u = y * y + c[1] * y + c[0]
    if degree == 9:
        _, _, t0, t1, t2 = c
        return t2 * u * u + t1 * y + t0
    _, _, f0, f1, t0, t2 = c
    return t2 * (u * u + f1 * y + f0) ** 2 + t0


def minimax(s):
    for degree, top, c in LIBRARY:
        s = s / top * polynomial(degree, c, (s / top) ** 2)
    return s


def short(s, steps, safety=1.0):
    for a, b, c in steps:
        s = (a / safety) * s + (b / safety**3) * s**3 + (c / safety**5) * s**5
    return s


METHODS = (
    ("Muon, 5 steps", "#e9a83b", lambda s: short(s, MUON)),
    ("Polar Express, 5 steps", "#1b6ca8", lambda s: short(s, POLAR_EXPRESS, 1.01)),
    ("minimax, 3 steps", "#9b2226", minimax),
)


def report():
    s = np.geomspace(1e-6, 1, 200001)
    for name, _, method in METHODS:
        out = method(s)
        ends = [f"from {low:g}: {out[s >= low].min():.3f} to {out[s >= low].max():.3f}" for low in (1e-3, 1e-2, 0.1)]
        print(f"{name}: slope at 0 {out[0] / s[0]:.0f}; " + "; ".join(ends))


def draw(path):
    s = np.geomspace(1e-4, 1, 1600)
    lines = [{"name": n, "color": color, "points": list(zip(s, f(s), strict=True))} for n, color, f in METHODS]
    names = "singular value before, of a matrix of norm 1", "singular value after"
    parts = panel((60, 72, 740, 368), Axis(1e-4, 1, 10), Axis(0, 1.3), names, lines)
    picture = page(760, 420, "What is left of singular values", "", *parts, *legend(540, 270, lines))
    path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    report()
    draw(Path(__file__).resolve().parents[2] / "docs/images/long-steps.svg")
