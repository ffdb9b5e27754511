"""fully_shard (FSDP2) with Shampoo: parameters, gradients and the optimizer's state divided among processes.

    torchrun --nproc-per-node 2 fsdp.py                          # FSDP2; some seconds on CPUs
    torchrun --nproc-per-node 4 fsdp.py --replicas 2             # HSDP: two replicas, each sharded over two processes

The only line of Torchium's is the one that makes the optimizer: mesh and placements come from the parameters, which are
DTensors. Ends with a checkpoint that any other number of processes can load.
"""

import argparse

import distributed_run
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchium.optim import Shampoo


def make(mesh: DeviceMesh) -> tuple[nn.Module, Shampoo]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    net.to(mesh.device_type)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    options = {"grafting": "adam", "relative_eps": 1e-4, "precondition_frequency": 5, "max_preconditioner_dim": 64}
    return net, Shampoo(net.parameters(), lr=0.01, betas=(0.9, 0.99), **options)


def train(net: nn.Module, optimizer: Shampoo, steps: range) -> list[float]:
    """The loss of each step; each process draws rows of its own."""
    losses, device = [], next(net.parameters()).device
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + distributed.get_rank())
        x = torch.randn(64, 32, generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), torch.sin(x).sum(1, keepdim=True))
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
    device = distributed_run.start()
    size = distributed.get_world_size()
    if args.replicas > 1:
        shape = (args.replicas, size // args.replicas)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (size,))

    net, optimizer = make(mesh)
    losses = train(net, optimizer, range(args.steps))
    kilobytes = optimizer.memory_report()["state"] / 1e3
    distributed_run.say(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {kilobytes:.0f} kB of optimizer state")
    distributed_run.finish(lambda: make(mesh), train, net, optimizer, args.steps)


if __name__ == "__main__":
    main()
