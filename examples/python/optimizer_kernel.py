"""An optimizer of the library with a custom kernel inside: Lion, whose update torchium.optim does not have.

    python optimizer_kernel.py                                  # a few seconds
    python optimizer_kernel.py --steps 1000 --device cpu

The function below is all there is to write: what happens to one element. SGD keeps the one buffer that Lion needs, and
brings the rest: many parameters in one launch, schedules, mixed precision, skipped steps, checkpoints. Its training is
compared with the same optimizer written in PyTorch. At the end a kernel that does not compile shows what happens then:
a warning, and the built-in goes on.
"""

import argparse
import copy
import warnings

import torch
import torchium
from torch import nn

# e.p is the weight, e.g its gradient, e.m the buffer of SGD; k has the numbers of the group.
LION = """
__device__ void lion(tch_element &e, const tch_numbers &k)
{
    tch_real u = (tch_real)0.9 * e.m + (tch_real)0.1 * e.g;
    e.p -= k.lr * ((u > 0) - (u < 0) + k.weight_decay * e.p);
    e.m = k.momentum * e.m + (1 - k.momentum) * e.g;
}
"""


class PlainLion(torch.optim.Optimizer):
    """The same in PyTorch: u = 0.9 m + 0.1 g, p -= lr (sign(u) + λ p), m = μ m + (1 - μ) g."""

    def __init__(self, params, lr, momentum, weight_decay):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                u = 0.9 * m + 0.1 * p.grad
                p -= group["lr"] * (u.sign() + group["weight_decay"] * p)
                m.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    """Learns sin(3 x) + y² from random points, with a learning rate that falls to 0."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    points = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        x = (4 * torch.rand(256, 2, generator=points) - 2).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x)[:, 0], torch.sin(3 * x[:, 0]) + x[:, 1] ** 2)
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torchium.is_available("cuda") else "cpu")
    args = parser.parse_args()
    numbers = {"lr": args.lr, "momentum": 0.99, "weight_decay": 0.1}
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)

    plain, own, broken = (copy.deepcopy(start) for _ in range(3))
    loss = train(plain, PlainLion(plain.parameters(), **numbers), args.steps, args.device)
    print(f"Lion in PyTorch      loss {loss:.6f} after {args.steps} steps on {args.device}")

    optimizer = torchium.optim.SGD(own.parameters(), update_kernel=LION, **numbers)
    loss = train(own, optimizer, args.steps, args.device)
    report = optimizer.stats()["kernels"]["update"]
    print(f"Lion as a kernel     loss {loss:.6f}, {report['served']} parameters in {report['launches']} launches")

    optimizer = torchium.optim.SGD(broken.parameters(), update_kernel=LION.replace("k.lr", "k.rate"), **numbers)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train(broken, optimizer, 2, args.device)
    report = optimizer.stats()["kernels"]["update"]
    print(f"a kernel that fails  in use: {report['in_use']}, {len(heard)} warning, with the compiler's words:")
    print(next(line for line in report["reason"].splitlines() if "rate" in line))


if __name__ == "__main__":
    main()
