"""The change of one line: a training loop of PyTorch with Shampoo in place of AdamW.

    python one_line.py                                          # a few seconds

Trains the same network twice, once with each optimizer, on points of two spirals, and prints both losses.
"""

import torch
from torch import nn
from torchium.optim import Shampoo


def spirals(count: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two arms that wind around each other, and which arm each is on."""
    arm = torch.arange(count) % 2
    turn = 9 * torch.rand(count).sqrt()
    angle = turn + arm * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5
    return points + 0.02 * torch.randn(count, 2), arm


def train(make_optimizer, steps: int = 300) -> float:
    torch.manual_seed(0)
    x, y = spirals()
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = make_optimizer(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.03)


def shampoo(model):
    """Takes the length of a step from Adam, so Adam's learning rates carry over."""
    return Shampoo(model, lr=0.03, precondition_frequency=10)


if __name__ == "__main__":
    print(f"torch.optim.AdamW       loss {train(adamw):.5f} after 300 steps")
    print(f"torchium.optim.Shampoo  loss {train(shampoo):.5f} after 300 steps")
