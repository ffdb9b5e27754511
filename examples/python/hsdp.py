"""HSDP with SOAP: replicas of a model, each of them sharded over processes of its own.

    torchrun --nproc-per-node 4 hsdp.py                          # two replicas of two shards; some seconds on CPUs

The mesh has two dimensions, and fully_shard does the rest: the optimizer reads mesh and placements from the parameters.
A tile of SOAP has one owner among all four processes, so nothing is computed or kept twice.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchium.optim import SOAP


def make(mesh: DeviceMesh) -> tuple[nn.Module, SOAP]:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *hidden, nn.Linear(64, 1)).to(mesh.device_type)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, SOAP(net.parameters(), lr=0.01, precondition_frequency=5)


def train(net: nn.Module, optimizer: SOAP, steps: range, device: str) -> list[float]:
    """The loss of this process after each step; every process draws rows of its own."""
    losses = []
    for step in steps:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + distributed.get_rank()))
        x = x.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), torch.sin(x).sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(net: nn.Module, optimizer: SOAP, folder: str) -> None:
    net_state, state = get_state_dict(net, optimizer)
    dcp.save({"net": net_state, "optimizer": state}, checkpoint_id=folder)


def load(net: nn.Module, optimizer: SOAP, folder: str) -> None:
    net_state, state = get_state_dict(net, optimizer)
    dcp.load({"net": net_state, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=net_state, optim_state_dict=state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    shape = (args.replicas, size // args.replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    net, optimizer = make(mesh)
    losses = train(net, optimizer, range(args.steps), device)
    kilobytes = optimizer.memory_report()["state"] / 1e3
    print(f"rank {rank}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {kilobytes:.0f} kB of optimizer state", flush=True)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    save(net, optimizer, folder[0])
    other, resumed = make(mesh)
    load(other, resumed, folder[0])
    then = range(args.steps, args.steps + 2)
    same = train(net, optimizer, then, device) == train(other, resumed, then, device)
    print(f"rank {rank}: resumed {'bitwise identical' if same else 'with a difference'}", flush=True)
    distributed.barrier()  # no process leaves while another still waits for it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
