#!/usr/bin/env python3
"""Times the Python package: what it adds to the C library, and the steps of its optimizers beside PyTorch's classes.

    PYTHONPATH=build/release/python bench/python_compare.py --device cpu [--quick] [--json FILE] [--folder DIR]

Steps are measured as optim_compare.py measures them through ctypes, on the same parameters and gradients: medians, by
device events on a GPU, and on the CPU in turns, the sides alternating. Beside each stands the same step of the C
interface, and `same_as_c` says that after one step both had the same parameters to the bit. What fails is reported and
the rest goes on; the figures are written after each row. The commit is git's, or what TORCHIUM_COMMIT says where there
is no repository.
"""

import argparse
import gc
import importlib
import os
import statistics
import subprocess
import sys
import time
from functools import partial

import figures
import torch
from library import Library
from optim_compare import GPT2, GPT2_VECTORS, LLAMA, MLP, SMALL, PlainShampoo, PlainSoap, make, torch_optimizer
from python_overhead import NEVER, Pair, overheads
from timing import LONG, Clock, in_rounds, in_turns, machine, waiter

HERE = os.path.dirname(os.path.abspath(__file__))
SLOW = 0.2  # seconds: a step that takes longer is repeated a few times only


class Report:
    """Prints every figure as it comes and keeps all of them in a file."""

    def __init__(self, path, machine):
        self.path = path
        self.figures = {"machine": machine, "rows": [], "calls": [], "steps": [], "failed": []}

    def add(self, part, entry, line):
        self.figures[part].append(entry)
        print(line, flush=True)
        figures.write(self.path, self.figures)

    def attempt(self, what, function, *arguments, **options):
        """Whatever goes wrong in one measurement is written down, and the next one has its turn."""
        try:
            function(*arguments, **options)
        except Exception as failure:
            why = f"{type(failure).__name__}: {failure}".splitlines()[0]
            self.add("failed", {"what": what, "why": why}, f"FAILED {what}: {why}")


def give_back():
    """Returns the memory of the last row to the device: the next one may be large."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- steps beside PyTorch's -------------------------------------------------------------------------------------------


class Steps:
    def __init__(self, library, device, seconds, report, quick):
        self.library, self.device, self.seconds, self.report, self.quick = library, device, seconds, report, quick
        self.clock = Clock(device)

    def median(self, step, seconds):
        """Milliseconds of a step; of three, or of one, where it takes long."""
        start = time.perf_counter()
        step()
        waiter(self.device)()
        first = time.perf_counter() - start
        if first < SLOW:
            return self.clock.median(step, seconds)
        return statistics.median(self.clock.times(step, 3 if first < LONG else 1))

    def medians(self, sides):
        """Milliseconds of each side: by events one after the other, on the CPU the best median of three turns."""
        if self.device.type == "cuda":
            return {name: self.median(step, self.seconds) for name, step in sides.items()}
        return in_turns(sides, self.seconds / 3, self.median)

    def host_ms(self, pair):
        """What a step keeps the host busy for, without synchronizing: of the package and of the library.
        Nothing on the CPU, where that is the step itself."""
        if self.device.type != "cuda":
            return {}
        sides = {"package": pair.package.step, "library": pair.library.step}
        times = in_rounds(sides, waiter(self.device), 0.5 * self.seconds, 1)
        return {
            "host_ms": 1e-3 * statistics.median(times["package"]),
            "c_host_ms": 1e-3 * statistics.median(times["library"]),
        }

    def anchors(self, builders, parameters, gradients, what):
        """The steps of PyTorch by name, each taken once; one that fails is left out and said."""
        steps = {}

        def build(name):
            step = builders[name](parameters, gradients)
            step()
            steps[name] = step

        for name in builders:
            self.report.attempt(f"{name} for {what}", build, name)
        return steps

    def measure(self, row, kind, work, size, shapes, target, anchors, **options):
        """One row: the package, the library with the same options, and the anchors, each a function that takes the
        parameters and gradients and gives a step."""
        options = {"nonfinite": "ignore"} | options
        parameters, gradients = make(shapes, self.device)
        pair = Pair(self.library, kind, parameters, gradients, **options)
        same = pair.agree()
        for _ in range(3):
            pair.package.step()
            pair.library.step()
        sides = {"package": pair.package.step, "library": pair.library.step}
        ms = self.medians(sides | self.anchors(anchors, parameters, gradients, f"{work}, {size}"))
        entry = self.entry(row, work, size, ms, target) | {"same_as_c": same} | self.host_ms(pair)
        entry |= {"failed_factors": pair.package.stats()["failed"]} if kind in ("shampoo", "soap") else {}
        pair.close()
        self.library.trim()
        self.report.add("rows", entry, line(entry))

    def slowest(self, row, kind, work, size, shapes, target, anchors, update_freq, **options):
        """The slowest step of a period, the median of five periods, after two that are not counted."""
        parameters, gradients = make(shapes, self.device)
        options |= {"nonfinite": "ignore", "update_freq": update_freq}
        pair = Pair(self.library, kind, parameters, gradients, **options)
        same = pair.agree()
        ms, mean = {}, {}
        for name, step in (("package", pair.package.step), ("library", pair.library.step)):
            self.clock.times(step, 2 * update_freq)
            times = [self.clock.times(step, update_freq) for _ in range(5)]
            ms[name] = statistics.median(max(t) for t in times)
            mean[name] = statistics.mean(t for passed in times for t in passed)
        entry = self.entry(row, work, size, ms, target)
        entry |= {"mean_ms": mean["package"], "c_mean_ms": mean["library"], "same_as_c": same}
        pair.close()
        self.library.trim()
        self.report.add("rows", entry, line(entry))

    def entry(self, row, work, size, ms, target):
        anchors = {name: value for name, value in ms.items() if name not in ("package", "library")}
        return {
            "row": row,
            "work": work,
            "size": size,
            "ours_ms": ms["package"],
            "c_ms": ms["library"],
            "anchors_ms": anchors,
            "target_ms": target,
        }


def line(entry):
    """A row as a line of the table."""
    ours, target = entry["ours_ms"], entry["target_ms"]
    said = f"row {entry['row']:<3} {entry['work']:<36} {entry['size']:<10} {ours:>9.3f} ms  C {entry['c_ms']:.3f}"
    for name, ms in entry["anchors_ms"].items():
        said += f"  {name} {ms:.3f} (x{ms / ours:.2f})"
    if target:
        said += f"  target {target:g} " + ("met" if ours <= target else "NOT MET")
    if "host_ms" in entry:
        said += f"  host {entry['host_ms']:.3f}, C {entry['c_host_ms']:.3f}"
    return said + ("" if entry["same_as_c"] else "  NOT THE SAME AS C")


# --- what is measured -------------------------------------------------------------------------------------------------

SHAMPOO = {
    "lr": 1e-4,
    "betas": (0.9, 1.0),
    "eps": 0.0,
    "relative_eps": 1e-6,
    "grafting": None,
    "max_preconditioner_dim": 1024,
}
SOAP = {"lr": 1e-4, "max_precond_dim": 1024, "block": True}


def shampoo_by_hand(refresh):
    def build(parameters, gradients):
        by_hand = PlainShampoo(parameters, gradients, SHAMPOO["max_preconditioner_dim"])
        by_hand.step(False)
        return lambda: by_hand.step(refresh)

    return {"plain PyTorch": build}


def soap_by_hand(parameters, gradients):
    return PlainSoap(parameters, gradients, SOAP["max_precond_dim"]).step


def of_torch(cls, *ways, **options):
    """PyTorch's class, if this PyTorch has it: as it is, or once for each way among fused and foreach."""
    if not hasattr(torch.optim, cls):
        return {}
    make_step = partial(torch_optimizer, getattr(torch.optim, cls), **options)
    if not ways:
        return {f"torch {cls}": make_step}
    return {f"torch {way}": partial(make_step, **{way: True}) for way in ways}


def table(slow):
    """Row, kind, what it is called, PyTorch's ways of doing it, and our options."""
    refreshed, tracked = (shampoo_by_hand(True), {"plain PyTorch": soap_by_hand}) if slow else ({}, {})
    adamw = of_torch("AdamW", "fused", "foreach", lr=1e-3)
    sgd = of_torch("SGD", "fused", "foreach", lr=1e-3, momentum=0.9)
    return [
        (10, "adamw", "AdamW step", adamw, {"lr": 1e-3}),
        ("10+", "adamw", "the same, gradients checked", {}, {"lr": 1e-3, "nonfinite": "skip"}),
        ("-", "sgd", "SGD step, momentum", sgd, {"lr": 1e-3, "momentum": 0.9}),
        (9, "muon", "Muon step", of_torch("Muon", lr=1e-3), {"lr": 1e-3}),
        ("9+", "muon", "the same, Muon's own coefficients", {}, {"lr": 1e-3, "method": "muon"}),
        (5, "shampoo", "Shampoo step, no refresh", shampoo_by_hand(False), SHAMPOO | {"update_freq": NEVER}),
        (6, "shampoo", "Shampoo step, all roots refreshed", refreshed, SHAMPOO | {"update_freq": 1}),
        (7, "shampoo", "Shampoo, every 10 steps, slowest", {}, SHAMPOO | {"update_freq": 10}),
        (8, "soap", "SOAP step, basis tracked every step", tracked, SOAP | {"precondition_frequency": 1}),
    ]


def measure_rows(s, size, shapes, targets, slow, chosen=None):
    """The table for one set of parameters, or the rows of it that are chosen; targets by row."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    for row, kind, work, anchors, options in table(slow):
        if chosen is None or row in chosen:
            measure = s.slowest if row == 7 else s.measure
            which = matrices if kind == "muon" else shapes
            what = f"{work}, {size}"
            s.report.attempt(what, measure, row, kind, work, size, which, targets.get(row), anchors, **options)
            give_back()


def gpu_rows(s):
    h200 = "H200" in torch.cuda.get_device_name(s.device)
    targets = {5: 6.0, 6: 90.0, 7: 15.0, 8: 60.0, 9: 6.0, 10: 0.75} if h200 else {}
    measure_rows(s, "GPT-2", GPT2 + GPT2_VECTORS, targets, slow=not s.quick)
    targets = {9: 45.0, 10: 6.2} if h200 else {}
    measure_rows(s, "Llama-1B", LLAMA, targets, False, (9, 10) if s.quick else (9, "9+", 10, "10+"))


def cpu_rows(s):
    measure_rows(s, "64 to 128", SMALL, {}, True)
    measure_rows(s, "64 to 512", MLP, {}, True)


# --- the command ------------------------------------------------------------------------------------------------------


def commit():
    """The commit, with + where files have changed since; None where it cannot be known."""
    try:
        found = subprocess.run(
            ["git", "-C", HERE, "describe", "--always", "--abbrev=12", "--dirty=+"],
            capture_output=True,
            text=True,
            check=True,
        )
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TORCHIUM_COMMIT")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="shorter, and on a GPU without the slow anchors")
    parser.add_argument("--json", help="where the figures go; python-DEVICE.json in the folder when left out")
    parser.add_argument("--folder", default=figures.RESULTS)
    return parser.parse_args()


def main():
    arguments = parse()
    try:
        extension = importlib.import_module("torchium._C")
    except ImportError as failure:
        print(f"python_compare: the package cannot be imported ({failure}); is its folder in PYTHONPATH?")
        return 2
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("highest")
    info = machine(device, extension.version) | {"commit": commit()}
    name = f"python-{figures.device_name(info['device'])}.json"
    report = Report(arguments.json or os.path.join(arguments.folder, name), info)
    print(f"{info['device']}; PyTorch {info['torch']}; Torchium {info['torchium']} at {info['commit']}")
    library = Library(extension.library_path(), arguments.device)
    if device.type == "cuda":
        library.set_stream(torch.cuda.current_stream().cuda_stream)
    s = Steps(library, device, 0.15 if arguments.quick else 0.3, report, arguments.quick)
    begun = time.perf_counter()
    for part in (gpu_rows if device.type == "cuda" else cpu_rows, overheads):
        report.attempt(part.__name__, part, s)
    print(f"figures in {report.path}; {time.perf_counter() - begun:.0f} s")
    return 1 if report.figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
