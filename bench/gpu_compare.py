#!/usr/bin/env python3
"""Times libtorchium beside PyTorch on one GPU: the same inputs, one process, medians by CUDA events.

    bench/gpu_compare.py build/cuda/src/libtorchium.so [--folder DIR] [--quick] [--limit SECONDS] [--device cpu]

First the rows with targets, each with the error of both sides against float64, then the memory a batch of roots takes
under a budget and (unless --quick) sweeps over the size for every method and over the batch for the one the library
takes. Outputs are poisoned before they are timed. --device cpu is a dry run of everything at tiny sizes: its figures
mean nothing.
"""

import argparse
import math
import os
import platform
import sys
import time

import figures
import torch
from library import Library, linear_layer
from timing import Clock, host_ms

DAMPING = 1e-6  # relative to the largest eigenvalue, which is 1
ROOT = 4
FULL, TINY = "full", "tiny"


def power_law_batch(batch, n, device, seed):
    """float32 [batch, n, n] with eigenvalues i^-2 and random eigenvectors. Sixteen have eigenvectors of their own, the
    others are those with the signs of random coordinates changed: other numbers, the same spectrum, made quickly."""
    generator = torch.Generator(device).manual_seed(seed)
    spectrum = torch.arange(1, n + 1, dtype=torch.float64, device=device).pow(-2)
    own = min(batch, 16)
    made = []
    for _ in range(own):
        q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, device=device, generator=generator))
        a = (q * spectrum) @ q.T
        made.append((0.5 * (a + a.T)).float())
    base = torch.stack(made)
    if batch == own:
        return base
    out = torch.empty(batch, n, n, device=device)
    for first in range(0, batch, own):
        count = min(own, batch - first)
        signs = torch.randint(0, 2, (count, n), device=device, generator=generator).float() * 2 - 1
        out[first : first + count] = base[:count] * signs[:, :, None] * signs[:, None, :]
    return out


def reference_power(a, power, relative):
    """(A + relative * largest I)^power by float64 eigendecomposition of the very numbers given, a few at a time."""
    parts = []
    for piece in a.split(max(1, 2**25 // a.shape[-1] ** 2)):
        w, v = torch.linalg.eigh(piece.double())
        damped = w.clamp_min(0) + relative * w[:, -1:]
        parts.append((v * damped.pow(power).unsqueeze(-2)) @ v.mT)
    return torch.cat(parts)


def error(x, reference):
    """Largest relative Frobenius error of the batch; NaN counts as infinite."""
    gap = torch.linalg.matrix_norm(x.double() - reference) / torch.linalg.matrix_norm(reference)
    worst = gap.max().item()
    return worst if math.isfinite(worst) else math.inf


# --- anchors: what people write with PyTorch today --------------------------------------------------------------------


def torch_eigh_power(a, power):
    w, v = torch.linalg.eigh(a)
    damped = w.clamp_min(0) + DAMPING * w[:, -1:]
    return (v * damped.pow(power).unsqueeze(-2)) @ v.mT


def torch_newton_root(a):
    """The textbook coupled Newton iteration for A^(-1/4), batched, in float32: M -> I while X -> the root."""
    eye = torch.eye(a.shape[-1], device=a.device)
    damped = a + DAMPING * eye  # the largest eigenvalue is 1
    z = (1 + ROOT) / (2 * torch.linalg.matrix_norm(damped))[:, None, None]
    m = damped * z
    x = eye * z ** (1 / ROOT)
    previous = math.inf
    for _ in range(60):
        t = (1 + 1 / ROOT) * eye - m / ROOT
        x = x @ t
        square = t @ t
        m = square @ square @ m
        off = (m - eye).abs().amax().item()
        if not off < previous or off < 1e-6:  # converged, or rounding has the upper hand
            break
        previous = off
    return x


def torch_streamed(a, b, device, rows):
    """A host-resident product in panels of rows: copy in, multiply, copy out."""
    out = torch.empty(a.shape[0], b.shape[1])
    resident = b.to(device)
    for first in range(0, a.shape[0], rows):
        panel = a[first : first + rows].to(device)
        out[first : first + rows] = (panel @ resident).cpu()
    return out


def torch_gram_norms(x, g):
    """Squared norms of the gradients of weight and bias of a linear layer: the Gram form, three batched products."""
    inputs = torch.bmm(x, x.mT)
    outputs = torch.bmm(g, g.mT)
    return (inputs * outputs).sum((1, 2)) + outputs.sum((1, 2))


def reference_norms(x, g):
    """The same from the gradients themselves, a sample at a time, in float64."""
    norms = []
    for a, b in zip(x.double(), g.double(), strict=True):
        norms.append((b.mT @ a).square().sum() + b.sum(0).square().sum())
    return torch.stack(norms)


# --- the comparison ---------------------------------------------------------------------------------------------------


class Comparison:
    def __init__(self, library, device, seconds, scale):
        self.library = library
        self.device = device
        self.clock = Clock(device)
        self.seconds = seconds
        self.scale = scale
        self.rows = []

    def use_current_stream(self):
        if self.device.type == "cuda":
            self.library.set_stream(torch.cuda.current_stream().cuda_stream)

    def size(self, batch, n):
        """The size asked for, or a tiny one in a dry run."""
        return (batch, n) if self.scale == FULL else (min(batch, 3), max(8, n // 32))

    def poisoned(self, *shape):
        return torch.full(shape, math.nan, device=self.device)

    def root(self, a, method, **options):
        """A call that takes the roots of `a`, its output and its reports."""
        out = torch.full_like(a, math.nan)
        report = torch.full((a.shape[0],), -1, dtype=torch.int32, device=self.device)
        call = self.library.inverse_root(a, ROOT, out, method, relative_eps=DAMPING, report=report, **options)
        return call, out, report

    def measure_root(self, a, method, reference, picked):
        """Time, and error over the picked matrices: infinite where one of the batch was not delivered."""
        call, out, report = self.root(a, method)
        ms = self.clock.median(call, self.seconds)
        delivered = not (report != 0).any().item() and not torch.isnan(out).any().item()
        return {"ms": ms, "error": error(out[picked], reference) if delivered else math.inf}

    def add(self, number, work, size, ours, anchors, target, **more):
        row = {"row": number, "work": work, "size": size, "ours": ours, "anchors": anchors, "target_ms": target} | more
        self.rows.append(row)
        print_row(row)

    def inverse_root(self, number, batch, n, target):
        batch, n = self.size(batch, n)
        a = power_law_batch(batch, n, self.device, number)
        reference = reference_power(a, -1 / ROOT, DAMPING)
        everything = slice(None)
        ours = {m: self.measure_root(a, m, reference, everything) for m in ("auto", "newton", "eigen")}
        anchors = {}
        for name, function in (
            ("torch eigh", lambda: torch_eigh_power(a, -1 / ROOT)),
            ("torch textbook Newton", lambda: torch_newton_root(a)),
        ):
            ms = self.clock.median(function, self.seconds)
            anchors[name] = {"ms": ms, "error": error(function(), reference)}
        self.add(number, "inverse root", f"{batch}x{n}", ours, anchors, target, allowed_error=1e-3)

    def eigen_power(self, batch, n, target):
        batch, n = self.size(batch, n)
        a = power_law_batch(batch, n, self.device, 4)
        reference = reference_power(a, -0.3, DAMPING)
        out = torch.full_like(a, math.nan)
        report = torch.full((batch,), -1, dtype=torch.int32, device=self.device)
        call = self.library.matrix_power(a, -0.3, DAMPING, out, report)
        ms = self.clock.median(call, self.seconds)
        ours = {"eigen": {"ms": ms, "error": math.inf if (report != 0).any() else error(out, reference)}}
        ms = self.clock.median(lambda: torch_eigh_power(a, -0.3), self.seconds)
        anchors = {"torch eigh": {"ms": ms, "error": error(torch_eigh_power(a, -0.3), reference)}}
        # Both are rounding, of the same size: which one is larger is chance.
        allowed = 2 * anchors["torch eigh"]["error"]
        self.add(4, "eigen power", f"{batch}x{n}", ours, anchors, target, allowed_error=allowed)

    def kronecker(self, m, p, target):
        m, p = (m, p) if self.scale == FULL else (4, 6)
        a = torch.randn(m, m, device=self.device)
        b = torch.randn(p, p, device=self.device)
        out = self.poisoned(m * p, m * p)
        ms = self.clock.median(self.library.kronecker_product(a, b, out), self.seconds)
        reference = torch.kron(a.double(), b.double())
        ours = {"kernel": {"ms": ms, "error": error(out[None], reference[None])}}
        theirs = self.clock.median(lambda: torch.kron(a, b), self.seconds)
        anchors = {"torch.kron": {"ms": theirs, "error": error(torch.kron(a, b)[None], reference[None])}}
        gigabytes = 4 * (m * p) ** 2 / 1e9
        more = {"gigabytes_per_second": gigabytes / ms * 1e3, "allowed_error": anchors["torch.kron"]["error"]}
        self.add(14, "kronecker product", f"{m} (x) {p}", ours, anchors, target, **more)

    def layer(self, batch, positions, inputs, outputs, seed, dtype=torch.float32):
        """What a linear layer saw: inputs and output gradients, of a tiny layer in a dry run."""
        if self.scale != FULL:
            batch, positions, inputs, outputs = min(batch, 3), min(positions, 5), 24, 40
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(batch, positions, inputs, device=self.device, generator=generator).to(dtype)
        g = torch.randn(batch, positions, outputs, device=self.device, generator=generator).to(dtype)
        return x, g

    def measure(self, anchors, gap):
        """Time and error of functions that return their result; `gap` takes it to its error."""
        return {
            name: {"ms": self.clock.median(function, self.seconds), "error": gap(function())}
            for name, function in anchors.items()
        }

    def sample_gradients(self, batch, n, target):
        """Row 11: one position, so that each gradient is an outer product, and writing them is the work."""
        x, g = self.layer(batch, 1, n, n, 11)
        shape = x.shape[0], g.shape[2], x.shape[2]
        out = self.poisoned(*shape)
        ms = self.clock.median(self.library.grad_samples(linear_layer(), x, g, out), self.seconds)
        reference = torch.einsum("btp,btd->bpd", g.double(), x.double())

        def gap(result):
            return relative_gap(result, reference, reference.abs().amax())

        ours = {"samples": {"ms": ms, "error": gap(out)}}
        anchors = {
            "torch einsum": lambda: torch.einsum("btp,btd->bpd", g, x),
            "torch bmm": lambda: torch.bmm(g.mT, x),
        }
        found = self.measure(anchors, gap)
        # One product for each number, rounded once.
        more = {"gigabytes_per_second": 4 * math.prod(shape) / ms / 1e6, "allowed_error": 2**-24}
        self.add(11, "sample gradients", f"{shape[0]}x{shape[2]}->{shape[1]}", ours, found, target, **more)

    def sample_norms(self, batch, positions, inputs, outputs, dtype, target):
        """Row 12. Rounding operands to TF32 (11 bits) or taking bfloat16 ones as they are, each of the many terms of a
        norm is off by 2^-11 at most, at random; the bound is for all of them together."""
        x, g = self.layer(batch, positions, inputs, outputs, 12, dtype)
        norms = torch.full((x.shape[0],), math.nan, dtype=torch.float64, device=self.device)
        reference = reference_norms(x, g)
        ours = {}
        for name, rounded in (("rounded", True), ("float32", False)):
            norms.fill_(math.nan)
            call = self.library.grad_norms(linear_layer(rounded), x, g, norms)
            ours[name] = {
                "ms": self.clock.median(call, self.seconds),
                "error": relative_gap(norms, reference, reference),
            }
        anchors = {"torch Gram form": lambda: torch_gram_norms(x, g)}
        found = self.measure(anchors, lambda result: relative_gap(result, reference, reference))
        size = f"{x.shape[0]}x{x.shape[1]} {x.shape[2]}->{g.shape[2]}"
        name = f"sample norms, {str(dtype).removeprefix('torch.')}"
        self.add(12, name, size, ours, found, target, allowed_error=2**-11)

    def factors(self, batch, positions, inputs, outputs, dtype, target):
        """Row 13. Entries are sums of many products; in norm, TF32's rounding of both operands is the bound."""
        x, g = self.layer(batch, positions, inputs, outputs, 13, dtype)
        rows = x.shape[0] * x.shape[1]
        a, b = self.poisoned(x.shape[2], x.shape[2]), self.poisoned(g.shape[2], g.shape[2])
        x2, g2 = x.reshape(rows, -1), g.reshape(rows, -1)
        references = x2.double().mT @ x2.double() / rows, g2.double().mT @ g2.double() / x.shape[0]

        def gap(pair):
            return max(error(mine[None], wanted[None]) for mine, wanted in zip(pair, references, strict=True))

        ours = {}
        for name, rounded in (("rounded", True), ("float32", False)):
            a.fill_(math.nan)
            b.fill_(math.nan)
            call = self.library.grad_factors(linear_layer(rounded), x, g, 1.0, 0.0, a, b)
            ours[name] = {"ms": self.clock.median(call, self.seconds), "error": gap((a, b))}
        x3, g3 = x2.float(), g2.float()
        anchors = {"torch, two float32 products": lambda: (x3.mT @ x3 / rows, g3.mT @ g3 / x.shape[0])}
        if dtype != torch.float32:
            anchors["torch, two symmetric products"] = lambda: (x2.mT @ x2 / rows, g2.mT @ g2 / x.shape[0])
        found = self.measure(anchors, gap)
        size = f"{x.shape[0]}x{x.shape[1]} {x.shape[2]}->{g.shape[2]}"
        name = f"KFAC factors, {str(dtype).removeprefix('torch.')}"
        self.add(13, name, size, ours, found, target, allowed_error=2**-11)

    def host_matrix(self, rows, cols, pinned):
        """Random numbers made on the device, where it is quick, and kept on the host."""
        host = torch.empty(rows, cols, pin_memory=pinned and self.device.type == "cuda")
        for piece in host.split(4096):
            piece.copy_(torch.rand(piece.shape, device=self.device) - 0.5)
        return host

    def product_errors(self, a, b, *results):
        """Errors of some rows against float64; infinite where an element was not written."""
        picked = torch.linspace(0, a.shape[0] - 1, 8).long()
        reference = a[picked].to(self.device).double() @ b.to(self.device).double()
        errors = []
        for x in results:
            whole = all(not torch.isnan(piece).any() for piece in x.split(8192))
            errors.append(error(x[picked].to(self.device)[None], reference[None]) if whole else math.inf)
        return errors

    def resident_product_ms(self, a, b):
        a, b = a.to(self.device), b.to(self.device)
        return self.clock.median(lambda: a @ b, self.seconds)

    def streamed(self, m, k, n, budget, pinned):
        """Row 15, in memory of the host. The limit is the arithmetic alone, as PyTorch does it on resident panels."""
        m, k, n, budget = (m, k, n, budget) if self.scale == FULL else (200, 64, 48, 2**20)
        a, b = self.host_matrix(m, k, pinned), self.host_matrix(k, n, pinned)
        out = torch.full((m, n), math.nan, pin_memory=pinned and self.device.type == "cuda")
        call = self.library.matmul_chunked(a, b, budget, out)
        ours = best_ms(call, 3)
        limit = m / (m // 16) * self.resident_product_ms(a[: m // 16], b)
        kept = []
        theirs = best_ms(lambda: kept.append(torch_streamed(a, b, self.device, max(1, m // 16))), 1)
        gap, their_gap = self.product_errors(a, b, out, kept[-1])
        where = "page-locked" if pinned else "pageable"
        self.add(
            15,
            f"host product, {where}",
            f"{m}x{k}x{n}",
            {"streamed": {"ms": ours, "error": gap}},
            {"torch in panels": {"ms": theirs, "error": their_gap}},
            1.25 * limit if self.scale == FULL else None,
            limit_ms=limit,
            budget_bytes=budget,
            allowed_error=2 * their_gap,
        )

    def memory(self, batch, n):
        """Row 16: what a batch of roots takes beside its state (the matrices and their roots), with and without a
        budget."""
        batch, n = self.size(batch, n)
        a = power_law_batch(batch, n, self.device, 16)
        state = 2 * a.numel() * a.element_size()
        reference = reference_power(a[:1], -1 / ROOT, DAMPING)
        results = []
        for share in (None, 1.0, 0.5, 0.15, 0.05):
            limit = 0 if share is None else int(share * state)
            self.library.trim()
            self.library.set_workspace_limit(limit)
            self.library.reset_peak()
            before = self.library.memory()["allocated"]
            result = {"share_of_state": share, "limit_bytes": limit, "state_bytes": state}
            try:
                result |= self.measure_root(a, "auto", reference, slice(0, 1))
                result["peak_bytes"] = self.library.memory()["peak"] - before
            except RuntimeError as refusal:
                result["refused"] = str(refusal)
            results.append(result)
            print_memory(result)
        self.library.set_workspace_limit(0)
        self.library.trim()
        return results


def relative_gap(x, reference, size):
    """Largest difference as a share of `size`; NaN counts as infinite."""
    gap = ((x.double() - reference).abs() / size).amax().item()
    return gap if math.isfinite(gap) else math.inf


def best_ms(function, repeats):
    """Best of some calls that return when they are done, after one that is not counted."""
    function()
    return min(host_ms(function) for _ in range(repeats))


# --- sweeps -----------------------------------------------------------------------------------------------------------


class Sweep:
    """Times per matrix and errors for one size and batch at a time, until the deadline."""

    def __init__(self, comparison, deadline):
        self.c = comparison
        self.deadline = deadline
        self.points = []
        self.left_out = []

    def reference(self, a):
        """Up to three matrices of the batch and their roots: the ends and the middle."""
        picked = torch.tensor(sorted({0, a.shape[0] // 2, a.shape[0] - 1}), device=a.device)
        return reference_power(a[picked], -1 / ROOT, DAMPING), picked

    def keep(self, kind, name, n, batch, result):
        point = {"sweep": kind, "method": name, "n": n, "batch": batch} | result
        point["us_per_matrix"] = 1e3 * result["ms"] / batch
        self.points.append(point)
        print(
            f"{kind:<6} n {n:>5} batch {batch:>6} {name:<22} {result['ms']:>10.3f} ms "
            f"{point['us_per_matrix']:>10.2f} us each   error {result['error']:.1e}",
            flush=True,
        )

    def anchor(self, kind, name, function, a, reference, picked):
        """An anchor on as much of the batch as takes about a second: a slow one need not do all of it."""
        some = min(a.shape[0], 8)
        part = a[:some].contiguous()
        ms = self.c.clock.median(lambda: function(part), 0.0)
        count = min(a.shape[0], max(some, int(1000 / max(ms / some, 1e-6))))
        part = a[:count].contiguous()
        ms = self.c.clock.median(lambda: function(part), 0.2)
        inside = picked < count
        gap = error(function(part)[picked[inside]], reference[inside])
        self.keep(kind, name, a.shape[1], count, {"ms": ms, "error": gap})

    def point(self, kind, batch, n, methods, anchors):
        if time.perf_counter() > self.deadline:
            self.left_out.append({"sweep": kind, "n": n, "batch": batch})
            return
        a = power_law_batch(batch, n, self.c.device, 1000 + n)
        reference, picked = self.reference(a)
        for method in methods:
            try:
                self.keep(kind, method, n, batch, self.c.measure_root(a, method, reference, picked))
            except RuntimeError as failure:  # out of memory, or a method that cannot: said, and the sweep goes on
                self.left_out.append({"sweep": kind, "n": n, "batch": batch, "method": method, "why": str(failure)})
                print(f"{kind:<6} n {n:>5} batch {batch:>6} {method:<22} {failure}", flush=True)
        if anchors:
            self.anchor(kind, "torch eigh", lambda t: torch_eigh_power(t, -1 / ROOT), a, reference, picked)
            self.anchor(kind, "torch textbook Newton", torch_newton_root, a, reference, picked)

    def run(self):
        tiny = self.c.scale == TINY
        elements = 2**12 if tiny else 2**24
        for n in (8, 16, 24) if tiny else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
            self.point("size", max(1, elements // n**2), n, ("auto", "newton", "eigen"), True)
        for n in (8, 16) if tiny else (16, 64, 128, 256, 1024):
            for batch in (1, 3) if tiny else (1, 4, 16, 64, 256, 1024, 4096):
                if batch * n * n <= 2**29:
                    self.point("batch", batch, n, ("auto",), False)


# --- what is said -----------------------------------------------------------------------------------------------------


def print_row(row):
    """Ours is the first entry; the fastest anchor is named. Says whether the target is met, time and error both."""
    ours = next(iter(row["ours"].values()))
    name, anchor = min(row["anchors"].items(), key=lambda item: item[1]["ms"])
    good = ours["error"] <= row["allowed_error"]
    if row["target_ms"] is None:
        verdict = "no target"
    else:
        verdict = f"target {row['target_ms']:.3g} ms " + (
            "met" if good and ours["ms"] <= row["target_ms"] else "NOT MET"
        )
    print(
        f"row {row['row']:<3} {row['work']:<26} {row['size']:>18} {ours['ms']:>10.3f} ms  {name} {anchor['ms']:.3f} ms "
        f"(x{anchor['ms'] / ours['ms']:.1f})  errors {ours['error']:.1e} {anchor['error']:.1e}  {verdict}",
        flush=True,
    )
    row["met"] = row["target_ms"] is not None and bool(good and ours["ms"] <= row["target_ms"])


def print_memory(result):
    share = "no budget" if result["share_of_state"] is None else f"{result['share_of_state']:.0%} of the state"
    said = result.get("refused") or (
        f"peak {result['peak_bytes'] / result['state_bytes']:.1%} of the state, {result['ms']:.3f} ms, "
        f"error {result['error']:.1e}"
    )
    print(f"memory {share:<18} {said}", flush=True)


def machine(library, device):
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"dry run on {platform.machine()}",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "torchium": library.version(),
    }


def run_rows(c, quick):
    """Targets are those set for one H200; other GPUs have none. Returns the rows that failed, with the reason."""
    h200 = c.device.type == "cuda" and "H200" in torch.cuda.get_device_name(c.device)
    host_product = (65536, 16384, 16384, 4 * 10**9)
    cases = [
        (c.inverse_root, (1, 16, 1024), 8.0),
        (c.inverse_root, (2, 64, 256), 1.2),
        (c.inverse_root, (3, 4, 2048), 16.0),
        (c.eigen_power, (64, 256), 4.5),
        (c.eigen_power, (16, 1024), 75.0),
        (c.sample_gradients, (256, 1024), 0.31),
        (c.sample_norms, (32, 256, 768, 3072, torch.float32), 0.15),
        (c.sample_norms, (32, 256, 768, 3072, torch.bfloat16), 0.15),
        (c.factors, (32, 256, 768, 3072, torch.float32), 0.6),
        (c.factors, (32, 256, 768, 3072, torch.bfloat16), 0.6),
        (c.kronecker, (64, 128), 0.085),
        (c.streamed, host_product, False),
    ]
    if not quick:
        cases.append((c.streamed, host_product, True))
    failed = []
    for measure, size, last in cases:
        try:
            measure(*size, last if isinstance(last, bool) or h200 else None)
        except RuntimeError as failure:
            failed.append({"row": measure.__name__, "size": [str(part) for part in size], "why": str(failure)})
            print(f"FAILED {measure.__name__} {size}: {failure}", flush=True)
    return failed


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--folder", default=figures.RESULTS, help="where the figures go, as DEVICE.json")
    parser.add_argument("--quick", action="store_true", help="only the rows with targets")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no sweep is begun")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser.parse_args()


def main():
    arguments = parse()
    start = time.perf_counter()
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("highest")
    library = Library(arguments.library, arguments.device)
    info = machine(library, device)
    path = os.path.join(arguments.folder, f"{figures.device_name(info['device'])}.json")
    print(f"{info['device']}; PyTorch {info['torch']}; Torchium {info['torchium']}")
    c = Comparison(library, device, 0.3, FULL if device.type == "cuda" else TINY)
    c.use_current_stream()
    failed = run_rows(c, arguments.quick)
    found = {"machine": info, "rows": c.rows, "failed": failed}
    figures.write(path, found)  # kept even if the rest runs out of time
    found["memory"] = c.memory(128, 1024)
    if not arguments.quick:
        sweep = Sweep(c, start + arguments.limit)
        sweep.run()
        found |= {"sweeps": sweep.points, "left_out": sweep.left_out}
    figures.write(path, found)
    print(f"figures in {path}; {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
