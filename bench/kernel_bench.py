#!/usr/bin/env python3
"""Times custom kernels: compilation, cache hits, launches, and torchium.elementwise vs PyTorch.

    PYTHONPATH=build/cuda/python bench/kernel_bench.py [--device cpu] [--json FILE]

One line per figure, with its target on a GPU; the exit status is 1 if one is missed, except with --report. Compilation
is timed in new processes with a separate cache folder: the first call of a process also loads the compiler.
"""

import argparse
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
from timing import row_us, waiter
from torchium import _C

SOURCE = """
__global__ void scale_add(float *y, const float *x, float a, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += a * x[i];
}
"""
OTHER = SOURCE.replace("+=", "-=", 1).replace("scale_add", "other")
N = 256
LAUNCHES = 200  # per round: well below the length of a stream's queue, beyond which a launch blocks
TARGETS = {"first_ms": 300, "next_ms": 300, "cached_ms": 5, "launch_inside_us": 5, "launch_us": 12}


def median_us(function, wait, calls, rounds=15, waited=False):
    """Median over rounds of a call's host time, or with `waited` until the device is done."""
    times = []
    for _ in range(rounds + 2):
        wait()
        times.append(row_us(function, calls, wait if waited else lambda: None))
    return statistics.median(times[2:])


def compile_ms(source, name, device):
    """Milliseconds, and whether it was a cache hit."""
    start = time.perf_counter()
    info = torchium.kernel(source, name).info(device)
    return 1e3 * (time.perf_counter() - start), info["from_cache"]


def compiling(device):
    """In this process: the first kernel, the second, and the second again, a cache hit."""
    first, cached = compile_ms(SOURCE, "scale_add", device)
    second, _ = compile_ms(OTHER, "other", device)
    again = [compile_ms(OTHER, "other", device) for _ in range(9)]
    found = {"first": first, "first_from_cache": cached, "second": second}
    return found | {"again": statistics.median(ms for ms, _ in again), "again_from_cache": all(c for _, c in again)}


def in_fresh_process(device, cache):
    command = [sys.executable, __file__, "--device", device, "--compiling"]
    done = subprocess.run(command, env=os.environ | {"TORCHIUM_CACHE": cache}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def launching(device):
    """Microseconds of a launch with four arguments, and of the part inside the library."""
    x, y = torch.ones(N, device=device), torch.zeros(N, device=device)
    kernel, arguments = torchium.kernel(SOURCE, "scale_add", cache=False), (y, x, 0.5, N)
    whole = median_us(lambda: kernel(1, N, arguments), waiter(device), LAUNCHES, 25)
    before = _C.library_time()
    for _ in range(LAUNCHES):
        kernel(1, N, arguments)
    return {"launch_us": whole, "launch_inside_us": 1e-3 * (_C.library_time() - before) / LAUNCHES}


def elementwise(device):
    """z = a x + y, one PyTorch operation, for increasing sizes: one row each."""
    axpy = torchium.elementwise("T a, T x, T y", "T z", "z = a * x + y", "axpy")
    for n in (10**k for k in range(3, 9 if device != "cpu" else 7)):
        x, y, z = (torch.rand(n, device=device) for _ in range(3))
        if not torch.allclose(axpy(0.5, x, y), torch.add(y, x, alpha=0.5)):
            raise SystemExit(f"axpy of {n} elements is wrong")
        sides = {
            "ours": lambda x=x, y=y: axpy(0.5, x, y),
            "torch": lambda x=x, y=y: torch.add(y, x, alpha=0.5),
            "ours_out": lambda x=x, y=y, z=z: axpy(0.5, x, y, out=z),
            "torch_out": lambda x=x, y=y, z=z: torch.add(y, x, alpha=0.5, out=z),
        }
        calls = max(4, min(LAUNCHES, 10**8 // n))
        row = {name: median_us(side, waiter(device), calls, waited=True) for name, side in sides.items()}
        print(f"a x + y, {n:>9} elements: " + "  ".join(f"{name} {us:.2f} us" for name, us in row.items()), flush=True)
        yield {"elements": n} | row


def measure(device):
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = in_fresh_process(device, cache), in_fresh_process(device, cache)
    if cold["first_from_cache"] or not (warm["first_from_cache"] and cold["again_from_cache"]):
        raise SystemExit("the cache was not used as the figures need it")
    found = {"first_ms": cold["first"], "next_ms": cold["second"], "cached_ms": cold["again"]}
    found |= {"cached_first_ms": warm["first"]} | launching(device)
    missed = [name for name, target in TARGETS.items() if found[name] > target]
    for name, figure in found.items():
        target = f"  target {TARGETS[name]}: {'MISSED' if name in missed else 'met'}" if name in TARGETS else ""
        print(f"{name:<20} {figure:8.2f}{target}")
    return found | {"elementwise": list(elementwise(device))}, missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--report", action="store_true", help="a target that is missed is no failure")
    parser.add_argument("--compiling", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compiling:
        print(json.dumps(compiling(arguments.device)))
        return 0
    found, missed = measure(arguments.device)
    if arguments.json:
        figures.write(arguments.json, {"device": arguments.device} | found)
    return 1 if missed and not arguments.report else 0


if __name__ == "__main__":
    sys.exit(main())
