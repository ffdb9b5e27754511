#!/usr/bin/env python3
"""Where a Muon step on a GPU spends its time: the step of a Llama of a billion parameters, kernel by kernel as the
profiler of PyTorch records them, and the products it asks cuBLAS for, alone and sustained.

    bench/muon_profile.py build/cuda/src/libtorchium.so [--steps N] [--products]
"""

import argparse
import collections
import functools

import torch
from library import Library
from optim_compare import LLAMA, make
from optimizers import NONFINITE, Optimizer, defaults
from timing import Clock

SQUARE, LONG = (64, 2048, 2048), (48, 2048, 5632)


def open_muon(library, method):
    parameters, gradients = make(LLAMA, torch.device("cuda"))
    config = defaults(library, "muon", muon_method=method, nonfinite=NONFINITE["ignore"])
    optimizer = Optimizer(library, config, parameters)
    optimizer.set_gradients(gradients)
    return optimizer


def kernels_of(function, count):
    """(milliseconds, launches) of a call for each kernel, and the time from the first to the last."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            function()
        torch.cuda.synchronize()
    total = collections.defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += event.time_range.elapsed_us() / 1e3 / count
            total[event.name][1] += 1 / count
    return total


def show_step(library, clock, name, method, steps):
    optimizer = open_muon(library, method)
    ms = clock.median(optimizer.step, 1.0)
    total = kernels_of(optimizer.step, steps)
    print(f"{name}: {ms:.3f} ms a step, {sum(t for t, _ in total.values()):.3f} in kernels")
    for kernel, (time, launches) in sorted(total.items(), key=lambda item: -item[1][0])[:14]:
        print(f"  {time:8.3f} ms {launches:6.1f} launches  {kernel[:110]}", flush=True)
    optimizer.close()
    library.trim()


def show_products(clock):
    """Q X for symmetric Q, which may be asked for as Q or as its transpose."""
    for batch, m, n in (SQUARE, LONG):
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(batch, m, n, device="cuda", dtype=dtype) / n**0.5
            q = torch.randn(batch, m, m, device="cuda", dtype=dtype) / m**0.5
            out = torch.empty_like(x)
            for word, left in (("Q X", q), ("Q'X", q.transpose(1, 2))):
                ms = clock.median(functools.partial(torch.bmm, left, x, out=out), 1.0)
                rate = 2e-9 * batch * m * m * n / ms
                print(f"{batch} x {m} x {n} {word:3} {str(dtype)[6:]:9} {ms:7.3f} ms {rate:6.0f} TFLOP/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--products", action="store_true")
    arguments = parser.parse_args()
    clock = Clock(torch.device("cuda"))
    library = Library(arguments.library, "cuda")
    library.set_stream(torch.cuda.current_stream().cuda_stream)
    for name, method in (("minimax", 2), ("polar_express", 0), ("muon", 1)):
        show_step(library, clock, name, method, arguments.steps)
    if arguments.products:
        show_products(clock)


if __name__ == "__main__":
    main()
