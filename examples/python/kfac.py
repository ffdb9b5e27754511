"""KFAC, EKFAC and the natural gradient vs AdamW, on images of digits and a network of convolutions.

    python kfac.py                               # drawn digits; a few seconds on two cores
    python kfac.py --optimizers kfac,adamw --lr kfac=0.05
    python kfac.py --quick                       # a few steps of a tiny network

These optimizers look at the layers of a model, so they are made from the model and not from its parameters:

    optimizer = torchium.optim.KFAC(model, lr=0.1)
"""

import torch
from compare import Batch, Task, compare, options, settle
from digits import drawn
from torch import nn
from torch.nn import functional
from torchium.optim import KFAC, AdamW, NaturalGradient

# How these numbers were found is in the README.
RATES = {"kfac": 0.1, "ekfac": 0.1, "natural": 3.0, "adamw": 0.03}


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    numbers = {"momentum": 0.5, "damping": 0.03, "kl_clip": 0.01, "factor_update_steps": 1}
    match name:
        case "kfac":
            return KFAC(model, lr, inv_update_steps=5, **numbers)
        case "ekfac":
            return KFAC(model, lr, inv_update_steps=20, method="ekfac", **numbers)
        case "natural":
            return NaturalGradient(model, lr, damping=10.0, momentum=0.5)
        case "adamw":
            return AdamW(model.parameters(), lr, weight_decay=0.01)
    raise ValueError(f"no optimizer {name!r}")


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(18 * width, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def make_task(args) -> Task:
    images, labels = drawn(args.samples, args.seed)
    images = functional.avg_pool2d(images, 2)  # 14 by 14
    images = ((images - images.mean()) / images.std()).to(args.device)
    labels = labels.to(args.device)
    train = len(images) * 4 // 5

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        rows = torch.randint(train, (args.batch,), generator=generator).to(args.device)
        return images[rows], labels[rows]

    held_out = list(zip(images[train:].split(500), labels[train:].split(500), strict=True))
    return Task("Digits", lambda: make_model(args.width), make_optimizer, RATES, batch, held_out)


def main() -> None:
    parser = options(__doc__.splitlines()[0], steps=150, rates=RATES)
    parser.set_defaults(batch=64)
    parser.add_argument("--samples", type=int, default=5_000, help="digits to draw; a fifth is held out")
    parser.add_argument("--width", type=int, default=8, help="channels of the first convolution")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny network, to see that it runs")
    args = settle(parser.parse_args(), RATES)
    if args.precision == "fp16":
        raise SystemExit("fp16 needs a GradScaler that the optimizers know (grad_scaler=...): use bf16 or fp32")
    if args.quick:
        args.steps, args.log_every, args.samples, args.width, args.batch = 20, 5, 500, 4, 16
    task = make_task(args)
    weights = sum(p.numel() for p in task.make_model().parameters())
    compare(task, args, f"{weights:,} weights, {args.batch} images a step")


if __name__ == "__main__":
    main()
