"""Tensor parallelism with Muon: a transformer block whose matrices are cut among processes, with data parallelism over
the rest of them.

    torchrun --nproc-per-node 2 tensor_parallel.py               # each matrix on two processes; some seconds on CPUs
    torchrun --nproc-per-node 4 tensor_parallel.py               # the same twice, sharded over both by fully_shard

parallelize_module and fully_shard make DTensors of the parameters, and Muon orthogonalizes whole matrices all the same:
one process has all of a matrix for the length of the work, and the others have other matrices.
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchium.optim import Muon

WIDTH, HEAD, LENGTH = 32, 8, 12


class Block(nn.Module):
    """Attention and a feedforward layer. A process has the heads that are in its part of the matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(x)))


PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")} | {
    name: RowwiseParallel() for name in ("out", "down")
}


def make(mesh: DeviceMesh) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    net = Block().to(mesh.device_type)
    parallelize_module(net, mesh["tensor"], PLAN)
    if mesh["data"].size() > 1:
        fully_shard(net, mesh=mesh["data"])
    return net, Muon(net.parameters(), lr=0.02, weight_decay=0.0)


def train(net: nn.Module, optimizer: Muon, steps: range, mesh: DeviceMesh) -> list[float]:
    """The loss after each step, of predicting a sequence's running mean. Processes that share a matrix have the same
    sequences, those along "data" other ones."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + mesh["data"].get_local_rank())
        x = torch.randn(16, LENGTH, WIDTH, generator=generator).to(mesh.device_type)
        mean = x.cumsum(1) / torch.arange(1, LENGTH + 1, device=x.device).unsqueeze(-1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), mean)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(net: nn.Module, optimizer: Muon, folder: str) -> None:
    net_state, state = get_state_dict(net, optimizer)
    dcp.save({"net": net_state, "optimizer": state}, checkpoint_id=folder)


def load(net: nn.Module, optimizer: Muon, folder: str) -> None:
    net_state, state = get_state_dict(net, optimizer)
    dcp.load({"net": net_state, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=net_state, optim_state_dict=state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tensor", type=int, default=2, help="processes that share a matrix; at most the heads")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh(device, (size // args.tensor, args.tensor), mesh_dim_names=("data", "tensor"))

    net, optimizer = make(mesh)
    losses = train(net, optimizer, range(args.steps), mesh)
    print(f"rank {rank}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {net.up.weight.placements}", flush=True)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    save(net, optimizer, folder[0])
    other, resumed = make(mesh)
    load(other, resumed, folder[0])
    then = range(args.steps, args.steps + 2)
    same = train(net, optimizer, then, mesh) == train(other, resumed, then, mesh)
    print(f"rank {rank}: resumed {'bitwise identical' if same else 'with a difference'}", flush=True)
    distributed.barrier()  # no process leaves while another still waits for it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
