#!/usr/bin/env python3
"""Shampoo with its factors and roots in several forms: what a step takes where all roots are refreshed and with a
period, and how much memory.

    PYTHONPATH=build/release/python bench/state_compare.py [--forms whole,packed] [--out FILE]
    PYTHONPATH=build/release/python bench/state_compare.py --device cpu --size small

The matrices of a Llama of a billion parameters in blocks of 1024, with gradients of rank 64 and noise. Milliseconds
are of the clock on the wall around a step that is waited for: the median with all roots, the mean of a period of 10
and its longest step. Memory is the library's state and, on a GPU, the most that PyTorch had beyond parameters and
gradients.
"""

import argparse
import math
import os
import statistics
import sys
import time

import figures
import torch
from timing import machine, waiter
from torchium.optim import Shampoo

PERIOD = 10
RANK = 64  # of the gradients, under noise
SIZES = {
    "llama": (16 * (4 * [(2048, 2048)] + 2 * [(5632, 2048)] + [(2048, 5632)]), 1024),
    "small": (2 * [(96, 64), (64, 160)], 64),
}
FORMS = {
    "whole": {},
    "packed": {"packed_factors": True},
    "bf16-roots": {"root_dtype": "bfloat16"},
    "packed-bf16-roots": {"packed_factors": True, "root_dtype": "bfloat16"},
}


def world(shapes, device):
    """Parameters with a gradient each: low rank and noise, as those of layers are."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for rows, columns in shapes:
        parameter = torch.nn.Parameter(0.02 * torch.randn(rows, columns, device=device, generator=generator))
        left = torch.randn(rows, RANK, device=device, generator=generator)
        signal = left @ torch.randn(RANK, columns, device=device, generator=generator) / math.sqrt(RANK)
        noise = torch.randn(rows, columns, device=device, generator=generator)
        parameter.grad = 1e-3 * (signal + noise)
        parameters.append(parameter)
    return parameters


def timed(step, count, wait):
    """Milliseconds of each of so many steps."""
    times = []
    for _ in range(count):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measure(parameters, most, options, period, device):
    wait = waiter(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    optimizer = Shampoo(parameters, update_freq=period, max_preconditioner_dim=most, **options)
    timed(optimizer.step, 3 * period + 2, wait)  # steps are recorded at their third time
    times = timed(optimizer.step, max(period, 5), wait)
    peak = {"peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9} if device == "cuda" else {}
    return times, {"state_gb": optimizer.memory_report()["state"] / 1e9} | peak


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=SIZES, help="llama on a GPU, small without one")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"some of {', '.join(FORMS)}")
    parser.add_argument("--out", default=os.path.join(figures.RESULTS, "state-h200.json"))
    args = parser.parse_args()
    args.names = args.forms.split(",")
    unknown = [name for name in args.names if name not in FORMS]
    if unknown:
        parser.error(f"--forms: there is no {', '.join(unknown)}; only {', '.join(FORMS)}")
    args.size = args.size or ("llama" if args.device == "cuda" else "small")
    return args


def main():
    args = arguments()
    import torchium

    shapes, most = SIZES[args.size]
    parameters = world(shapes, args.device)
    report = {"machine": machine(args.device, torchium.__version__), "size": args.size, "rows": []}
    for name in args.names:
        every, memory = measure(parameters, most, FORMS[name], 1, args.device)
        periodic, _ = measure(parameters, most, FORMS[name], PERIOD, args.device)
        numbers = {
            "all_roots_ms": statistics.median(every),
            "period_ms": statistics.fmean(periodic),
            "slowest_ms": max(periodic),
        } | memory
        report["rows"].append({"form": name} | numbers)
        figures.write(args.out, report)
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
