#!/usr/bin/env python3
"""Times steps of Muon and Shampoo sharded over two processes by gloo, one thread each, vs Dion's Muon and Meta's
Distributed Shampoo, in one run: the same parameters and gradients, replicated (as under DDP) and sharded by rows (as
under fully_shard).

    PYTHONPATH=build/release/python:DION:SHAMPOO bench/gloo_compare.py [--width N] [--layers N] [--bfloat16]

DION and SHAMPOO are checkouts of github.com/microsoft/dion and github.com/facebookresearch/optimizers; missing ones are
skipped. Rounds alternate between all of them, so that other load on the machine affects all alike. In addition to a
step's milliseconds it reports the CPU time of both processes, which load affects less.

Dion orthogonalizes in bfloat16, which many CPUs do not support: it gets five steps of Muon's polynomial in float32, as
does Torchium in a second row, and --bfloat16 adds Dion's own. Of Meta's modes for shards, the default preconditions
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
from timing import machine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS, PERIOD = 2, 5
WARM_UP = 3  # rounds: Dion's functions are compiled, and again for other sizes


def shapes(width, layers):
    """The matrices of a GPT's blocks."""
    return layers * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def numbers(width, layers):
    """Parameters, and gradients of rank 16 plus noise."""
    generator = torch.Generator().manual_seed(0)
    for m, n in shapes(width, layers):
        low = torch.randn(m, 16, generator=generator) @ torch.randn(16, n, generator=generator)
        noise = torch.randn(m, n, generator=generator)
        yield 0.02 * torch.randn(m, n, generator=generator), 1e-2 * low + 1e-3 * noise


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


# --- optimizers -------------------------------------------------------------------------------------------------------


def our_muon(parameters, mesh, **options):
    from torchium.optim import Muon

    shared = {} if mesh else {"process_group": dist.group.WORLD}
    return Muon(parameters, lr=0.01, weight_decay=0.0, **shared, **options)


def our_shampoo(parameters, mesh):
    from torchium.optim import Shampoo

    return Shampoo(
        parameters,
        lr=0.01,
        betas=(0.9, 0.99),
        grafting="adam",
        exponent_override=0,
        precondition_frequency=PERIOD,
        max_preconditioner_dim=256,
        **({} if mesh else {"process_group": dist.group.WORLD}),
    )


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
WORK = {
    "Muon step": {
        OURS: our_muon,
        "torchium, Muon's polynomial": partial(our_muon, ns_coefficients=(3.4445, -4.7750, 2.0315), ns_steps=5),
        "Dion, float32": partial(dion_muon, newton_schulz_func=newton_schulz),
        "Dion, bfloat16": dion_muon,
    },
    f"Shampoo step, roots every {PERIOD}": {OURS: our_shampoo, "Meta": meta_shampoo},
}
ONLY_SHARDED = {f"Shampoo step, roots every {PERIOD}": {"Meta, REPLICATE": partial(meta_shampoo, strategy="REPLICATE")}}
NEEDS = {"Dion": "dion", "Meta": "distributed_shampoo"}


def found(name):
    module = NEEDS.get(name.split(",")[0])
    return module is None or importlib.util.find_spec(module) is not None


# --- timing -----------------------------------------------------------------------------------------------------------


class Trial:
    """One optimizer with its own parameters."""

    def __init__(self, make, mesh, args):
        def place(value):
            return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) if mesh else value.clone()

        self.parameters = []
        for value, gradient in numbers(args.width, args.layers):
            self.parameters.append(torch.nn.Parameter(place(value)))
            self.parameters[-1].grad = place(gradient)
        self.optimizer = make(self.parameters, mesh)
        self.wall, self.busy = [], []

    def period(self, timed):
        """As many steps as the refresh interval. Milliseconds per step of the slowest rank, and CPU time of both."""
        dist.barrier()
        wall, busy = time.perf_counter(), time.process_time()
        for _ in range(PERIOD):
            self.optimizer.step()
        spent = torch.tensor([time.perf_counter() - wall, time.process_time() - busy], dtype=torch.float64)
        every = [torch.empty_like(spent) for _ in range(RANKS)]
        dist.all_gather(every, spent)
        if timed:
            self.wall.append(1e3 * max(float(one[0]) for one in every) / PERIOD)
            self.busy.append(1e3 * sum(float(one[1]) for one in every) / PERIOD)


def measure(work, placement, mesh, args):
    """A row: all trials alternating, round after round."""
    makers = WORK[work] | (ONLY_SHARDED.get(work, {}) if mesh else {})
    if not args.bfloat16:
        makers.pop("Dion, bfloat16", None)
    trials = {name: Trial(make, mesh, args) for name, make in makers.items() if found(name)}
    for round_ in range(WARM_UP + args.rounds):
        for trial in trials.values():
            trial.period(round_ >= WARM_UP)
    wall = {name: statistics.median(trial.wall) for name, trial in trials.items()}
    busy = {name: statistics.median(trial.busy) for name, trial in trials.items()}
    return {
        "work": work,
        "size": f"GPT, {args.layers} x {args.width}",
        "placement": placement,
        "ranks": RANKS,
        "ours_ms": wall.pop(OURS),
        "anchors_ms": wall,
        "ours_processor_ms": busy.pop(OURS),
        "anchors_processor_ms": busy,
    }


def worker(rank, folder, args):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch._dynamo.config.recompile_limit = 1000  # Dion compiles its functions for every shape and placement
    rows = []
    for placement, mesh in (("replicated", None), ("sharded by rows", init_device_mesh("cpu", (RANKS,)))):
        for work in WORK:
            rows.append(measure(work, placement, mesh, args))
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        import torchium

        described = machine("cpu", torchium.__version__)
        described |= {"device": f"cpu, {os.cpu_count()} cores", "processes": RANKS, "threads": 1}
        figures.write(args.out, {"machine": described, "rows": rows})
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.path.join(figures.RESULTS, "gloo-2-processes.json"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="Dion's own orthogonalization too")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {PERIOD} steps each")
    mp.spawn(worker, args=(tempfile.mkdtemp(), parser.parse_args()), nprocs=RANKS)


if __name__ == "__main__":
    main()
