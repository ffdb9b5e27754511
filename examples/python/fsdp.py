"""fully_shard (FSDP2) with Shampoo: parameters, gradients and the optimizer's state divided among processes.

    torchrun --nproc-per-node 2 fsdp.py                          # FSDP2; some seconds on CPUs
    torchrun --nproc-per-node 4 fsdp.py --replicas 2             # HSDP: two replicas, each sharded over two processes

Nothing of it is Torchium's but the line that makes the optimizer: mesh and placements come from the parameters, which
are DTensors. Ends with a checkpoint that any other number of processes can load.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchium.optim import Shampoo


def sharded_model(mesh) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    net.to(mesh.device_type)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def make_optimizer(net: nn.Module) -> Shampoo:
    return Shampoo(
        net.parameters(),
        lr=0.01,
        betas=(0.9, 0.99),
        grafting="adam",
        relative_eps=1e-4,
        update_freq=5,
        max_preconditioner_dim=64,
    )


def batch(step: int, rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each process draws rows of its own."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
    return x, torch.sin(x).sum(1, keepdim=True)


def train(net: nn.Module, optimizer: Shampoo, steps: range, device: str) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step, distributed.get_rank(), device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=1, help="of the model, each sharded over the other processes")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    size = distributed.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.replicas > 1:
        shape = (args.replicas, size // args.replicas)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (size,))

    net = sharded_model(mesh)
    optimizer = make_optimizer(net)
    losses = train(net, optimizer, range(args.steps), device)
    kilobytes = optimizer.memory_report()["state"] / 1e3
    rank = distributed.get_rank()
    print(f"rank {rank}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {kilobytes:.0f} kB of optimizer state", flush=True)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])

    other = sharded_model(mesh)
    resumed = make_optimizer(other)
    model_state, optimizer_state = get_state_dict(other, resumed)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    set_state_dict(other, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    again = train(other, resumed, range(args.steps, args.steps + 2), device)
    same = train(net, optimizer, range(args.steps, args.steps + 2), device) == again
    print(f"rank {rank}: resumed {'bitwise identical' if same else 'with a difference'}", flush=True)
    distributed.barrier()  # no process leaves while another still waits for it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
