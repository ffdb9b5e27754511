#!/usr/bin/env python3
"""Steps of Shampoo, SOAP and Muon beside those of others, all through Python: with every root or basis refreshed, and
with none. On a GPU the matrices are those of GPT-2 small, on the CPU those of a GPT of a quarter of its width.

    PYTHONPATH=build/release/python bench/step_compare.py --peer-path META --peer-path SOAP --peer-path HEAVYBALL
    PYTHONPATH=build/release/python bench/step_compare.py --device cpu --peer-path META ...

Others are compared where they can be imported, or lie in folders named by --peer-path or by TORCHIUM_PEERS:
facebookresearch/optimizers, nikhilvyas/SOAP, HomebrewML/HeavyBall, microsoft/dion, NVIDIA-NeMo/Emerging-Optimizers. Who
fails is reported, and the rest goes on. Milliseconds are of the clock on the wall around a step that is waited for.
"""

import argparse
import importlib.util
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import figures
import torch
from timing import machine, waiter

SHAPES = {
    "cuda": 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
    "cpu": 2 * [(576, 192), (192, 192), (768, 192), (192, 768)],
}
RESULTS = {"cuda": "steps-h200.json", "cpu": "steps-cpu-2-cores.json"}
RANK = 64  # of the gradients, under noise
NEVER = 1000  # a period that no measurement comes to the end of
BETAS, DECAY = (0.9, 0.95), 0.1


def our_shampoo(parameters, period):
    from torchium.optim import Shampoo

    return Shampoo(
        parameters, betas=BETAS, update_freq=period, grafting_beta2=BETAS[1], weight_decay=DECAY, stagger=False
    )


def meta_shampoo(parameters, period):
    import distributed_shampoo as meta

    return meta.DistributedShampoo(
        parameters,
        lr=1e-3,
        betas=BETAS,
        epsilon=1e-12,
        weight_decay=DECAY,
        precondition_frequency=period,
        max_preconditioner_dim=1024,
        grafting_config=meta.AdamPreconditionerConfig(beta2=BETAS[1], epsilon=1e-8),
    )


def our_soap(parameters, period):
    from torchium.optim import SOAP

    return SOAP(parameters, lr=1e-3, precondition_frequency=period, weight_decay=DECAY, stagger=False)


def our_soap_in_blocks(parameters, period):
    from torchium.optim import SOAP

    options = {"max_precond_dim": 1024, "block": True, "stagger": False}
    return SOAP(parameters, lr=1e-3, precondition_frequency=period, weight_decay=DECAY, **options)


def vyas_soap(parameters, period):
    from soap import SOAP

    return SOAP(parameters, lr=1e-3, precondition_frequency=period, weight_decay=DECAY)


def heavyball_soap(parameters, period):
    import heavyball

    heavyball.utils.compile_mode = None  # it takes minutes for that, and more to try kernels out
    options = {"max_precond_dim": 10000, "merge_dims": False, "use_precond_schedule": False}
    return heavyball.SOAP(
        parameters, lr=1e-3, betas=(0.95, 0.95), weight_decay=DECAY, precondition_frequency=period, **options
    )


def emerging_soap(parameters, period):
    from emerging_optimizers.legacy_soap.soap import SOAP

    return SOAP(parameters, lr=1e-3, weight_decay=DECAY)


def our_muon(parameters, period):
    from torchium.optim import Muon

    return Muon(parameters, lr=1e-3, weight_decay=DECAY)


def torch_muon(parameters, period):
    return torch.optim.Muon(parameters, lr=1e-3, weight_decay=DECAY)


def dion_muon(parameters, period):
    from dion import Muon

    return Muon(parameters, lr=1e-3, mu=0.95, nesterov=True, weight_decay=DECAY)


def emerging_muon(parameters, period):
    from emerging_optimizers.orthogonalized_optimizers.muon import Muon

    return Muon(parameters, lr=1e-3, weight_decay=DECAY, nesterov=True)


ALL, NONE, EVERY = "all refreshed", "none refreshed", "a step"


@dataclass(frozen=True)
class Entry:
    method: str
    by: str
    make: Callable
    needs: str
    slow: bool = False  # fewer steps are measured where all are refreshed
    what: tuple = (ALL, NONE)


ENTRIES = {
    "shampoo": Entry("Shampoo, blocks of 1024", "Torchium", our_shampoo, "torchium"),
    "meta": Entry("Shampoo, blocks of 1024", "Meta", meta_shampoo, "distributed_shampoo", slow=True),
    "soap": Entry("SOAP, whole dimensions", "Torchium", our_soap, "torchium"),
    "vyas": Entry("SOAP, whole dimensions", "nikhilvyas", vyas_soap, "soap", slow=True),
    "heavyball": Entry("SOAP, whole dimensions", "HeavyBall", heavyball_soap, "heavyball", slow=True),
    "emerging": Entry(
        "SOAP, whole dimensions", "Emerging-Optimizers", emerging_soap, "emerging_optimizers", slow=True, what=(ALL,)
    ),
    "soap-blocks": Entry("SOAP, blocks of 1024", "Torchium", our_soap_in_blocks, "torchium"),
    "muon": Entry("Muon", "Torchium", our_muon, "torchium", what=(EVERY,)),
    "torch-muon": Entry("Muon", "torch.optim", torch_muon, "torch", what=(EVERY,)),
    "dion-muon": Entry("Muon", "Dion", dion_muon, "dion", what=(EVERY,)),
    "emerging-muon": Entry("Muon", "Emerging-Optimizers", emerging_muon, "emerging_optimizers", what=(EVERY,)),
}


def world(device):
    """Parameters, and two sets of gradients that come in turns: low rank and noise, as those of layers are."""
    torch.manual_seed(0)
    shapes = SHAPES[device]
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]

    def gradient(rows, columns):
        signal = torch.randn(rows, RANK, device=device) @ torch.randn(RANK, columns, device=device)
        return 1e-3 * (signal / math.sqrt(RANK) + torch.randn(rows, columns, device=device))

    return parameters, [[gradient(*shape) for shape in shapes] for _ in range(2)]


def measure(entry, what, device):
    parameters, gradients = world(device)
    optimizer = entry.make(parameters, NEVER if what == NONE else 1)
    warm, count = (1, 2) if entry.slow and what == ALL and device == "cuda" else (5, 9)
    wait = waiter(device)
    times = []
    for step in range(warm + count):
        for parameter, value in zip(parameters, gradients[step % 2], strict=True):
            parameter.grad = value.clone()
        wait()
        start = time.perf_counter()
        optimizer.step()
        wait()
        if step >= warm:
            times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times), "steps": count}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--optimizers", default=",".join(ENTRIES), help=f"some of {', '.join(ENTRIES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch and of the library, on the CPU")
    parser.add_argument("--out", help="figures; a file of bench/results for the device")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help="where an optimizer lies")
    args = parser.parse_args()
    args.names = args.optimizers.split(",")
    args.out = args.out or os.path.join(figures.RESULTS, RESULTS[args.device])
    unknown = [name for name in args.names if name not in ENTRIES]
    if unknown:
        parser.error(f"--optimizers: there is no {', '.join(unknown)}; only {', '.join(ENTRIES)}")
    sys.path.extend(args.peer_path + [path for path in os.environ.get("TORCHIUM_PEERS", "").split(os.pathsep) if path])
    return args


def main():
    args = arguments()
    import torchium
    from torchium import _C

    if args.device == "cpu":
        torch.set_num_threads(args.threads)
        _C.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")  # of others
    report = {"machine": machine(args.device, torchium.__version__), "rows": [], "failed": []}
    for name in args.names:
        entry = ENTRIES[name]
        if importlib.util.find_spec(entry.needs) is None:
            print(f"{name}: {entry.needs} is not installed here, left out", flush=True)
            continue
        for what in entry.what:
            try:
                row = {"method": entry.method, "by": entry.by, "what": what} | measure(entry, what, args.device)
            except Exception as failure:
                why = f"{type(failure).__name__}: {failure}".splitlines()[0]
                report["failed"].append({"by": entry.by, "what": what, "why": why})
                print(f"FAILED {entry.by}, {what}: {why}", flush=True)
                continue
            report["rows"].append(row)
            figures.write(args.out, report)
            print(f"{entry.method}, {entry.by}, {what}: {row['ms']:.1f} ms", flush=True)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
