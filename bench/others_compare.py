#!/usr/bin/env python3
"""Per-sample gradients beside Opacus, and AdamW with eight-bit state beside bitsandbytes and torch.optim's float32: on
the same samples and gradients, in turns.

    PYTHONPATH=build/release/python bench/others_compare.py [--device cuda] [--peer-path FOLDER] [--out FILE]

Milliseconds are medians. Per-sample gradients are those of forward and backward of `GradSampleModule`, ours and theirs,
and are compared before they are timed. Who cannot be imported, also from a --peer-path, is left out.
"""

import argparse
import copy
import importlib.util
import os
import statistics
import sys
import time
import warnings

import figures
import torch
from timing import machine
from torch import nn

THREADS = 2  # of PyTorch, where it works on the CPU


# --- per-sample gradients ---------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """Linear layers over positions, as in a transformer."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def models():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    yield "MLP, 784 to 512 to 512 to 10, 128 samples", mlp, torch.randn(128, 784)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 15 * 15, 10),
    )  # fmt: skip
    yield "two convolutions and a linear layer, 3 x 32 x 32, 32 samples", convolutions, torch.randn(32, 3, 32, 32)
    feed = nn.Sequential(nn.LayerNorm(128), Feed(128), nn.LayerNorm(128), Feed(128))
    yield "two blocks of linear layers of 128 to 512, 64 positions, 32 samples", feed, torch.randn(32, 64, 128)
    words = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64))
    yield "embedding of 1000 x 64, 32 positions, 32 samples", words, torch.randint(1000, (32, 32))


def step(wrapped, x, synchronize):
    synchronize()
    start = time.perf_counter()
    wrapped.zero_grad()
    for parameter in wrapped.parameters():
        parameter.grad_sample = None
    wrapped(x).square().flatten(1).sum(1).mean().backward()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def gradients(wrapped):
    return [parameter.grad_sample.detach().double() for parameter in wrapped.parameters()]


def compare(name, model, x, device, count):
    import torchium
    from opacus import GradSampleModule

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    model, x = model.to(device), x.to(device)
    ours = torchium.GradSampleModule(copy.deepcopy(model))
    theirs = GradSampleModule(copy.deepcopy(model))
    for wrapped in (ours, theirs):
        step(wrapped, x, synchronize)
    pairs = zip(gradients(ours), gradients(theirs), strict=True)
    difference = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    times = [[], []]
    for _ in range(count):
        for kept, wrapped in zip(times, (ours, theirs), strict=True):
            kept.append(step(wrapped, x, synchronize))
    mine, other = (statistics.median(kept) for kept in times)
    print(
        f"{name}: {mine:.2f} ms, Opacus {other:.2f} ms, {other / mine:.2f} times; differ by {difference:.1e}",
        flush=True,
    )
    return {"what": name, "ms": mine, "opacus_ms": other, "times": other / mine, "difference": difference}


def samples(device, count):
    if importlib.util.find_spec("opacus") is None:
        print("opacus is not installed here, left out", flush=True)
        return []
    return [compare(*model, device, count) for model in models()]


# --- AdamW in eight bits ----------------------------------------------------------------------------------------------

MATRICES = 8 * [(1024, 1024)]


def makers():
    import torchium

    yield "Torchium, int8", lambda p: torchium.optim.AdamW(p, lr=1e-3, state_dtype="int8")
    yield "Torchium, float32", lambda p: torchium.optim.AdamW(p, lr=1e-3)
    yield "torch, float32, fused", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        yield "bitsandbytes, 8 bits", lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-3)


def state_bytes(optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


def adamw(device, count):
    """Every optimizer has parameters of its own, and all of them the same gradients."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    gradients = [1e-3 * torch.randn(shape, device=device) for shape in MATRICES]
    runs = []
    for name, make in makers():
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        runs.append((name, make(parameters), []))
    for turn in range(count + 2):
        for _, optimizer, times in runs:
            synchronize()
            start = time.perf_counter()
            optimizer.step()
            synchronize()
            times += [1e3 * (time.perf_counter() - start)] if turn >= 2 else []
    elements = sum(gradient.numel() for gradient in gradients)
    rows = []
    for name, optimizer, times in runs:
        row = {"by": name, "ms": statistics.median(times), "state_bytes_an_element": state_bytes(optimizer) / elements}
        print(
            f"AdamW of {elements:,}, {name}: {row['ms']:.1f} ms, {row['state_bytes_an_element']:.2f} bytes", flush=True
        )
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=21, help="passes of each that are timed")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help="where one of them lies")
    parser.add_argument("--out", default=os.path.join(figures.RESULTS, "others.json"))
    args = parser.parse_args()
    sys.path.extend(args.peer_path)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(THREADS)
    import torchium

    report = {"machine": machine(args.device, torchium.__version__)}
    report |= {"samples": samples(args.device, args.count), "adamw": adamw(args.device, args.count)}
    figures.write(args.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
