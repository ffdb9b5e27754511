"""DistributedDataParallel with Muon in two processes, the check that both replicas stay the same, and a checkpoint that
the first process writes.

    python ddp.py                                               # starts two processes itself; some seconds
    torchrun --nproc-per-node 2 ddp.py                          # the same under torchrun

Uses gloo on CPUs, and NCCL where there is a GPU for each process. DDP averages the gradients; with `process_group=` the
processes divide the matrices among them, each orthogonalizes its own and keeps their momentum, and what comes out is
gathered: bitwise-identical on every process, and to what one process would have computed.
"""

import gc
import os
import socket
import tempfile

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchium.optim import Muon

PROCESSES, STEPS = 2, 40


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.device_count() >= PROCESSES else torch.device("cpu")


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
        model.parameters(),
        lr=0.01,
        adjust_lr_fn="match_rms_adamw",
        weight_decay=0.0,
        process_group=model.process_group,
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
    rank = int(os.environ["RANK"])
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
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


def start(rank: int, port: int) -> None:
    """What torchrun tells its processes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(PROCESSES), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    main()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            free_port = s.getsockname()[1]
        torch.multiprocessing.spawn(start, (free_port,), nprocs=PROCESSES)
