#!/usr/bin/env python3
"""Times Torchium vs PyTorch and other optimizers in one process, on the same inputs: the table of targets.

    bench/compare.py [LIBRARY] [--device cpu] [--quick] [--only TEXT] [--peer-path DIR ...] [--json FILE]

LIBRARY is libtorchium.so, by default the package's own. With the package in PYTHONPATH, steps run from Python too. Each
line has the row of the table of targets, Torchium's time, the fastest peer's, the fraction of the limit that is
reached, and whether the target is met at an allowed error. Times are medians, by device events on a GPU; on the CPU the
sides alternate and only the ratio counts. Outputs are poisoned first, and errors are relative to float64. A case that
fails is reported and does not end the run.
"""

import argparse
import gc
import os
import re
import sys
import warnings
from functools import partial

import figures
import matrices
import overhead
import samples
import steps
import torch
from cases import Bench, Case
from library import Library
from peers import found
from timing import machine

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TARGET = "target_ms", "target_ratio", "met"


def gpu_cases(tiny):
    """Sizes of the table of targets; a dry run has tiny ones."""

    def sized(make, *size, small, **options):
        return partial(make, *(small if tiny else size), **options)

    root = partial(sized, matrices.inverse_root, small=(3, 32))
    power = partial(sized, matrices.eigen_power, small=(3, 32))
    product = (200, 64, 48, 2**20) if tiny else (65536, 16384, 16384, 4 * 2**30)
    layer, layer_size = (3, 5, 24, 40) if tiny else (32, 256, 768, 3072), "32x256 768->3072"
    cases = [
        Case(1, "inverse root", "16x1024", root(16, 1024), 8.0, 4.5),
        Case(2, "inverse root", "64x256", root(64, 256), 1.2, 0.4),
        Case(3, "inverse root", "4x2048", root(4, 2048), 16.0, 9.0),
        Case(4, "eigen power", "64x256", power(64, 256), 4.5),
        Case(4, "eigen power", "16x1024", power(16, 1024), 75.0),
        *steps.gpu_cases(),
        Case(
            11, "sample gradients", "256x1024->1024",
            sized(samples.gradients, 256, 1, 1024, 1024, small=(3, 1, 24, 40)), 0.31, 0.26,
        ),
        Case(12, "sample norms, float32", layer_size, partial(samples.norms, *layer, F32), 0.15, 0.05),
        Case(12, "sample norms, no bias", layer_size, partial(samples.norms, *layer, F32, bias=False), 0.15, 0.05),
        Case(12, "sample norms, bfloat16", layer_size, partial(samples.norms, *layer, BF16), 0.15, 0.05),
        Case(13, "KFAC factors, float32", layer_size, partial(samples.factors, *layer, F32), 0.6, 0.2),
        Case(13, "KFAC factors, bfloat16", layer_size, partial(samples.factors, *layer, BF16), 0.6, 0.2),
        Case(14, "kronecker product", "64 (x) 128", sized(matrices.kronecker, 64, 128, small=(4, 6)), 0.085, 0.064),
    ]  # fmt: skip
    for where, pinned in (("pageable", False), ("page-locked", True)):
        make = partial(matrices.host_product, *product, pinned)
        cases.append(Case(15, f"host product, {where}", "65536x16384x16384", make, slow=pinned))
    if found("torchium"):
        for vocabulary in (50257, 50304):
            for tied in (False, True):
                sizes = (2, 32, 2, 101, 16, 4, tied) if tiny else (12, 768, 12, vocabulary, 1024, 8, tied)
                work = f"GPT with per-sample gradients, backward, V = {vocabulary}, tied head: {tied}"
                cases.append(Case(None, work, "12 x 768", partial(samples.gpt, *sizes), slow=True))
    return cases


def cpu_cases(quick):
    single = (64, 128, 256, 512, 1024) if quick else (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    batches = ((64, 64), (16, 256)) if quick else ((256, 32), (64, 64), (64, 128), (16, 256), (4, 512))
    alone = [(1, n) for n in single]
    cases = []

    def add(work, size, make, target, dtype, **options):
        name = str(dtype).removeprefix("torch.")
        cases.append(Case(None, f"{work}, {name}", size, partial(make, dtype=dtype, **options), target))

    for dtype in (F32, F64):
        for batch, n in (*alone, *batches):
            make = partial(matrices.eigen_power, batch, n)
            add("eigen power", f"{batch}x{n}", make, 1.0, dtype, power=-0.25, spectrum="ratios")
    roots = [
        ("inverse root, error as PyTorch's", F32, 1e-2, None, alone),
        ("inverse root", F32, 0.0, None, alone),
        ("inverse root, PyTorch in float64", F32, 0.0, F64, alone),
        ("inverse root", F64, 0.0, None, alone),
        ("inverse root, error as PyTorch's", F32, 1e-2, None, batches),
    ]
    for work, dtype, tolerance, theirs, sizes in roots:
        for batch, n in sizes:
            target = 1.5 if tolerance and batch == 1 and n >= 512 else 1.0
            target = None if dtype == F32 and not tolerance and not theirs else target
            options = {"tolerance": tolerance, "theirs": theirs, "methods": ("auto",), "spectrum": "ratios"}
            add(work, f"{batch}x{n}", partial(matrices.inverse_root, batch, n), target, dtype, **options)
    for dtype, last in ((F32, (64, 128)), (F64, (64, 64))):
        for m, p in ((16, 32), (32, 64)) if quick else ((16, 32), (32, 64), last):
            add("kronecker product", f"{m} (x) {p}", partial(matrices.kronecker, m, p), 1.0, dtype)
    return cases + sample_cases(quick) + steps.cpu_cases()


def sample_cases(quick):
    """Per-sample gradients on the CPU: of a linear layer, and of modules vs Opacus."""
    cases = []
    layers = [(64, 1, 256, 256), (16, 64, 256, 256)]
    layers += [] if quick else [(256, 1, 512, 512), (32, 128, 256, 512), (8, 256, 768, 768)]
    for dtype, shapes in ((F32, layers), (F64, layers[:1])):
        for shape in shapes:
            size = "{}x{} {}->{}".format(*shape)
            work = f"sample gradients, {str(dtype).removeprefix('torch.')}"
            cases.append(Case(None, work, size, partial(samples.gradients, *shape, dtype=dtype), 1.0))
    if found("torchium"):
        models = ((samples.mlp, (128, 784)), (samples.convolutions, (32, 3, 32, 32)))
        for make, shape in (*models, (samples.feed, (32, 64, 128)), (samples.words, (32, 32))):
            size = " x ".join(map(str, shape))
            work = f"sample gradients of a module, {make.__name__}"
            cases.append(Case(None, work, size, partial(samples.module, make, shape), slow=True))
    return cases


# --- the table --------------------------------------------------------------------------------------------------------


def row_text(row):
    said = f"row {row['row'] or '-':<4} {row['work']:<46} {row['size']:<18} {row['ours_ms']:>10.3f} ms"
    for name, ms in row.get("variants_ms", {}).items():
        said += f"  {name} {ms:.3f}"
    if row["anchors_ms"]:
        name, ms = min(row["anchors_ms"].items(), key=lambda item: item[1])
        said += f"  | {name} {ms:.3f} ms ({row['ratio']:.2f}x)"
    if row.get("limit_ms"):
        said += f"  | limit {row['limit_ms']:.3g} ms, {row['limit_ms'] / row['ours_ms']:.0%} of it"
    if "met" in row:
        aim = f"{row['target_ms']:.3g} ms" if "target_ms" in row else f"{row['target_ratio']:g}x"
        said += f"  | target {aim} {'met' if row['met'] else 'NOT MET'}"
    said += "  | errors " + " ".join(f"{error:.1e}" for error in row["errors"].values()) if row["errors"] else ""
    known = ("host_ms", "mean_ms", "slowest_over_median", "extra_share", "worst_residual", "failed")
    said += "".join(f"  {name} {row[name]:.3g}" for name in known if name in row)
    return said + (f"  state {row['state'] / 1e9:.3g} GB" if row.get("state", 0) > 1e7 else "")


def print_rows(rows):
    """The rows as a list, each printed when it is measured."""
    kept = []
    for row in rows:
        kept.append(row)
        said = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(said), flush=True)
    return kept


def selected_cases(arguments, bench):
    table = gpu_cases(bench.tiny) if bench.cuda or bench.tiny else cpu_cases(bench.quick)
    pattern = re.compile(arguments.only or "")
    for case in table:
        if not (case.slow and bench.quick) and pattern.search(f"row {case.row}: {case.work}, {case.size}"):
            yield case


def measure_cases(arguments, bench, report, path):
    h200 = bench.cuda and "H200" in torch.cuda.get_device_name(bench.device)
    for case in selected_cases(arguments, bench):
        row = bench.attempt(f"{case.work}, {case.size}", bench.measure, case)
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
        if row is None:
            continue
        if bench.tiny or (bench.cuda and not h200):  # targets and limits are an H200's
            row = {name: value for name, value in row.items() if name not in ("limit_ms", *TARGET)}
        report["rows"].append(row)
        print(row_text(row), flush=True)
        figures.write(path, report)  # kept even if the rest runs out of time
    host = [row["host_ms"] for row in report["rows"] if "host_ms" in row]
    if host and bench.cuda:
        print(f"row 17   host time of one step: {min(host):.2f} to {max(host):.2f} ms  | target 0.5 ms", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", help="libtorchium.so; the package's own by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter, without slow anchors and sweeps")
    parser.add_argument("--only", metavar="TEXT", help="cases whose 'row N: work, size' matches this pattern")
    parser.add_argument("--tiny", action="store_true", help="a dry run of a GPU's cases; its times mean nothing")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a sweep starts no more points")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help="folder of a peer")
    parser.add_argument("--json", help="figures; by default bench/results/targets-DEVICE.json")
    return parser.parse_args()


def main():
    arguments = parse()
    sys.path += arguments.peer_path + [p for p in os.environ.get("TORCHIUM_PEERS", "").split(os.pathsep) if p]
    warnings.filterwarnings("ignore")  # of others
    if not arguments.library:
        from torchium import _C

        arguments.library = _C.library_path()
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("highest")
    library = Library(arguments.library, arguments.device)
    library.set_threads(torch.get_num_threads())
    info = machine(device, library.version()) | {"processor": library.processor()}
    path = arguments.json or os.path.join(figures.RESULTS, f"targets-{figures.device_name(info['device'])}.json")
    print(f"{info['device']}; {info['processor']}; PyTorch {info['torch']}; Torchium {info['torchium']}")
    seconds = 0.02 if arguments.tiny else (0.15 if arguments.quick else 0.3) * (1 if device.type == "cuda" else 5)
    bench = Bench(library, device, seconds, arguments.quick, arguments.tiny)
    report = {"machine": info, "rows": [], "failed": bench.failed}
    measure_cases(arguments, bench, report, path)
    if not arguments.only and (bench.cuda or bench.tiny):
        scratch = matrices.scratch(*((3, 32) if bench.tiny else (128, 1024)), bench)
        report["memory"] = bench.attempt("scratch", print_rows, scratch) or []
        points = [] if arguments.quick else matrices.sweep(bench, arguments.limit)
        report["sweeps"] = bench.attempt("sweeps", print_rows, points) or []
    if found("torchium") and not arguments.only:
        report |= bench.attempt("overhead", overhead.measure, bench) or {}
    figures.write(path, report)
    print(f"figures in {path}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
