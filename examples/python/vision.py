"""A small convolutional network on images of digits, trained with AdamW, Muon, SOAP and Shampoo side by side.

    python vision.py                                            # drawn digits; less than a minute on two cores
    python vision.py --plot curves.svg --channels-last
    python vision.py --images train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --steps 2000

Files may be IDX (MNIST's format) or NPY, images of shape [n, h, w] or [n, channels, h, w]. On a GPU it trains under
bf16 autocast; `--precision fp16` uses a GradScaler.
"""

import torch
from compare import Batch, Task, compare, options, settle
from digits import drawn, from_files
from torch import Tensor, nn
from torchium.optim import SOAP, AdamW, Muon, Shampoo

# A first guess, the same for all; --tune finds better ones.
RATES = {"shampoo": 3e-3, "soap": 3e-3, "muon": 3e-3, "adamw": 3e-3}


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    parameters, decay = model.parameters(), 0.01
    match name:
        case "shampoo":
            factors = {"eps": 0.0, "update_freq": 10, "grafting": "adam"}
            return Shampoo(parameters, lr, betas=(0.9, 0.95), weight_decay=decay, **factors)
        case "soap":
            return SOAP(parameters, lr, weight_decay=decay, merge_dims=True)
        case "muon":
            return Muon(parameters, lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        case "adamw":
            return AdamW(parameters, lr, weight_decay=decay)
    raise ValueError(f"no optimizer {name!r}")


def make_model(channels: int, width: int, classes: int) -> nn.Module:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *stage(channels, width),
        *stage(width, 2 * width),
        *stage(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(36 * width, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def data(args) -> tuple[Tensor, Tensor]:
    if bool(args.images) != bool(args.labels):
        raise SystemExit("--images and --labels go together")
    return from_files(args.images, args.labels) if args.images else drawn(args.samples, args.seed)


def make_task(args) -> Task:
    images, labels = data(args)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed))
    images, labels = images[order].to(args.device), labels[order].to(args.device)
    images = (images - images.mean()) / images.std()
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    train = len(images) * 4 // 5

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        rows = torch.randint(train, (args.batch,), generator=generator).to(args.device)
        return images[rows].contiguous(memory_format=layout), labels[rows]

    held_out = list(zip(images[train:].split(500), labels[train:].split(500), strict=True))
    shape = images.shape[1], args.width, int(labels.max()) + 1
    return Task(
        "A small convolutional network on digits",
        lambda: make_model(*shape).to(memory_format=layout),
        make_optimizer,
        RATES,
        batch,
        held_out,
    )


def main() -> None:
    parser = options(__doc__.splitlines()[0], steps=300, rates=RATES)
    parser.set_defaults(batch=64)
    parser.add_argument("--images", metavar="FILE", help="IDX or NPY, in place of drawn digits")
    parser.add_argument("--labels", metavar="FILE", help="IDX or NPY")
    parser.add_argument("--samples", type=int, default=10_000, help="digits to draw; a fifth is held out")
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    parser.add_argument(
        "--channels-last", action="store_true", help="images and weights as [n, h, w, channels] in memory"
    )
    args = settle(parser.parse_args(), RATES)
    task = make_task(args)
    weights = sum(p.numel() for p in task.make_model().parameters())
    layout = ", channels last" if args.channels_last else ""
    compare(task, args, f"{weights:,} weights, {args.batch} images a step{layout}")


if __name__ == "__main__":
    main()
