#!/usr/bin/env python3
"""Times libtorchium beside PyTorch's CPU build on the same inputs, in one process and one run.

    bench/compare.py build/release/src/libtorchium.so [--json FILE] [--svg FILE] [--quick]

Every row has fresh random matrices, an output that is poisoned before it is checked, and the error of both sides
against float64. Times on a shared machine are noisy, so both sides run in turns and the medians are compared; the ratio
is what counts.
"""

import argparse
import platform
import sys

import figures
import numpy as np
import torch
from library import Library, linear_layer
from plots.bars import ratio_bars
from timing import in_turns


def symmetric_batch(rng, batch, n, condition, dtype):
    """Symmetric matrices with log-spaced eigenvalues from 1 down to 1/condition and random eigenvectors."""
    spectrum = np.logspace(0, -np.log10(condition), n)
    matrices = np.empty((batch, n, n), dtype)
    for i in range(batch):
        q, _ = np.linalg.qr(rng.standard_normal((n, n)))
        a = (q * spectrum) @ q.T
        matrices[i] = (0.5 * (a + a.T)).astype(dtype)
    return matrices


def reference_root(a, power, damping):
    """The power of the damped matrices, from float64 decompositions of the very numbers given. In float64 by singular
    values, which are the eigenvalues here: where NumPy and PyTorch are built with the same LAPACK, an
    eigendecomposition would compare PyTorch with itself."""
    if a.dtype == np.float64:
        v, w, _ = np.linalg.svd(a)
    else:
        w, v = np.linalg.eigh(a.astype(np.float64))
    return (v * (np.maximum(w, 0) + damping)[:, None, :] ** power) @ v.transpose(0, 2, 1)


def error(x, reference):
    """Largest relative Frobenius error of the batch; NaN counts as infinite."""
    gap = np.linalg.norm(x.astype(np.float64) - reference, axis=(1, 2)) / np.linalg.norm(reference, axis=(1, 2))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap)))


def torch_power(t, power, damping):
    """What people write today."""
    w, v = torch.linalg.eigh(t)
    return (v * (w.clamp_min(0) + damping).pow(power).unsqueeze(-2)) @ v.transpose(-1, -2)


class Comparison:
    def __init__(self, library, seconds, quiet):
        self.library = library
        self.seconds = seconds
        self.quiet = quiet
        self.rows = []
        self.rng = np.random.default_rng(20240607)

    def add(self, work, size, dtype, target, times, errors, allowed, note=""):
        """A row; `allowed` is the error ours may have where PyTorch's is smaller, `target` None where none was set."""
        ours, theirs = times
        row = {
            "work": work,
            "size": size,
            "dtype": np.dtype(dtype).name,
            "ours_ms": round(ours, 4),
            "torch_ms": round(theirs, 4),
            "ratio": round(theirs / ours, 3),
            "target": target,
            "ours_error": errors[0],
            "torch_error": errors[1],
            "note": note,
        }
        self.rows.append(row)
        if not self.quiet:
            fast = target is None or row["ratio"] >= target
            met = "met" if fast and errors[0] <= max(errors[1], allowed) else "NOT MET"
            aim = "no target" if target is None else f"target {target:.1f}"
            print(
                f"{work:<16} {size:>16} {row['dtype']:<8} {ours:10.3f} ms {theirs:10.3f} ms "
                f"{row['ratio']:6.2f} ({aim}) {met:<8} "
                f"{errors[0]:8.1e} {errors[1]:8.1e} {note}",
                flush=True,
            )

    def times(self, ours, theirs):
        """Milliseconds of both, after a call of each that is not counted."""
        ours()
        theirs()
        return in_turns({"ours": ours, "torch": theirs}, self.seconds / 6).values()

    def eigen_power(self, batch, n, dtype):
        a = symmetric_batch(self.rng, batch, n, 1e6, dtype)
        t = torch.from_numpy(a)
        out = np.full_like(a, np.nan)
        damping = 1e-6
        times = self.times(self.library.matrix_power(a, -0.25, damping, out), lambda: torch_power(t, -0.25, damping))
        reference = reference_root(a, -0.25, damping)
        errors = error(out, reference), error(torch_power(t, -0.25, damping).numpy(), reference)
        # Both are rounding, of the same size: which one is larger is chance.
        self.add("eigen power", f"{batch}x{n}", dtype, 1.0, times, errors, 2.0 * errors[1])

    def inverse_root(self, batch, n, dtype, tolerance, target, note, theirs=None):
        """A^(-1/4) with relative damping 1e-6; `tolerance` 0 is the library's own default, `theirs` is the type that
        PyTorch computes in, where it is not the matrix's."""
        a = symmetric_batch(self.rng, batch, n, 1e6, dtype)
        t = torch.from_numpy(a)
        out = np.full_like(a, np.nan)
        damping = 1e-6 * float(np.linalg.eigvalsh(a[0].astype(np.float64))[-1])
        ours = self.library.inverse_root(a, 4, out, relative_eps=1e-6, tolerance=tolerance)

        def by_torch():
            return torch_power(t.to(theirs or t.dtype), -0.25, damping).to(t.dtype)

        times = self.times(ours, by_torch)
        reference = reference_root(a, -0.25, damping)
        errors = error(out, reference), error(by_torch().numpy(), reference)
        asked = tolerance or (1e-9 if dtype == np.float64 else 1e-3)
        self.add("inverse root", f"{batch}x{n}", dtype, target, times, errors, asked, note)

    def kronecker(self, m, p, dtype):
        a = self.rng.standard_normal((m, m)).astype(dtype)
        b = self.rng.standard_normal((p, p)).astype(dtype)
        out = np.full((m * p, m * p), np.nan, dtype)
        ta, tb = torch.from_numpy(a), torch.from_numpy(b)
        times = self.times(self.library.kronecker_product(a, b, out), lambda: torch.kron(ta, tb))
        reference = np.kron(a.astype(np.float64), b.astype(np.float64))[None]
        errors = error(out[None], reference), error(torch.kron(ta, tb).numpy()[None], reference)
        self.add("kronecker", f"{m} (x) {p}", dtype, 1.0, times, errors, 0.0)

    def sample_gradients(self, batch, positions, inputs, outputs, dtype):
        x = self.rng.standard_normal((batch, positions, inputs)).astype(dtype)
        g = self.rng.standard_normal((batch, positions, outputs)).astype(dtype)
        out = np.full((batch, outputs, inputs), np.nan, dtype)
        tx, tg = torch.from_numpy(x), torch.from_numpy(g)

        def theirs():
            return torch.einsum("btp,btd->bpd", tg, tx)

        times = self.times(self.library.grad_samples(linear_layer(), x, g, out), theirs)
        reference = g.astype(np.float64).transpose(0, 2, 1) @ x.astype(np.float64)
        errors = error(out, reference), error(theirs().numpy(), reference)
        # Both are rounding, of the same size: which one is larger is chance.
        size = f"{batch}x{positions} {inputs}->{outputs}"
        self.add("sample gradients", size, dtype, 1.0, times, errors, 2.0 * errors[1])


def machine(library):
    """What the figures were measured on, without naming a host."""
    return {
        "processor": library.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def run(library, seconds, quick, quiet):
    c = Comparison(library, seconds, quiet)
    single = (64, 128, 256, 512, 1024) if quick else (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    batches = ((64, 64), (16, 256)) if quick else ((256, 32), (64, 64), (64, 128), (16, 256), (4, 512))
    for dtype in (np.float32, np.float64):
        for n in single:
            c.eigen_power(1, n, dtype)
        for batch, n in batches:
            c.eigen_power(batch, n, dtype)
    run_roots(c, single, batches)
    for dtype in (np.float32, np.float64):
        c.kronecker(16, 32, dtype)
        c.kronecker(32, 64, dtype)
        if not quick:
            c.kronecker(64, 128 if dtype == np.float32 else 64, dtype)
    run_gradients(c, quick)
    return c.rows


def run_roots(c, single, batches):
    """Matrices alone, of each size, and in batches."""
    for n in single:
        target = 1.5 if n >= 512 else 1.0
        c.inverse_root(1, n, np.float32, 1e-2, target, "error as PyTorch's or smaller")
    for n in single:
        c.inverse_root(1, n, np.float32, 0.0, None, "default: error below 1e-3, far below PyTorch's")
    for n in single:
        c.inverse_root(1, n, np.float32, 0.0, 1.0, "default; PyTorch in float64, to be below 1e-3", torch.float64)
    for n in single:
        c.inverse_root(1, n, np.float64, 1e-9, 1.0, "default: error below 1e-9")
    for batch, n in batches:
        c.inverse_root(batch, n, np.float32, 1e-2, 1.0, "error as PyTorch's or smaller")


def run_gradients(c, quick):
    """Samples, positions, inputs and outputs of linear layers."""
    layers = [(64, 1, 256, 256), (16, 64, 256, 256)]
    if not quick:
        layers += [(256, 1, 512, 512), (32, 128, 256, 512), (8, 256, 768, 768)]
    for shape in layers:
        c.sample_gradients(*shape, np.float32)
    c.sample_gradients(*layers[0], np.float64)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--svg", help="draw the ratios here")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter measurements")
    arguments = parser.parse_args()
    library = Library(arguments.library)
    library.set_threads(torch.get_num_threads())
    info = machine(library) | {"torchium": library.version()}
    print(f"{info['processor']}, {info['threads']} threads; PyTorch {info['torch']}; Torchium {info['torchium']}")
    print(f"{'work':<16} {'size':>16} {'dtype':<8} {'ours':>13} {'PyTorch':>13} ratio of times, and errors of both")
    rows = run(library, 0.6 if arguments.quick else 2.0, arguments.quick, False)
    if arguments.json:
        figures.write(arguments.json, {"machine": info, "rows": rows})
    if arguments.svg:
        with open(arguments.svg, "w", encoding="ascii") as file:
            file.write(ratio_bars([row for row in rows if row["target"] is not None]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
