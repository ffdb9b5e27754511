"""DistributedDataParallel with Muon, the check that all replicas stay the same, and a checkpoint that the first process
writes.

    torchrun --nproc-per-node 2 ddp.py                          # some seconds on CPUs

DDP averages the gradients. With `process_group=` the processes divide the matrices: each orthogonalizes its own and
keeps their momentum, and the results are gathered, bitwise-identical on every process and to those of one process.
"""

import gc
import tempfile

import distributed_run
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchium.optim import Muon

STEPS = 40


def part_of_batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Each process draws rows of its own."""
    generator = torch.Generator().manual_seed(step * distributed.get_world_size() + rank)
    x = torch.randn(64, 32, generator=generator)
    return x.to(device), torch.sin(x).sum(1, keepdim=True).to(device)


def difference(model: nn.Module) -> float:
    """How far the parameters of any process are from those of the first: 0 if all are the same."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    distributed.broadcast(first, 0)
    most = (mine - first).abs().max()
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return most.item()


def make(rank: int, device: torch.device) -> tuple[DistributedDataParallel, Muon]:
    torch.manual_seed(rank)  # DDP sends the first process's weights to all
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = Muon(
        model.parameters(), lr=0.01, adjust_lr_fn="match_rms_adamw", weight_decay=0.0, process_group=model.process_group
    )
    return model, optimizer


def train(model: DistributedDataParallel, optimizer: Muon, steps: range, rank: int, device: torch.device) -> None:
    for step in steps:
        x, y = part_of_batch(step, rank, device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def resumes(model: DistributedDataParallel, optimizer: Muon, rank: int, device: torch.device) -> bool:
    """The state that the processes have divided comes together on the first one, which saves it for any number of
    them; whether a model that goes on from there is the same."""
    file = [tempfile.mkstemp(suffix=".pt")[1] if rank == 0 else None]
    distributed.broadcast_object_list(file)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file[0])
    distributed.barrier()
    saved = torch.load(file[0], map_location=device)
    other, resumed = make(rank, device)
    other.module.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for pair in ((model, optimizer), (other, resumed)):
        train(*pair, range(STEPS, STEPS + 2), rank, device)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def main() -> None:
    device = torch.device(distributed_run.start())
    rank = distributed.get_rank()
    model, optimizer = make(rank, device)
    train(model, optimizer, range(STEPS), rank, device)
    apart = difference(model)
    same = resumes(model, optimizer, rank, device)
    del model, optimizer
    gc.collect()  # gloo's threads must not be left with anything of Python's when the interpreter ends
    distributed.barrier()  # no process leaves while another still waits for it
    distributed.destroy_process_group()
    if rank == 0:
        print(f"largest difference between replicas after {STEPS} steps: {apart}")
        print(f"resumed {'bitwise identical' if same else 'with a difference'}")
    if apart != 0 or not same:
        raise SystemExit("the replicas are not the same")


if __name__ == "__main__":
    main()
