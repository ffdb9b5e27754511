"""Expert parallelism with Muon: a mixture of experts, some of them on each process, and tokens that travel to them.

    torchrun --nproc-per-node 2 experts.py                       # four experts on two processes; some seconds on CPUs

All experts are one parameter [experts, m, n], a DTensor sharded by experts; `batch_dims=1` tells Muon that each expert
is a separate matrix. A process owns its experts' matrices as a whole, so the optimizer sends nothing for them. The
router is replicated: its gradient is averaged, and AdamW keeps the replicas equal.
"""

import argparse

import distributed_run
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer
from torchium.optim import AdamW, Muon

EXPERTS, WIDTH = 4, 16


class Exchange(torch.autograd.Function):
    """Rows in order of the process they go to; back come those of every process. Gradients take the way back."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.way_back = sent, received
        result = rows.new_empty(sum(received), rows.shape[1])
        distributed.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Exchange.apply(gradient, *ctx.way_back), None, None


class Mixture(nn.Module):
    """Every token goes to its best expert: on this process are those from `first` on."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.each = EXPERTS // distributed.get_world_size()
        self.first = distributed.get_rank() * self.each
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, device=device)
        mesh = init_device_mesh(device, (distributed.get_world_size(),))
        for name, rows, cols in (("up", 64, WIDTH), ("down", WIDTH, 64)):
            experts = torch.randn(EXPERTS, rows, cols) / cols**0.5
            self.register_parameter(name, nn.Parameter(distribute_tensor(experts.to(device), mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert // self.each, minlength=distributed.get_world_size())
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        there, back = received.tolist(), sent.tolist()
        tokens = Exchange.apply(x[order], there, back)
        numbers = Exchange.apply(expert[order].to(x.dtype).unsqueeze(-1), there, back).squeeze(-1)
        done = torch.zeros_like(tokens)
        up, down = self.up.to_local(), self.down.to_local()
        for k in range(self.each):
            mine = (numbers == self.first + k).unsqueeze(-1)
            done = done + mine * ((tokens @ up[k].T).relu() @ down[k].T)  # a large model would gather the rows instead
        result = Exchange.apply(done, back, there)[order.argsort()]
        return x + weight.unsqueeze(-1) * result


def make(device: str) -> tuple[Mixture, list[Optimizer]]:
    torch.manual_seed(0)
    net = Mixture(device)
    matrices = Muon([{"params": [net.up, net.down], "batch_dims": 1}], lr=0.02, weight_decay=0.0)
    return net, [matrices, AdamW(net.router.parameters(), lr=0.01)]


def average_gradients(net: Mixture) -> None:
    """The loss is the mean over processes: an expert has the sum of its tokens from all of them already."""
    size = distributed.get_world_size()
    for p in net.router.parameters():
        distributed.all_reduce(p.grad)
    for p in net.parameters():
        p.grad.div_(size)


def train(net: Mixture, optimizers: list[Optimizer], steps: range) -> list[float]:
    losses, device = [], net.router.weight.device
    for step in steps:
        x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1000 * step + distributed.get_rank()))
        x = x.to(device)
        target = torch.where(x[:, :1] > 0, x.flip(1), -x.roll(1, 1))  # what an expert can learn for its part
        net.zero_grad()
        loss = nn.functional.mse_loss(net(x), target)
        loss.backward()
        average_gradients(net)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    device = distributed_run.start()
    net, optimizers = make(device)
    losses = train(net, optimizers, range(args.steps))
    last = net.first + net.each - 1
    distributed_run.say(f"experts {net.first} to {last}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    distributed_run.finish(lambda: make(device), train, net, optimizers, args.steps)


if __name__ == "__main__":
    main()
