"""Tensor parallelism with Muon: a transformer block whose matrices are cut among processes, with data parallelism over
the rest of them.

    torchrun --nproc-per-node 2 tensor_parallel.py               # each matrix on two processes; some seconds on CPUs
    torchrun --nproc-per-node 4 tensor_parallel.py               # the same twice, sharded over both by fully_shard

parallelize_module and fully_shard turn the parameters into DTensors, and Muon still orthogonalizes whole matrices: each
matrix is gathered on one process for the time of the work, while other processes work on other matrices.
"""

import argparse
import functools

import distributed_run
import torch
from torch import distributed, nn
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


def train(mesh: DeviceMesh, net: nn.Module, optimizer: Muon, steps: range) -> list[float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tensor", type=int, default=2, help="processes that share a matrix; at most the heads")
    args = parser.parse_args()
    device = distributed_run.start()
    shape = (distributed.get_world_size() // args.tensor, args.tensor)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "tensor"))

    net, optimizer = make(mesh)
    losses = train(mesh, net, optimizer, range(args.steps))
    distributed_run.say(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {net.up.weight.placements}")
    distributed_run.finish(lambda: make(mesh), functools.partial(train, mesh), net, optimizer, args.steps)


if __name__ == "__main__":
    main()
