#!/usr/bin/env python3
"""Times steps of Muon and Shampoo sharded over two processes by gloo, one thread each, vs Dion's Muon and Meta's
Distributed Shampoo, in one run: the same parameters and gradients, replicated (as under DDP) and sharded by rows (as
under fully_shard).

    PYTHONPATH=build/release/python:DION:SHAMPOO bench/gloo_compare.py [--width N] [--layers N]

DION and SHAMPOO are checkouts of github.com/microsoft/dion and github.com/facebookresearch/optimizers; missing ones are
skipped. Rounds alternate between all of them, so that other load on the machine affects all alike. In addition to a
step's milliseconds it reports the CPU time of both processes, which load affects less.

Dion orthogonalizes in bfloat16, which many CPUs do not support: it gets five steps of Muon's polynomial in float32, as
does Torchium in a second row. Of Meta's modes for shards, the default preconditions
each shard separately, which is not equivalent to one process; REPLICATE is. ROUND_ROBIN, also equivalent, uses
collectives that gloo lacks.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from functools import partial

import figures
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from many_ranks import PERIOD, Training, join, our_muon, our_shampoo
from timing import machine
from torch.distributed.device_mesh import init_device_mesh

WARM_UP = 3  # rounds: Dion's functions are compiled, and again for other sizes


def newton_schulz(g, epsilon=1e-6):
    """Five steps of Muon's polynomial in float32."""
    x = g.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + epsilon)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


def dion_muon(parameters, mesh, **options):
    from dion import Muon

    return Muon(parameters, mesh or dist.group.WORLD, lr=0.01, weight_decay=0.0, nesterov=True, **options)


def meta_shampoo(parameters, mesh, strategy="DEFAULT"):
    import distributed_shampoo as meta

    if mesh:
        placed = meta.FullyShardDistributedConfig(
            param_assignment_strategy=getattr(meta.FSDPParamAssignmentStrategy, strategy)
        )
    else:
        placed = meta.DDPDistributedConfig()
    return meta.DistributedShampoo(
        parameters,
        lr=0.01,
        betas=(0.9, 0.99),
        epsilon=1e-8,
        grafting_config=meta.AdamPreconditionerConfig(beta2=0.99, epsilon=1e-8),
        precondition_frequency=PERIOD,
        max_preconditioner_dim=256,
        distributed_config=placed,
    )


OURS = "torchium"
MUON, SHAMPOO = "Muon step", f"Shampoo step, roots every {PERIOD}"
WORK = {
    MUON: {
        OURS: our_muon,
        "torchium, Muon's polynomial": partial(our_muon, ns_coefficients=(3.4445, -4.7750, 2.0315), ns_steps=5),
        "Dion, float32": partial(dion_muon, newton_schulz_func=newton_schulz),
    },
    SHAMPOO: {OURS: our_shampoo, "Meta": meta_shampoo},
}
ONLY_SHARDED = {SHAMPOO: {"Meta, REPLICATE": partial(meta_shampoo, strategy="REPLICATE")}}
NEEDS = {"Dion": "dion", "Meta": "distributed_shampoo"}


def found(name):
    module = NEEDS.get(name.split(",")[0])
    return module is None or importlib.util.find_spec(module) is not None


def period(optimizer, ranks):
    """As many steps as the refresh interval. Milliseconds per step of the slowest rank, and CPU time of all."""
    dist.barrier()
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(PERIOD):
        optimizer.step()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - busy], dtype=torch.float64)
    every = [torch.empty_like(spent) for _ in range(ranks)]
    dist.all_gather(every, spent)
    every = 1e3 * torch.stack(every) / PERIOD
    return every[:, 0].max().item(), every[:, 1].sum().item()


def measure(work, placement, mesh, args):
    """A row: all implementations alternating, round after round."""
    makers = WORK[work] | (ONLY_SHARDED.get(work, {}) if mesh else {})
    trainings = {name: Training(make, mesh, args) for name, make in makers.items() if found(name)}
    times = {name: [] for name in trainings}
    for training in trainings.values():
        training.set_gradients(0)
    for _ in range(WARM_UP + args.rounds):
        for name, training in trainings.items():
            times[name].append(period(training.optimizer, args.ranks))
    wall, busy = (
        {name: statistics.median(row[k] for row in rows[WARM_UP:]) for name, rows in times.items()} for k in range(2)
    )
    row = {"work": work, "size": f"GPT, {args.layers} x {args.width}", "placement": placement, "ranks": args.ranks}
    row |= {"ours_ms": wall.pop(OURS), "anchors_ms": wall}
    return row | {"ours_processor_ms": busy.pop(OURS), "anchors_processor_ms": busy}


def worker(rank, folder, args):
    join(rank, folder, args)
    torch._dynamo.config.recompile_limit = 1000  # Dion compiles its functions for every shape and placement
    rows = []
    for placement, mesh in (("replicated", None), ("sharded by rows", init_device_mesh("cpu", (args.ranks,)))):
        for work in WORK:
            rows.append(measure(work, placement, mesh, args))
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        import torchium

        described = machine("cpu", torchium.__version__)
        described |= {"device": f"cpu, {os.cpu_count()} cores", "processes": args.ranks, "threads": 1}
        figures.write(args.out, {"machine": described, "rows": rows})
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.set_defaults(device="cpu", ranks=2)
    parser.add_argument("--out", default=os.path.join(figures.RESULTS, "gloo-2-processes.json"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {PERIOD} steps each")
    args = parser.parse_args()
    mp.spawn(worker, args=(tempfile.mkdtemp(), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
