#!/usr/bin/env python3
"""Error of 8-bit state vs bitsandbytes: the distance of parameters from those with float32 state, as a percentage of
the distance that they moved, with the same gradients.

    PYTHONPATH=build/release/python bench/int8_compare.py [--steps 100] [--count 8192] [--seed 77] [--device cpu]
        [--out FILE]
"""

import argparse
import functools

import bitsandbytes
import figures
import torch
import torchium
from timing import machine

KINDS = {
    "AdamW": (functools.partial(torchium.optim.AdamW, weight_decay=0.0), bitsandbytes.optim.AdamW8bit),
    "Lion": (functools.partial(torchium.optim.Lion, betas=(0.9, 0.99)), bitsandbytes.optim.Lion8bit),
    "SGD": (functools.partial(torchium.optim.SGD, momentum=0.9), bitsandbytes.optim.SGD8bit),
}
THEIRS = {"AdamW": {"weight_decay": 0.0}, "Lion": {"betas": (0.9, 0.99)}, "SGD": {"momentum": 0.9}}


def cases(count):
    """Gradients of a step, from a generator."""
    fixed = torch.Generator().manual_seed(1)
    means = torch.randn(count, generator=fixed)
    spread = {power: 10 ** (-power * torch.rand(count, generator=fixed)) for power in (2, 4)}
    outliers = torch.ones(count)
    outliers[::64] = 1000.0

    def normal(generator):
        return torch.randn(count, generator=generator)

    def hit(generator, rows, share):
        return (torch.rand(rows, 1, generator=generator) < share).expand(rows, count // rows).reshape(-1)

    return {
        "white": normal,
        "mean 1, deviation 1": lambda g: 1 + normal(g),
        "means of their own, deviation 0.1": lambda g: means + 0.1 * normal(g),
        "sizes spread by 100": lambda g: spread[2] * normal(g),
        "sizes spread by 10,000": lambda g: spread[4] * normal(g),
        "one of 64 a thousand times larger": lambda g: outliers * normal(g),
        "one of 20 elements at a time": lambda g: normal(g) * hit(g, count, 0.05),
        "one of 10 rows of 256 at a time": lambda g: normal(g) * hit(g, count // 256, 0.1),
        "heavy tails": lambda g: normal(g) / torch.rand(count, generator=g).sqrt().clamp_min(1e-4),
    }


def train(make, gradient, args):
    generator = torch.Generator().manual_seed(args.seed)
    parameter = torch.nn.Parameter(torch.zeros(args.count, device=args.device))
    optimizer = make([parameter])
    for _ in range(args.steps):
        parameter.grad = gradient(generator).to(args.device)
        optimizer.step()
    return parameter.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--count", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    for kind, (ours, theirs) in KINDS.items():
        for case, gradient in cases(args.count).items():
            exact = train(functools.partial(ours, lr=1e-3), gradient, args)
            row = {"optimizer": kind, "gradients": case}
            for name, make in (
                ("ours_percent", functools.partial(ours, lr=1e-3, state_dtype="int8")),
                ("bitsandbytes_percent", functools.partial(theirs, lr=1e-3, **THEIRS[kind])),
            ):
                off = train(make, gradient, args) - exact
                row[name] = 100 * (off.norm() / exact.norm()).item()
            rows.append(row)
            percents = f"{row['ours_percent']:7.2f} {row['bitsandbytes_percent']:7.2f}"
            print(f"{kind:6} {case:36} {percents}", flush=True)
    if args.out:
        figures.write(
            args.out, {"machine": machine(args.device, torchium.__version__), "steps": args.steps, "rows": rows}
        )


if __name__ == "__main__":
    main()
