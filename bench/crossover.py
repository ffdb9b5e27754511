#!/usr/bin/env python3
"""Where the methods of the inverse root cross: times by size, for the constants in src/linalg/root_plan.c.

    bench/crossover.py build/release/src/libtorchium.so [--seconds S]

Prints one table for a single matrix and one for a batch, in microseconds per matrix; bench/ladder/inverse_root.md keeps
a run with its conclusions.
"""

import argparse
import sys
import time

import numpy as np
from compare import symmetric_batch
from library import Library
from timing import median_ms

SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
CASES = (
    (np.float32, 1e-4, 0.0),
    (np.float32, 1e-6, 1e-2),
    (np.float32, 1e-6, 0.0),
    (np.float64, 1e-6, 0.0),
)


def time_method(library, method, a, damping, tolerance, seconds):
    """Best of three medians, in microseconds per matrix."""
    out = np.full_like(a, np.nan)
    run = library.inverse_root(a, 4, out, method, relative_eps=damping, tolerance=tolerance)
    run()
    return min(median_ms(run, seconds) for _ in range(3)) * 1e3 / a.shape[0]


def table(library, batch, methods, seconds):
    rng = np.random.default_rng(7)
    for dtype, damping, tolerance in CASES:
        asked = f"tolerance {tolerance:g}" if tolerance else "default tolerance"
        print(f"\n{np.dtype(dtype).name}, relative damping {damping:g}, {asked}, batch {batch}; us per matrix")
        print(f"{'n':>5}" + "".join(f"{m:>12}" for m in methods) + "   fastest")
        for n in SIZES:
            if batch > 1 and n > 256:
                continue
            a = symmetric_batch(rng, batch, n, 1e8, dtype)
            time.sleep(0.3)  # the threads NumPy used for it go to sleep
            times = [time_method(library, m, a, damping, tolerance, seconds) for m in methods]
            fastest = methods[times.index(min(times))]
            print(f"{n:>5}" + "".join(f"{t:>12.1f}" for t in times) + f"   {fastest}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--seconds", type=float, default=0.05, help="per measurement")
    arguments = parser.parse_args()
    library = Library(arguments.library)
    table(library, 1, ("eigen", "rational", "newton"), arguments.seconds)
    table(library, 32, ("eigen", "rational", "newton"), arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
