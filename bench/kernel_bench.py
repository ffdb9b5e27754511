#!/usr/bin/env python3
"""Times custom kernels: compiling, compiling what the cache has, launching from C and from Python, and
torchium.elementwise beside PyTorch.

    PYTHONPATH=build/cuda/python bench/kernel_bench.py [--device cpu] [--json FILE]

One line for each figure, with its target; the process ends with status 1 where one is missed, but not with --report.
C is called through ctypes with prepared arguments, since a kernel of the package opens a context of its own; what
ctypes itself takes for a call with as many arguments is subtracted from launches. Compiling is timed in fresh processes
with a cache folder of their own: the first call of a process also opens the compiler. --device cpu is a dry run: the
targets are a GPU's. The last figure is of the CPU wherever it is run: a grid-stride kernel beside the same loop in C,
both on one thread.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import figures
import torch
import torchium
from library import Library, fields, tensor
from timing import row_us, waiter
from torchium import _C

SOURCE = b"""
__global__ void scale_add(float *y, const float *x, float a, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += a * x[i];
}
"""
OTHER = SOURCE.replace(b"+=", b"-=", 1).replace(b"scale_add", b"other")
N = 256
LAUNCHES = 200  # in a round: well below the number that a stream can hold, beyond which a launch waits
ROUNDS = 25


class Config(ctypes.Structure):
    _fields_ = fields(
        "size struct_size",
        "text source path name",
        "int option_count",
        "pointer options",
        "int include_count",
        "pointer includes",
        "int use_cache",
        "pointer log",
        "size log_size",
    )


class Argument(ctypes.Structure):
    _fields_ = fields("int kind", "pointer tensor", "long integer", "real real", "pointer bytes", "size size")


class Shape(ctypes.Structure):
    _fields_ = fields("size struct_size", "long grid[3] block[3] shared_bytes")


class Info(ctypes.Structure):
    _fields_ = fields(
        "size struct_size",
        "int parameters registers",
        "long shared_bytes local_bytes",
        "int max_threads suggested_threads suggested_blocks from_cache",
    )


TENSOR, INT, REAL = 0, 1, 2


def compile_kernel(library, source, name, use_cache):
    """A kernel, and the milliseconds it took."""
    config = Config(struct_size=ctypes.sizeof(Config), source=source, name=name, use_cache=use_cache)
    kernel = ctypes.c_void_p()
    start = time.perf_counter_ns()
    library._check(library.lib.tch_kernel_compile(library.context, ctypes.byref(config), ctypes.byref(kernel)))
    return kernel, 1e-6 * (time.perf_counter_ns() - start)


def is_from_cache(library, kernel):
    info = Info(struct_size=ctypes.sizeof(Info))
    library._check(library.lib.tch_kernel_get_info(kernel, ctypes.byref(info)))
    return bool(info.from_cache)


def microseconds(function, wait):
    """Median over the rounds of a call's time on the host; synchronized in between."""
    times = []
    for _ in range(ROUNDS + 3):
        wait()
        times.append(row_us(function, LAUNCHES))
    wait()
    return statistics.median(times[3:])


def launch_from_c(library, device):
    """A launch of a small kernel with four arguments, less what ctypes takes for a call with as many as it has."""
    kernel, _ = compile_kernel(library, SOURCE, b"scale_add", 0)
    x, y = (tensor(torch.ones(N, device=device)) for _ in range(2))
    arguments = (Argument * 4)(
        Argument(kind=TENSOR, tensor=ctypes.addressof(y)),
        Argument(kind=TENSOR, tensor=ctypes.addressof(x)),
        Argument(kind=REAL, real=0.5),
        Argument(kind=INT, integer=N),
    )
    shape = Shape(ctypes.sizeof(Shape), (1, 1, 1), (N, 1, 1), 0)
    place, count = ctypes.byref(shape), ctypes.c_int32(4)
    launch, idle = library.lib.tch_kernel_launch, library.lib.tch_context_get_workspace_limit
    library._check(launch(kernel, place, count, arguments))
    whole = microseconds(lambda: launch(kernel, place, count, arguments), library.synchronize)
    nothing = microseconds(lambda: idle(library.context, place, count, arguments), library.synchronize)
    return whole - nothing


def launch_from_python(device):
    """A call, and of it the part that was spent inside the library."""
    x, y = torch.ones(N, device=device), torch.zeros(N, device=device)
    kernel = torchium.kernel(SOURCE.decode(), "scale_add", cache=False)
    arguments = (y, x, 0.5, N)
    whole = microseconds(lambda: kernel(1, N, arguments), waiter(device))
    before = _C.library_time()
    for _ in range(LAUNCHES):
        kernel(1, N, arguments)
    return whole, 1e-3 * (_C.library_time() - before) / LAUNCHES


# --- elementwise functions --------------------------------------------------------------------------------------------


def each_us(function, wait, calls):
    """Microseconds of a call in a row of calls, to the end of the device's work: the median of 15 rows."""
    times = []
    for _ in range(15 + 2):
        wait()
        times.append(row_us(function, calls, wait))
    return statistics.median(times[2:])


def beside_torch(device):
    """z = a x + y, one operation of PyTorch's, for growing tensors: a row for each."""
    axpy = torchium.elementwise("T a, T x, T y", "T z", "z = a * x + y", "axpy")
    wait, rows = waiter(device), []
    for n in (10**k for k in range(3, 9 if device != "cpu" else 8)):
        x, y, z = (torch.rand(n, device=device) for _ in range(3))
        if not torch.allclose(axpy(0.5, x, y), torch.add(y, x, alpha=0.5)):
            raise SystemExit(f"axpy of {n} elements is wrong")
        axpy(0.5, x, y, out=z)
        calls = max(4, min(LAUNCHES, 10**8 // n))
        sides = {
            "ours": lambda x=x, y=y: axpy(0.5, x, y),
            "torch": lambda x=x, y=y: torch.add(y, x, alpha=0.5),
            "ours_out": lambda x=x, y=y, z=z: axpy(0.5, x, y, out=z),
            "torch_out": lambda x=x, y=y, z=z: torch.add(y, x, alpha=0.5, out=z),
        }
        rows.append({"elements": n} | {name: each_us(function, wait, calls) for name, function in sides.items()})
    return rows


def print_beside_torch(rows):
    for row in rows:
        new, out = row["ours"] / row["torch"], row["ours_out"] / row["torch_out"]
        print(
            f"a x + y, {row['elements']:>9} elements: {row['ours']:9.2f} us, torch {row['torch']:9.2f} ({new:.2f} x)"
            f"   with out {row['ours_out']:9.2f} us, torch {row['torch_out']:9.2f} ({out:.2f} x)"
        )


# --- the CPU beside a loop by hand ------------------------------------------------------------------------------------

LOOP = "void scale_add(float *y, const float *x, float a, int n) { for (int i = 0; i < n; i++) y[i] += a * x[i]; }"


def loop_by_hand(folder):
    """The same loop compiled by the system's C compiler; None where there is none."""
    source, made = os.path.join(folder, "loop.c"), os.path.join(folder, "loop.so")
    with open(source, "w", encoding="ascii") as file:
        file.write(LOOP)
    try:
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", made], check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    function = ctypes.CDLL(made).scale_add
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int]
    return function


def ratio_on_the_cpu(elements=1_000_000, rounds=200):
    """The shortest time of a grid-stride kernel over that of the loop, in turns: others only make times longer."""
    kernel = torchium.kernel(SOURCE.decode(), "scale_add")
    x, y = torch.ones(elements), torch.zeros(elements)
    threads = _C.get_num_threads()
    _C.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        by_hand = loop_by_hand(folder)
        if by_hand is None:
            return None
        sides = (
            lambda: kernel(64, 256, (y, x, 0.5, elements)),
            lambda: by_hand(y.data_ptr(), x.data_ptr(), 0.5, elements),
        )
        best = [float("inf")] * 2
        for _ in range(rounds):
            for i, side in enumerate(sides):
                best[i] = min(best[i], row_us(side, 1))
    _C.set_num_threads(threads)
    return best[0] / best[1]


# --- compiling --------------------------------------------------------------------------------------------------------


def time_compiling(device):
    """In this process: the first kernel, the second, and the second again, which is in the cache by then."""
    library = Library(_C.library_path(), device)
    first, first_ms = compile_kernel(library, SOURCE, b"scale_add", 1)
    _, second_ms = compile_kernel(library, OTHER, b"other", 1)
    again = [compile_kernel(library, OTHER, b"other", 1) for _ in range(9)]
    return {
        "first": first_ms,
        "first_from_cache": is_from_cache(library, first),
        "second": second_ms,
        "again": statistics.median(ms for _, ms in again),
        "again_from_cache": all(is_from_cache(library, kernel) for kernel, _ in again),
    }


def in_fresh_process(arguments, cache):
    command = [sys.executable, __file__, "--device", arguments.device, "--compiling"]
    done = subprocess.run(
        command, env=os.environ | {"TORCHIUM_CACHE": cache}, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


class Table:
    """Prints each figure with its target, and keeps them."""

    def __init__(self):
        self.figures, self.missed = {}, []

    def add(self, name, what, figure, unit, target=None):
        if figure is None:
            print(f"{what:<52} not measured")
            return
        self.figures[name] = figure
        met = target is None or figure <= target
        self.missed += [] if met else [name]
        goal = "" if target is None else f"  target {target:g} {unit}: {'met' if met else 'MISSED'}"
        print(f"{what:<52} {figure:8.2f} {unit}{goal}")


def measure(arguments):
    table = Table()
    with tempfile.TemporaryDirectory() as cache:
        cold = in_fresh_process(arguments, cache)
        warm = in_fresh_process(arguments, cache)
    if cold["first_from_cache"] or not (warm["first_from_cache"] and cold["again_from_cache"]):
        raise SystemExit("the cache was not used as the figures need it")
    whole, inside = launch_from_python(arguments.device)
    table.add("first_ms", "first compile of a process", cold["first"], "ms", 300)
    table.add("next_ms", "next compile", cold["second"], "ms", 300)
    table.add("cached_ms", "cached", cold["again"], "ms", 5)
    table.add("cached_first_ms", "cached, the first of a process", warm["first"], "ms")
    from_c = launch_from_c(Library(_C.library_path(), arguments.device), arguments.device)
    table.add("launch_c_us", "launch from C, host", from_c, "us", 5)
    table.add("launch_python_us", "launch from Python, host", whole, "us", 12)
    table.add("launch_python_inside_us", "  of it inside the library", inside, "us")
    table.figures["elementwise"] = beside_torch(arguments.device)
    print_beside_torch(table.figures["elementwise"])
    table.add("cpu_ratio", "grid-stride kernel on the CPU / loop in C", ratio_on_the_cpu(), "x", 1.5)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--report", action="store_true", help="a target that is missed is no failure")
    parser.add_argument("--compiling", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compiling:
        print(json.dumps(time_compiling(arguments.device)))
        return 0
    table = measure(arguments)
    if arguments.json:
        figures.write(arguments.json, {"device": arguments.device} | table.figures)
    return 1 if table.missed and not arguments.report else 0


if __name__ == "__main__":
    sys.exit(main())
