#!/usr/bin/env python3
"""Steps of Shampoo and SOAP on the matrices of GPT-2 small beside those of others, all through Python: with every root
or basis refreshed, and with none.

    PYTHONPATH=build/release/python bench/step_compare.py --peer-path META --peer-path SOAP --peer-path HEAVYBALL

Others are compared where they can be imported, or lie in folders named by --peer-path or by TORCHIUM_PEERS:
facebookresearch/optimizers, nikhilvyas/SOAP, HomebrewML/HeavyBall. Who fails is reported, and the rest goes on.
Milliseconds are of the clock on the wall around a step that is waited for.
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
from timing import machine

SHAPES = 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
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


def vyas_soap(parameters, period):
    from soap import SOAP

    return SOAP(parameters, lr=1e-3, precondition_frequency=period, weight_decay=DECAY)


def heavyball_soap(parameters, period):
    import heavyball

    options = {"max_precond_dim": 10000, "merge_dims": False, "use_precond_schedule": False}
    return heavyball.SOAP(
        parameters, lr=1e-3, betas=(0.95, 0.95), weight_decay=DECAY, precondition_frequency=period, **options
    )


@dataclass(frozen=True)
class Entry:
    method: str
    by: str
    make: Callable
    needs: str
    slow: bool = False  # fewer steps are measured where all are refreshed


ENTRIES = {
    "shampoo": Entry("Shampoo, blocks of 1024", "Torchium", our_shampoo, "torchium"),
    "meta": Entry("Shampoo, blocks of 1024", "Meta", meta_shampoo, "distributed_shampoo", slow=True),
    "soap": Entry("SOAP, whole dimensions", "Torchium", our_soap, "torchium"),
    "vyas": Entry("SOAP, whole dimensions", "nikhilvyas", vyas_soap, "soap", slow=True),
    "heavyball": Entry("SOAP, whole dimensions", "HeavyBall", heavyball_soap, "heavyball", slow=True),
}


def world(device):
    """Parameters, and two sets of gradients that come in turns: low rank and noise, as those of layers are."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in SHAPES]

    def gradient(rows, columns):
        signal = torch.randn(rows, RANK, device=device) @ torch.randn(RANK, columns, device=device)
        return 1e-3 * (signal / math.sqrt(RANK) + torch.randn(rows, columns, device=device))

    return parameters, [[gradient(*shape) for shape in SHAPES] for _ in range(2)]


def measure(entry, refreshed, device):
    parameters, gradients = world(device)
    optimizer = entry.make(parameters, 1 if refreshed else NEVER)
    warm, count = (1, 2) if entry.slow and refreshed else (5, 9)
    times = []
    for step in range(warm + count):
        for parameter, value in zip(parameters, gradients[step % 2], strict=True):
            parameter.grad = value.clone()
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        if step >= warm:
            times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times), "steps": count}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--optimizers", default=",".join(ENTRIES), help=f"some of {', '.join(ENTRIES)}")
    parser.add_argument("--out", default=os.path.join(figures.RESULTS, "steps-h200.json"))
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help="where an optimizer lies")
    args = parser.parse_args()
    args.names = args.optimizers.split(",")
    unknown = [name for name in args.names if name not in ENTRIES]
    if unknown:
        parser.error(f"--optimizers: there is no {', '.join(unknown)}; only {', '.join(ENTRIES)}")
    sys.path.extend(args.peer_path + [path for path in os.environ.get("TORCHIUM_PEERS", "").split(os.pathsep) if path])
    return args


def main():
    args = arguments()
    if not torch.cuda.is_available():
        print("step_compare.py: there is no GPU, and others would take minutes for a step without one")
        return 0
    import torchium

    warnings.filterwarnings("ignore")  # of others
    report = {"machine": machine("cuda", torchium.__version__), "rows": [], "failed": []}
    for name in args.names:
        entry = ENTRIES[name]
        if importlib.util.find_spec(entry.needs) is None:
            print(f"{name}: {entry.needs} is not installed here, left out", flush=True)
            continue
        for refreshed in (True, False):
            what = "all refreshed" if refreshed else "none refreshed"
            try:
                row = {"method": entry.method, "by": entry.by, "what": what} | measure(entry, refreshed, "cuda")
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
