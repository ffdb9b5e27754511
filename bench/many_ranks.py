#!/usr/bin/env python3
"""Checks optimizers that several processes share: equality with one process, bytes, overlap of communication with
computation, a resumed run, and a killed rank. By NCCL with one GPU for each rank, or by gloo on CPUs.

    PYTHONPATH=build/release/python bench/many_ranks.py --out FILE [--ranks N] [--device cuda] [--width N] [--layers N]

A rank's gradients are the same on all. On a GPU libraries may choose algorithms by batch size, so that results are
compared by their distance relative to the path, at most 2^-7 as for bfloat16; on a CPU they must be bitwise equal.
`hidden` is the share of the collectives' time that a step does not take longer than without them: without traffic from
other work, and meaningless on a CPU, where a step waits for each.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from functools import partial

import figures
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from timing import machine
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

STEPS, TIMED, PATIENCE = 8, 10, 60.0  # PATIENCE: seconds after which a missing rank is an error
TOLERANCE = {"cpu": 0.0, "cuda": 2.0**-7}
PERIOD = 5  # steps between refreshes of Shampoo


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


def our_muon(parameters, mesh):
    from torchium.optim import Muon

    return Muon(parameters, lr=0.01, weight_decay=0.0, **group_of(mesh))


def our_shampoo(parameters, mesh):
    from torchium.optim import Shampoo

    paper = {"betas": (0.9, 0.99), "grafting": "adam", "exponent_override": 0, "max_preconditioner_dim": 256}
    return Shampoo(parameters, lr=0.01, precondition_frequency=PERIOD, **paper, **group_of(mesh))


def group_of(mesh):
    return {} if mesh else {"process_group": dist.group.WORLD}


KINDS = {"Muon": our_muon, "Shampoo": our_shampoo}


class Training(torch.nn.Module):
    """A model whose gradients are given, and its optimizer; alone without a group."""

    def __init__(self, make, mesh, args, alone=False):
        super().__init__()
        self.mesh, self.device = mesh, device_of(args)
        made = list(numbers(args.width, args.layers))
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(self.place(value)) for value, _ in made)
        self.gradients = [gradient for _, gradient in made]
        self.optimizer = make(list(self.weights), mesh or alone)

    def place(self, value):
        value = value.to(self.device)
        return (
            value.clone() if self.mesh is None else distribute_tensor(value, self.mesh, [Shard(0)], src_data_rank=None)
        )

    def set_gradients(self, step):
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = self.place(gradient.roll(step, 0))

    def steps(self, first, last):
        for step in range(first, last):
            self.set_gradients(step)
            self.optimizer.step()

    def whole(self):
        return [w.full_tensor().detach() if isinstance(w, DTensor) else w.detach().clone() for w in self.weights]


def device_of(args):
    return torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")


def distance(found, expected, start):
    """Relative to the path from the start, the largest of all matrices."""
    pairs = zip(found, expected, start, strict=True)
    return max(float((a - b).norm() / (b - c).norm()) for a, b, c in pairs)


# --- checks of all ranks ----------------------------------------------------------------------------------------------


def check_equality(kind, mesh, args):
    alone, shared = Training(KINDS[kind], None, args, alone=True), Training(KINDS[kind], mesh, args)
    start = alone.whole()
    alone.steps(0, STEPS)
    shared.steps(0, STEPS)
    apart = distance(shared.whole(), alone.whole(), start)
    return {"distance": apart, "good": apart <= TOLERANCE[args.device]}


def check_resumed(kind, mesh, args, folder):
    """Through torch.distributed.checkpoint, into a new model."""
    first, again = Training(KINDS[kind], mesh, args), Training(KINDS[kind], mesh, args)
    first.steps(0, STEPS // 2)
    model, state = get_state_dict(first, first.optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/{kind}")
    model, state = get_state_dict(again, again.optimizer)
    loaded = {"model": model, "optimizer": state}
    dcp.load(loaded, checkpoint_id=f"{folder}/{kind}")
    set_state_dict(again, again.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for training in (first, again):
        training.steps(STEPS // 2, STEPS)
    same = all(torch.equal(a, b) for a, b in zip(first.whole(), again.whole(), strict=True))
    return {"bitwise": same, "good": same}


def bytes_of(group, operation, numbers):
    """That a rank sends to others."""
    if operation == "all_to_all":
        return sum(numbers[1]) - numbers[1][group.rank]
    return numbers * (group.size - 1) if operation == "all_gather" else 4 * numbers


def slowest_ms(function, args):
    """Of all ranks, per call."""
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    wait()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(TIMED):
        function()
    wait()
    spent = torch.tensor([1e3 * (time.perf_counter() - begin) / TIMED], device=device_of(args))
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def measure_traffic(kind, mesh, args):
    """Bytes and milliseconds of a step: with collectives, without them, and of them alone."""
    from torchium.optim._shared.group import Group

    training, calls, real = Training(KINDS[kind], mesh, args), [], Group._call
    training.steps(0, 6)  # both kinds of step, with and without a refresh

    def note(group, *call):
        calls.append((group, *call))
        real(group, *call)

    Group._call = note
    training.optimizer.step()
    Group._call = real
    sent = sum(bytes_of(group, operation, numbers) for group, operation, _, _, numbers in calls)
    step = slowest_ms(training.optimizer.step, args)
    alone = slowest_ms(lambda: [real(*call) for call in calls], args)
    Group._call = lambda *call: None
    silent = slowest_ms(training.optimizer.step, args)
    Group._call = real
    hidden = 1.0 - (step - silent) / alone if args.device == "cuda" else None
    return {"bytes": sent, "collectives": len(calls), "ms": step, "without_ms": silent, "alone_ms": alone,
            "hidden": hidden, "good": True}  # fmt: skip


def worker(rank, folder, args):
    join(rank, folder, args)
    rows = []
    for placement, mesh in (("replicated", None), ("sharded by rows", init_device_mesh(args.device, (args.ranks,)))):
        for kind in KINDS:
            checks = {"equal to one process": partial(check_equality, kind, mesh, args)}
            if mesh:
                checks["resumed"] = partial(check_resumed, kind, mesh, args, folder)
            checks["traffic of a step"] = partial(measure_traffic, kind, mesh, args)
            for name, check in checks.items():
                rows.append({"check": name, "method": kind, "placement": placement} | check())
                if rank == 0:
                    print(rows[-1], flush=True)
    torch.save(rows, f"{folder}/rows{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group


def join(rank, folder, args):
    from datetime import timedelta

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if args.device == "cuda" else "gloo"
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.ranks, timeout=timedelta(seconds=PATIENCE))


# --- a killed rank ----------------------------------------------------------------------------------------------------


def lose_a_rank(rank, folder, args):
    """The last rank is killed inside its fourth step; the others must end."""
    from torchium.optim._shared.group import Group

    join(rank, folder, args)
    training = Training(our_muon, None, args)
    training.steps(0, 3)
    dist.barrier()
    if rank == args.ranks - 1:
        Group._call = lambda *call: os.kill(os.getpid(), signal.SIGKILL)
    try:
        training.steps(3, STEPS)
        if args.device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        os._exit(3)
    os._exit(0)


def check_killed(args):
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=lose_a_rank, args=(rank, folder, args)) for rank in range(args.ranks)]
        for process in ranks:
            process.start()
        ranks[-1].join()
        begin = time.monotonic()
        for process in ranks[:-1]:
            process.join(3 * PATIENCE)
        hangs = [process for process in ranks if process.is_alive()]
        for process in hangs:
            process.kill()
    codes = [process.exitcode for process in ranks[:-1]]
    good = not hangs and 0 not in codes
    return {"check": "killed rank", "codes": codes, "seconds": time.monotonic() - begin, "good": good}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    import torchium

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder, args), nprocs=args.ranks)
        rows = torch.load(f"{folder}/rows0")
    rows.append(check_killed(args))
    print(rows[-1], flush=True)
    described = machine(args.device, torchium.__version__) | {"processes": args.ranks}
    figures.write(args.out, {"machine": described, "rows": rows})
    bad = [row for row in rows if not row["good"]]
    print(f"{len(rows) - len(bad)} checks are good, {len(bad)} are not")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
