"""Training with a bound on what any one sample can do: gradients clipped sample by sample, and noise, as in DP-SGD.

    python dp_sgd.py                                            # drawn digits; less than a minute on two cores
    python dp_sgd.py --max-norm 0.5 --noise 0.8 --device cuda

Each step adds normal noise of `noise * max_norm / batch` to the mean of the clipped gradients. How private that is
depends on how the batches are drawn and on the number of steps, and takes an accountant; here only the step is shown.
"""

import argparse

import torch
import torchium
from digits import drawn
from torch import Tensor, nn


def make_model(width: int = 16) -> nn.Module:
    """Group norm, because batch norm mixes the samples of a batch."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


def private_step(model, optimizer, clipping, x: Tensor, y: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """One step. The loss, and the share of samples that were clipped, both still on the device."""
    optimizer.zero_grad()
    with clipping:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
    for p in model.parameters():
        p.grad += torch.randn_like(p) * (noise * clipping.max_norm / len(x))
    optimizer.step()
    return loss.detach(), (clipping.norms > clipping.max_norm).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torchium.is_available("cuda") else "cpu")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--noise", type=float, default=0.5, help="of the largest change one sample can make")
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = (t.to(args.device) for t in drawn(args.samples, seed=0))
    held_out = args.samples // 5
    model = make_model().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    clipping = torchium.GhostClipping(model, args.max_norm)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(held_out, args.samples, (args.batch,), device=args.device)
        loss, share = private_step(model, optimizer, clipping, images[chosen], labels[chosen], args.noise)
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}: loss {loss.item():.3f}, {100 * share.item():.0f} % of the samples clipped")
    with torch.no_grad():
        right = (model(images[:held_out]).argmax(1) == labels[:held_out]).float().mean().item()
    print(
        f"{100 * right:.1f} % of {held_out} held-out digits right; norms clipped at {args.max_norm}, noise {args.noise}"
    )


if __name__ == "__main__":
    main()
